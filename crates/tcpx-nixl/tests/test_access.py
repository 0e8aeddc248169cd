"""Who was given the metadata of some memory reaches that memory, and no other."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from node import Node, Peer

SIZE = 4096


@pytest.fixture
def owner() -> Iterator[Peer]:
    """An agent with two regions of one size."""
    there = Peer("there")
    for seed in (1, 2):
        there.alloc(SIZE, seed)
    yield there
    assert there.guards_hold()
    assert there.end() == 0


def named(metadata: bytes) -> bytes:
    """What the metadata of one region says of it: the last of the backend's two parts, from the name on."""
    return metadata[metadata.rindex(b"TCPX") :]


def moved_to(metadata: bytes, address: int, to: int) -> bytes:
    """The metadata of memory at `address`, as if it lay elsewhere: NIXL itself knows memory by that."""
    assert metadata.count(struct.pack("<Q", address)) == 1
    return metadata.replace(struct.pack("<Q", address), struct.pack("<Q", to))


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_metadata_of_one_region_opens_no_other(owner: Peer, op: str) -> None:
    shared, private = owner.partial_metadata(0), owner.partial_metadata(1)
    given, hidden = owner.address(0), owner.address(1)
    before = owner.content(1)
    here = Node("here")
    local = here.alloc(SIZE, 3)
    mine = here.content(local)
    ours, theirs = [(here.address(local), SIZE)], [(hidden, SIZE)]

    # All that is guessed of another region: where it lies, and its number, which the peer says
    # itself.
    guess = named(shared)[:5] + named(private)[5:13] + named(shared)[13:]
    forged = moved_to(shared, given, hidden).replace(named(shared), guess)
    here.add(forged)
    handle = here.prepare(op, ours, theirs, "there", b"never")
    with pytest.raises(Exception, match="(?i)not.?found"):
        state = here.agent.transfer(handle, b"never")
        while state == "PROC":
            state = here.agent.check_xfer_state(handle)
    here.release(handle)
    assert owner.content(1) == before and here.content(local) == mine

    # What was given is reached, by the same connection.
    here.remove("there")
    here.add(shared)
    assert here.transfer(op, ours, [(given, SIZE)], "there", b"given") == "DONE"
    assert owner.wait_notifs(1) == [("here", b"given")]
    assert owner.content(0) == here.content(local) and owner.content(1) == before
    # And the other one with its own metadata: what is forged above is that alone.
    here.remove("there")
    here.add(moved_to(shared, given, hidden).replace(named(shared), named(private)))
    assert here.transfer(op, ours, theirs, "there") == "DONE"
    here.close()

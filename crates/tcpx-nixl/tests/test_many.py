"""Regions and handles by the thousand, all of them at a time, whose ends nobody asks for meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from node import Node, Peer, pattern


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize(
    ("regions", "handles"),
    # Layers of a large model, keys and values apart, for many requests; one region for many more.
    [(320, 64), (1, 10_000)],
)
def test_many_handles_over_many_regions_at_a_time(
    pair: tuple[Node, Peer], op: str, regions: int, handles: int
) -> None:
    here, there = pair
    size = 16
    # Every other piece, so that they stay pieces.
    local = here.alloc_regions(regions, 2 * size * handles, 1)
    remote = there.alloc_regions(regions, 2 * size * handles, 2)
    here.add(there.metadata())

    def pieces(start: int, handle: int) -> np.ndarray:
        addresses = start + 2 * size * (np.arange(regions) * handles + handle)
        return np.stack([addresses, np.full(regions, size), np.zeros(regions)], axis=1).astype(np.uint64)

    for handle in range(handles):
        ours, theirs = pieces(here.address(local), handle), pieces(there.address(remote), handle)
        assert here.post_and_leave(op, ours, theirs, "there", b"moved") in ("PROC", "DONE")
    assert there.wait_notifs(handles) == [("here", b"moved")] * handles
    assert {here.wait(handle) for handle in here.handles} == {"DONE"}
    moved = np.zeros((regions * handles, 2 * size), dtype=bool)
    moved[:, :size] = True
    whole = moved.size
    source, other = (1, 2) if op == "WRITE" else (2, 1)
    expected = np.where(moved.reshape(whole), pattern(whole, source), pattern(whole, other))
    written = there.content(remote) if op == "WRITE" else here.content(local)
    assert written == expected.tobytes()


def test_one_transfer_over_20000_regions(pair: tuple[Node, Peer]) -> None:
    here, there = pair
    count, size = 20_000, 32
    local = here.alloc(count * size, 1)
    remote = there.alloc_regions(count, size, 2)
    here.add(there.metadata())
    order = np.random.default_rng(3).permutation(count)
    ours = [(here.address(local) + int(at) * size, size) for at in order]
    theirs = [(there.address(remote) + at * size, size) for at in range(count)]
    expected = here.view(local).reshape(count, size)[order].tobytes()
    assert here.transfer("WRITE", ours, theirs, "there", b"all") == "DONE"
    assert there.wait_notifs(1) == [("here", b"all")]
    assert there.content(remote) == expected
    here.fill(local, 4)
    assert here.transfer("READ", ours, theirs, "there") == "DONE"
    assert here.view(local).reshape(count, size)[order].tobytes() == expected

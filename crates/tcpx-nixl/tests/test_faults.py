"""Peers that die, stop, come back, have another key; handles that are released too early; many lives."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from node import Node, Peer, pattern

MIB = 1 << 20
# The folder of what `cargo xtask last-release` has built.
LAST_RELEASE = os.environ.get("TCPX_LAST_RELEASE", "")
# Until a peer that is silent counts as dead, and more, on a busy machine.
DEAD = 50.0


def memory_pair(size: int, there: Peer, here: Node) -> tuple[int, int]:
    local, remote = here.alloc(size, 1), there.alloc(size, 2)
    here.add(there.metadata())
    return local, remote


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("when", ["loaded", "connected", "under way"])
def test_a_peer_that_dies_is_an_error_and_its_successor_works(op: str, when: str) -> None:
    size = 256 * MIB if when == "under way" else 4096
    here, there = Node("here"), Peer("there")
    local, remote = memory_pair(size, there, here)
    ours, theirs = [(here.address(local), size)], [(there.address(remote), size)]
    if when == "connected":
        assert here.transfer(op, ours, theirs, "there") == "DONE"
    handle = here.prepare(op, ours, theirs, "there", b"never")
    if when == "under way":
        # The first transfer sets the connection up.
        assert here.transfer(op, [(ours[0][0], 64)], [(theirs[0][0], 64)], "there") == "DONE"
        state = here.post(handle, b"never")
        assert state == "PROC"
        there.kill()
    else:
        there.kill()
        state = here.post(handle, b"never")
    started = time.monotonic()
    if state == "PROC":
        state = here.wait(handle)
    assert state == "ERR"
    assert time.monotonic() - started < DEAD
    here.release(handle)
    # Another one of that name, at another port, with other memory.
    successor = Peer("there")
    again = successor.alloc(size, 3)
    try:
        here.remove("there")
    except Exception:
        pass  # Newer NIXLs have forgotten it by themselves.
    here.add(successor.metadata())
    theirs = [(successor.address(again), size)]
    assert here.transfer(op, ours, theirs, "there", b"restored") == "DONE"
    assert successor.wait_notifs(1) == [("here", b"restored")]
    assert successor.content(again) == here.content(local)
    here.close()
    assert successor.end() == 0


def test_a_peer_that_stops_is_an_error_within_the_deadline() -> None:
    here, there = Node("here"), Peer("there")
    local, remote = memory_pair(4096, there, here)
    ours, theirs = [(here.address(local), 4096)], [(there.address(remote), 4096)]
    assert here.transfer("WRITE", ours, theirs, "there") == "DONE"
    there.stop()
    try:
        started = time.monotonic()
        assert here.transfer("WRITE", ours, theirs, "there") == "ERR"
        assert time.monotonic() - started < DEAD
    finally:
        there.go_on()
    here.close()
    there.end()


def test_a_peer_that_left_in_order_is_an_error() -> None:
    here, there = Node("here"), Peer("there")
    local, remote = memory_pair(4096, there, here)
    ours, theirs = [(here.address(local), 4096)], [(there.address(remote), 4096)]
    assert here.transfer("WRITE", ours, theirs, "there") == "DONE"
    assert there.end() == 0
    assert here.transfer("WRITE", ours, theirs, "there") == "ERR"
    here.close()


def test_another_key_is_an_error_and_the_same_one_is_not() -> None:
    # Made by `tcpx key`.
    one, other = "2NGI7HSPVT2H7BKI6GI6VKCQ42OBPANL", "E2DKOKND5PSIDPLOK2I6FNHCN3LVUZM5"
    for theirs_key, expected in ((one, "DONE"), (other, "ERR")):
        here, there = Node("here", key=one), Peer("there", {"TCPX_KEY": theirs_key})
        local, remote = memory_pair(4096, there, here)
        ours, theirs = [(here.address(local), 4096)], [(there.address(remote), 4096)]
        assert here.transfer("WRITE", ours, theirs, "there") == expected
        untouched = there.content(remote) == pattern(4096, 2).tobytes()
        assert untouched == (expected == "ERR")
        here.close()
        there.end()


def test_agents_speak_the_highest_protocol_that_both_know() -> None:
    for theirs_range in ("1-3", "3-9"):
        here, there = Node("here"), Peer("there", {"TCPX_PROTOCOLS": theirs_range})
        local, remote = memory_pair(MIB, there, here)
        ours, theirs = [(here.address(local), MIB)], [(there.address(remote), MIB)]
        assert here.transfer("WRITE", ours, theirs, "there", b"moved") == "DONE"
        assert there.wait_notifs(1) == [("here", b"moved")]
        assert there.content(remote) == here.content(local)
        here.close()
        assert there.end() == 0


@pytest.mark.skipif(not LAST_RELEASE, reason="`cargo xtask last-release` has built none")
def test_agents_of_the_last_release_and_this_tree_move_bytes_both_ways() -> None:
    this, last = Peer("this"), Peer("last", {"NIXL_PLUGIN_DIR": LAST_RELEASE})
    for owner, asker in ((this, last), (last, this)):
        local, remote = asker.alloc(MIB, 1), owner.alloc(MIB, 2)
        asker.add(owner.metadata())
        ours, theirs = [(asker.address(local), MIB)], [(owner.address(remote), MIB)]
        for op, source, number in (("WRITE", asker, local), ("READ", owner, remote)):
            source.fill(number, len(op))
            assert asker.transfer(op, ours, theirs, owner.name, op.encode()) == "DONE"
            assert owner.content(remote) == asker.content(local) == source.content(number)
            assert owner.wait_notifs(1) == [(asker.name, op.encode())]
    assert this.end() == 0
    assert last.end() == 0


def test_agents_without_a_common_protocol_name_both(capfd: pytest.CaptureFixture[str]) -> None:
    here, there = Node("here"), Peer("there", {"TCPX_PROTOCOLS": "4-5"})
    here.alloc(4096, 1)
    there.alloc(4096, 2)
    with pytest.raises(Exception):
        here.add(there.metadata())
    said = capfd.readouterr().err
    assert "protocol 3)" in said and "protocols 4 to 5)" in said, said
    here.close()
    there.end()


def test_memory_that_was_deregistered_is_refused(pair: tuple[Node, Peer]) -> None:
    here, there = pair
    local, remote = here.alloc(MIB, 1), there.alloc(MIB, 2)
    here.add(there.metadata())
    for size in (4096, MIB):
        ours, theirs = [(here.address(local), size)], [(there.address(remote), size)]
        assert here.transfer("WRITE", ours, theirs, "there") == "DONE"
    before = there.content(remote)
    there.deregister(remote)
    here.fill(local, 9)
    for op in ("WRITE", "READ"):
        for size in (4096, MIB):
            ours, theirs = [(here.address(local), size)], [(there.address(remote), size)]
            assert here.transfer(op, ours, theirs, "there") == "ERR"
    assert there.content(remote) == before
    # The connection lives on.
    fresh = there.alloc(4096, 5)
    here.add(there.metadata())
    ours, theirs = [(here.address(local), 4096)], [(there.address(fresh), 4096)]
    assert here.transfer("WRITE", ours, theirs, "there") == "DONE"


@pytest.mark.parametrize("whose", ["here", "there"])
@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("kept", [0, 3 * MIB + 4096])
def test_unmapped_memory_fails_its_transfer_and_no_other(
    pair: tuple[Node, Peer], whose: str, op: str, kept: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A program frees memory that it has registered; `kept` bytes of it stay."""
    here, there = pair
    size = 8 * MIB
    local, remote = here.alloc(size, 1), there.alloc(size, 2)
    gone = {"here": here, "there": there}[whose].alloc_apart(size)
    here.add(there.metadata())
    ours, theirs = here.address(local), there.address(remote)
    good = ([(ours, size)], [(theirs, size)])
    assert here.transfer(op, *good, "there") == "DONE"
    {"here": here, "there": there}[whose].hide(gone + kept, size - kept)
    if whose == "here":
        bad = here.prepare(op, [(gone, size)], [(theirs, size)], "there")
    else:
        bad = here.prepare(op, [(ours, size)], [(gone, size)], "there")
    for _ in range(3):
        here.post(bad)
        for _ in range(5):
            assert here.transfer(op, *good, "there") == "DONE"
        assert here.wait(bad) == "ERR"
    here.release(bad)
    assert here.transfer(op, *good, "there", b"still there") == "DONE"
    assert there.wait_notifs(1) == [("here", b"still there")]
    assert hex(gone) in capfd.readouterr().err


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize(("size", "count"), [(256 * MIB, 1), (4096, 20_000)])
def test_release_while_under_way_does_not_block(op: str, size: int, count: int) -> None:
    here, there = Node("here"), Peer("there")
    space = size * count * (2 if count > 1 else 1)
    local, remote = memory_pair(space, there, here)
    step = 2 * size
    ours = [(here.address(local) + at * step, size) for at in range(count)]
    theirs = [(there.address(remote) + at * step, size) for at in range(count)]
    assert here.transfer(op, ours[:1], theirs[:1], "there") == "DONE"
    for _ in range(3):
        handle = here.prepare(op, ours, theirs, "there")
        assert here.post(handle) in ("PROC", "DONE")
        here.release(handle)
        if op == "READ":
            # The memory is the caller's again: nothing arrives any more.
            before = here.content(local)
            assert there.content(remote, 0, 64)
            assert here.content(local) == before
    # What was released is in nobody's way.
    assert here.transfer(op, ours, theirs, "there", b"whole") == "DONE"
    assert there.wait_notifs(1) == [("here", b"whole")]
    here.close()
    assert there.end() == 0


def test_no_descriptors_and_threads_are_left() -> None:
    there = Peer("there")
    remote = there.alloc(MIB, 2)
    metadata, address = there.metadata(), there.address(remote)
    counts = []
    for life in range(12):
        here = Node(f"here {life}")
        local = here.alloc(MIB, life)
        here.add(metadata)
        ours = [(here.address(local), MIB)]
        assert here.transfer("WRITE", ours, [(address, MIB)], "there") == "DONE"
        counts.append((here.descriptors(), there.descriptors()))
        if life < 11:
            here.close()
    # The first lives set up what a process has once.
    most = [max(count[side] for count in counts[:6]) for side in (0, 1)]
    # Both sides close their descriptors of a connection a little after its end.
    until = time.monotonic() + DEAD
    while here.descriptors() > most[0]:
        assert time.monotonic() < until, counts
    here.close()
    while there.descriptors() > most[1]:
        assert time.monotonic() < until, counts
    assert there.end() == 0


LIVES = """
import sys
sys.path.insert(0, sys.argv[1])
from node import Node
for life in range(int(sys.argv[2])):
    one, other = Node("one"), Node("other")
    a, b = one.alloc(65536, life), other.alloc(65536, life + 1)
    one.add(other.metadata())
    for size in (40, 4096, 65536):
        ours, theirs = [(one.address(a), size)], [(other.address(b), size)]
        assert one.transfer("WRITE", ours, theirs, "other", b"n" * size) == "DONE"
        assert other.wait_notifs(1) == [("one", b"n" * size)]
        assert one.transfer("READ", ours, theirs, "other") == "DONE"
    one.remove("other")
    one.close()
    other.close()
print("lived")
"""


def test_many_lives_under_the_heap_checker() -> None:
    lives = os.environ.get("TCPX_NIXL_LIVES", "200")
    variables = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.check=3", MALLOC_PERTURB_="165")
    checker = next(iter(Path("/lib/x86_64-linux-gnu").glob("libc_malloc_debug.so.0")), None)
    if checker:
        variables["LD_PRELOAD"] = str(checker)
    done = subprocess.run(
        [sys.executable, "-c", LIVES, str(Path(__file__).parent), lives],
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("lived"), done.stderr[-4000:]


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("NIXL_PLUGIN_DIR", "/nowhere", "unset NIXL_PLUGIN_DIR"),
        ("TCPX_NIXL_PORT", "abc", "the lines above say why"),
    ],
)
def test_the_check_ends_with_a_reason(variable: str, value: str, reason: str) -> None:
    pytest.importorskip("tcpx.nixl")
    command = [sys.executable, "-m", "tcpx.nixl", "--check"]
    variables = {**os.environ, variable: value}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("FAILED: ")
    assert reason in ended.stderr and "Traceback" not in ended.stderr

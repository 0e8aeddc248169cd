"""What NIXL and its callers expect of a backend beside moving bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from node import Node, Peer, pattern

MIB = 1 << 20
# How late what waits for nothing may be, in seconds; a busy machine may delay all of so many tries
# but one.
LATE, TRIES = 0.1, 20


def are_soon(attempt: Callable[[], list[float]]) -> None:
    """Each of what an attempt times is in time, in one of some."""
    least = attempt()
    for _ in range(1, TRIES):
        if max(least) < LATE:
            break
        least = list(map(min, least, attempt()))
    assert max(least) < LATE, least


def test_metadata_is_the_same_each_time_and_may_come_again(pair: tuple[Node, Peer]) -> None:
    here, there = pair
    local, first = here.alloc(4096, 1), there.alloc(4096, 2)
    metadata = there.metadata()
    assert there.metadata() == metadata
    here.add(metadata)
    ours, theirs = [(here.address(local), 4096)], [(there.address(first), 4096)]
    assert here.transfer("WRITE", ours, theirs, "there") == "DONE"
    # Once more, and with more memory: the transfers of before go on.
    here.add(metadata)
    second = there.alloc(8192, 3)
    here.add(there.metadata())
    for number in (first, second):
        theirs = [(there.address(number), 4096)]
        assert here.transfer("WRITE", ours, theirs, "there") == "DONE"
        assert there.content(number, 0, 4096) == here.content(local)


@pytest.mark.parametrize("forgotten", [False, True])
def test_memory_that_was_registered_anew_is_reached(pair: tuple[Node, Peer], forgotten: bool) -> None:
    """As Ray does for each object: the same address, another registration, the metadata anew, with or without the old
    forgotten. In between nothing is reached."""
    here, there = pair
    local, remote = here.alloc(MIB, 1), there.alloc(MIB, 2)
    ours, theirs = [(here.address(local), MIB)], [(there.address(remote), MIB)]
    for life in range(5):
        here.add(there.metadata())
        here.fill(local, life)
        assert here.transfer("WRITE", ours, theirs, "there", b"life") == "DONE"
        assert there.wait_notifs(1) == [("here", b"life")]
        before = there.content(remote)
        assert before == here.content(local)
        there.deregister(remote)
        here.fill(local, life + 10)
        assert here.transfer("WRITE", ours, theirs, "there", b"never") == "ERR"
        assert there.content(remote) == before
        there.register_again(remote)
        if forgotten:
            here.remove("there")


def test_the_same_memory_registered_twice_is_one(pair: tuple[Node, Peer]) -> None:
    here, there = pair
    local, remote = here.alloc(MIB, 1), there.alloc(MIB, 2)
    ours, theirs = [(here.address(local), MIB)], [(there.address(remote), MIB)]
    here.add(there.metadata())
    again = here.agent.register_memory([(here.address(local), MIB, 0, "")], "DRAM")
    for op in ("WRITE", "READ"):
        assert here.transfer(op, ours, theirs, "there") == "DONE"
    here.agent.deregister_memory(again)
    for op in ("WRITE", "READ"):
        assert here.transfer(op, ours, theirs, "there") == "DONE"
    assert there.content(remote) == here.content(local)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_strided_lists_move_what_they_name(pair: tuple[Node, Peer], op: str) -> None:
    """Rows of address, bytes, device, stride and count, with gaps at both ends, in order and in any."""
    here, there = pair
    count, size, gap_here, gap_there = 5000, 300, 17, 40
    local = here.alloc(count * (size + gap_here), 1)
    remote = there.alloc(count * (size + gap_there), 2)
    here.add(there.metadata())
    agent = here.agent

    def listed(name: str, start: int, stride: int) -> object:
        return agent.prep_xfer_dlist(name, np.array([[start, size, 0, stride, count]], np.uint64), "DRAM")

    try:
        ours = listed("NIXL_INIT_AGENT", here.address(local), size + gap_here)
        others = listed("there", there.address(remote), size + gap_there)
    except Exception:
        pytest.skip("this NIXL has no lists with strides")
    mine = pattern(count * (size + gap_here), 1).reshape(count, -1)
    theirs = pattern(count * (size + gap_there), 2).reshape(count, -1)
    in_order = np.arange(count, dtype=np.int32)
    shuffled = np.random.default_rng(5).permutation(count).astype(np.int32)
    for order in (in_order, in_order[::2], shuffled):
        handle = agent.make_prepped_xfer(op, ours, order, others, in_order[: len(order)], b"")
        assert here.run(handle) == "DONE"
        here.release(handle)
        if op == "WRITE":
            theirs[: len(order), :size] = mine[order, :size]
        else:
            mine[order, :size] = theirs[: len(order), :size]
        assert here.content(local) == mine.tobytes()
        assert there.content(remote) == theirs.tobytes()


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_release_waits_for_no_peer(op: str) -> None:
    """While the peer stalls: a write is let go of, a read too unless something can still arrive."""
    here, there = Node("here"), Peer("there")
    size = 64 * MIB
    local, remote = here.alloc(size, 1), there.alloc(size, 2)
    here.add(there.metadata())
    ours, theirs = [(here.address(local), size)], [(there.address(remote), size)]
    assert here.transfer(op, ours, theirs, "there") == "DONE"
    handle = here.prepare(op, ours, theirs, "there")
    there.stop()
    try:
        assert here.post(handle) == "PROC"
        refused = False
        try:
            here.agent.release_xfer_handle(handle)
        except Exception:
            refused = True
        assert op == "READ" or not refused
    finally:
        there.go_on()
    if refused:
        here.release(handle)
    # The connection did not end by it, and nothing of what was let go of lands behind the next
    # transfer.
    here.fill(local, 7)
    assert here.transfer("WRITE", ours, theirs, "there", b"next") == "DONE"
    assert there.wait_notifs(1) == [("here", b"next")]
    assert there.content(remote) == here.content(local)
    assert here.guards_hold() and there.guards_hold()
    here.close()
    assert there.end() == 0


def test_telemetry_tells_what_moved() -> None:
    here, there = Node("here", telemetry=True), Peer("there")
    local, remote = here.alloc(MIB, 1), there.alloc(MIB, 2)
    here.add(there.metadata())
    handle = here.prepare("WRITE", [(here.address(local), MIB)], [(there.address(remote), MIB)], "there")
    assert here.run(handle) == "DONE"
    told = here.agent.get_xfer_telemetry(handle)
    assert told.totalBytes == MIB and told.descCount == 1
    assert here.agent.query_xfer_backend(handle) == "TCPX"
    here.release(handle)
    here.close()
    assert there.end() == 0


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_memory_is_let_go_of_though_nobody_polls(op: str) -> None:
    """By deregistration and by the end of an agent, after transfers whose handles were never asked."""
    size = 4096

    def attempt() -> list[float]:
        here, there = Node("here"), Peer("there")
        remote = there.alloc(2 * size, 9)
        here.add(there.metadata())
        local, other = here.alloc(size, 1), here.alloc(size, 2)
        for number, offset in ((local, 0), (other, size)):
            ours, theirs = [(here.address(number), size)], [(there.address(remote) + offset, size)]
            assert here.post_and_leave(op, ours, theirs, "there", b"moved") in ("PROC", "DONE")
        there.wait_notifs(2)
        took = [here.seconds_to("deregister", local)]
        # The handles live on, and are not released first: the agent ends with them.
        kept, here.handles = here.handles, []
        started = time.monotonic()
        here.close()
        del kept
        took += [time.monotonic() - started, there.seconds_to("close")]
        assert there.end() == 0
        return took

    are_soon(attempt)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_memory_is_let_go_of_amid_a_transfer_with_a_peer_that_stands_still(op: str) -> None:
    """The transfer ends as cancelled, the connection goes on, and what moved with other memory arrives."""
    here, there = Node("here"), Peer("there")
    size = 64 * MIB
    local, other = here.alloc(size, 1), here.alloc(size, 2)
    remote, beside = there.alloc(size, 3), there.alloc(size, 4)
    here.add(there.metadata())
    theirs = [(there.address(remote), size)]
    # The first transfer sets the connection up.
    assert here.transfer(op, [(here.address(local), size)], theirs, "there") == "DONE"

    def attempt() -> list[float]:
        handle = here.prepare(op, [(here.address(local), size)], theirs, "there")
        # Of other memory, behind it.
        ours, far = [(here.address(other), size)], [(there.address(beside), size)]
        stays = here.prepare("WRITE", ours, far, "there")
        there.stop()
        try:
            assert here.post(handle) == "PROC"
            assert here.post(stays) == "PROC"
            took = here.seconds_to("deregister", local)
            assert here.wait(handle) == "ERR"
        finally:
            there.go_on()
        assert here.wait(stays) == "DONE"
        assert there.content(beside) == here.content(other)
        assert here.guards_hold() and there.guards_hold()
        here.release(handle)
        here.release(stays)
        here.register_again(local)
        return [took]

    are_soon(attempt)
    here.close()
    assert there.end() == 0


def test_a_transfer_that_waits_keeps_no_memory() -> None:
    """For a peer that does not answer: the memory is let go of at once, and the transfer ends as failed."""
    size = 4096

    def attempt() -> list[float]:
        here, there = Node("here"), Peer("there")
        local, remote = here.alloc(size, 1), there.alloc(size, 2)
        here.add(there.metadata())
        ours, theirs = [(here.address(local), size)], [(there.address(remote), size)]
        there.stop()
        try:
            handle = here.prepare("WRITE", ours, theirs, "there")
            assert here.post(handle) == "PROC"
            took = here.seconds_to("deregister", local)
        finally:
            there.go_on()
        assert here.wait(handle) == "ERR"
        here.release(handle)
        here.close()
        there.end()
        return [took]

    are_soon(attempt)

"""Much of everything: regions and handles by the thousand whose ends nobody asks for meanwhile, memory of gigabytes,
notifications that nobody reads, and lists of several threads while peers die."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from node import Node, Peer, pattern

GIB = 1 << 30


def rows(addresses: np.ndarray, sizes: np.ndarray | int) -> np.ndarray:
    """A list of pieces of host memory."""
    sizes = np.broadcast_to(sizes, addresses.shape)
    return np.stack([addresses, sizes, np.zeros_like(addresses)], axis=1).astype(np.uint64)


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
        return rows(start + 2 * size * (np.arange(regions) * handles + handle), size)

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


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_pieces_lie_above_4_gib_in_their_region(pair: tuple[Node, Peer], op: str) -> None:
    here, there = pair
    whole, size = 5 * GIB, 4096
    ours, theirs = here.alloc_apart(whole), there.alloc_apart(whole)
    here.add(there.metadata())
    # Around 4 GiB, where 32 bits end, and at both ends; the pieces of a line are apart by as much
    # again.
    offsets = np.array([0, 4 * GIB - 2 * size, 4 * GIB - 8, 4 * GIB + size, whole - size])
    source, begin, target, end = (here, ours, there, theirs) if op == "WRITE" else (there, theirs, here, ours)
    for number, offset in enumerate(offsets):
        source.write(begin + int(offset), pattern(size, number).tobytes())
    # Each lands where another lay.
    lands = np.roll(offsets, 1)
    places = (offsets, lands) if op == "WRITE" else (lands, offsets)
    local, remote = (rows(start + at, size) for start, at in zip((ours, theirs), places, strict=True))
    assert here.run(handle := here.prepare(op, local, remote, "there")) == "DONE"
    here.release(handle)
    for number, offset in enumerate(lands):
        assert target.read(end + int(offset), size) == pattern(size, number).tobytes()


def test_8_gib_are_registered_at_once_and_cost_no_memory(pair: tuple[Node, Peer]) -> None:
    here, there = pair
    size = 8 * GIB
    before = here.resident(), there.resident()
    ours, theirs = here.alloc_apart(size), there.alloc_apart(size)
    here.add(there.metadata())
    here.write(ours + size - 8, b"the last")
    last = [(ours + size - 8, 8)], [(theirs + size - 8, 8)]
    assert here.transfer("WRITE", *last, "there") == "DONE"
    assert there.read(theirs + size - 8, 8) == b"the last"
    for node, had in zip((here, there), before, strict=True):
        assert node.resident() - had < size // 64


@pytest.mark.parametrize("idle", [0, pytest.param(45, marks=pytest.mark.slow)])
def test_a_burst_comes_after_a_rest(pair: tuple[Node, Peer], idle: int) -> None:
    """Longer than whatever a connection does by the clock."""
    here, there = pair
    pieces, handles, size = 2048, 512, 16
    whole = 2 * size * pieces * handles
    local, remote = here.alloc(whole, 1), there.alloc(whole, 2)
    here.add(there.metadata())

    def burst(seed: int) -> None:
        here.fill(local, seed)
        # Every other piece, so that they stay pieces.
        at = 2 * size * np.random.default_rng(seed).permutation(pieces * handles).reshape(handles, pieces)
        for places in at:
            ours, theirs = (rows(start + places, size) for start in (here.address(local), there.address(remote)))
            assert here.post_and_leave("WRITE", ours, theirs, "there", b"moved") in ("PROC", "DONE")
        assert there.wait_notifs(handles) == [("here", b"moved")] * handles
        assert here.wait_all() == {"DONE"}
        moved, stays = (pattern(whole, one).reshape(-1, 2, size) for one in (seed, 2))
        moved[:, 1] = stays[:, 1]
        assert there.content(remote) == moved.tobytes()
        while here.handles:
            here.release(here.handles.pop())

    burst(3)
    time.sleep(idle)
    burst(4)


@pytest.mark.parametrize("size", [4000, 58_000])
def test_58_mb_of_unread_notifications_come_once_in_order(pair: tuple[Node, Peer], size: int) -> None:
    here, there = pair
    here.add(there.metadata())
    count = 58_000_000 // size
    for number in range(count):
        here.notify("there", number.to_bytes(8, "little") * (size // 8))
    came = there.wait_notifs(count)
    numbers = [int.from_bytes(message[:8], "little") for _, message in came]
    assert numbers == list(range(count))
    assert all(name == "here" and message == message[:8] * (size // 8) for name, message in came)
    here.notify("there", b"last")
    assert there.wait_notifs(1) == [("here", b"last")]


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_lists_of_four_threads_are_right_while_other_peers_die(pair: tuple[Node, Peer], kills: int) -> None:
    here, there = pair
    threads, unit, count = 4, 64, 4096
    whole = unit * count
    locals_, remotes = ([node.alloc(whole, seed) for _ in range(threads)] for seed, node in ((1, here), (2, there)))
    starts = [there.address(remote) for remote in remotes]
    here.add(there.metadata())
    is_over, failed = threading.Event(), []

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        view = here.view(locals_[number]).reshape(count, unit)
        theirs = pattern(whole, 2).reshape(count, unit)
        rounds = 0
        while rounds < 10 or not is_over.is_set():
            rounds += 1
            pieces = int(random.integers(1, count))
            ours_at, theirs_at = (random.permutation(count)[:pieces] for _ in range(2))
            sizes = random.integers(1, unit + 1, pieces)
            local = rows(here.address(locals_[number]) + unit * ours_at, sizes)
            remote = rows(starts[number] + unit * theirs_at, sizes)
            op = ("WRITE", "READ")[rounds % 2]
            expected = view.copy()
            within = np.arange(unit) < sizes[:, None]
            if op == "WRITE":
                theirs[theirs_at] = np.where(within, view[ours_at], theirs[theirs_at])
            else:
                expected[ours_at] = np.where(within, theirs[theirs_at], view[ours_at])
            handle = here.prepare(op, local, remote, "there")
            assert here.run(handle) == "DONE"
            here.release(handle)
            assert (view == expected).all()
        # All of it comes back as it was written.
        handle = here.prepare("READ", [(here.address(locals_[number]), whole)], [(starts[number], whole)], "there")
        assert here.run(handle) == "DONE"
        here.release(handle)
        assert (view == theirs).all()

    def worker(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)
            raise

    workers = [threading.Thread(target=worker, args=(number,)) for number in range(threads)]
    for one in workers:
        one.start()
    size = 64 << 20
    local = here.alloc(size, 3)
    try:
        for life in range(kills):
            victim = Peer(f"victim {life}")
            remote = victim.alloc(size, 4)
            name = here.add(victim.metadata())
            ours, theirs = here.address(local), victim.address(remote)
            assert here.transfer("READ", [(ours, 64)], [(theirs, 64)], name) == "DONE"
            handle = here.prepare(("WRITE", "READ")[life % 2], [(ours, size)], [(theirs, size)], name)
            here.post(handle)
            victim.kill()
            here.wait(handle)
            here.release(handle)
    finally:
        is_over.set()
        for one in workers:
            one.join()
    assert not failed, failed

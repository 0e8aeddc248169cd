"""Notifications: alone, to self, empty, long, from threads, behind data that nobody polls for."""

from __future__ import annotations

import threading

import pytest
from node import Node, Peer, pattern

MIB = 1 << 20


def test_alone_empty_and_long(pair: tuple[Node, Peer]) -> None:
    here, there = pair
    here.add(there.metadata())
    messages = [b"", b"one", b"with \x00 inside", bytes(100_000), bytes(range(256)) * 4000]
    for message in messages:
        here.notify("there", message)
    came = there.wait_notifs(len(messages))
    assert sorted(came) == sorted(("here", message) for message in messages)


def test_to_self() -> None:
    node = Node("alone")
    node.notify("alone", b"me")
    node.notify("alone", b"")
    assert node.wait_notifs(2) == [("alone", b"me"), ("alone", b"")]
    node.close()


def test_from_four_threads(pair: tuple[Node, Peer]) -> None:
    here, there = pair
    here.add(there.metadata())
    each = 2000

    def work(number: int) -> None:
        for at in range(each):
            here.notify("there", f"{number}:{at}".encode())

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    came = sorted(message for _, message in there.wait_notifs(4 * each))
    assert came == sorted(f"{number}:{at}".encode() for number in range(4) for at in range(each))


@pytest.mark.parametrize(
    ("size", "count"), [(4096, 1), (16 * MIB, 1), (100, 200), (4096, 2000), (MIB, 40)]
)
def test_the_initiator_need_not_poll(pair: tuple[Node, Peer], size: int, count: int) -> None:
    """The target sees the notification behind its data, though the initiator does nothing after its post."""
    here, there = pair
    local, remote = here.alloc(size * count * 2, 1), there.alloc(size * count * 2, 2)
    here.add(there.metadata())
    # Every other piece, so that they stay pieces.
    ours = [(here.address(local) + at * 2 * size, size) for at in range(count)]
    theirs = [(there.address(remote) + at * 2 * size, size) for at in range(count)]
    state = here.post_and_leave("WRITE", ours, theirs, "there", b"here it is")
    assert state in ("PROC", "DONE")
    notifs, content = there.content_at_notif(remote)
    assert notifs == [("here", b"here it is")]
    expected = pattern(size * count * 2, 2)
    source = pattern(size * count * 2, 1)
    for at in range(count):
        expected[at * 2 * size : at * 2 * size + size] = source[
            at * 2 * size : at * 2 * size + size
        ]
    assert content == expected.tobytes()


def test_a_read_notifies_its_owner(pair: tuple[Node, Peer]) -> None:
    here, there = pair
    local, remote = here.alloc(MIB, 1), there.alloc(MIB, 2)
    here.add(there.metadata())
    ours, theirs = [(here.address(local), MIB)], [(there.address(remote), MIB)]
    assert here.transfer("READ", ours, theirs, "there", b"taken") == "DONE"
    assert there.wait_notifs(1) == [("here", b"taken")]
    assert here.content(local) == pattern(MIB, 2).tobytes()


def test_each_post_has_its_own_notification(pair: tuple[Node, Peer]) -> None:
    here, there = pair
    local, remote = here.alloc(4096, 1), there.alloc(4096, 2)
    here.add(there.metadata())
    handle = here.prepare(
        "WRITE", [(here.address(local), 4096)], [(there.address(remote), 4096)], "there"
    )
    for at in range(300):
        here.fill(local, at)
        assert here.run(handle, f"post {at}".encode()) == "DONE"
    # NIXL itself keeps the last one for a post without any.
    assert here.run(handle) == "DONE"
    came = there.wait_notifs(301)
    numbers = [*range(300), 299]
    assert came == [("here", f"post {at}".encode()) for at in numbers]
    assert there.content(remote) == pattern(4096, 299).tobytes()
    here.release(handle)

"""Windows, puts, gets, batches and notifications."""

from __future__ import annotations

import asyncio
import collections
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy
import pytest
from conftest import PATIENCE, connect_pair, run_python

import tcpx
from tcpx._tcpx import Completions


def test_random_puts_and_gets_are_what_a_model_says(pair):
    user, owner = pair
    chosen = random.Random(7)
    size = 16 << 20
    cache = numpy.frombuffer(bytearray(os.urandom(size)), dtype=numpy.uint8)
    model = cache.copy()
    window = owner.expose(cache)
    assert len(window) == size
    for length in [0, 1, 23, 4096, 65_536, 131_073, 1 << 20, size] * 4:
        offset = chosen.randrange(size - length + 1)
        level = chosen.choice(["placed", "verified"])
        if chosen.random() < 0.5:
            source = os.urandom(length)
            model[offset : offset + length] = numpy.frombuffer(source, dtype=numpy.uint8)
            report = user.put(source, window.key, offset, level=level).wait(PATIENCE)
        else:
            destination = bytearray(length)
            report = user.get(destination, window.key, offset, level=level).wait(PATIENCE)
            assert destination == model[offset : offset + length].tobytes()
        assert (report.nbytes, report.level) == (length, level)
    window.revoke(PATIENCE)
    assert (cache == model).all()


def test_a_batch_of_a_thousand_pieces_is_notified_once(pair):
    user, owner = pair
    blocks, block = 1000, 3000
    cache = bytearray(blocks * block)
    window = owner.expose(cache, "put")
    source = numpy.frombuffer(os.urandom(blocks * block), dtype=numpy.uint8)
    batch = user.batch()
    for at in range(blocks):
        there = at * 387 % blocks * block
        batch.put(source[at * block : (at + 1) * block], window.key, there)
    assert len(batch) == blocks
    transfer = batch.notify(b"applied").start()
    assert owner.notification().wait(PATIENCE) == b"applied"
    for at in range(blocks):
        there = at * 387 % blocks * block
        assert cache[there : there + block] == source[at * block : (at + 1) * block].tobytes()
    assert transfer.wait(PATIENCE).nbytes == blocks * block
    assert owner.notification().test() is None
    with pytest.raises(tcpx.SettingError, match="a batch"):
        batch.start()


def test_hundreds_of_puts_and_gets_are_awaited_at_once(pair):
    user, owner = pair
    count, size = 250, 2000
    cache = bytearray(os.urandom(count * size))
    before = bytes(cache)
    other = bytearray(count * size)
    readable, writable = owner.expose(cache, "get"), owner.expose(other, "put")

    async def run():
        got = [bytearray(size) for _ in range(count)]
        sent = [at.to_bytes(2, "little") * (size // 2) for at in range(count)]
        await asyncio.wait_for(
            asyncio.gather(
                *(user.get(one, readable.key, at * size) for at, one in enumerate(got)),
                *(user.put(one, writable.key, at * size) for at, one in enumerate(sent)),
            ),
            PATIENCE,
        )
        assert b"".join(got) == before
        assert bytes(other) == b"".join(sent)

    asyncio.run(run())


def test_as_many_puts_as_may_be_run_beside_the_peers_gets(pair):
    user, owner = pair
    # Longer than what travels with its announcement.
    size, slots = 66_000, 4096
    source = bytes(size)
    window = owner.expose(bytearray(size * slots))
    content = os.urandom(16)
    readable = user.expose(bytearray(content))
    failed, done = [], threading.Event()

    def gets():
        try:
            for _ in range(100):
                back = bytearray(16)
                owner.get(back, readable.key).wait(PATIENCE)
                assert back == content
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=gets)
    thread.start()
    running, number = collections.deque(), 0
    while not done.is_set():
        # A place is written again once the put before has let go of it.
        if len(running) == slots:
            running.popleft().wait(PATIENCE)
        running.append(user.put(source, window.key, number % slots * size))
        number += 1
    thread.join()
    assert not failed
    for put in running:
        put.wait(PATIENCE)


def test_sides_that_take_two_of_each_take_all_in_turn():
    names = ("puts", "notifications", "gets", "asks", "windows", "tags", "pieces", "list_windows")
    user, owner = connect_pair(limits=dict.fromkeys(names, 2))
    size, count = 66_000, 20
    memory = bytearray(size * count)
    window = owner.expose(memory)
    sent = [bytes([at]) * size for at in range(count)]
    puts = [user.put(one, window.key, at * size) for at, one in enumerate(sent)]
    for put in puts:
        put.wait(PATIENCE)
    got = [bytearray(size) for _ in range(count)]
    came = [bytearray(size) for _ in range(count)]
    gets = [user.get(one, window.key, at * size) for at, one in enumerate(got)]
    sends = [user.send(one, tag=at % 7) for at, one in enumerate(sent)]
    told = [user.notify(bytes([at])) for at in range(count)]
    receives = [owner.recv(one, tag=at % 7) for at, one in enumerate(came)]
    for at in range(count):
        assert owner.notification().wait(PATIENCE) == bytes([at])
    for one in gets + sends + told + receives:
        one.wait(PATIENCE)
    assert got == came == sent
    # What can never fit is refused.
    batch = user.batch()
    for at in range(3):
        batch = batch.put(sent[at], window.key, 2 * at * size)
    with pytest.raises(tcpx.Error, match="lists of 2 pieces"):
        batch.start()
    for limits in ({"put": 2}, {"puts": 0}):
        with pytest.raises(tcpx.SettingError, match="put"):
            tcpx.Endpoint("127.0.0.1:0", limits=limits)


def test_gets_that_end_unanswered_leave_the_connection_well():
    code = """
import sys, tcpx
endpoint = tcpx.Endpoint("127.0.0.1:0", insecure=True)
print(endpoint.address[1], flush=True)
connection = endpoint.accept().wait()
window = connection.expose(bytearray(1 << 20))
print(window.key.hex(), flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(owner.stdout.readline())
        user = tcpx.connect(f"127.0.0.1:{port}", insecure=True, timeout=PATIENCE).wait()
        key = bytes.fromhex(owner.stdout.readline())
        owner.send_signal(signal.SIGSTOP)
        os.waitpid(owner.pid, os.WUNTRACED)
        late = [user.get(bytearray(4096), key, stall=0.02) for _ in range(600)]
        for get in late:
            with pytest.raises(tcpx.TimeoutError):
                get.wait(PATIENCE)
        owner.send_signal(signal.SIGCONT)
        for _ in range(3):
            user.get(bytearray(16), key).wait(PATIENCE)
    finally:
        owner.send_signal(signal.SIGCONT)
        owner.kill()
        owner.wait()


def test_tasks_await_notifications(pair):
    user, owner = pair

    async def run():
        tasks = [asyncio.create_task(_await(owner.notification())) for _ in range(5)]
        await asyncio.sleep(0)
        given_up = asyncio.create_task(_await(owner.notification()))
        await asyncio.sleep(0)
        given_up.cancel()
        for number in range(5):
            await user.notify(bytes([number]) * 3)
        messages = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
        assert sorted(messages) == [bytes([number]) * 3 for number in range(5)]
        user.close()
        with pytest.raises(tcpx.ClosedError):
            await asyncio.wait_for(_await(owner.notification()), PATIENCE)

    asyncio.run(run())


async def _await(awaitable):
    return await awaitable


def test_notifications_keep_their_order_between_threads(pair):
    user, owner = pair
    count = 2000

    def send():
        for number in range(count):
            user.notify(number.to_bytes(4, "little")).wait(PATIENCE)

    thread = threading.Thread(target=send)
    thread.start()
    for number in range(count):
        assert owner.notification().wait(PATIENCE) == number.to_bytes(4, "little")
    thread.join()


def test_what_a_window_does_not_allow_is_refused(pair):
    user, owner = pair
    cache = bytearray(b"7" * 1000)
    window = owner.expose(cache, "put")
    with pytest.raises(tcpx.SettingError, match="1000 bytes"):
        user.put(bytes(10), window.key, 991)
    with pytest.raises(tcpx.SettingError, match="right"):
        user.get(bytearray(10), window.key)
    with pytest.raises(tcpx.SettingError, match="window key"):
        user.put(b"x", window.key[:-1])
    with pytest.raises(ValueError, match="rights"):
        owner.expose(cache, "read")
    with pytest.raises(BufferError, match="read-only"):
        owner.expose(bytes(10), "put")
    with pytest.raises(BufferError, match="read-only"):
        user.get(bytes(10), window.key)
    wrong = window.key[:-1] + bytes([window.key[-1] ^ 1])
    with pytest.raises(tcpx.TransferError, match="does not exist") as info:
        user.put(b"x", wrong).wait(PATIENCE)
    assert "nothing" in info.value.delivered and info.value.tag is None
    with window:
        user.put(b"x", window.key).wait(PATIENCE)
    assert window.revoked
    with pytest.raises(tcpx.TransferError, match="revoked"):
        user.put(b"y", window.key).wait(PATIENCE)
    assert cache == b"x" + b"7" * 999
    read_only = owner.expose(b"abc", "get")
    destination = bytearray(3)
    user.get(destination, read_only.key).wait(PATIENCE)
    assert destination == b"abc"
    with pytest.raises(tcpx.TimeoutError):
        owner.notification().wait(0)


class Cache(bytearray):
    """Memory that can be referred to weakly."""


def test_dropped_windows_let_go_of_their_memory(pair):
    user, owner = pair
    opened = []
    for number in range(2000):
        cache = Cache(64)
        opened.append(weakref.ref(cache))
        window = owner.expose(cache)
        if number % 100 == 0:
            user.put(b"there", window.key).wait(PATIENCE)
        del window, cache
    until = time.monotonic() + PATIENCE
    while any(one() is not None for one in opened) and time.monotonic() < until:
        # The engine lets go in its own time, and the interpreter's part is done by the next call.
        user.notify(b"").wait(PATIENCE)
        owner.notification().wait(PATIENCE)
        gc.collect()
    assert all(one() is None for one in opened)


def test_who_gave_up_waiting_is_not_told(pair):
    user, owner = pair
    completions = Completions()
    waiting = owner.notification()
    for token in range(100):
        assert waiting.watch(completions, token) is None
        if token != 50:
            waiting.unwatch(completions, token)
    user.notify(b"one").wait(PATIENCE)
    assert owner.notification().wait(PATIENCE) == b"one"
    told, until = [], time.monotonic() + PATIENCE
    while not told and time.monotonic() < until:
        told = completions.drain()
    assert told == [50]


def test_a_wait_that_was_given_up_loses_nothing(pair):
    user, owner = pair

    async def run():
        for _ in range(100):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_await(owner.notification()), 0.0001)
        await user.notify(b"here")
        assert await asyncio.wait_for(_await(owner.notification()), PATIENCE) == b"here"

    asyncio.run(run())


EXIT = """
import threading, tcpx
server = tcpx.Endpoint("127.0.0.1:0")
accepted = []
thread = threading.Thread(target=lambda: accepted.append(server.accept(timeout=60)))
thread.start()
user = tcpx.connect(server.pairing()).wait()
thread.join()
window = accepted[0].expose(bytearray(64 << 20))
running = [user.put(bytes(32 << 20), window.key), user.get(bytearray(16 << 20), window.key)]
print("running", flush=True)
"""


def test_the_interpreter_ends_with_a_window_in_use():
    with run_python(EXIT) as program:
        out, err = program.communicate(timeout=PATIENCE)
    assert program.returncode == 0, err
    assert "running" in out


def test_both_ends_use_windows_from_threads():
    ends = connect_pair()
    caches = [bytearray(1 << 20), bytearray(1 << 20)]
    windows = [end.expose(cache) for end, cache in zip(ends, caches, strict=True)]
    failures = []

    def use(at: int) -> None:
        try:
            key = windows[1 - at].key
            for number in range(200):
                block = bytes([number % 256]) * 5000
                ends[at].put(block, key, number * 5000).wait(PATIENCE)
                back = bytearray(5000)
                ends[at].get(back, key, number * 5000).wait(PATIENCE)
                assert back == block
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=use, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures

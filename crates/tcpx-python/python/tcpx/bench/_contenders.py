"""Whoever moves bytes in the bench: each is a class, made in either of two processes of this host.

``here`` starts what is timed, ``there`` has the memory that it goes to. All use one buffer at each side, cut into as
many slots as messages are in flight.
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import tcpx

from ._nixl import OVER_TCP

LIMIT = 120.0
# Sends of a round trip that may wait for their acknowledgement.
UNACKNOWLEDGED = 8
# One agent's name in the other.
OTHER = {"here": "there", "there": "here"}


class Memory:
    """Pages of this process."""

    def __init__(self, size: int) -> None:
        self.map = mmap.mmap(-1, size)
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def slot(self, at: int, size: int) -> memoryview:
        return self.view[at * size : (at + 1) * size]


class Contender:
    """One of the two sides. ``swap`` gives an object to the other side, and returns that side's."""

    #: The receiver has a part in it: its end is the end.
    two_sided = True
    #: Variables of the process, set before anything is imported.
    variables: dict[str, str] = {}

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        self.side, self.memory = side, memory

    def send(self, size: int, depth: int, count: int) -> None:
        """Moves ``count`` messages to the other side, ``depth`` of them in flight."""
        raise NotImplementedError

    def receive(self, size: int, depth: int, count: int) -> None:
        """The other side's part of it."""

    def ping(self, size: int, count: int) -> list[float]:
        """Seconds of each round trip."""
        raise NotImplementedError

    def pong(self, size: int, count: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of everything."""


def _queued(start: Callable[[int], tcpx.Transfer], depth: int, count: int) -> None:
    running: collections.deque[tcpx.Transfer] = collections.deque()
    for at in range(count):
        if len(running) == depth:
            running.popleft().wait(LIMIT)
        running.append(start(at % depth))
    for transfer in running:
        transfer.wait(LIMIT)


def _settle(transfers: collections.deque[tcpx.Transfer], most: int) -> None:
    while len(transfers) > most:
        transfers.popleft().wait(LIMIT)


class Tcpx(Contender):
    """Sends and receives, waited for."""

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        super().__init__(side, memory, swap)
        if side == "there":
            with tcpx.Endpoint("127.0.0.1:0") as server:
                accepted: list[tcpx.Connection] = []
                thread = threading.Thread(target=lambda: accepted.append(server.accept(LIMIT)))
                thread.start()
                swap(server.pairing())
                thread.join()
            self.connection = accepted[0]
        else:
            self.connection = tcpx.connect(swap(None)).wait()

    def send(self, size: int, depth: int, count: int) -> None:
        slots = [self.memory.slot(at, size) for at in range(depth)]
        _queued(lambda at: self.connection.send(slots[at]), depth, count)

    def receive(self, size: int, depth: int, count: int) -> None:
        slots = [self.memory.slot(at, size) for at in range(depth)]
        _queued(lambda at: self.connection.recv(slots[at]), depth, count)

    # In the order of the program's: a receive is posted before the clock starts, or while the other side works, and
    # a few sends may wait for their acknowledgement.

    def ping(self, size: int, count: int) -> list[float]:
        one, other = self.memory.slot(0, size), self.memory.slot(1, size)
        send, recv, took = self.connection.send, self.connection.recv, []
        questions: collections.deque[tcpx.Transfer] = collections.deque()
        for _ in range(count):
            answer = recv(other)
            started = time.perf_counter()
            questions.append(send(one))
            answer.wait()
            took.append(time.perf_counter() - started)
            _settle(questions, UNACKNOWLEDGED - 1)
        _settle(questions, 0)
        return took

    def pong(self, size: int, count: int) -> None:
        one, other = self.memory.slot(0, size), self.memory.slot(1, size)
        send, recv = self.connection.send, self.connection.recv
        answers: collections.deque[tcpx.Transfer] = collections.deque()
        expected = collections.deque(recv(one) for _ in range(min(2, count)))
        for at in range(count):
            expected.popleft().wait()
            answers.append(send(other))
            if at + 2 < count:
                expected.append(recv(one))
            _settle(answers, UNACKNOWLEDGED - 1)
        _settle(answers, 0)

    def close(self) -> None:
        self.connection.close()


class Awaited(Tcpx):
    """The same, awaited."""

    def _run(self, start: Callable[[int], tcpx.Transfer], depth: int, count: int) -> None:
        async def run() -> None:
            running: collections.deque[tcpx.Transfer] = collections.deque()
            for at in range(count):
                if len(running) == depth:
                    await running.popleft()
                running.append(start(at % depth))
            for transfer in running:
                await transfer

        asyncio.run(run())

    def send(self, size: int, depth: int, count: int) -> None:
        slots = [self.memory.slot(at, size) for at in range(depth)]
        self._run(lambda at: self.connection.send(slots[at]), depth, count)

    def receive(self, size: int, depth: int, count: int) -> None:
        slots = [self.memory.slot(at, size) for at in range(depth)]
        self._run(lambda at: self.connection.recv(slots[at]), depth, count)

    def ping(self, size: int, count: int) -> list[float]:
        one, other = self.memory.slot(0, size), self.memory.slot(1, size)
        send, recv = self.connection.send, self.connection.recv
        took: list[float] = []

        async def run() -> None:
            questions: collections.deque[tcpx.Transfer] = collections.deque()
            for _ in range(count):
                answer = recv(other)
                started = time.perf_counter()
                questions.append(send(one))
                await answer
                took.append(time.perf_counter() - started)
                while len(questions) >= UNACKNOWLEDGED:
                    await questions.popleft()
            for question in questions:
                await question

        asyncio.run(run())
        return took


class Put(Tcpx):
    """Puts into a window of the other side."""

    two_sided = False

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        super().__init__(side, memory, swap)
        self.window = self.connection.expose(memory.map)
        self.key = swap(self.window.key)

    def send(self, size: int, depth: int, count: int) -> None:
        slots = [self.memory.slot(at, size) for at in range(depth)]
        put, key = self.connection.put, self.key
        _queued(lambda at: put(slots[at], key, at * size), depth, count)

    def receive(self, size: int, depth: int, count: int) -> None:
        """Nothing: the window is open."""

    def ping(self, size: int, count: int) -> list[float]:
        slot, took = self.memory.slot(0, size), []
        for _ in range(count):
            started = time.perf_counter()
            put = self.connection.put(slot, self.key, notify=b"")
            self.connection.notification().wait()
            took.append(time.perf_counter() - started)
            put.wait()
        return took

    def pong(self, size: int, count: int) -> None:
        slot = self.memory.slot(1, size)
        for _ in range(count):
            self.connection.notification().wait()
            self.connection.put(slot, self.key, size, notify=b"").wait()


class Nixl(Contender):
    """Writes over NIXL's UCX backend, as it is between hosts without RDMA."""

    two_sided = False
    variables = {"UCX_TLS": OVER_TCP}
    backend = "UCX"

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        from ._nixl import nixl

        super().__init__(side, memory, swap)
        api = nixl()
        self.agent = api.nixl_agent(side, api.nixl_agent_config(backends=[]))
        self.agent.create_backend(self.backend)
        place = (memory.address, len(memory.view), 0, "")
        self.registered = self.agent.register_memory([place], "DRAM")
        metadata, self.there = swap((self.agent.get_agent_metadata(), memory.address))
        self.agent.add_remote_agent(metadata)
        self.seen = 0

    def _handle(self, at: int, size: int) -> Any:
        descs = [
            self.agent.get_xfer_descs([(base + at * size, size, 0)], "DRAM")
            for base in (self.memory.address, self.there)
        ]
        return self.agent.initialize_xfer("WRITE", *descs, OTHER[self.side])

    def _finish(self, handle: Any, state: str) -> None:
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a NIXL transfer ended with {state}")

    def send(self, size: int, depth: int, count: int) -> None:
        handles = [self._handle(at, size) for at in range(depth)]
        running: collections.deque[tuple[Any, str]] = collections.deque()
        for at in range(count):
            if len(running) == depth:
                self._finish(*running.popleft())
            handle = handles[at % depth]
            running.append((handle, self.agent.transfer(handle)))
        for one in running:
            self._finish(*one)
        for handle in handles:
            self.agent.release_xfer_handle(handle)

    def _collect(self) -> None:
        while self.seen == 0:
            self.seen += sum(map(len, self.agent.get_new_notifs().values()))
        self.seen -= 1

    def ping(self, size: int, count: int) -> list[float]:
        handle, took = self._handle(0, size), []
        for _ in range(count):
            started = time.perf_counter()
            self._finish(handle, self.agent.transfer(handle, b"ping"))
            self._collect()
            took.append(time.perf_counter() - started)
        self.agent.release_xfer_handle(handle)
        return took

    def pong(self, size: int, count: int) -> None:
        handle = self._handle(1, size)
        for _ in range(count):
            self._collect()
            self._finish(handle, self.agent.transfer(handle, b"pong"))
        self.agent.release_xfer_handle(handle)

    def close(self) -> None:
        self.agent.remove_remote_agent(OTHER[self.side])
        self.agent.deregister_memory(self.registered)


class Mooncake(Contender):
    """Writes over Mooncake's TCP transport. Its receiver is told nothing, so that there are no round trips."""

    two_sided = False

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        from mooncake.engine import TransferEngine

        super().__init__(side, memory, swap)
        self.engine = TransferEngine()
        self._check(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self._check(self.engine.register_memory(memory.address, len(memory.view)))
        place = f"127.0.0.1:{self.engine.get_rpc_port()}", memory.address
        self.target, self.there = swap(place)

    def _check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"Mooncake failed with {code}")

    def send(self, size: int, depth: int, count: int) -> None:
        places = [at * size for at in range(depth)]
        ours = [self.memory.address + place for place in places]
        theirs = [self.there + place for place in places]
        for first in range(0, count, depth):
            number = min(depth, count - first)
            if number == 1:
                code = self.engine.transfer_sync_write(self.target, ours[0], theirs[0], size)
            else:
                lists = ours[:number], theirs[:number], [size] * number
                code = self.engine.batch_transfer_sync_write(self.target, *lists)
            self._check(code)


class Gloo(Contender):
    """Sends and receives of torch.distributed over gloo."""

    variables = {"GLOO_SOCKET_IFNAME": "lo"}

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        import torch
        import torch.distributed

        super().__init__(side, memory, swap)
        self.torch, self.dist = torch, torch.distributed
        is_here = side == "here"
        if is_here:
            store = self.dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
            swap(store.port)
        else:
            store = self.dist.TCPStore("127.0.0.1", swap(None), 2, False)
        self.dist.init_process_group("gloo", store=store, rank=int(not is_here), world_size=2)
        self.other = int(is_here)
        self.tensor = torch.frombuffer(memory.map, dtype=torch.uint8)

    def _slots(self, size: int, depth: int) -> list[Any]:
        return [self.tensor[at * size : (at + 1) * size] for at in range(depth)]

    def _run(self, start: Callable[..., Any], size: int, depth: int, count: int) -> None:
        slots = self._slots(size, depth)
        running: collections.deque[Any] = collections.deque()
        for at in range(count):
            if len(running) == depth:
                running.popleft().wait()
            running.append(start(slots[at % depth], self.other))
        for work in running:
            work.wait()

    def send(self, size: int, depth: int, count: int) -> None:
        self._run(self.dist.isend, size, depth, count)

    def receive(self, size: int, depth: int, count: int) -> None:
        self._run(self.dist.irecv, size, depth, count)

    def ping(self, size: int, count: int) -> list[float]:
        one, other = self._slots(size, 2)
        took = []
        for _ in range(count):
            started = time.perf_counter()
            self.dist.send(one, self.other)
            self.dist.recv(other, self.other)
            took.append(time.perf_counter() - started)
        return took

    def pong(self, size: int, count: int) -> None:
        one, other = self._slots(size, 2)
        for _ in range(count):
            self.dist.recv(one, self.other)
            self.dist.send(other, self.other)

    def close(self) -> None:
        self.dist.destroy_process_group()


OURS: dict[str, type[Contender]] = {"tcpx": Tcpx, "tcpx, awaited": Awaited, "tcpx, put": Put}
PEERS: dict[str, type[Contender]] = {"nixl": Nixl, "mooncake": Mooncake, "gloo": Gloo}


def serve(name: str, side: str, size: int, orders: Any, other: Any) -> None:
    """A process of the bench: does what the bench orders, until that is to end."""
    kind = {**OURS, **PEERS}[name]
    os.environ.update(kind.variables)
    # Whatever the contenders say by the way is not for the table.
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)

    def swap(what: Any) -> Any:
        other.send(what)
        return heard()

    def heard() -> Any:
        if not other.poll(LIMIT):
            raise RuntimeError("the other process does not answer")
        return other.recv()

    try:
        memory = Memory(size)
        if side == "here":
            for at in range(0, size, 1 << 20):
                memory.map[at : at + (1 << 20)] = os.urandom(min(1 << 20, size - at))
        contender = kind(side, memory, swap)
        orders.send(("ready", None))
        while True:
            order, arguments = orders.recv()
            started, spent = time.perf_counter(), time.process_time()
            took: Any = None
            if order == "end":
                contender.close()
                return
            if order == "digest":
                orders.send(("digest", hashlib.sha256(memory.view[: arguments[0]]).digest()))
                continue
            if order == "stream" and side == "here":
                contender.send(*arguments)
                if contender.two_sided:
                    heard()
            elif order == "stream":
                contender.receive(*arguments)
                if contender.two_sided:
                    other.send(None)
            elif side == "here":
                took = contender.ping(*arguments)
            else:
                contender.pong(*arguments)
            seconds = time.perf_counter() - started
            orders.send(("done", (seconds, time.process_time() - spent, took)))
    except BaseException as error:
        orders.send(("failed", f"{type(error).__name__}: {error}"))

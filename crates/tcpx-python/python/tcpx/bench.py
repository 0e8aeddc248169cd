"""``python -m tcpx.bench``: tcpx from Python and other libraries, beside the program, between two processes of this host.

``python -m tcpx.bench --who NAME,... [FLAGS OF tcpx bench net]`` runs the package's program ``tcpx bench net`` with these
peers; the report is the program's. ``python`` sends, receives, puts and gets, ``awaited`` does so in an event loop.
Beside them, where they are installed: ``nixl-tcpx``, ``nixl-ucx`` (NIXL over our backend, and over UCX as between hosts
without RDMA; ``--op put,get --piece-bytes SIZE`` has them write and read, also lists), ``mooncake`` and ``gloo``.

``python -m tcpx.bench serve NAME [gpu]`` measures one of them on command (crates/tcpx-bench/src/process.rs): by itself the
file needs nothing of the package but for ``python`` and ``awaited``. What arrives is compared before it is timed.
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import hashlib
import importlib
import json
import mmap
import os
import random
import signal
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

MIB = 1 << 20
LIMIT = 120.0
# Sends of a round trip that may wait for their acknowledgement.
UNACKNOWLEDGED = 8
OTHER = {"here": "there", "there": "here"}
# Where the host has GPUs, NIXL's UCX does not begin without their copies, whichever memory is
# moved.
OVER_TCP = "tcp,cuda_copy" if Path("/dev/nvidiactl").exists() else "tcp"


class Memory:
    """Pages of this process, or memory of a GPU: the first one here, the last one there."""

    def __init__(self, size: int, side: str, gpu: bool) -> None:
        self.size, self.device, self.kind = size, 0, "VRAM" if gpu else "DRAM"
        seed = random.Random(side).randbytes(min(size, MIB))
        if gpu:
            torch = importlib.import_module("torch")
            self.device = 0 if side == "here" else torch.cuda.device_count() - 1
            fresh = torch.frombuffer(bytearray(seed), dtype=torch.uint8).to(f"cuda:{self.device}")
            self.view: Any = fresh.repeat(-(-size // len(seed)))[:size].contiguous()
            self.address = int(self.view.data_ptr())
            torch.cuda.synchronize(self.device)
        else:
            self.map = mmap.mmap(-1, size)
            self.view = memoryview(self.map)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
            for at in range(0, size, len(seed)):
                self.view[at : at + len(seed)] = seed[: size - at]

    def slot(self, at: int, size: int) -> Any:
        return self.view[at * size : (at + 1) * size]

    def digest(self, size: int) -> bytes:
        of = self.view[:size] if self.kind == "DRAM" else self.view[:size].cpu().numpy()
        return hashlib.sha256(of).digest()


class Contender:
    """One of the two sides; ``swap`` gives an object to the other side, and returns that side's."""

    #: What it does: send, put or get; whole, in lists of pieces, there and back.
    ops: Sequence[str] = ("send",)
    lists = False
    round_trips = True
    #: It polls while nothing moves: it is stopped then.
    polls = True
    #: Variables of the process, set before anything is imported.
    variables: dict[str, str] = {}

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        self.side, self.memory, self.op = side, memory, "send"

    def prepare(self, size: int, depth: int) -> None:
        """Slots of this size follow."""
        self.slots = [self.memory.slot(at, size) for at in range(depth)]

    def start(self, at: int) -> Any:
        """Begins to move a slot to the other side, or from there."""

    def expect(self, at: int) -> Any:
        """Begins to receive a message into a slot."""

    def finish(self, one: Any) -> object:
        """Waits for what was begun."""

    def queue(self, begin: Callable[[int], Any], depth: int, count: int) -> None:
        running: collections.deque[Any] = collections.deque()
        for at in range(count):
            if len(running) == depth:
                self.finish(running.popleft())
            running.append(begin(at % depth))
        for one in running:
            self.finish(one)

    def stream(self, size: int, depth: int, count: int) -> None:
        """This side's part of ``count`` messages, ``depth`` of them in flight."""
        self.prepare(size, depth)
        if self.side == "here":
            self.queue(self.start, depth, count)
        elif self.op == "send":
            self.queue(self.expect, depth, count)

    def latency(self, size: int, _depth: int, count: int) -> list[float]:
        """Seconds of half of each round trip. As the program does: a receive is posted before the clock starts, or while
        the other side works, and a few sends may wait for their acknowledgement."""
        self.prepare(size, 2)
        sent: collections.deque[Any] = collections.deque()
        took, here = [], self.side == "here"
        expected = collections.deque(self.expect(1) for _ in range(0 if here else min(2, count)))
        for at in range(count):
            if here:
                expected.append(self.expect(1))
                started = time.perf_counter()
                sent.append(self.start(0))
                self.finish(expected.popleft())
                took.append((time.perf_counter() - started) / 2)
            else:
                self.finish(expected.popleft())
                sent.append(self.start(0))
                if at + 2 < count:
                    expected.append(self.expect(1))
            while len(sent) >= UNACKNOWLEDGED:
                self.finish(sent.popleft())
        for one in sent:
            self.finish(one)
        return took

    def pieces(self, size: int, pieces: int, count: int) -> None:
        """Moves a list of pieces as often, in any order at both ends; with a count of 0 once, to the same places."""

    def close(self) -> None:
        """Lets go of everything."""


class Tcpx(Contender):
    """Sends, receives, puts and gets, waited for."""

    ops, polls = ("send", "put", "get"), False

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        import tcpx

        super().__init__(side, memory, swap)
        if side == "there":
            with tcpx.Endpoint("127.0.0.1:0") as server:
                accepted: list[Any] = []
                thread = threading.Thread(target=lambda: accepted.append(server.accept(LIMIT)))
                thread.start()
                swap(server.pairing())
                thread.join()
            self.connection = accepted[0]
        else:
            self.connection = tcpx.connect(swap(None)).wait()
        self.window = self.connection.expose(memory.view)
        self.key = swap(self.window.key)

    def start(self, at: int) -> Any:
        slot = self.slots[at]
        if self.op == "send":
            return self.connection.send(slot)
        return getattr(self.connection, self.op)(slot, self.key, at * len(slot))

    def expect(self, at: int) -> Any:
        return self.connection.recv(self.slots[at])

    def finish(self, one: Any) -> object:
        return one.wait(LIMIT)

    def close(self) -> None:
        self.connection.close()


class Awaited(Tcpx):
    """The same, awaited."""

    round_trips = False

    def queue(self, begin: Callable[[int], Any], depth: int, count: int) -> None:
        async def all_of() -> None:
            running: collections.deque[Any] = collections.deque()
            for at in range(count):
                if len(running) == depth:
                    await running.popleft()
                running.append(begin(at % depth))
            for transfer in running:
                await transfer

        asyncio.run(all_of())


def nixl() -> Any:
    """NIXL's Python API, of whichever wheel is installed."""
    try:
        importlib.import_module("torch")
    except ImportError:
        # Wheels up to 1.2 import torch, and use it for tensors alone.
        stand_in: Any = types.ModuleType("torch")
        stand_in.Tensor = type("Tensor", (), {})
        sys.modules["torch"] = stand_in
    for name in ("nixl_cu12", "nixl_cu13"):
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError:
            continue
    raise OSError("no NIXL wheel is installed: pip install nixl numpy")


class Nixl(Contender):
    """Writes and reads over a backend of NIXL; a notification tells the other side of a round trip."""

    ops, lists = ("send", "put", "get"), True
    backend = "TCPX"
    variables = {"TCPX_SOCKET_IFNAME": "=lo"}

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        super().__init__(side, memory, swap)
        api = nixl()
        self.agent = api.nixl_agent(side, api.nixl_agent_config(backends=[]))
        self.agent.create_backend(self.backend)
        place = (memory.address, memory.size, memory.device, "")
        self.registered = self.agent.register_memory([place], memory.kind)
        metadata, *self.there = swap((self.agent.get_agent_metadata(), memory.address, memory.device))
        self.agent.add_remote_agent(metadata)
        self.seen, self.notification = 0, b""
        self.handles: list[Any] = []

    def handle(self, ours: list[int], theirs: list[int], size: int) -> Any:
        ends = (ours, self.memory.address, self.memory.device), (theirs, *self.there)
        descs = [
            self.agent.get_xfer_descs([(base + at * size, size, device) for at in places], self.memory.kind)
            for places, base, device in ends
        ]
        return self.agent.initialize_xfer("READ" if self.op == "get" else "WRITE", *descs, OTHER[self.side])

    def prepare(self, size: int, depth: int) -> None:
        for handle in self.handles:
            self.agent.release_xfer_handle(handle)
        self.handles = [self.handle([at], [at], size) for at in range(depth)]

    def stream(self, size: int, depth: int, count: int) -> None:
        self.notification = b""
        self.prepare(size, depth)
        if self.side == "here":
            self.queue(self.start, depth, count)

    def latency(self, size: int, _depth: int, count: int) -> list[float]:
        self.notification = b"message"
        return super().latency(size, _depth, count)

    def start(self, at: int) -> Any:
        handle, state = self.handles[at], self.agent.transfer(self.handles[at], self.notification)
        if self.notification:
            # A handle cannot start again before its end, which some backends see only where they
            # are asked.
            self.finish((handle, state))
            state = "DONE"
        return handle, state

    def finish(self, one: Any) -> object:
        if one is None:
            # The end of a round trip: a notification.
            while self.seen == 0:
                self.seen += sum(map(len, self.agent.get_new_notifs().values()))
            self.seen -= 1
            return None
        handle, state = one
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise OSError(f"a NIXL transfer ended with {state}")
        return None

    def pieces(self, size: int, pieces: int, count: int) -> None:
        if self.side == "there":
            return
        self.notification = b""
        ours = random.Random(7).sample(range(pieces), pieces)
        theirs = ours if count == 0 else random.Random(11).sample(ours, pieces)
        handle = self.handle(ours, theirs, size)
        for _ in range(max(count, 1)):
            self.finish((handle, self.agent.transfer(handle)))
        self.agent.release_xfer_handle(handle)

    def close(self) -> None:
        self.prepare(1, 0)
        self.agent.remove_remote_agent(OTHER[self.side])
        self.agent.deregister_memory(self.registered)


class NixlUcx(Nixl):
    backend, variables = "UCX", {"UCX_TLS": OVER_TCP}


class Mooncake(Contender):
    """Writes over Mooncake's TCP transport. Its receiver is told nothing, so that there are no round trips."""

    ops, round_trips = ("send", "put"), False

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        from mooncake.engine import TransferEngine

        super().__init__(side, memory, swap)
        self.engine = TransferEngine()
        self.check(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self.check(self.engine.register_memory(memory.address, memory.size))
        place = f"127.0.0.1:{self.engine.get_rpc_port()}", memory.address
        self.target, self.there = swap(place)

    def check(self, code: int) -> None:
        if code != 0:
            raise OSError(f"Mooncake failed with {code}")

    def stream(self, size: int, depth: int, count: int) -> None:
        ours, theirs = ([base + at * size for at in range(depth)] for base in (self.memory.address, self.there))
        for first in range(0, count if self.side == "here" else 0, depth):
            number = min(depth, count - first)
            lists = ours[:number], theirs[:number], [size] * number
            self.check(self.engine.batch_transfer_sync_write(self.target, *lists))


class Gloo(Contender):
    """Sends and receives of torch.distributed over gloo."""

    variables = {"GLOO_SOCKET_IFNAME": "lo"}

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        import torch
        import torch.distributed

        super().__init__(side, memory, swap)
        self.dist, is_here = torch.distributed, side == "here"
        if is_here:
            store = self.dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
            swap(store.port)
        else:
            store = self.dist.TCPStore("127.0.0.1", swap(None), 2, False)
        self.dist.init_process_group("gloo", store=store, rank=int(not is_here), world_size=2)
        self.other = int(is_here)
        self.tensor = torch.frombuffer(memory.map, dtype=torch.uint8)

    def prepare(self, size: int, depth: int) -> None:
        self.slots = [self.tensor[at * size : (at + 1) * size] for at in range(depth)]

    def start(self, at: int) -> Any:
        return self.dist.isend(self.slots[at], self.other)

    def expect(self, at: int) -> Any:
        return self.dist.irecv(self.slots[at], self.other)

    def finish(self, one: Any) -> object:
        return one.wait()

    def close(self) -> None:
        self.dist.destroy_process_group()


OURS: dict[str, type[Contender]] = {"python": Tcpx, "awaited": Awaited}
PEERS: dict[str, type[Contender]] = {"nixl-tcpx": Nixl, "nixl-ucx": NixlUcx, "mooncake": Mooncake, "gloo": Gloo}


class Side:
    """One of the two processes of a contender."""

    def __init__(self, name: str, side: str, gpu: bool, pipe: Any) -> None:
        self.kind = {**OURS, **PEERS}[name]
        os.environ.update(self.kind.variables)
        self.side, self.gpu, self.pipe = side, gpu, pipe
        self.contender: Contender | None = None

    def swap(self, what: Any) -> Any:
        self.pipe.send(("done", what))
        return self.answer()

    def answer(self) -> Any:
        how, what = self.pipe.recv()
        if how == "failed":
            raise OSError(what)
        return what

    def part(self, what: str, op: str, arguments: tuple[int, ...]) -> Any:
        """This side's part, with the processor seconds that it took."""
        size, number = arguments[:2]
        have = self.contender
        # Memory for the largest case so far.
        if have is None or have.memory.size < size * max(number, 2):
            if have is not None:
                have.close()
            self.contender = have = None
            self.contender = have = self.kind(self.side, Memory(size * max(number, 2), self.side, self.gpu), self.swap)
        have.op, spent = op, time.process_time()
        took = have.memory.digest(size * number) if what == "digest" else getattr(have, what)(*arguments)
        return took, time.process_time() - spent

    def follow(self) -> None:
        """The other side's process."""
        # Also while it is stopped.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        while True:
            try:
                self.pipe.send(("done", self.part(*self.pipe.recv())))
            except EOFError:
                return
            except BaseException as error:
                self.pipe.send(("failed", f"{type(error).__name__}: {error}"))
                return

    def both(self, what: str, op: str, *arguments: int) -> tuple[float, Any, Any, float]:
        """Both sides' parts: the seconds and the results, and processor seconds of both."""
        self.pipe.send((what, op, arguments))
        started = time.perf_counter()
        ours, spent = self.part(what, op, arguments)
        theirs = self.answer()
        return time.perf_counter() - started, ours, theirs[0], spent + theirs[1]

    def measure(self, case: dict[str, Any]) -> dict[str, float]:
        """Figures of a case."""
        run, span = case["run"], case["ms"] / 1000
        op, size, piece = run["op"], run["bytes"], run["piece"]
        if run["mode"] == "latency":
            if op != "send" or not self.kind.round_trips:
                raise NotImplementedError("it has no such round trips")
            warm = self.both("latency", op, size, 2, 20)[0] / 20
            _, took, _, _ = self.both("latency", op, size, 2, max(20, min(20_000, int(span / warm))))
            times = {"p50": statistics.median(took) * 1e6}
            return times | ({"p99": statistics.quantiles(took, n=100)[98] * 1e6} if len(took) >= 100 else {})
        if run["mode"] != "one" or op not in self.kind.ops or (piece and not self.kind.lists):
            raise NotImplementedError("it does not move messages so")
        what, number, least = ("pieces", size // piece, 1) if piece else ("stream", run["depth"], run["depth"])
        # To the same places at both ends, so that they can be compared.
        first = self.both(what, op, piece or size, number, 0 if piece else number)[0]
        _, ours, theirs, _ = self.both("digest", op, piece or size, number, 0)
        if ours != theirs:
            raise OSError("what arrived is not what was sent")
        count = max(least, int(span / (first / least)))
        seconds, _, _, spent = self.both(what, op, piece or size, number, count)
        moved = size * count / 1e9
        return {"rate": moved / seconds, "cpu": spent / moved}


def follow(name: str, gpu: bool, pipe: Any) -> None:
    Side(name, "there", gpu, pipe).follow()


def serve(name: str, gpu: bool) -> None:
    """Measures a contender on command."""
    # What libraries print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=follow, args=(name, gpu, theirs), daemon=True).start()
    theirs.close()
    here = Side(name, "here", gpu, ours)
    for line in sys.stdin:
        answer: dict[str, Any] = {"polls": here.kind.polls}
        try:
            answer["figures"] = here.measure(json.loads(line))
        except NotImplementedError as error:
            answer["error"] = str(error)
        except Exception as error:
            # The sides may have parted amid anything.
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
            sys.exit(1)
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    match sys.argv[1:]:
        case ["serve", name, *gpu]:
            return serve(name, bool(gpu))
        case ["--who", names, *flags]:
            who = names.split(",")
        case _:
            raise SystemExit(__doc__)
    if unknown := [name for name in who if name not in (*OURS, *PEERS)]:
        raise SystemExit(f"there is no contender {unknown[0]!r}: any of {', '.join((*OURS, *PEERS))}")
    import tcpx

    gpu = [] if "host" in flags or "--from" not in flags else ["gpu"]
    peers = [f"--peer={name}={' '.join([sys.executable, '-m', 'tcpx.bench', 'serve', name, *gpu])}" for name in who]
    places = [] if "--from" in flags else ["--from=host", "--to=host"]
    program = str(tcpx.program_path())
    os.execv(program, [program, "bench", "net", *places, *peers, *flags])


if __name__ == "__main__":
    main()

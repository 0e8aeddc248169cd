"""``python -m tcpx.bench``: tcpx from Python beside other libraries, between two processes of this host.

Contenders take turns within each round, and the report is that of ``tcpx bench``. ``tcpx`` sends and receives,
``awaited`` does so in an event loop, ``put`` writes into a window. Beside them, where they are installed: ``program``
(the program tcpx), ``nixl-tcpx``, ``nixl-ucx`` (NIXL over our backend, and over UCX as between hosts without RDMA; with
``-read`` they read), ``mooncake`` and ``gloo``. What arrives is compared before it is timed. A peer is stopped while it
has no turn: some poll without end. The file runs by itself where only NIXL's wheel is installed (``--program``).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import ctypes
import datetime
import hashlib
import importlib
import json
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LIMIT = 120.0
# Bytes in flight at most, unless one message is longer.
IN_FLIGHT_BYTES = 128 * MIB
# Sends of a round trip that may wait for their acknowledgement.
UNACKNOWLEDGED = 8
OTHER = {"here": "there", "there": "here"}
# Where the host has GPUs, NIXL's UCX does not begin without their copies, whichever memory is moved.
OVER_TCP = "tcp,cuda_copy" if Path("/dev/nvidiactl").exists() else "tcp"

# Mode, bytes of a message or of a piece, messages in flight or pieces: `latency`, `one`, `list`.
Case = tuple[str, int, int]


def parse_size(text: str) -> int:
    for unit, factor in (("KiB", KIB), ("MiB", MIB), ("GiB", GIB), ("B", 1), ("", 1)):
        if text.endswith(unit) and text[: len(text) - len(unit)].isdigit():
            return int(text[: len(text) - len(unit)]) * factor
    raise argparse.ArgumentTypeError(f"{text!r} is no size; expected one such as 4KiB")


def show_size(size: int) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def title(case: Case) -> str:
    mode, size, number = case
    if mode == "latency":
        return f"{show_size(size)}, half a round trip"
    return f"{number} pieces of {show_size(size)}" if mode == "list" else f"{show_size(size)}, {number} in flight"


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

    #: The receiver has a part in it: its end is the end.
    two_sided = True
    modes: tuple[str, ...] = ("latency", "one")
    #: Variables of the process, set before anything is imported.
    variables: dict[str, str] = {}

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        self.side, self.memory = side, memory

    def prepare(self, size: int, depth: int) -> None:
        """Slots of this size follow."""
        self.slots = [self.memory.slot(at, size) for at in range(depth)]

    def start(self, at: int) -> Any:
        """Begins to move a slot to the other side."""

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
        elif self.two_sided:
            self.queue(self.expect, depth, count)

    def latency(self, size: int, count: int) -> list[float]:
        """Seconds of each round trip. As the program does: a receive is posted before the clock starts, or while the
        other side works, and a few sends may wait for their acknowledgement."""
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
                took.append(time.perf_counter() - started)
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

    def move_list(self, size: int, pieces: int, count: int) -> None:
        """Moves a list of pieces, in any order at both ends, as often; once to the same places with a count of 0."""

    def close(self) -> None:
        """Lets go of everything."""


class Tcpx(Contender):
    """Sends and receives, waited for."""

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

    def start(self, at: int) -> Any:
        return self.connection.send(self.slots[at])

    def expect(self, at: int) -> Any:
        return self.connection.recv(self.slots[at])

    def finish(self, one: Any) -> object:
        return one.wait(LIMIT)

    def close(self) -> None:
        self.connection.close()


class Awaited(Tcpx):
    """The same, awaited."""

    modes = ("one",)

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


class Put(Tcpx):
    """Puts into a window of the other side."""

    two_sided = False
    modes = ("one",)

    def __init__(self, side: str, memory: Memory, swap: Callable[[Any], Any]) -> None:
        super().__init__(side, memory, swap)
        self.window = self.connection.expose(memory.view)
        self.key = swap(self.window.key)

    def start(self, at: int) -> Any:
        slot = self.slots[at]
        return self.connection.put(slot, self.key, at * len(slot))


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
    """Writes, or reads, over a backend of NIXL; a notification tells the other side of a round trip."""

    two_sided = False
    modes: tuple[str, ...] = ("latency", "one", "list")
    backend, op = "TCPX", "WRITE"
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
        return self.agent.initialize_xfer(self.op, *descs, OTHER[self.side])

    def prepare(self, size: int, depth: int) -> None:
        for handle in self.handles:
            self.agent.release_xfer_handle(handle)
        self.handles = [self.handle([at], [at], size) for at in range(depth)]

    def stream(self, size: int, depth: int, count: int) -> None:
        self.notification = b""
        super().stream(size, depth, count)

    def latency(self, size: int, count: int) -> list[float]:
        self.notification = b"message"
        return super().latency(size, count)

    def start(self, at: int) -> Any:
        handle, state = self.handles[at], self.agent.transfer(self.handles[at], self.notification)
        if self.notification:
            # A handle cannot start again before its end, which some backends see only where they are asked.
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

    def move_list(self, size: int, pieces: int, count: int) -> None:
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


class NixlRead(Nixl):
    op, modes = "READ", ("one", "list")


class NixlUcx(Nixl):
    backend, variables = "UCX", {"UCX_TLS": OVER_TCP}


class NixlUcxRead(NixlUcx):
    op, modes = "READ", ("one", "list")


class Mooncake(Contender):
    """Writes over Mooncake's TCP transport. Its receiver is told nothing, so that there are no round trips."""

    two_sided = False
    modes = ("one",)

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


OURS: dict[str, type[Contender]] = {"tcpx": Tcpx, "awaited": Awaited, "put": Put}
PEERS: dict[str, type[Contender]] = {
    "nixl-tcpx": Nixl, "nixl-tcpx-read": NixlRead, "nixl-ucx": NixlUcx, "nixl-ucx-read": NixlUcxRead,
    "mooncake": Mooncake, "gloo": Gloo,
}
PROGRAM = "program"


def serve(name: str, side: str, size: int, gpu: bool, orders: Any, other: Any) -> None:
    """A process of a contender."""

    def swap(what: Any) -> Any:
        other.send(what)
        return other.recv()

    try:
        kind = {**OURS, **PEERS}[name]
        os.environ.update(kind.variables)
        memory = Memory(size, side, gpu)
        contender = kind(side, memory, swap)
        orders.send(("done", None))
        while True:
            order, arguments = orders.recv()
            started, spent = time.perf_counter(), time.process_time()
            took: Any = None
            if order == "end":
                return contender.close()
            if order == "digest":
                took = memory.digest(*arguments)
            elif order == "list" and side == "here":
                contender.move_list(*arguments)
            elif order == "stream":
                contender.stream(*arguments)
                if contender.two_sided:
                    other.recv() if side == "here" else other.send(None)
            elif order == "latency":
                took = contender.latency(*arguments)
            seconds = time.perf_counter() - started
            orders.send(("done", (seconds, time.process_time() - spent, took)))
    except BaseException as error:
        orders.send(("failed", f"{type(error).__name__}: {error}"))


class Pair:
    """The two processes of a contender."""

    def __init__(self, name: str, size: int, gpu: bool, limit: float) -> None:
        context = get_context("spawn")
        ends = context.Pipe()
        self.name, self.limit, self.orders, self.processes = name, limit, [], []
        for side, end in zip(OTHER, ends, strict=True):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(name, side, size, gpu, theirs, end))
            process.start()
            theirs.close()
            self.orders.append(ours)
            self.processes.append(process)
        for end in ends:
            end.close()
        for pipe in self.orders:
            self.answer(pipe)

    def answer(self, pipe: Any) -> Any:
        try:
            kind, what = pipe.recv() if pipe.poll(self.limit) else ("failed", f"no answer within {self.limit:g} s")
        except EOFError:
            kind, what = "failed", "its process died"
        if kind == "failed":
            self.kill()
            raise OSError(what)
        return what

    def order(self, what: str, *arguments: int) -> list[Any]:
        # The receiver first.
        for pipe in reversed(self.orders):
            pipe.send((what, arguments))
        return [self.answer(pipe) for pipe in self.orders]

    def pause(self, paused: bool) -> None:
        for process in self.processes if self.name in PEERS else []:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def measure(self, case: Case, span: float) -> tuple[float, float]:
        """GB/s, or microseconds of half a round trip; and processor seconds of both ends for 10^9 bytes."""
        mode, size, number = case
        if mode == "latency":
            warm = self.order("latency", size, 20)[0][0] / 20
            count = max(20, min(20_000, int(span / warm)))
            (_, here, took), (_, there, _) = self.order("latency", size, count)
            return statistics.median(took) / 2 * 1e6, (here + there) / (2 * size * count / 1e9)
        what, bytes_of_one = ("list", size * number) if mode == "list" else ("stream", size)
        # To the same places at both ends, so that they can be compared.
        (first, _, _), _ = self.order(what, size, number, 0 if mode == "list" else number)
        ours, theirs = (done[2] for done in self.order("digest", size * number))
        if ours != theirs:
            self.kill()
            raise OSError("what arrived is not what was sent")
        each = first / (1 if mode == "list" else number)
        count = max(1 if mode == "list" else number, int(span / each))
        (seconds, here, _), (_, there, _) = self.order(what, size, number, count)
        moved = bytes_of_one * count / 1e9
        return moved / seconds, (here + there) / moved

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def close(self) -> None:
        self.pause(False)
        for pipe, process in zip(self.orders, self.processes, strict=True):
            if process.is_alive():
                pipe.send(("end", ()))
        for process in self.processes:
            process.join(10)
        self.kill()


def of_program(program: str, case: Case, span: float) -> tuple[float, float]:
    """The same case with the program, which starts a second process of its own."""
    mode, size, depth = case
    kind = f"{mode}:{size}:{depth}"
    command = [program, "bench", "net", "--from", "host", "--to", "host", "--rounds", "1", "--json"]
    command += ["--span", f"{max(span * 1000, 1):.0f}ms", "--case", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip().splitlines()[-1])
    row = json.loads(done.stdout)["rows"][0]
    return row["median"], row.get("cpu_seconds_per_gb", 0.0)


def measure(
    cases: list[Case], names: list[str], rounds: int, span: float, program: str, gpu: bool, limit: float
) -> tuple[dict[tuple[Case, str], list[tuple[float, float]]], list[str]]:
    """Rates or times with processor seconds, by case and contender; and who was left out."""
    size = max(size * max(number, 2) for _, size, number in cases)
    pairs: dict[str, Pair | None] = {}
    found: dict[tuple[Case, str], list[tuple[float, float]]] = {}
    notes: list[str] = []

    def leave_out(name: str, why: object) -> None:
        notes.append(f"{name} is left out: {why}.")
        print(notes[-1], file=sys.stderr)
        pairs.pop(name, None)

    try:
        for name in names:
            try:
                pair = pairs[name] = None if name == PROGRAM else Pair(name, size, gpu, limit)
                if pair is not None:
                    pair.pause(True)
            except OSError as error:
                leave_out(name, error)
        for number in range(rounds):
            for case in cases:
                # Nobody is always the first.
                turns = [name for name in pairs if case[0] in ({**OURS, **PEERS}.get(name) or Tcpx).modes]
                first = number % max(len(turns), 1)
                for name in turns[first:] + turns[:first]:
                    pair = pairs[name]
                    try:
                        if pair is None:
                            figure = of_program(program, case, span)
                        else:
                            pair.pause(False)
                            figure = pair.measure(case, span)
                            pair.pause(True)
                    except OSError as error:
                        leave_out(name, error)
                        continue
                    found.setdefault((case, name), []).append(figure)
    finally:
        # Also after an interrupt: what is stopped would never end.
        for ended in pairs.values():
            if ended is not None:
                ended.close()
    return found, notes


def subject(found: dict[tuple[Case, str], list[tuple[float, float]]], machine: str, notes: list[str]) -> dict[str, Any]:
    """A file of ``benchmarks/``."""
    rows = []
    for (case, who), figures in found.items():
        values, is_time = [value for value, _ in figures], case[0] == "latency"
        row: dict[str, Any] = {
            "name": f"{title(case)}: {who}" + (", p50" if is_time else ""), "unit": "us" if is_time else "GB/s",
            "median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values),
        }
        if not is_time:
            row["cpu_seconds_per_gb"] = statistics.median(cpu for _, cpu in figures)
        rows.append(row)
    uname = os.uname()
    return {
        "schema": 1, "subject": "From Python, beside other libraries",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": f"{machine}, {os.cpu_count()} cores, {uname.sysname} {uname.release}, both ends on one host",
        "command": " ".join(["python -m tcpx.bench", *sys.argv[1:]]), "rows": rows,
        "notes": ["Contenders take turns within each round; what arrives was compared before.", *notes],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tcpx.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = lambda text: [parse_size(one) for one in text.split(",") if one]  # noqa: E731
    numbers = lambda text: [int(one) for one in text.split(",")]  # noqa: E731
    names = lambda text: [one for one in text.split(",") if one]  # noqa: E731
    everybody = f"any of {', '.join([*OURS, PROGRAM, *PEERS])}"
    parser.add_argument("--who", type=names, default=[*OURS, PROGRAM], help=everybody)
    parser.add_argument("--sizes", type=sizes, default="4KiB,64KiB,1MiB,16MiB,64MiB,256MiB")
    parser.add_argument("--latency", type=sizes, default="4KiB", help="sizes of round trips")
    parser.add_argument("--in-flight", type=numbers, default="1,8")
    parser.add_argument("--lists", type=names, default="", help="lists such as 32768x32KiB, which NIXL's contenders move")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--span", type=float, default=0.25, help="seconds of a measurement")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which a contender is left out")
    parser.add_argument("--gpu", action="store_true", help="memory of the first and the last GPU, with torch")
    parser.add_argument("--program", help="path of the program tcpx, if not the package's")
    parser.add_argument("--json", type=Path, help="write the report as a file of benchmarks/")
    options = parser.parse_args()
    if unknown := [name for name in options.who if name not in (*OURS, PROGRAM, *PEERS)]:
        parser.error(f"there is no contender {unknown[0]!r}: {everybody}")
    cases: list[Case] = [("latency", size, 1) for size in options.latency]
    for size in options.sizes:
        depths = {min(depth, max(1, IN_FLIGHT_BYTES // size)) for depth in options.in_flight}
        cases += [("one", size, depth) for depth in sorted(depths)]
    for one in options.lists:
        pieces, _, size_of = one.partition("x")
        cases.append(("list", parse_size(size_of), int(pieces)))
    if options.program is None:
        import tcpx

        options.program = str(tcpx.program_path())
    found, notes = measure(
        cases, options.who, options.rounds, options.span, options.program, options.gpu, options.limit
    )
    if not found:
        raise SystemExit("nothing was measured")
    text = json.dumps(subject(found, "GPU memory" if options.gpu else "host memory", notes), indent=1)
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or Path(folder) / "report.json"
        path.write_text(text + "\n")
        sys.exit(subprocess.run([options.program, "bench", "show", str(path)], check=False).returncode)


if __name__ == "__main__":
    main()

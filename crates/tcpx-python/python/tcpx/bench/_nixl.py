"""The NIXL backend TCPX beside UCX of the same wheel: two processes, host or GPU memory, in turns.

Needs a NIXL wheel (`pip install nixl numpy`) that finds the plugin. Each round runs every case with
each backend in a pair of processes of its own; a figure is the median of the rounds' medians, with
the least and the greatest of them. `ucx-tcp` is UCX as it is between hosts without RDMA
(UCX_TLS=tcp); `ucx` may copy within one host (shared memory, CMA), which no two hosts can.

The workloads are those of NIXL's callers: vLLM reads or writes the blocks of a request out of prepared
strided lists, with a notification for each; SGLang writes from several threads without notifications;
LMCache moves pages of 32 MiB and looks every millisecond. A list is shuffled at both ends, as in a
cache that has been used for a while. What arrives is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
# Where the host has GPUs, NIXL's UCX does not begin without their copies, whichever memory is moved.
OVER_TCP = "tcp,cuda_copy" if Path("/dev/nvidiactl").exists() else "tcp"
PEERS = {
    "tcpx": ("TCPX", {"TCPX_SOCKET_IFNAME": "=lo"}),
    "ucx-tcp": ("UCX", {"UCX_TLS": OVER_TCP}),
    "ucx": ("UCX", {}),
}
SIZES = [("1 MiB", MIB, 60), ("16 MiB", 16 * MIB, 20), ("256 MiB", 256 * MIB, 5)]
# name, pieces, bytes of each
LISTS = [
    ("Llama-8B, 32,768 x 32 KiB", 32_768, 32 * KIB),
    ("70B at TP8, 81,920 x 4 KiB", 81_920, 4 * KIB),
    ("MLA, 4,096 x 72 KiB", 4_096, 72 * KIB),
]
# A request of 512 tokens of Llama-8B: 32 blocks in each of 64 regions, a key's or a value's of a layer.
REGIONS, BLOCKS, BLOCK_BYTES, REQUEST_BLOCKS, REQUESTS = 64, 256, 32 * KIB, 32, 8
PAGES, PAGE_BYTES = 8, 32 * MIB
THREADS = 4
LIMIT = 300.0
# No case is repeated for longer, in seconds.
SPAN = 4.0
# A case that did not end within as many seconds is ended, and the run goes on without it.
CASE_LIMIT = 60.0
# Instead of bytes: the case took longer than its seconds.
SLOW = -1
# A quick run moves so many times less.
QUICK = 32

# What one pair of processes found: seconds, and bytes where that makes a rate.
Figures = dict[str, tuple[float, int]]


class BenchError(Exception):
    """A transfer failed, or what arrived is not what was sent."""


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
    raise SystemExit("no NIXL wheel is installed: pip install nixl numpy")


class Agent:
    """An agent with one registered buffer."""

    def __init__(self, name: str, backend: str, size: int, seed: int, kind: str) -> None:
        import numpy as np

        api = nixl()
        config = api.nixl_agent_config(backends=[], capture_telemetry=True)
        # Several threads post at a time.
        if hasattr(api, "nixl_thread_sync_t"):
            config.sync_mode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self.nixl = api.nixl_agent(name, config)
        self.nixl.create_backend(backend)
        random = np.random.default_rng(seed)
        self.memory: Any = random.integers(0, 256, size, dtype=np.uint8)
        self.kind = kind
        if kind == "VRAM":
            # On the last GPU for the target, which is another one where there are several.
            torch = importlib.import_module("torch")
            self.device = 0 if name == "initiator" else torch.cuda.device_count() - 1
            self.memory = torch.from_numpy(self.memory).to(f"cuda:{self.device}")
            self.address = int(self.memory.data_ptr())
            # NIXL knows nothing of the stream that filled it.
            torch.cuda.synchronize(self.device)
        else:
            self.device, self.address = 0, int(self.memory.ctypes.data)
        self.registered = self.nixl.register_memory([(self.address, size, self.device, "")], kind)
        self.seen = 0

    def descs(self, pieces: list[tuple[int, int]], address: int, device: int) -> Any:
        return self.nixl.get_xfer_descs([(address + at, size, device) for at, size in pieces], self.kind)

    def collect(self, count: int) -> None:
        """Waits until so many more notifications have come."""
        until = time.monotonic() + LIMIT
        while self.seen < count:
            self.seen += sum(map(len, self.nixl.get_new_notifs().values()))
            if time.monotonic() > until:
                raise BenchError("a notification did not come")
        self.seen -= count

    def finish(self, handle: Any, state: str, pause: float | None = None) -> None:
        until = time.monotonic() + LIMIT
        while state != "DONE":
            if state == "ERR" or time.monotonic() > until:
                raise BenchError(f"a transfer ended with {state}")
            if pause is not None:
                time.sleep(pause)
            state = self.nixl.check_xfer_state(handle)

    def run(self, handle: Any, notif: bytes = b"", pause: float | None = None) -> None:
        self.finish(handle, self.nixl.transfer(handle, notif), pause)

    def bytes_at(self, pieces: list[tuple[int, int]]) -> bytes:
        pieces_of = (self.memory[at : at + size] for at, size in pieces)
        if self.kind == "VRAM":
            pieces_of = (piece.cpu().numpy() for piece in pieces_of)
        return b"".join(piece.tobytes() for piece in pieces_of)

    def close(self, peer: str) -> None:
        self.nixl.remove_remote_agent(peer)
        self.nixl.deregister_memory(self.registered)


def target(pipe: Any, backend: str, size: int, kind: str) -> None:
    """The other side: it has memory, takes notifications, and answers some."""
    agent = Agent("target", backend, size, 2, kind)
    pipe.send((agent.nixl.get_agent_metadata(), agent.address, agent.device))
    agent.nixl.add_remote_agent(pipe.recv())
    pipe.send("ready")
    while True:
        order, argument = pipe.recv()
        if order == "pong":
            # A small transfer with a notification for each that comes, to where it came from.
            rounds, address, device = argument
            piece = [(0, 4096)]
            local, remote = agent.descs(piece, agent.address, agent.device), agent.descs(piece, address, device)
            handle = agent.nixl.initialize_xfer("WRITE", local, remote, "initiator", b"pong")
            pipe.send("ready")
            for _ in range(rounds):
                agent.collect(1)
                agent.run(handle, b"pong")
            agent.nixl.release_xfer_handle(handle)
        elif order == "collect":
            pipe.send("ready")
            agent.collect(argument)
            agent.nixl.send_notif("initiator", b"all")
        elif order == "bytes":
            pipe.send(agent.bytes_at(argument))
        else:
            agent.close("initiator")
            return


class Pair:
    """This process as initiator, and the target in another one."""

    def __init__(self, backend: str, size: int, kind: str, without: list[str]) -> None:
        self.without = without
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, backend, size, kind))
        self.process.start()
        theirs.close()
        self.us = Agent("initiator", backend, size, 1, kind)
        metadata, self.address, self.device = self.pipe.recv()
        self.us.nixl.add_remote_agent(metadata)
        self.order(self.us.nixl.get_agent_metadata())

    def begins(self, case: str) -> bool:
        """Tells the process that waits for this one; whether it wants the case."""
        if case in self.without:
            return False
        print(f"CASE {case}", flush=True)
        return True

    def order(self, what: Any) -> Any:
        self.pipe.send(what)
        if not self.pipe.poll(LIMIT):
            raise BenchError("the other process does not answer")
        return self.pipe.recv()

    def compare(self, ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> None:
        if self.us.bytes_at(ours) != self.order(("bytes", theirs)):
            raise BenchError("what arrived is not what was sent")

    def close(self) -> None:
        self.pipe.send(("end", None))
        self.process.join(60)
        self.us.close("target")

    def places(self, ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> tuple[Any, Any]:
        us = self.us
        return us.descs(ours, us.address, us.device), us.descs(theirs, self.address, self.device)

    def request(self, op: str, size: int) -> Any:
        local, remote = self.places([(0, size)], [(0, size)])
        return self.us.nixl.initialize_xfer(op, local, remote, "target")


def timed(work: Callable[[], object], repeats: int) -> float:
    """The median of so many runs, without the first. Long ones are repeated less often."""
    took: list[float] = []
    while len(took) < 2 or len(took) <= repeats and sum(took) < SPAN:
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return statistics.median(took[1:])


def small(pair: Pair) -> Iterator[tuple[str, float, int]]:
    """One piece of 4 KiB: with a notification back and forth, and alone."""
    us, rounds = pair.us, 300
    name = "notification behind 4 KiB, half a round trip"
    if pair.begins(name):
        handle = pair.request("WRITE", 4096)
        pair.order(("pong", (rounds + 1, us.address, us.device)))
        took = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            us.run(handle, b"ping")
            us.collect(1)
            took.append(time.perf_counter() - started)
        yield name, statistics.median(took[1:]) / 2, 0
        us.nixl.release_xfer_handle(handle)
    for op in ("WRITE", "READ"):
        name = f"4 KiB {op}, post to DONE"
        if pair.begins(name):
            handle = pair.request(op, 4096)
            yield name, timed(lambda: us.run(handle), 1000), 0
            us.nixl.release_xfer_handle(handle)


def sizes(pair: Pair, scale: int) -> Iterator[tuple[str, float, int]]:
    for name, size, repeats in SIZES:
        for op in ("WRITE", "READ"):
            if not pair.begins(f"{name} {op}"):
                continue
            handle = pair.request(op, size // scale)
            yield f"{name} {op}", timed(lambda: pair.us.run(handle), repeats), size // scale
            pair.us.nixl.release_xfer_handle(handle)
            pair.compare([(0, size // scale)], [(0, size // scale)])


def prepared(pair: Pair, regions: int, blocks: int, size: int) -> tuple[Any, Any]:
    """Lists of every block at both ends: strided where NIXL takes such, one row for each region."""
    import numpy as np

    def listed(start: int, device: int) -> tuple[Any, Any]:
        at = start + np.arange(regions, dtype=np.uint64) * np.uint64(blocks * size)
        rows = [at, size, device, size, blocks]
        strided = np.stack([np.broadcast_to(np.asarray(row, np.uint64), regions) for row in rows], axis=1)
        each = start + np.arange(regions * blocks, dtype=np.uint64) * np.uint64(size)
        dense = np.zeros((regions * blocks, 3), np.uint64)
        dense[:, 0], dense[:, 1], dense[:, 2] = each, size, device
        return strided, dense

    def prepare(name: str, start: int, device: int) -> Any:
        strided, dense = listed(start, device)
        try:
            return pair.us.nixl.prep_xfer_dlist(name, strided, pair.us.kind)
        except Exception:
            # Older releases know no strides.
            return pair.us.nixl.prep_xfer_dlist(name, dense, pair.us.kind)

    us = pair.us
    return prepare("NIXL_INIT_AGENT", us.address, us.device), prepare("target", pair.address, pair.device)


def lists(pair: Pair, scale: int) -> Iterator[tuple[str, float, int]]:
    """Whole caches, in any order."""
    import numpy as np

    us, random = pair.us, np.random.default_rng(7)
    for name, all_pieces, size in LISTS:
        count = all_pieces // scale
        ours, theirs = prepared(pair, 1, count, size)
        order = [random.permutation(count).astype(np.int32) for _ in range(2)]
        for op in ("WRITE", "READ"):
            if not pair.begins(f"{name} {op}"):
                continue
            handle = us.nixl.make_prepped_xfer(op, ours, order[0], theirs, order[1])
            posts: list[float] = []

            def run(handle: Any = handle, posts: list[float] = posts) -> None:
                started = time.perf_counter()
                state = us.nixl.transfer(handle)
                posts.append(time.perf_counter() - started)
                us.finish(handle, state)

            yield f"{name} {op}", timed(run, 3), count * size
            if all_pieces == 32_768:
                yield f"posting 32,768 pieces {op}", statistics.median(posts[1:]), 0
            us.nixl.release_xfer_handle(handle)
            some = random.choice(count, min(count, 64), replace=False)
            pair.compare(*([(int(at[one]) * size, size) for one in some] for at in order))
        us.nixl.release_dlist_handle(ours)
        us.nixl.release_dlist_handle(theirs)


class Cache:
    """Requests of a cache of Llama-8B, whose blocks lie anywhere in each region."""

    def __init__(self, pair: Pair, scale: int) -> None:
        import numpy as np

        self.pair = pair
        regions = max(REGIONS // scale, 1)
        self.lists = prepared(pair, regions, BLOCKS, BLOCK_BYTES)
        random = np.random.default_rng(11)
        first = np.arange(regions, dtype=np.int32)[:, None] * np.int32(BLOCKS)

        def chosen() -> list[Any]:
            blocks = random.permutation(BLOCKS).astype(np.int32).reshape(REQUESTS, REQUEST_BLOCKS)
            return [(first + some[None, :]).ravel() for some in blocks]

        self.ours, self.theirs = chosen(), chosen()
        self.bytes = regions * BLOCKS * BLOCK_BYTES

    def make(self, op: str, request: int, notif: bytes) -> Any:
        indices = self.ours[request], self.theirs[request]
        make = self.pair.us.nixl.make_prepped_xfer
        return make(op, self.lists[0], indices[0], self.lists[1], indices[1], notif)

    def compare(self) -> None:
        for ours, theirs in zip(self.ours, self.theirs, strict=True):
            some = ([(int(at) * BLOCK_BYTES, BLOCK_BYTES) for at in ends[:8]] for ends in (ours, theirs))
            self.pair.compare(*some)

    def close(self) -> None:
        for one in self.lists:
            self.pair.us.nixl.release_dlist_handle(one)


def vllm(pair: Pair, cache: Cache) -> Iterator[tuple[str, float, int]]:
    """Pull: a READ for each request. Push: a WRITE for each, announced. A notification behind each."""
    us = pair.us

    def move(op: str) -> None:
        pair.order(("collect", REQUESTS * (1 if op == "READ" else 2)))
        running = []
        for request in range(REQUESTS):
            if op == "WRITE":
                us.nixl.send_notif("target", f"PUSH_REG:{request}".encode())
            notif = f"request-{request}:1".encode()
            handle = cache.make(op, request, notif)
            running.append((handle, us.nixl.transfer(handle, notif)))
        until = time.monotonic() + LIMIT
        while running:
            # As its scheduler does: every request is looked at in turn.
            left = []
            for handle, state in running:
                if state == "DONE":
                    us.nixl.get_xfer_telemetry(handle)
                    us.nixl.release_xfer_handle(handle)
                elif state == "ERR" or time.monotonic() > until:
                    raise BenchError(f"a request ended with {state}")
                else:
                    left.append((handle, us.nixl.check_xfer_state(handle)))
            running = left
        us.collect(1)

    for op, way in (("READ", "pull"), ("WRITE", "push")):
        name = f"vLLM {way}, {REQUESTS} requests"
        if pair.begins(name):
            yield name, timed(lambda: move(op), 3), cache.bytes
            cache.compare()


def sglang(pair: Pair, cache: Cache) -> Iterator[tuple[str, float, int]]:
    """Threads write a request each, and its small state, with no notification."""
    us = pair.us
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for request in range(number, REQUESTS, THREADS):
                handles = [cache.make("WRITE", request, b""), pair.request("WRITE", 1024)]
                states = [us.nixl.transfer(handle) for handle in handles]
                for handle, state in zip(handles, states, strict=True):
                    us.finish(handle, state, 0.0)
                    us.nixl.release_xfer_handle(handle)
        except BaseException as error:
            failed.append(error)

    def move() -> None:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    name = f"SGLang, {REQUESTS} requests, {THREADS} threads"
    if pair.begins(name):
        yield name, timed(move, 3), cache.bytes


def lmcache(pair: Pair, scale: int) -> Iterator[tuple[str, float, int]]:
    us, size = pair.us, PAGE_BYTES // scale
    pages = [(page * size, size) for page in range(PAGES)]
    for op in ("WRITE", "READ"):
        name = f"LMCache, {PAGES} pages {op}"
        if not pair.begins(name):
            continue
        # Pages in another order there, so that they are not one run.
        local, remote = pair.places(pages, pages[::-1])
        handle = us.nixl.initialize_xfer(op, local, remote, "target")
        yield name, timed(lambda: us.run(handle, pause=0.001), 3), PAGES * size
        us.nixl.release_xfer_handle(handle)
        pair.compare(pages, pages[::-1])


def measure(backend: str, only: str, scale: int, kind: str, without: list[str]) -> None:
    """Prints every case with one backend, or those of the group `only`, each as it begins and as it has ended."""
    longest = [size for _, size, _ in SIZES] + [count * size for _, count, size in LISTS]
    longest += [REGIONS * BLOCKS * BLOCK_BYTES, PAGES * PAGE_BYTES]
    pair = Pair(backend, max(MIB, max(longest) // scale), kind, without)

    def cached(cases: Callable[[Pair, Cache], Iterator[tuple[str, float, int]]]) -> Any:
        cache = Cache(pair, scale)
        yield from cases(pair, cache)
        cache.close()

    groups: dict[str, Callable[[], Iterator[tuple[str, float, int]]]] = {
        "small": lambda: small(pair),
        "sizes": lambda: sizes(pair, scale),
        "lists": lambda: lists(pair, scale),
        "vllm": lambda: cached(vllm),
        "sglang": lambda: cached(sglang),
        "lmcache": lambda: lmcache(pair, scale),
    }
    for name, cases in groups.items():
        if only in ("", name):
            for figure in cases():
                print("RESULT " + json.dumps(figure), flush=True)
    pair.close()


def cell(found: list[tuple[float, int]]) -> str:
    if not found:
        return "-"
    moved = found[0][1]
    if moved == SLOW:
        return f"more than {found[0][0]:g} s"
    values = sorted(moved / seconds / 1e9 if moved else seconds * 1e6 for seconds, _ in found)
    digits = 2 if moved else 1
    text = f"{statistics.median(values):.{digits}f} {'GB/s' if moved else 'us'}"
    if len(values) > 1:
        text += f" ({values[0]:.{digits}f} to {values[-1]:.{digits}f})"
    return text


def ratio(ours: list[tuple[float, int]], theirs: list[tuple[float, int]]) -> str:
    """How many times as fast the first is."""
    if not ours or not theirs or SLOW in (ours[0][1], theirs[0][1]):
        return "-"
    median = [statistics.median(seconds for seconds, _ in found) for found in (ours, theirs)]
    return f"{median[1] / median[0]:.2f}"


def show(found: dict[str, list[Figures]]) -> None:
    peers = list(found)
    others = [peer for peer in peers if peer != "tcpx"] if "tcpx" in peers else []
    print("| case | " + " | ".join(peers + [f"against {peer}" for peer in others]) + " |")
    print("|---" * (1 + len(peers) + len(others)) + "|")
    cases = dict.fromkeys(case for rounds in found.values() for one in rounds for case in one)
    for case in cases:
        of = {peer: [one[case] for one in found[peer] if case in one] for peer in peers}
        cells = [cell(of[peer]) for peer in peers]
        cells += [ratio(of["tcpx"], of[peer]) for peer in others]
        print(f"| {case} | " + " | ".join(cells) + " |")


def _lines(command: list[str], variables: dict[str, str], limit: float, errors: Path) -> Iterator[str]:
    """What a process of the bench prints. It is ended, with its own child, `limit` seconds after a case has begun."""
    with errors.open("w") as file:
        process = subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True
        )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    left = LIMIT
    try:
        while (line := lines.get(timeout=left)) is not None:
            yield line
            if line.startswith("ENDED"):
                return
            left = limit if line.startswith("CASE") else LIMIT
    except queue.Empty:
        yield "SLOW"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def in_turns(
    peers: list[str],
    rounds: int,
    memory: str = "DRAM",
    only: str = "",
    quick: bool = False,
    limit: float = CASE_LIMIT,
) -> tuple[dict[str, list[Figures]], bool]:
    """The figures of every round of every peer, and whether a round of `tcpx` failed."""
    found: dict[str, list[Figures]] = {peer: [] for peer in peers}
    slow: dict[str, list[str]] = {peer: [] for peer in peers}
    failed = False
    for _ in range(rounds):
        for peer in peers:
            figures: Figures = {case: (limit, SLOW) for case in slow[peer]}
            found[peer].append(figures)
            failed |= not _round(peer, figures, slow[peer], memory, only, quick, limit) and peer == "tcpx"
    return found, failed


def _round(
    peer: str, figures: Figures, slow: list[str], memory: str, only: str, quick: bool, limit: float
) -> bool:
    """Fills `figures`, by processes of which each goes on behind the case that was too slow for the one before."""
    variables = {**os.environ, **PEERS[peer][1]}
    command = [sys.executable, __file__, "--one", peer, "--memory", memory]
    command += ["--only", only] if only else []
    command += ["--quick"] if quick else []
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "errors"
        while True:
            case, outcome = "", ""
            without = ["--without", json.dumps(list(figures))]
            for line in _lines(command + without, variables, limit, errors):
                outcome, _, rest = line.strip().partition(" ")
                if outcome == "CASE":
                    case = rest
                elif outcome == "RESULT":
                    name, seconds, moved = json.loads(rest)
                    figures[name], case = (seconds, moved), ""
            if outcome != "SLOW" or not case:
                break
            slow.append(case)
            figures[case] = (limit, SLOW)
        if outcome != "ENDED":
            print(f"{peer} failed{f' at {case}' if case else ''}:\n{errors.read_text()[-2000:]}", file=sys.stderr)
        return outcome == "ENDED"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tcpx.bench nixl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    only = ["small", "sizes", "lists", "vllm", "sglang", "lmcache"]
    parser.add_argument("--only", default="", choices=only, help="one group of cases")
    memory = "host memory, or a GPU's (needs torch)"
    parser.add_argument("--memory", default="DRAM", choices=["DRAM", "VRAM"], help=memory)
    parser.add_argument("--quick", action="store_true", help=f"move {QUICK} times less, to see that it works")
    parser.add_argument("--json", type=Path, help="write every round's seconds and bytes")
    seconds = f"a case that takes longer is left out, and the table says so; {CASE_LIMIT:g} by default"
    parser.add_argument("--limit", type=float, default=CASE_LIMIT, metavar="SECONDS", help=seconds)
    parser.add_argument("--one", choices=list(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--without", type=json.loads, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else 1
    if options.one:
        measure(PEERS[options.one][0], options.only, scale, options.memory, options.without)
        print("ENDED", flush=True)
        return
    peers = options.peers.split(",")
    unknown = [peer for peer in peers if peer not in PEERS]
    if unknown:
        parser.error(f"there is no peer {unknown[0]}; {', '.join(PEERS)} are")
    found, failed = in_turns(
        peers, options.rounds, options.memory, options.only, options.quick, options.limit
    )
    if options.quick:
        print(f"Quick: all but the cases of 4 KiB move {QUICK} times less than they say.\n")
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])

"""What torch's own work feels of tcpx in Python and under NIXL: steps of scripts/gpu-torch.sh.

`captures COUNT` captures CUDA graphs on streams of both kinds while a process beside it takes part
in sends, puts, gets, connections that come and go, and transfers of NIXL; `ends DOOR WAY` begins
transfers at a door (python, nixl) and then ends them in a way: reset (of the GPU), return, exit.
The peer's process is this file, too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

BLOCK = 256 << 10
BLOCKS = 64
# Of those that are under way at a reset or at the end: more than there is pinned memory for.
MANY = 100
LIMIT = 20.0


def blocks(seed: int | None = None, times: int = 1) -> torch.Tensor:
    """GPU memory of 64 blocks, or of `times` as many: random, or poisoned."""
    if seed is None:
        return torch.full((times * BLOCKS * BLOCK,), 0x5A, dtype=torch.uint8, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (BLOCKS * BLOCK,), dtype=torch.uint8, device="cuda", generator=generator)


def block(of: torch.Tensor, at: int) -> torch.Tensor:
    at %= BLOCKS
    return of[at * BLOCK : (at + 1) * BLOCK]


def agent(name: str, memory: torch.Tensor) -> Any:
    from nixl_cu13 import nixl_agent, nixl_agent_config

    made = nixl_agent(name, nixl_agent_config(backends=[]))
    made.create_backend("TCPX")
    made.register_memory([(memory.data_ptr(), memory.numel(), 0, "")], "VRAM")
    return made


def peer(pipe: Any, times: int) -> None:
    """The other process: echoes what is sent, opens a window, has an agent. Ends with the pipe."""
    import tcpx

    faulthandler.enable()
    torch.cuda.init()
    window_memory, nixl_memory = blocks(times=times), blocks(times=times)
    torch.cuda.synchronize()
    endpoint = tcpx.Endpoint("127.0.0.1:0", gpu=0)
    made = agent("peer", nixl_memory)
    pipe.send((endpoint.pairing(), made.get_agent_metadata(), nixl_memory.data_ptr()))

    def serve(connection: Any) -> None:
        received = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        try:
            window = connection.expose(window_memory)
            connection.notify(window.key).wait(LIMIT)
            while True:
                connection.recv(received, 1, stream="ready").wait()
                connection.send(received, 2, stream="ready").wait(LIMIT)
        except tcpx.Error:
            pass  # Its other side has closed it, or has ended.

    # Torch aborts where Python ends with a thread that frees a tensor: all of them are waited for.
    threads: list[threading.Thread] = []

    def accept() -> None:
        while True:
            try:
                connection = endpoint.accept().wait()
            except tcpx.Error:
                return
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        while pipe.recv() == "digest":
            pipe.send((window_memory.cpu().numpy().tobytes(), nixl_memory.cpu().numpy().tobytes()))
    except EOFError:
        pass
    endpoint.close()
    accepting.join()
    for thread in threads:
        thread.join()


class Peer:
    def __init__(self, times: int = 1) -> None:
        here, there = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=peer, args=(there, times), daemon=True)
        self.process.start()
        there.close()
        self.pipe = here
        self.pairing, self.metadata, self.address = here.recv()

    def memory(self) -> tuple[bytes, bytes]:
        self.pipe.send("digest")
        window, nixl = self.pipe.recv()
        return window, nixl

    def end(self) -> None:
        """Ends the other process, which must end in order."""
        self.pipe.close()
        self.process.join(LIMIT)
        if self.process.exitcode != 0:
            raise SystemExit(f"the other process ended with {self.process.exitcode}")


class Beside:
    """Threads that move data without a pause; torch's GPU functions are not called in them."""

    def __init__(self, other: Peer) -> None:
        self.other, self.over = other, threading.Event()
        self.done: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.wrong: list[str] = []
        self.source, self.echoed, self.got = blocks(1), blocks(), blocks()
        # NIXL registers both as one region, which ends after the agent.
        registered = torch.cat([blocks(2), blocks()])
        self.nixl_source, self.nixl_got = registered[: BLOCKS * BLOCK], registered[BLOCKS * BLOCK :]
        self.agent = agent("here", registered)
        torch.cuda.synchronize()
        works = self.echo, self.put_and_get, self.come_and_go, self.nixl
        self.threads = [threading.Thread(target=self.run, args=(work,)) for work in works]
        for thread in self.threads:
            thread.start()

    def run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 (whatever it is, it is the test's failure)
            self.wrong.append(f"{work.__name__}: {type(error).__name__}: {error}")

    def count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1

    def beside_captures(self, what: str, begin: Callable[[], Any]) -> None:
        """One that may be refused: it waits for the default streams, which cannot be while a stream
        is captured that synchronises with them."""
        import tcpx

        try:
            begin().wait(LIMIT)
            self.count(what)
        except tcpx.MemoryError as error:
            if "captured" not in str(error):
                raise
            self.refused[what] = self.refused.get(what, 0) + 1

    def echo(self) -> None:
        import tcpx

        with tcpx.connect(self.other.pairing, gpu=0) as connection:
            connection.notification().wait(LIMIT)
            at = 0
            while not self.over.is_set() or at < BLOCKS:
                receive = connection.recv(block(self.echoed, at), 2, stream="ready")
                connection.send(block(self.source, at), 1, stream="ready").wait(LIMIT)
                receive.wait(LIMIT)
                self.count("echo")
                at += 1

    def put_and_get(self) -> None:
        import tcpx

        with tcpx.connect(self.other.pairing, gpu=0) as connection:
            key = connection.notification().wait(LIMIT)
            # What the window gets for good, after the streams' work or after nothing.
            for at in range(BLOCKS):
                connection.put(block(self.source, at), key, at * BLOCK, stream="ready").wait(LIMIT)
            at = 0
            while not self.over.is_set() or at < BLOCKS:
                offset = at % BLOCKS * BLOCK
                self.beside_captures("put", lambda: connection.put(block(self.source, at), key, offset))
                self.count("get")
                connection.get(block(self.got, at), key, offset, stream="ready").wait(LIMIT)
                at += 1

    def come_and_go(self) -> None:
        import tcpx

        while not self.over.is_set():
            with tcpx.connect(self.other.pairing, gpu=0) as connection:
                connection.notification().wait(LIMIT)
            self.count("connect and close")

    def nixl(self) -> None:
        made = self.agent
        made.add_remote_agent(self.other.metadata)
        at = 0
        while not self.over.is_set() or at < BLOCKS:
            offset = at % BLOCKS * BLOCK
            for op, ours in (("WRITE", self.nixl_source), ("READ", self.nixl_got)):
                local = made.get_xfer_descs([(ours.data_ptr() + offset, BLOCK, 0)], "VRAM")
                remote = made.get_xfer_descs([(self.other.address + offset, BLOCK, 0)], "VRAM")
                handle = made.initialize_xfer(op, local, remote, "peer")
                state = made.transfer(handle)
                deadline = time.monotonic() + LIMIT
                while state == "PROC" and time.monotonic() < deadline:
                    state = made.check_xfer_state(handle)
                if state != "DONE":
                    raise OSError(f"{op} ended with {state}")
                made.release_xfer_handle(handle)
                self.count(f"NIXL {op}")
            at += 1

    def end(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(60)
            if thread.is_alive():
                self.wrong.append("a thread beside the captures does not end")


def capture_streams() -> dict[str, torch.cuda.Stream]:
    """A stream that synchronises with the legacy one, and one that does not."""
    cuda = ctypes.CDLL("libcuda.so.1")
    made = ctypes.c_void_p()
    if cuda.cuStreamCreate(ctypes.byref(made), 0) != 0:
        raise OSError("cuStreamCreate failed")
    return {"blocking": torch.cuda.ExternalStream(made.value), "non-blocking": torch.cuda.Stream()}


def captures(count: int) -> dict[str, Any]:
    import tcpx

    other = Peer()
    torch.cuda.init()
    mine = tcpx.connect(other.pairing, gpu=0).wait()
    key = mine.notification().wait(LIMIT)
    beside = Beside(other)
    streams = capture_streams()
    own = torch.ones(1 << 20, device="cuda")
    refused = 0
    # Captures begin once everything moves.
    deadline = time.monotonic() + LIMIT
    while len(beside.done) < 6 and not beside.wrong and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        for at in range(count):
            kind = ("blocking", "non-blocking")[at % 2]
            mode = ("global", "global", "thread_local", "relaxed")[at % 4]
            graph, before = torch.cuda.CUDAGraph(), at + 1.0
            into = torch.zeros_like(own)
            own.fill_(before)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=streams[kind], capture_error_mode=mode):
                for _ in range(20):
                    into.add_(own)
                    time.sleep(0.001)
                # An operation after the stream that is being captured: refused, and no harm done.
                for begin in (lambda: mine.send(own, 9), lambda: mine.put(own[:1000], key)):
                    try:
                        begin()
                        raise SystemExit("an operation on a captured stream was taken")
                    except tcpx.MemoryError as error:
                        if "captured" not in str(error):
                            raise
                        refused += 1
            graph.replay()
            torch.cuda.synchronize()
            if not torch.all(into == 20 * before):
                raise SystemExit(f"capture {at} ({kind}, {mode}) computed something else")
    finally:
        beside.end()
    mine.close()
    torch.cuda.synchronize()
    window, nixl = other.memory()
    checks = {
        "echoed": torch.equal(beside.source, beside.echoed),
        "put": window == beside.source.cpu().numpy().tobytes(),
        "got": torch.equal(beside.source, beside.got),
        "NIXL wrote": nixl == beside.nixl_source.cpu().numpy().tobytes(),
        "NIXL read": torch.equal(beside.nixl_source, beside.nixl_got),
    }
    other.end()
    wrong = beside.wrong + [name for name, is_same in checks.items() if not is_same]
    if wrong:
        raise SystemExit("; ".join(wrong))
    return {"captures": count, "refused amid a capture": refused, "beside": beside.done, "refused beside": beside.refused}


def reset() -> None:
    """What `cudaDeviceReset` does."""
    cuda, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    code = cuda.cuDevicePrimaryCtxReset_v2(device)
    if code != 0:
        raise OSError(f"cuDevicePrimaryCtxReset failed with {code}")


def ends(door: str, way: str) -> dict[str, Any]:
    """Ends amid transfers. A reset must end each with an error, and nothing with a signal."""
    import tcpx

    other = Peer(MANY)
    torch.cuda.init()
    memory = blocks(3)
    each = memory.numel()
    torch.cuda.synchronize()
    if door == "python":
        connection = tcpx.connect(other.pairing, gpu=0).wait()
        key = connection.notification().wait(LIMIT)
        running = [connection.put(memory, key, at * each, stream="ready") for at in range(MANY)]
        running[0].wait(LIMIT)
    else:
        made = agent("here", memory)
        made.add_remote_agent(other.metadata)
        local = made.get_xfer_descs([(memory.data_ptr(), each, 0)], "VRAM")
        remotes = [[(other.address + at * each, each, 0)] for at in range(MANY)]
        remotes = [made.get_xfer_descs(remote, "VRAM") for remote in remotes]
        handles = [made.initialize_xfer("WRITE", local, remote, "peer") for remote in remotes]
        for handle in handles:
            made.transfer(handle)
        deadline = time.monotonic() + LIMIT
        while made.check_xfer_state(handles[0]) == "PROC":
            if time.monotonic() > deadline:
                raise SystemExit("the first transfer does not end")
    if way == "exit":
        sys.exit(0)
    if way == "return":
        return {"door": door, "way": way}
    reset()
    failed, deadline = 0, time.monotonic() + LIMIT
    if door == "python":
        for one in running:
            try:
                one.wait(LIMIT)
            except tcpx.TimeoutError:
                raise
            except tcpx.Error:
                failed += 1
        try:
            connection.close(1.0)
        except tcpx.ConnectionLost:
            pass  # The copies that failed have ended it.
    else:
        for handle in handles:
            state = "PROC"
            while state == "PROC":
                if time.monotonic() > deadline:
                    raise SystemExit("a transfer does not end after the reset")
                try:
                    state = made.check_xfer_state(handle)
                except Exception:  # noqa: BLE001 (NIXL's errors have no common class)
                    state = "ERR"
            failed += state != "DONE"
    if failed == 0:
        raise SystemExit("no transfer was under way at the reset: more are needed")
    other.end()
    return {"door": door, "way": way, "failed": failed}


def main() -> None:
    what, *rest = sys.argv[1:]
    report = captures(int(rest[0])) if what == "captures" else ends(*rest)
    if report:
        print(json.dumps(report))


if __name__ == "__main__":
    os.environ.setdefault("TCPX_SOCKET_IFNAME", "=lo")
    main()

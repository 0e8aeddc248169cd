"""An agent of NIXL with the backend TCPX, here or in a process of its own.

The process is told what to do over a pipe, by name of a method of `Node`.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from typing import Any

import numpy as np

GUARD = 4096
GUARD_BYTE = 0xA5
# No wait of a test is unbounded; none should come near.
LIMIT = 60.0
BACKEND = os.environ.get("TCPX_NIXL_BACKEND", "TCPX")


def nixl() -> Any:
    """NIXL's Python API, of whichever wheel is installed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        # Wheels up to 1.2 import torch, and use it for tensors alone.
        stand_in = types.ModuleType("torch")
        stand_in.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
        sys.modules["torch"] = stand_in
    for name in ("nixl_cu12", "nixl_cu13"):
        try:
            module = __import__(f"{name}._api", fromlist=["_api"])
        except ImportError:
            continue
        finally:
            if isinstance(getattr(sys.modules.get("torch"), "Tensor", None), type) and not hasattr(
                sys.modules["torch"], "__version__"
            ):
                del sys.modules["torch"]
        return module
    raise ImportError("no NIXL wheel is installed: pip install --no-deps nixl-cu12")


class Node:
    """One agent, its memory, and transfers from it."""

    def __init__(
        self,
        name: str,
        progress: bool = True,
        telemetry: bool = False,
        backend: str = BACKEND,
        **params: str,
    ) -> None:
        api = nixl()
        config = api.nixl_agent_config(
            enable_prog_thread=progress, capture_telemetry=telemetry, backends=[]
        )
        if hasattr(api, "nixl_thread_sync_t"):
            config.sync_mode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        self.agent = api.nixl_agent(name, config)
        self.agent.create_backend(backend, params)
        self.name = name
        self.memory: list[np.ndarray] = []
        self.registered: list[Any] = []
        self.notifs: list[tuple[str, bytes]] = []
        self.handles: list[Any] = []
        self.lists: list[Any] = []

    def alloc(self, size: int, seed: int | None = None) -> int:
        """Registers memory between guards; its number."""
        whole = np.full(size + 2 * GUARD, GUARD_BYTE, dtype=np.uint8)
        if seed is not None:
            whole[GUARD : GUARD + size] = pattern(size, seed)
        self.memory.append(whole)
        self.registered.append(
            self.agent.register_memory([(whole.ctypes.data + GUARD, size, 0, "")], "DRAM")
        )
        return len(self.memory) - 1

    def alloc_regions(self, count: int, size: int, seed: int) -> int:
        """As `alloc`, of neighbours that are a region each; the number of all of them."""
        number = self.alloc(count * size, seed)
        self.deregister(number)
        start = self.address(number)
        regions = [(start + at * size, size, 0, "") for at in range(count)]
        self.registered[number] = self.agent.register_memory(regions, "DRAM")
        return number

    def alloc_apart(self, size: int) -> int:
        """Registers memory of a mapping of its own; its address."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        # More than the host has is no matter, as nothing touches most of it.
        no_reserve = 0x4000
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        address = libc.mmap(None, ctypes.c_size_t(size), 3, kind, -1, ctypes.c_long(0))
        self.registered.append(self.agent.register_memory([(address, size, 0, "")], "DRAM"))
        self.memory.append(np.full(2 * GUARD, GUARD_BYTE, dtype=np.uint8))
        return int(address)

    def hide(self, address: int, size: int) -> None:
        """Takes memory away that is still registered, as who unmaps it does. Nothing else comes to lie there."""
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 0) == 0

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def address(self, number: int) -> int:
        return int(self.memory[number].ctypes.data) + GUARD

    def view(self, number: int) -> np.ndarray:
        return self.memory[number][GUARD:-GUARD]

    def content(self, number: int, offset: int = 0, size: int | None = None) -> bytes:
        view = self.view(number)
        end = len(view) if size is None else offset + size
        return view[offset:end].tobytes()

    def fill(self, number: int, seed: int) -> None:
        view = self.view(number)
        view[:] = pattern(len(view), seed)

    def guards_hold(self) -> bool:
        return all(
            bool((whole[:GUARD] == GUARD_BYTE).all() and (whole[-GUARD:] == GUARD_BYTE).all())
            for whole in self.memory
        )

    def deregister(self, number: int) -> None:
        registered, self.registered[number] = self.registered[number], None
        if registered is not None:
            self.agent.deregister_memory(registered)

    def register_again(self, number: int) -> None:
        """The same memory, by another registration."""
        self.deregister(number)
        size = len(self.view(number))
        self.registered[number] = self.agent.register_memory([(self.address(number), size, 0, "")], "DRAM")

    def metadata(self) -> bytes:
        return bytes(self.agent.get_agent_metadata())

    def partial_metadata(self, number: int) -> bytes:
        """What a peer needs for one piece of memory."""
        return bytes(self.agent.get_partial_agent_metadata(self.registered[number], True, [BACKEND]))

    def add(self, metadata: bytes) -> str:
        name = self.agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        self.agent.remove_remote_agent(name)

    def connect(self, name: str) -> None:
        self.agent.make_connection(name)

    def notify(self, name: str, message: bytes) -> None:
        self.agent.send_notif(name, message)

    def collect(self) -> list[tuple[str, bytes]]:
        for name, messages in self.agent.get_new_notifs().items():
            who = name.decode() if isinstance(name, bytes) else str(name)
            self.notifs += [(who, bytes(message)) for message in messages]
        return self.notifs

    def wait_notifs(self, count: int, limit: float = LIMIT) -> list[tuple[str, bytes]]:
        """Waits for so many notifications, and takes them."""
        until = time.monotonic() + limit
        while len(self.collect()) < count:
            if time.monotonic() > until:
                raise TimeoutError(f"{len(self.notifs)} of {count} notifications came")
            time.sleep(0)
        taken, self.notifs = self.notifs, []
        return taken

    def content_at_notif(self, number: int, count: int = 1) -> tuple[list[tuple[str, bytes]], bytes]:
        """Notifications, and the memory as it was when they were seen."""
        notifs = self.wait_notifs(count)
        return notifs, self.content(number)

    def descs(self, pieces: list[tuple[int, int]] | np.ndarray) -> Any:
        """A transfer list of (address, bytes)."""
        if isinstance(pieces, np.ndarray):
            return self.agent.get_xfer_descs(pieces, "DRAM")
        return self.agent.get_xfer_descs([(at, size, 0) for at, size in pieces], "DRAM")

    def prepare(
        self,
        op: str,
        local: list[tuple[int, int]] | np.ndarray,
        remote: list[tuple[int, int]] | np.ndarray,
        peer: str,
        notif: bytes = b"",
    ) -> Any:
        return self.agent.initialize_xfer(op, self.descs(local), self.descs(remote), peer, notif)

    def wait(self, handle: Any, limit: float = LIMIT) -> str:
        """Polls until the transfer has ended: DONE, or ERR also where NIXL raises."""
        until = time.monotonic() + limit
        while True:
            try:
                state = self.agent.check_xfer_state(handle)
            except Exception:
                return "ERR"
            if state != "PROC":
                return str(state)
            if time.monotonic() > until:
                raise TimeoutError("the transfer has not ended")
            time.sleep(0)

    def wait_all(self) -> set[str]:
        """How the transfers ended that were left."""
        return {self.wait(handle) for handle in self.handles}

    def post(self, handle: Any, notif: bytes = b"") -> str:
        try:
            return str(self.agent.transfer(handle, notif))
        except Exception:
            return "ERR"

    def run(self, handle: Any, notif: bytes = b"", limit: float = LIMIT) -> str:
        state = self.post(handle, notif)
        return self.wait(handle, limit) if state == "PROC" else state

    def release(self, handle: Any, limit: float = LIMIT) -> float:
        """Releases a handle, again while the memory of it is in use; the longest call in seconds."""
        until, longest = time.monotonic() + limit, 0.0
        while True:
            started = time.monotonic()
            try:
                self.agent.release_xfer_handle(handle)
                return max(longest, time.monotonic() - started)
            except Exception:
                longest = max(longest, time.monotonic() - started)
                if time.monotonic() > until:
                    raise
                time.sleep(0.001)

    def transfer(
        self,
        op: str,
        local: list[tuple[int, int]],
        remote: list[tuple[int, int]],
        peer: str,
        notif: bytes = b"",
    ) -> str:
        handle = self.prepare(op, local, remote, peer, notif)
        state = self.run(handle, notif)
        self.release(handle)
        return state

    def post_and_leave(
        self,
        op: str,
        local: list[tuple[int, int]],
        remote: list[tuple[int, int]],
        peer: str,
        notif: bytes,
    ) -> str:
        """Posts a transfer, and does nothing for it any more."""
        handle = self.prepare(op, local, remote, peer, notif)
        self.handles.append(handle)
        return self.post(handle, notif)

    def list_blocks(self, local: np.ndarray, remote: np.ndarray, peer: str) -> None:
        """Makes the lists of which transfers name some pieces by number; rows may have a stride and a count."""
        self.lists = [
            self.agent.prep_xfer_dlist(name, rows, "DRAM")
            for name, rows in (("NIXL_INIT_AGENT", local), (peer, remote))
        ]

    def post_listed(self, op: str, local: np.ndarray, remote: np.ndarray, notif: bytes) -> str:
        """Posts a transfer of some of what was listed, and does nothing for it any more."""
        ours, theirs = self.lists
        ours_chosen, theirs_chosen = (one.astype(np.int32) for one in (local, remote))
        handle = self.agent.make_prepped_xfer(op, ours, ours_chosen, theirs, theirs_chosen, notif)
        self.handles.append(handle)
        return self.post(handle, notif)

    def seconds_to(self, method: str, *arguments: Any) -> float:
        """How long a call takes."""
        started = time.monotonic()
        getattr(self, method)(*arguments)
        return time.monotonic() - started

    def resident(self) -> int:
        """Bytes of memory that the process has."""
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def threads(self) -> int:
        return len(os.listdir("/proc/self/task"))

    def close(self) -> None:
        for handle in self.handles:
            self.release(handle)
        self.handles = []
        for listed in self.lists:
            self.agent.release_dlist_handle(listed)
        self.lists = []
        for number in range(len(self.registered)):
            self.deregister(number)
        self.registered = []
        self.agent = None


def pattern(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def enter(namespace: str, names: str | None) -> None:
    """Goes to a network namespace, with all threads that are started from now on; `names` is their /etc/hosts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"no way into {namespace}")
    # Whose interfaces /sys shows is settled when it is mounted.
    own_mounts, private, bind = 0x20000, 0x44000, 0x1000
    done = [
        libc.unshare(own_mounts),
        libc.mount(b"none", b"/", None, ctypes.c_ulong(private), None),
        libc.mount(b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None),
    ]
    if names:
        done.append(libc.mount(names.encode(), b"/etc/hosts", None, ctypes.c_ulong(bind), None))
    if any(done):
        raise OSError(ctypes.get_errno(), f"{namespace} does not get its own /sys, or {names} no /etc/hosts")


def serve(
    pipe: Any,
    name: str,
    options: dict[str, Any],
    variables: dict[str, str],
    namespace: str | None,
    names: str | None,
) -> None:
    os.environ.update(variables)
    if namespace:
        enter(namespace, names)
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    node: Node | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if node is None:
                node = Node(name, **options)
            answer: Any = getattr(node, method)(*arguments)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(answer)
        if method == "close":
            return


def end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


class Peer:
    """A `Node` in a process of its own; every method of a node is one of this."""

    def __init__(
        self,
        name: str,
        variables: dict[str, str] | None = None,
        namespace: str | None = None,
        names: str | None = None,
        **options: Any,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.name = name
        arguments = (theirs, name, options, variables or {}, namespace, names)
        self.process = context.Process(target=serve, args=arguments)
        self.process.start()
        theirs.close()

    def begin(self, method: str, *arguments: Any) -> None:
        self.pipe.send((method, arguments))

    def answer(self) -> Any:
        if not self.pipe.poll(2 * LIMIT):
            raise TimeoutError(f"{self.name} does not answer")
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)

        def call(*arguments: Any) -> Any:
            self.begin(method, *arguments)
            return self.answer()

        return call

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        """Stops the process, and returns when none of its threads runs any more."""
        os.kill(self.process.pid, signal.SIGSTOP)
        tasks = f"/proc/{self.process.pid}/task"
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            states = []
            for task in os.listdir(tasks):
                with open(f"{tasks}/{task}/stat") as stat:
                    states.append(stat.read().rpartition(")")[2].split()[0])
            if all(state == "T" for state in states):
                return
        raise TimeoutError(f"{self.name} does not stop")

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> int:
        """Closes the agent, and ends the process; its exit status."""
        if self.process.is_alive():
            try:
                self.close()
            except (EOFError, BrokenPipeError, ConnectionResetError):
                pass
            self.process.join(LIMIT)
            if self.process.is_alive():
                self.kill()
        return int(self.process.exitcode)

"""The names of UCCL's ``p2p.Endpoint`` over tcpx, for scripts that move: ``from tcpx import uccl as p2p``.

As there, a method returns whether it worked, or a tuple that begins with that; why one did not is logged under
``tcpx.uccl``. New code is better off with :class:`tcpx.Connection`, whose exceptions say what to do.

What differs: connections are authenticated. The key of an endpoint travels in its metadata, which is a secret
therefore; scripts that exchange addresses in another way set ``TCPX_KEY`` at both sides. Memory is of the host, or of
the GPU that the endpoint was made for. ``*_ipc`` and ``uccl.collective`` do not exist here.
"""

from __future__ import annotations

import base64
import ctypes
import itertools
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from . import _core, _tcpx
from ._errors import ClosedError, Error

__all__ = ["Endpoint", "XferDesc", "get_oob_ip"]

_log = logging.getLogger("tcpx.uccl")
_T = TypeVar("_T")

# The first message of whoever connects: its GPU, and a name of the connection that both sides know
# then.
_HELLO_TAG, _HELLO_BYTES = 1 << 62, 24
# As long as UCCL's, so that scripts may have room for so much.
_ITEM_BYTES = 64
# What an endpoint's metadata said, by address and port.
_keys: dict[tuple[str, int], str] = {}


def get_oob_ip() -> str:
    """The address under which others reach this host."""
    return _tcpx.reachable("::")


@dataclass
class XferDesc:
    """A registered tensor, or one of the peer's."""

    addr: int
    size: int
    mr_id: int
    # The keys of its windows, by the connection's name.
    keys: dict[str, str]


@dataclass
class _Memory:
    address: int
    size: int
    device: str
    # What keeps a tensor's memory.
    owner: object = None

    def part(self, address: int, size: int) -> tuple[int, int, str]:
        if address < self.address or address + size > self.address + self.size:
            raise ValueError(f"{size} bytes at {address:#x} are outside of the registered memory")
        return address, size, self.device


@dataclass
class _Peer:
    connection: _core.Connection
    name: str
    gpu: int


class Endpoint:
    """Listens, connects and moves registered memory.

    Args:
        local_gpu_idx: The GPU whose memory it moves beside the host's; host memory only without it.
        num_cpus: Accepted for old scripts, without effect.
    """

    def __init__(self, local_gpu_idx: int | None = None, num_cpus: int | None = None) -> None:
        self._gpu = local_gpu_idx
        port = os.environ.get("UCCL_TCP_OOB_PORT") or os.environ.get("UCCL_TCPX_OOB_PORT") or "0"
        try:
            self._listener = _core.Endpoint(f":{port}", gpu=local_gpu_idx)
        except Error as error:
            if local_gpu_idx is None:
                raise
            _log.warning("GPU %d cannot be used, host memory only: %s", local_gpu_idx, error)
            self._gpu = None
            self._listener = _core.Endpoint(f":{port}")
        self._peers: dict[int, _Peer] = {}
        self._memory: dict[int, _Memory] = {}
        self._windows: dict[tuple[int, int, int], _tcpx.Window] = {}
        self._transfers: dict[int, list[_tcpx.Transfer]] = {}
        self._numbers = itertools.count(1)
        self._passive: threading.Thread | None = None

    # Connections

    def get_metadata(self) -> bytes:
        """``address:port?gpu?key`` for the other side, by a way that nobody else reads."""
        gpu = -1 if self._gpu is None else self._gpu
        return f"{get_oob_ip()}:{self._listener.address[1]}?{gpu}?{self._listener.key}".encode()

    get_endpoint_metadata = get_metadata

    @staticmethod
    def parse_metadata(metadata: bytes) -> tuple[str, int, int]:
        """Address, port and GPU. The key is kept for :meth:`connect`."""
        try:
            place, gpu, key = metadata.decode().split("?")
            address, port = place.rsplit(":", 1)
            _keys[address, int(port)] = key
            return address, int(port), int(gpu)
        except ValueError as error:
            raise ValueError("this is no metadata of a tcpx.uccl.Endpoint") from error

    def connect(
        self, remote_ip_addr: str, remote_gpu_bdf: object = None, remote_port: int = -1
    ) -> tuple[bool, int]:
        """Connects to an endpoint whose metadata was parsed, or with the key in ``TCPX_KEY``."""

        def open_it() -> int:
            key = _keys.get((remote_ip_addr, remote_port))
            host = f"[{remote_ip_addr}]" if ":" in remote_ip_addr else remote_ip_addr
            address = f"{host}:{remote_port}"
            connection = _core.connect(address, key=key, gpu=self._gpu).wait()
            name = secrets.token_bytes(16)
            hello = (-1 if self._gpu is None else self._gpu).to_bytes(8, "little", signed=True) + name
            connection.send(hello, _HELLO_TAG).wait()
            return self._add(connection, hello)

        return _tried(open_it, 0)

    def accept(self) -> tuple[bool, str, int, int]:
        """Waits for a peer: address, its GPU (-1 for none), the connection's number."""

        def take() -> tuple[str, int, int]:
            connection = self._listener.accept().wait()
            hello = bytearray(_HELLO_BYTES)
            connection.recv(hello, _HELLO_TAG).wait()
            number = self._add(connection, bytes(hello))
            return connection.peer.rsplit(":", 1)[0].strip("[]"), self._peers[number].gpu, number

        ok, found = _tried(take, ("", -1, 0))
        return ok, *found

    def _add(self, connection: _core.Connection, hello: bytes) -> int:
        number = next(self._numbers)
        gpu = int.from_bytes(hello[:8], "little", signed=True)
        self._peers[number] = _Peer(connection, hello[8:].hex(), gpu)
        return number

    def start_passive_accept(self) -> bool:
        """Accepts whoever comes, in a thread."""

        def run() -> None:
            while not self._listener.closed:
                if not self.accept()[0] and self._listener.closed:
                    return

        if self._passive is None:
            self._passive = threading.Thread(target=run, name="tcpx-uccl", daemon=True)
            self._passive.start()
        return True

    def add_remote_endpoint(self, metadata: bytes) -> tuple[bool, int]:
        """Connects to the endpoint with this metadata."""
        address, port, gpu = self.parse_metadata(metadata)
        return self.connect(address, gpu, port)

    def remove_remote_endpoint(self, conn_id: int) -> bool:
        """Closes a connection."""

        def close() -> None:
            for place in [place for place in self._windows if place[0] == conn_id]:
                del self._windows[place]
            self._peers.pop(conn_id).connection.close()

        return _tried(close, None)[0]

    def close(self) -> None:
        """Closes every connection and stops listening."""
        self._listener.close()
        for number in list(self._peers):
            self.remove_remote_endpoint(number)

    # Memory

    def reg(self, ptr: int, size: int, float_type: object = None) -> tuple[bool, int]:
        """Registers ``size`` bytes at ``ptr``, which the caller keeps; its number."""
        number = next(self._numbers)
        self._memory[number] = _Memory(ptr, size, self._device(ptr))
        return True, number

    def regv(self, ptrs: Sequence[int], sizes: Sequence[int]) -> tuple[bool, list[int]]:
        return True, [self.reg(ptr, size)[1] for ptr, size in zip(ptrs, sizes, strict=True)]

    def dereg(self, mr_id: int) -> bool:
        """Ends every use of registered memory."""

        def end() -> None:
            del self._memory[mr_id]
            for place in [place for place in self._windows if place[1] == mr_id]:
                try:
                    self._windows.pop(place).revoke()
                except ClosedError:
                    pass

        return _tried(end, None)[0]

    def _device(self, address: int) -> str:
        if self._gpu is None:
            return "cpu"
        kind = ctypes.c_uint(0)
        driver = ctypes.CDLL("libcuda.so.1")
        # CU_POINTER_ATTRIBUTE_MEMORY_TYPE: 2 is a device's; memory that the driver does not know is
        # the host's.
        failed = driver.cuPointerGetAttribute(ctypes.byref(kind), 2, ctypes.c_uint64(address))
        return f"cuda:{self._gpu}" if not failed and kind.value == 2 else "cpu"

    def _window(self, conn_id: int, mr_id: int, ptr: int, size: int) -> bytes:
        place = conn_id, mr_id, ptr
        window = self._windows.get(place)
        if window is None or len(window) != size:
            memory = self._memory[mr_id].part(ptr, size)
            window = self._peers[conn_id].connection.expose(memory)
            self._windows[place] = window
        return window.key

    def advertise(self, conn_id: int, mr_id: int, ptr: int, size: int) -> tuple[bool, bytes]:
        """What lets the peer of this connection write and read the memory."""

        def item() -> bytes:
            key = self._window(conn_id, mr_id, ptr, size)
            return key.ljust(_ITEM_BYTES - 1, b"\0") + bytes([len(key)])

        return _tried(item, b"")

    def advertisev(
        self,
        conn_id: int,
        mr_ids: Sequence[int],
        ptrs: Sequence[int],
        sizes: Sequence[int],
        num_iovs: int | None = None,
    ) -> tuple[bool, list[bytes]]:
        items = [self.advertise(conn_id, *one) for one in zip(mr_ids, ptrs, sizes, strict=True)]
        return all(ok for ok, _ in items), [item for _, item in items]

    def register_memory(self, tensors: Iterable[Any]) -> list[XferDesc]:
        """Registers tensors or arrays."""
        descs = []
        for tensor in tensors:
            number = next(self._numbers)
            if hasattr(tensor, "data_ptr"):
                address, size = int(tensor.data_ptr()), int(tensor.nbytes)
                device = str(tensor.device)
            else:
                address, size, device = int(tensor.ctypes.data), int(tensor.nbytes), "cpu"
            self._memory[number] = _Memory(address, size, device, tensor)
            descs.append(XferDesc(address, size, number, {}))
        return descs

    def deregister_memory(self, descs: Iterable[XferDesc]) -> bool:
        return all([self.dereg(desc.mr_id) for desc in descs])

    def get_serialized_descs(self, descs: Iterable[XferDesc]) -> bytes:
        """For the peers that are connected now: connect before this is called."""

        def entry(desc: XferDesc) -> dict[str, Any]:
            keys = {
                peer.name: base64.b64encode(
                    self._window(number, desc.mr_id, desc.addr, desc.size)
                ).decode()
                for number, peer in self._peers.items()
            }
            return {"addr": desc.addr, "size": desc.size, "mr_id": desc.mr_id, "keys": keys}

        return json.dumps([entry(desc) for desc in descs]).encode()

    @staticmethod
    def deserialize_descs(data: bytes) -> list[XferDesc]:
        try:
            return [XferDesc(**entry) for entry in json.loads(data)]
        except (ValueError, TypeError) as error:
            raise ValueError("these are no descriptors of a tcpx.uccl.Endpoint") from error

    # Transfers

    def _start(self, work: Callable[[], list[_tcpx.Transfer]]) -> tuple[bool, int]:
        def begin() -> int:
            number = next(self._numbers)
            self._transfers[number] = work()
            return number

        return _tried(begin, 0)

    def _finish(self, started: tuple[bool, int]) -> bool:
        ok, number = started
        if not ok:
            return False
        transfers = self._transfers.pop(number)
        return all([_tried(transfer.wait, None)[0] for transfer in transfers])

    def poll_async(self, transfer_id: int) -> tuple[bool, bool]:
        """Whether the transfer is well, and whether it is done."""
        transfers = self._transfers.get(transfer_id)
        if transfers is None:
            _log.warning("there is no transfer %d, or its end was told already", transfer_id)
            return False, False
        ended = [_tried(transfer.test, None) for transfer in transfers]
        failed = not all(ok for ok, _ in ended)
        is_done = failed or all(report is not None for _, report in ended)
        if is_done:
            del self._transfers[transfer_id]
        return not failed, is_done

    def _all(self, operation: str, conn_id: int, *lists: Sequence[Any]) -> tuple[bool, int]:
        """Starts an operation of a connection for each of some parts of registered memory."""
        return self._start(lambda: [
            getattr(self._peers[conn_id].connection, operation)(self._memory[mr].part(ptr, size))
            for mr, ptr, size in zip(*lists, strict=True)
        ])

    def sendv_async(
        self,
        conn_id: int,
        mr_ids: Sequence[int],
        ptrs: Sequence[int],
        sizes: Sequence[int],
        num_iovs: int | None = None,
    ) -> tuple[bool, int]:
        return self._all("send", conn_id, mr_ids, ptrs, sizes)

    def recvv_async(
        self,
        conn_id: int,
        mr_ids: Sequence[int],
        ptrs: Sequence[int],
        sizes: Sequence[int],
        num_iovs: int | None = None,
    ) -> tuple[bool, int]:
        return self._all("recv", conn_id, mr_ids, ptrs, sizes)

    def writev_async(
        self,
        conn_id: int,
        mr_ids: Sequence[int],
        ptrs: Sequence[int],
        sizes: Sequence[int],
        metas: Sequence[bytes],
        num_iovs: int | None = None,
    ) -> tuple[bool, int]:
        return self._start(lambda: self._batch(True, conn_id, mr_ids, ptrs, sizes, metas))

    def readv_async(
        self,
        conn_id: int,
        mr_ids: Sequence[int],
        ptrs: Sequence[int],
        sizes: Sequence[int],
        metas: Sequence[bytes],
        num_iovs: int | None = None,
    ) -> tuple[bool, int]:
        return self._start(lambda: self._batch(False, conn_id, mr_ids, ptrs, sizes, metas))

    def _batch(
        self,
        is_write: bool,
        conn_id: int,
        mr_ids: Sequence[int],
        ptrs: Sequence[int],
        sizes: Sequence[int],
        metas: Sequence[bytes],
    ) -> list[_tcpx.Transfer]:
        batch = self._peers[conn_id].connection.batch()
        add = batch.put if is_write else batch.get
        for mr, ptr, size, meta in zip(mr_ids, ptrs, sizes, metas, strict=True):
            item = bytes(meta)
            if len(item) != _ITEM_BYTES or item[-1] >= _ITEM_BYTES:
                raise ValueError("this is not what advertise returned at the peer")
            add(self._memory[mr].part(ptr, size), item[: item[-1]])
        return [batch.start()]

    def transfer(
        self,
        conn_id: int,
        operation: str,
        local_descs: Sequence[XferDesc],
        remote_descs: Sequence[XferDesc],
    ) -> tuple[bool, int]:
        """Starts to ``"write"`` local tensors into the peer's, or to ``"read"`` those; for :meth:`poll_async`."""

        def begin() -> list[_tcpx.Transfer]:
            if operation not in ("read", "write"):
                raise ValueError(f'expected "read" or "write", got {operation!r}')
            peer = self._peers[conn_id]
            batch = peer.connection.batch()
            add = batch.put if operation == "write" else batch.get
            for local, remote in zip(local_descs, remote_descs, strict=True):
                if peer.name not in remote.keys:
                    raise ValueError("the peer serialized its descriptors before this connection was there")
                memory = self._memory[local.mr_id].part(local.addr, local.size)
                add(memory, base64.b64decode(remote.keys[peer.name]))
            return [batch.start()]

        return self._start(begin)

    def send_async(self, conn_id: int, mr_id: int, ptr: int, size: int) -> tuple[bool, int]:
        return self.sendv_async(conn_id, [mr_id], [ptr], [size])

    def recv_async(self, conn_id: int, mr_id: int, ptr: int, size: int) -> tuple[bool, int]:
        return self.recvv_async(conn_id, [mr_id], [ptr], [size])

    def write_async(
        self, conn_id: int, mr_id: int, ptr: int, size: int, meta: bytes
    ) -> tuple[bool, int]:
        return self.writev_async(conn_id, [mr_id], [ptr], [size], [meta])

    def read_async(
        self, conn_id: int, mr_id: int, ptr: int, size: int, meta: bytes
    ) -> tuple[bool, int]:
        return self.readv_async(conn_id, [mr_id], [ptr], [size], [meta])

    def send(self, conn_id: int, mr_id: int, ptr: int, size: int) -> bool:
        return self._finish(self.send_async(conn_id, mr_id, ptr, size))

    def recv(self, conn_id: int, mr_id: int, ptr: int, size: int) -> bool:
        return self._finish(self.recv_async(conn_id, mr_id, ptr, size))

    def write(self, conn_id: int, mr_id: int, ptr: int, size: int, meta: bytes) -> bool:
        return self._finish(self.write_async(conn_id, mr_id, ptr, size, meta))

    def read(self, conn_id: int, mr_id: int, ptr: int, size: int, meta: bytes) -> bool:
        return self._finish(self.read_async(conn_id, mr_id, ptr, size, meta))

    def sendv(self, *arguments: Any) -> bool:
        return self._finish(self.sendv_async(*arguments))

    def recvv(self, *arguments: Any) -> bool:
        return self._finish(self.recvv_async(*arguments))

    def writev(self, *arguments: Any) -> bool:
        return self._finish(self.writev_async(*arguments))

    def readv(self, *arguments: Any) -> bool:
        return self._finish(self.readv_async(*arguments))


def _tried(work: Callable[[], _T], otherwise: _T) -> tuple[bool, _T]:
    """The result, or what stands for none; the reason is logged."""
    try:
        return True, work()
    except (Error, OSError, ValueError, BufferError) as error:
        _log.warning("%s", error)
    except KeyError as error:
        _log.warning("there is no connection or memory with the number %s", error)
    return False, otherwise

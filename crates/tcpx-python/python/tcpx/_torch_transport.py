"""The transport itself; ``torch_transport`` has looked at torch's version before it imports this.

Each transport listens with a key of its own, which is part of its connection URL. Who connects has a connection for
its reads and writes; the listening side takes no part in them, but for the first use of a region on a connection:
the initiator asks by a notification, and gets the key of a window that is opened for this connection. A region's name
is a random secret, so that nobody reaches memory whose descriptor was not given away.

One thread for the process waits for what comes in the background: connections, such questions, and the ends of
transfers that somebody has a Work or a future of.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import itertools
import json
import logging
import operator
import os
import select
import threading
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal, cast

import torch
from torch.distributed import Work
from torch.distributed._transport._api import MemoryView, MutableMemoryView, RemoteBuffer, Transport
from torch.distributed._transport._serialization import _WireDescriptor
from torch.distributed._transport._work import _validate_timeout, wait_all

from . import _loop, _tcpx
from ._core import Connection, Endpoint, connect, host_names
from ._errors import ClosedError, Error
from ._errors import TimeoutError as TransferTimeout

_log = logging.getLogger("tcpx.torch")

_VERSION = 1
_PENDING = "transport wait timed out; operation remains pending"


class _Reader:
    """The thread that waits in the background for every transport of this process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.completions = _tcpx.Completions()
        self._actions: dict[int, Callable[[int], None]] = {}
        self._tokens = itertools.count(1)
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._run, name="tcpx-torch", daemon=True)
        self._thread.start()
        # Before the interpreter goes: it ends other threads amid native code.
        atexit.register(self.stop)

    def add(self, action: Callable[[int], None]) -> int:
        """The token under which ``action`` is called once, in the thread."""
        token = next(self._tokens)
        self._actions[token] = action
        return token

    def remove(self, token: int) -> None:
        self._actions.pop(token, None)

    def at_end(self, transfer: _tcpx.Transfer, action: Callable[[int], None]) -> None:
        """Calls ``action`` once when the transfer has ended: in the thread, or at once where it has already."""
        token = self.add(action)
        try:
            is_over = transfer.watch(self.completions, token) is not None
        except Error:
            is_over = True
        if is_over:
            self.remove(token)
            action(token)

    def stop(self) -> None:
        if self.process == os.getpid():
            os.write(self._stopped, b"x")
            self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self.completions.fileno(), select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        while True:
            if any(descriptor == self._stop for descriptor, _ in poll.poll()):
                return
            for token in self.completions.drain():
                action = self._actions.pop(token, None)
                if action is None:
                    continue
                try:
                    action(token)
                except Exception:
                    _log.exception("a transfer's end could not be reported")


_the_reader: _Reader | None = None
_reader_lock = threading.Lock()


def _reader() -> _Reader:
    global _the_reader
    with _reader_lock:
        if _the_reader is None or _the_reader.process != os.getpid():
            _the_reader = _Reader()
        return _the_reader


class _Messages:
    """Calls ``arrived`` with each notification of a connection, and ``ended`` once at its end; in the reader's thread."""

    def __init__(
        self,
        connection: Connection,
        arrived: Callable[[_Messages, bytes], None],
        ended: Callable[[Error], None],
    ) -> None:
        self.connection = connection
        self.over = False
        self._arrived, self._ended = arrived, ended
        self._next = connection.notification()
        self._reader = _reader()
        self._sending: set[_tcpx.Transfer] = set()
        self._listen(None)

    def _listen(self, told: int | None) -> None:
        completions = self._reader.completions
        while True:
            if told is not None:
                self._next.unwatch(completions, told)
            told = self._reader.add(self._listen)
            try:
                message = self._next.watch(completions, told)
            except Error as error:
                self._reader.remove(told)
                self.over = True
                self._ended(error)
                return
            if message is None:
                return
            self._reader.remove(told)
            self._arrived(self, message)

    def send(self, message: dict[str, Any], failed: Callable[[Error], None]) -> None:
        transfer = self.connection.notify(json.dumps(message).encode())
        # Dropped, it would be cancelled.
        self._sending.add(transfer)

        def over(_: int) -> None:
            self._sending.discard(transfer)
            try:
                transfer.test()
            except Error as error:
                failed(error)

        self._reader.at_end(transfer, over)


class _End:
    """Awaits a transfer, which goes on where the task does not."""

    def __init__(self, transfer: _tcpx.Transfer) -> None:
        self._transfer = transfer

    def __await__(self) -> Generator[object, None, _tcpx.Report]:
        return _loop.result_of(self._transfer)


@dataclass(frozen=True)
class TcpxRemoteBuffer(_WireDescriptor):
    """A peer's registered memory. Whoever holds it, and is connected to that peer, can read and write it."""

    _backend: ClassVar[str] = "tcpx"
    _fields: ClassVar[dict[str, type]] = {"endpoint": str, "region": str, "length": int}

    endpoint: str
    region: str
    length: int


class _Registration:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.bytes = tensor.detach().reshape(-1).view(torch.uint8)
        self.address = tensor.data_ptr()
        self.length = tensor.numel() * tensor.element_size()
        self.name = uuid.uuid4().hex + uuid.uuid4().hex
        self.active = True
        # By the connection that each was opened for.
        self.windows: dict[Connection, _tcpx.Window] = {}

    def ensure_active(self) -> None:
        if not self.active:
            raise RuntimeError("memory has been unregistered")

    def check(self) -> None:
        self.ensure_active()
        tensor = self.tensor
        if (
            tensor.data_ptr() != self.address
            or tensor.numel() * tensor.element_size() != self.length
        ):
            raise RuntimeError("registered tensor was resized or its storage was replaced")


class TcpxMemoryView:
    """A byte range of registered memory."""

    def __init__(self, memory: TcpxMemory, offset: int, length: int) -> None:
        self._memory, self._offset, self._length = memory, offset, length

    def size(self) -> int:
        """Bytes."""
        return self._length

    def _bytes(self) -> torch.Tensor:
        return self._memory._registration.bytes[self._offset : self._offset + self._length]


class TcpxMutableMemoryView(TcpxMemoryView):
    """A byte range that reads may fill."""

    writable: Literal[True] = True


class TcpxMemory:
    """A registered tensor."""

    def __init__(self, transport: TcpxTransport, registration: _Registration) -> None:
        self._transport, self._registration = transport, registration

    def _range(self, offset: int | None, length: int | None) -> tuple[int, int]:
        self._registration.ensure_active()
        whole = self._registration.length
        offset = 0 if offset is None else operator.index(offset)
        if not 0 <= offset <= whole:
            raise ValueError(f"offset {offset} is outside of the registered {whole} bytes")
        length = whole - offset if length is None else operator.index(length)
        if not 0 <= length <= whole - offset:
            raise ValueError(f"{length} bytes from {offset} on exceed the registered {whole} bytes")
        return offset, length

    def to_view(self, offset: int | None = None, length: int | None = None) -> TcpxMemoryView:
        """Bytes ``offset`` to ``offset + length``, all by default, as a source."""
        return TcpxMemoryView(self, *self._range(offset, length))

    def to_mutable_view(
        self, offset: int | None = None, length: int | None = None
    ) -> TcpxMutableMemoryView:
        """The same as a destination."""
        return TcpxMutableMemoryView(self, *self._range(offset, length))

    def to_remote_buffer(self, *, timeout: float | None = None) -> TcpxRemoteBuffer:
        """What lets the peer in. It says where the memory is only to who is connected to this transport."""
        _validate_timeout(timeout)
        self._transport._ensure_open()
        registration = self._registration
        registration.ensure_active()
        return TcpxRemoteBuffer(self._transport._name, registration.name, registration.length)


class TcpxWork(Work):
    """A transfer. It starts once the key of the peer's window is known."""

    def __init__(
        self,
        transport: TcpxTransport,
        write: bool,
        local: TcpxMemoryView,
        timeout: float,
    ) -> None:
        super().__init__()
        self._transport, self._write, self._local = transport, write, local
        self._timeout = timeout
        self._transfer: _tcpx.Transfer | None = None
        # Set with the transfer, or with the end of a work that never had one.
        self._started = threading.Event()
        self._lock = threading.Lock()
        self._done = False
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None

    def _start(self, connection: Connection, key: bytes, watched: bool) -> None:
        move = connection.put if self._write else connection.get
        try:
            # The caller has seen to the GPU's work before: streams have calls of their own.
            self._transfer = move(self._local._bytes(), key, stream="ready")
        except Exception as error:
            self._end(error)
            return
        self._started.set()
        if watched:
            self._watch()

    def _watch(self) -> None:
        """Has the reader's thread end this."""
        assert self._transfer is not None
        _reader().at_end(self._transfer, lambda _: self._look())

    def _look(self) -> None:
        """Takes the transfer's outcome if there is one."""
        if self._done or self._transfer is None:
            return
        try:
            if self._transfer.test() is None:
                return
        except Error as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            if self._done:
                return
            self._error, self._done = error, True
            future = self._future
        self._started.set()
        self._transport._pending.discard(self)
        # Without the lock: callbacks of the future may ask this for more.
        if future is not None:
            self._settle(future)

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result([])
        else:
            future.set_exception(self._error)

    def is_completed(self) -> bool:
        self._look()
        return self._done

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the end, ``timeout`` or the transfer's own time at most. The transfer goes on after that."""
        seconds = timeout.total_seconds()
        _validate_timeout(seconds)
        self._wait(seconds or self._timeout)
        return True

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        if not self._started.wait(seconds):
            raise TimeoutError(_PENDING)
        if not self._done and self._transfer is not None:
            try:
                self._transfer.wait(max(0.0, until - time.monotonic()))
            except TransferTimeout:
                if not self.is_completed():
                    raise TimeoutError(_PENDING) from None
            except Error:
                # It is kept by the look that follows.
                pass
            self._look()
        if self._error is not None:
            raise self._error

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that the reader's thread settles: with an empty list, or with the error."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
            is_late = self._done
        if is_late:
            self._settle(self._future)
        return self._future

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return []

    def synchronize(self) -> None:
        self.wait()


class _Peer:
    """The connection for reads and writes, and what is known of the peer's regions."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name, self.connection = name, connection
        self.lost: Error | None = None
        self.keys: dict[str, bytes] = {}
        # Works that wait for the key of a region.
        self._asked: dict[str, list[TcpxWork]] = {}
        self._lock = threading.Lock()
        self._messages = _Messages(connection, self._answered, self._ended)

    def start(self, work: TcpxWork, region: str, watched: bool) -> None:
        key = self.keys.get(region)
        if key is not None:
            work._start(self.connection, key, watched)
            return
        with self._lock:
            key, lost = self.keys.get(region), self.lost
            is_first = region not in self._asked
            if key is None and lost is None:
                self._asked.setdefault(region, []).append(work)
        if key is not None:
            work._start(self.connection, key, watched)
        elif lost is not None:
            work._end(lost)
        elif is_first:
            try:
                self._messages.send({"open": region}, lambda error: self._refused(region, error))
            except Error as error:
                self._refused(region, error)

    def _answered(self, _: _Messages, message: bytes) -> None:
        try:
            answer = json.loads(message)
            region = answer["region"]
            key = base64.b64decode(answer["key"]) if "key" in answer else None
            why = str(answer.get("why"))
        except (ValueError, KeyError, TypeError, AttributeError):
            _log.warning("the peer %s sent what is no answer of tcpx", self.connection)
            return
        if key is None:
            self._refused(region, RuntimeError(f"the peer does not open this memory: {why}"))
            return
        with self._lock:
            self.keys[region] = key
            works = self._asked.pop(region, [])
        for work in works:
            work._start(self.connection, key, True)

    def _refused(self, region: str, error: Exception) -> None:
        with self._lock:
            works = self._asked.pop(region, [])
        for work in works:
            work._end(error)

    def _ended(self, error: Error) -> None:
        with self._lock:
            self.lost = error
            works = list(itertools.chain.from_iterable(self._asked.values()))
            self._asked.clear()
        for work in works:
            work._end(error)


class TcpxTransport(Transport):
    """One-sided transfers of tensors over tcpx; see :func:`tcpx.torch_transport.new_transport`."""

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        listen: str = "0.0.0.0:0",
        host: str | None = None,
        encrypt: bool | None = None,
        timeout: float = 30.0,
    ) -> None:
        super().__init__(device)
        if self.device is not None and self.device.type not in ("cpu", "cuda"):
            raise ValueError("the transport tcpx moves tensors on \"cpu\" and \"cuda\"")
        _validate_timeout(timeout)
        self._default_timeout = self._timeout = timeout
        self._listen, self._host, self._encrypt = listen, host, encrypt
        self._name = uuid.uuid4().hex
        self._endpoint: Endpoint | None = None
        self._peer: _Peer | None = None
        self._incoming: dict[Connection, _Messages] = {}
        self._regions: dict[str, _Registration] = {}
        self._by_place: dict[tuple[int, int, str], _Registration] = {}
        self._pending: set[TcpxWork] = set()
        self._lock = threading.RLock()
        # Of its own: peers connect meanwhile.
        self._connecting = threading.Lock()
        self._closing = self._closed = False
        self._reader = _reader()

    @staticmethod
    def supported() -> bool:
        return True

    def _ensure_open(self) -> None:
        if self._closing or self._closed:
            raise RuntimeError("transport is closed")

    def _limit(self, timeout: float | None) -> float:
        _validate_timeout(timeout)
        return self._timeout if timeout is None else timeout

    def _gpu(self) -> int | None:
        if self.device is None:
            return int(torch.cuda.current_device()) if torch.cuda.is_available() else None
        if self.device.type == "cpu":
            return None
        index = self.device.index
        return int(torch.cuda.current_device() if index is None else index)

    # Connections

    def bind(self, *, timeout: float | None = None) -> bytes:
        """Listens, and returns what lets a peer connect: give it to that peer alone."""
        _validate_timeout(timeout)
        with self._lock:
            self._ensure_open()
            if self._endpoint is None:
                key = _tcpx.generate_key()
                self._endpoint = Endpoint(
                    self._listen, key=key, encrypt=self._encrypt, gpu=self._gpu()
                )
                self._accept(None)
            endpoint = self._endpoint
        host, port = endpoint.address
        url = {
            "version": _VERSION,
            "backend": "tcpx",
            "endpoint": self._name,
            "addresses": [_address(one, port) for one in host_names(host, self._host)],
            "key": endpoint.key,
        }
        return json.dumps(url).encode()

    def _accept(self, told: int | None) -> None:
        """Takes every peer that has come, and has the reader call this again."""
        endpoint = self._endpoint
        assert endpoint is not None
        waiting, completions = endpoint._next(), self._reader.completions
        while True:
            if told is not None:
                waiting.unwatch(completions, told)
            told = self._reader.add(self._accept)
            try:
                connection = waiting.watch(completions, told)
            except ClosedError:
                self._reader.remove(told)
                waiting.unwatch(completions, told)
                return
            except Error as error:
                _log.warning("a peer could not be set up: %s", error)
                self._reader.remove(told)
                continue
            if connection is None:
                return
            self._reader.remove(told)
            self._serve(connection)

    def _serve(self, connection: Connection) -> None:
        """Answers what a peer asks on its connection."""

        def asked(messages: _Messages, message: bytes) -> None:
            try:
                region = json.loads(message)["open"]
                answer = {"region": region, **self._window(connection, region)}
            except (ValueError, KeyError, TypeError):
                _log.warning("the peer %s asked what is no question of tcpx", connection)
                return
            try:
                # Whoever does not get the answer learns of the lost connection.
                messages.send(answer, lambda _: None)
            except Error:
                pass

        def ended(_: Error) -> None:
            with self._lock:
                self._incoming.pop(connection, None)
                windows = [one.windows.pop(connection, None) for one in self._regions.values()]
            # Dropped here, and revoked by it.
            del windows

        with self._lock:
            messages = _Messages(connection, asked, ended)
            if not messages.over:
                self._incoming[connection] = messages

    def _window(self, connection: Connection, region: str) -> dict[str, str]:
        with self._lock:
            registration = self._regions.get(region)
            if registration is None or self._closing:
                return {"why": "it is not registered there, or no longer"}
            window = registration.windows.get(connection)
            if window is None:
                try:
                    window = connection.expose(registration.bytes)
                except Exception as error:
                    return {"why": str(error)}
                registration.windows[connection] = window
        return {"key": base64.b64encode(window.key).decode()}

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        """Connects to the transport whose ``bind`` returned ``peer_url``."""
        until = time.monotonic() + self._limit(timeout)
        name, addresses, key = _parsed(peer_url)
        with self._connecting:
            self._ensure_open()
            if self._peer is not None:
                raise RuntimeError("transport is already connected")
            for at, address in enumerate(addresses):
                left = max(0.0, until - time.monotonic()) / (len(addresses) - at)
                settings = connect(
                    address, key=key, encrypt=self._encrypt, gpu=self._gpu(), timeout=left
                )
                try:
                    self._peer = _Peer(name, settings.wait())
                    break
                except Error:
                    if at == len(addresses) - 1:
                        raise
        return 0

    def connected(self) -> bool:
        return self._peer is not None and self._peer.lost is None and not self._closing

    # Memory

    def register_memory(
        self, tensor: torch.Tensor, *, timeout: float | None = None
    ) -> TcpxMemory:
        """Registers a contiguous tensor. Nobody reaches it before its descriptor was given away."""
        _validate_timeout(timeout)
        self._check_device(tensor.device)
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"the transport tcpx moves tensors on \"cpu\" and \"cuda\", not {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError("the tensor is not contiguous; register tensor.contiguous()")
        registration = _Registration(tensor)
        place = registration.address, registration.length, str(tensor.device)
        with self._lock:
            self._ensure_open()
            registration = self._by_place.setdefault(place, registration)
            self._regions[registration.name] = registration
        return TcpxMemory(self, registration)

    def unregister_memory(self, memory: Any, *, timeout: float | None = None) -> None:
        """Ends every use of the memory, within ``timeout``; its descriptors are void from then on."""
        until = time.monotonic() + self._limit(timeout)
        if not isinstance(memory, TcpxMemory) or memory._transport is not self:
            raise TypeError("memory was not registered by this transport")
        registration = memory._registration
        with self._lock:
            self._ensure_open()
            if not registration.active:
                return
            streams = cast("list[TcpxMemoryView]", self._cuda_stream_views())
            if any(view._memory._registration is registration for view in streams):
                raise RuntimeError("memory is retained by CUDA stream transfers or graphs")
            if any(work._local._memory._registration is registration for work in list(self._pending)):
                raise RuntimeError("memory has pending transfers; wait before unregistering")
            registration.active = False
            self._regions.pop(registration.name, None)
            places = [place for place, one in self._by_place.items() if one is registration]
            for place in places:
                del self._by_place[place]
        _revoke(registration, until)

    # Transfers

    def _check_transfer(
        self, local_buffer: MemoryView, remote_buffer: RemoteBuffer, *, mutable: bool
    ) -> None:
        expected = TcpxMutableMemoryView if mutable else TcpxMemoryView
        if not isinstance(local_buffer, expected) or local_buffer._memory._transport is not self:
            what = "a mutable view" if mutable else "a view"
            raise TypeError(f"local_buffer is not {what} of memory that this transport registered")
        if not isinstance(remote_buffer, TcpxRemoteBuffer):
            raise TypeError("remote_buffer is not a descriptor of the transport tcpx")
        if self._peer is None:
            raise RuntimeError("transport is not connected")
        if self._peer.name != remote_buffer.endpoint:
            raise ValueError("remote buffer does not belong to the connected peer")
        if local_buffer.size() > remote_buffer.length:
            raise ValueError("local view does not fit in the remote buffer")
        local_buffer._memory._registration.check()

    def _submit(
        self, write: bool, local: MemoryView, remote: RemoteBuffer, timeout: float, watched: bool
    ) -> TcpxWork:
        self._ensure_open()
        self._check_transfer(local, remote, mutable=not write)
        view, buffer = cast(TcpxMemoryView, local), cast(TcpxRemoteBuffer, remote)
        work = TcpxWork(self, write, view, timeout)
        if view.size() == 0:
            work._end(None)
            return work
        self._pending.add(work)
        cast(_Peer, self._peer).start(work, buffer.region, watched)
        return work

    def _run(
        self,
        write: bool,
        local: MemoryView,
        remote: RemoteBuffer,
        async_op: bool,
        timeout: float | None,
    ) -> int | Work:
        limit = self._limit(timeout)
        work = self._submit(write, local, remote, limit, async_op)
        if async_op:
            return work
        try:
            work._wait(limit)
        except BaseException:
            self._leave(work)
            raise
        return 0

    def _leave(self, work: TcpxWork) -> None:
        """Nobody waits for it any more."""
        if not work._done and work._transfer is not None:
            work._watch()

    def write(
        self,
        local_buffer: MemoryView,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | Work:
        """Writes a local view to the start of the remote buffer; done when the bytes are there."""
        return self._run(True, local_buffer, remote_buffer, async_op, timeout)

    def read(
        self,
        local_buffer: MutableMemoryView,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | Work:
        """Fills a local view from the start of the remote buffer."""
        return self._run(False, local_buffer, remote_buffer, async_op, timeout)

    async def _run_async(
        self, write: bool, local: MemoryView, remote: RemoteBuffer, timeout: float | None
    ) -> None:
        limit = self._limit(timeout)
        until = time.monotonic() + limit
        work = self._submit(write, local, remote, limit, False)
        transfer = work._transfer
        if transfer is None and not work._done:
            # The key of the peer's window is not known yet: the reader's thread goes on.
            await wait_all((work,), timeout=limit)
            return
        try:
            if transfer is not None and not work.is_completed():
                # What it raises stands in the work too.
                with contextlib.suppress(Error):
                    await asyncio.wait_for(_End(transfer), max(0.0, until - time.monotonic()))
        except asyncio.TimeoutError:
            if not work.is_completed():
                raise TimeoutError(_PENDING) from None
        finally:
            work._look()
            self._leave(work)
        if work._error is not None:
            raise work._error

    async def write_async(
        self,
        local_buffer: MemoryView,
        remote_buffer: RemoteBuffer,
        *,
        timeout: float | None = None,
    ) -> None:
        """As :meth:`write`, awaited."""
        await self._run_async(True, local_buffer, remote_buffer, timeout)

    async def read_async(
        self,
        local_buffer: MutableMemoryView,
        remote_buffer: RemoteBuffer,
        *,
        timeout: float | None = None,
    ) -> None:
        """As :meth:`read`, awaited."""
        await self._run_async(False, local_buffer, remote_buffer, timeout)

    # The end

    def close(self, *, timeout: float | None = None) -> None:
        """Waits for running transfers and ends every use of registered memory. Call it again where time runs out."""
        until = time.monotonic() + self._limit(timeout)
        self._close_cuda_streams()
        self._closing = True
        error: BaseException | None = None
        for work in list(self._pending):
            try:
                work._wait(max(0.0, until - time.monotonic()))
            except BaseException as failure:
                if not work.is_completed():
                    raise
                error = error or failure
        self._release(until)
        if error is not None:
            raise error

    async def close_async(self, *, timeout: float | None = None) -> None:
        """As :meth:`close`; the event loop goes on meanwhile."""
        limit = self._limit(timeout)
        until = time.monotonic() + limit
        self._close_cuda_streams()
        self._closing = True
        pending = list(self._pending)
        error: BaseException | None = None
        try:
            await wait_all(pending, timeout=limit)
        except BaseException as failure:
            if isinstance(failure, asyncio.CancelledError) or not all(
                work.is_completed() for work in pending
            ):
                raise
            error = failure
        await asyncio.get_running_loop().run_in_executor(None, self._release, until)
        if error is not None:
            raise error

    def _release(self, until: float) -> None:
        if self._closed:
            return
        endpoint = self._endpoint
        if endpoint is not None:
            endpoint.close()
        with self._lock:
            registrations = list(self._regions.values())
            self._regions.clear()
            self._by_place.clear()
        for registration in registrations:
            registration.active = False
            _revoke(registration, until)
        with self._lock:
            connections = list(self._incoming)
        if self._peer is not None:
            connections.append(self._peer.connection)
        for connection in connections:
            try:
                connection.close(max(0.0, until - time.monotonic()))
            except Error as error:
                # The peer has gone, or does not answer: nothing of it touches the memory any more.
                _log.info("closed without a goodbye: %s", error)
        self._closed = True


def _revoke(registration: _Registration, until: float) -> None:
    for connection, window in list(registration.windows.items()):
        try:
            window.revoke(max(0.0, until - time.monotonic()))
        except ClosedError:
            pass
        registration.windows.pop(connection, None)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parsed(url: bytes) -> tuple[str, list[str], str]:
    """Name, addresses and key of a peer."""
    if not isinstance(url, bytes):
        raise TypeError("a connection URL is bytes, as the peer's bind returned them")
    try:
        value = json.loads(url)
        version, backend = value["version"], value["backend"]
        name, addresses, key = value["endpoint"], value["addresses"], value["key"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("malformed connection URL") from error
    if backend != "tcpx" or version != _VERSION:
        raise ValueError(f"the connection URL is of {backend!r}, version {version!r}; expected tcpx, {_VERSION}")
    texts = isinstance(addresses, list) and all(isinstance(one, str) for one in addresses)
    if not (isinstance(name, str) and isinstance(key, str) and texts and addresses):
        raise ValueError("malformed connection URL")
    return name, addresses, key

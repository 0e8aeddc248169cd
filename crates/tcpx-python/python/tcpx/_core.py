"""Endpoints and connections: what waits and what is awaited."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, overload

from . import _loop, _tcpx
from ._errors import Error
from ._tcpx import generate_key

if TYPE_CHECKING:
    from ._tcpx import Dialling, Limits, Local, NextConnection, Progress, Settings

__all__ = ["Accepting", "Connecting", "Connection", "Endpoint", "connect", "generate_key"]

Connection = _tcpx.Connection


_NO = ("", "0", "n", "no", "f", "false", "off")


def _settings(
    key: str | None,
    key_file: str | os.PathLike[str] | None,
    insecure: bool,
    encrypt: bool | None,
    local: Local | None,
    gpu: int | None,
    progress: Progress,
    limits: Limits | None,
    timeout: float | None,
) -> Settings:
    """What is not given is as the environment says."""
    if key is None and key_file is None and not insecure:
        # An empty variable counts as unset, as for the program.
        key = os.environ.get("TCPX_KEY", "").strip() or None
    if encrypt is None:
        encrypt = os.environ.get("TCPX_ENCRYPT", "").lower() not in _NO
    return {
        "key": key,
        "key_file": key_file,
        "insecure": insecure,
        "encrypt": encrypt,
        "local": local,
        "gpu": gpu,
        "progress": progress,
        "limits": limits,
        "timeout": timeout,
    }


class _Opening:
    """A connection that is about to be: wait for it, or await it. Nothing happens before."""

    def __init__(
        self,
        open_within: Callable[[float | None], Connection],
        opening: Callable[[], Dialling | NextConnection],
        limit: float | None,
    ) -> None:
        self._open_within = open_within
        self._opening = opening
        self._limit = limit

    def wait(self, timeout: float | None = None) -> Connection:
        """The connection. ``timeout`` (seconds) bounds the wait."""
        return self._open_within(self._limit if timeout is None else timeout)

    def __await__(self) -> Generator[object, None, Connection]:
        return _loop.result_of(self._opening())


class Connecting(_Opening):
    """A connection that :func:`connect` opens; also a context manager, for ``async with`` too."""

    _connection: Connection | None = None

    def __enter__(self) -> Connection:
        self._connection = self.wait()
        return self._connection

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            self._connection.__exit__(kind, value, trace)

    async def __aenter__(self) -> Connection:
        self._connection = await self
        return self._connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connection is None:
            return
        try:
            await self._connection.aclose()
        except Error:
            # The exception of the block is the news.
            if kind is None:
                raise


class Accepting(_Opening):
    """The next connection of an :class:`Endpoint`."""


class Endpoint(_tcpx.Endpoint):
    """A listening port that accepts connections until it is closed.

    Args:
        listen: ``host:port``, or ``:port`` for every address of this host; port 0 takes a free one.
        key: The listening side's own key; by default ``TCPX_KEY``, else a fresh one. ``Endpoint.key`` is what
            connecting sides need.
        key_file: In place of ``key``: a file that holds it.
        insecure: Listen without a key: whoever reaches the port can connect.
        encrypt: Encrypt payload too, as the other side must; by default as ``TCPX_ENCRYPT`` says, else not.
        local: Whether a peer on this host reads payload where it lies, and the reverse: ``off``, ``on`` (with
            encryption too) or ``auto``; by default as ``TCPX_LOCAL`` says.
        gpu: The GPU whose memory is moved; host memory only by default.
        progress: ``background`` (a thread of the engine sees to what comes) or ``manual``: only waits, tests,
            awaiting and :meth:`Connection.progress` make progress.
        limits: What this side takes of its peer at a time, as ``{"gets": 2}``: ``puts`` into its windows and
            ``gets`` from them, ``notifications`` that nobody has collected, ``asks`` (sends without a receive),
            ``windows`` (receives that wait for sends of this side), ``tags``, and of batches ``pieces`` and
            ``list_windows``. The peer keeps the rest, and begins that as others end; nothing fails for it.
        timeout: Seconds for the whole set-up of a connection; 10 by default.
    """

    def __new__(
        cls,
        listen: str,
        *,
        key: str | None = None,
        key_file: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        encrypt: bool | None = None,
        local: Local | None = None,
        gpu: int | None = None,
        progress: Progress = "background",
        limits: Limits | None = None,
        timeout: float | None = None,
    ) -> Endpoint:
        settings = _settings(
            key, key_file, insecure, encrypt, local, gpu, progress, limits, timeout
        )
        return super().__new__(cls, listen, settings)

    @overload
    def accept(self) -> Accepting: ...
    @overload
    def accept(self, timeout: float) -> Connection: ...
    def accept(self, timeout: float | None = None) -> Accepting | Connection:
        """The next connection, in the order in which they came: ``await server.accept()``,
        ``server.accept().wait()``, or ``server.accept(timeout=10)``, which waits at most so many seconds.

        A connection comes about only while somebody accepts: until then the other side's :func:`connect` waits,
        for 10 seconds unless it was given another ``timeout``. An error is about one peer, which may have given
        up before: call it again.
        """
        if timeout is not None:
            return self._accept(timeout)
        return Accepting(self._accept, self._next, None)

    def pairing(self, host: str | None = None) -> str:
        """The line for the other side: ``TCPX_KEY=... HOST:PORT``, as :func:`connect` takes it.

        ``host`` is the name or address under which the other side reaches this one; by default
        the address that it listens on, or of all of them the one that most likely leads here.
        """
        address, port = self.address
        if host is None:
            host = _tcpx.reachable(address)
        if ":" in host:
            host = f"[{host}]"
        key = f"TCPX_KEY={self.key} " if self.key else ""
        return f"{key}{host}:{port}"

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    address: str,
    *,
    key: str | None = None,
    key_file: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    encrypt: bool | None = None,
    local: Local | None = None,
    gpu: int | None = None,
    progress: Progress = "background",
    limits: Limits | None = None,
    timeout: float | None = None,
) -> Connecting:
    """Connects to a listening :class:`Endpoint`, from ``wait()``, ``await`` or ``with`` on: nothing is dialled before.

    Args:
        address: ``host:port`` (each address of a name is tried), or the whole line of :meth:`Endpoint.pairing`.
        key: The key of the listening side; by default that of the line, else ``TCPX_KEY``.
        key_file: In place of ``key``: a file that holds it.
        insecure: Connect without a key, to a side that listens without one.
        encrypt, local, gpu, progress, limits: As for :class:`Endpoint`.
        timeout: Seconds for the whole set-up; 10 by default. The other side must accept meanwhile.
    """
    words = address.split()
    if len(words) == 2 and words[0].startswith("TCPX_KEY="):
        if key_file is None:
            key = key or words[0].removeprefix("TCPX_KEY=")
        address = words[1]
    settings = _settings(key, key_file, insecure, encrypt, local, gpu, progress, limits, timeout)

    def open_within(limit: float | None) -> Connection:
        return _tcpx.connect(address, {**settings, "timeout": limit})

    def opening() -> Dialling:
        return _tcpx.dial(address, settings)

    return Connecting(open_within, opening, timeout)

"""Awaiting transfers: one descriptor and one reader for each event loop."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Protocol

from . import _tcpx

if TYPE_CHECKING:
    from ._tcpx import (
        Completions,
        Connection,
        Dialling,
        NextConnection,
        NextNotification,
        Report,
        Transfer,
    )


class _Watched(Protocol):
    def unwatch(self, completions: Completions, token: int) -> None: ...


class _Driven(_Watched, Protocol):
    """What may be on a connection on which the program makes progress."""

    def progress_fd(self) -> int | None: ...
    def make_progress(self) -> bool: ...


_readers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Reader] = (
    weakref.WeakKeyDictionary()
)


class _Reader:
    """The completions of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._completions = _tcpx.Completions()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._tokens = itertools.count(1)
        # Descriptors of connections on which the program makes progress, and how many wait on each.
        self._driven: dict[int, int] = {}
        # The loop keeps the reader, and the reader not the loop.
        loop.add_reader(self._completions.fileno(), self._ended)

    def _ended(self) -> None:
        for token in self._completions.drain():
            future = self._waiting.pop(token, None)
            if future is not None and not future.done():
                future.set_result(None)

    async def end_of(self, transfer: Transfer) -> None:
        """Returns when the transfer has ended."""
        token = next(self._tokens)
        if not transfer.watch(self._completions, token):
            await self._told_while_driving(transfer, token)

    async def notification(self, waiting: NextNotification) -> bytes:
        """The next notification. Another task may take the one that this one was woken for."""
        while True:
            token = next(self._tokens)
            message = waiting.watch(self._completions, token)
            if message is not None:
                return message
            await self._told_while_driving(waiting, token)

    async def connection(self, opening: Dialling | NextConnection) -> Connection:
        """The connection. Another task may take the one that this one was woken for."""
        while True:
            token = next(self._tokens)
            opening.watch(self._completions, token)
            try:
                connection = opening.take()
            except BaseException:
                opening.unwatch(self._completions, token)
                raise
            if connection is not None:
                opening.unwatch(self._completions, token)
                return connection
            await self._told(opening, token)

    async def _told(self, watched: _Watched, token: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        try:
            await future
        finally:
            # Also where the task gave up: nobody waits under this token any more.
            self._waiting.pop(token, None)
            watched.unwatch(self._completions, token)

    async def _told_while_driving(self, watched: _Driven, token: int) -> None:
        descriptor = watched.progress_fd()
        if descriptor is None:
            await self._told(watched, token)
            return
        loop = asyncio.get_running_loop()
        self._driven[descriptor] = self._driven.get(descriptor, 0) + 1
        if self._driven[descriptor] == 1:
            loop.add_reader(descriptor, watched.make_progress)
        try:
            # What can be done at once need not make the descriptor readable.
            while watched.make_progress():
                pass
            await self._told(watched, token)
        finally:
            self._driven[descriptor] -= 1
            if self._driven[descriptor] == 0:
                del self._driven[descriptor]
                loop.remove_reader(descriptor)


def _reader() -> _Reader:
    loop = asyncio.get_running_loop()
    reader = _readers.get(loop)
    if reader is None:
        reader = _readers[loop] = _Reader(loop)
    return reader


def wait(transfer: Transfer) -> Generator[object, None, Report]:
    """The ``__await__`` of a transfer. A task that is cancelled cancels the transfer."""
    report: Report | None = transfer.test()
    if report is None:
        try:
            yield from _reader().end_of(transfer).__await__()
        except asyncio.CancelledError:
            transfer.cancel()
            raise
        report = transfer.test()
        assert report is not None, "the engine reported an end without an outcome"
    return report


def wait_notification(waiting: NextNotification) -> Generator[object, None, bytes]:
    """The ``__await__`` of a notification."""
    return _reader().notification(waiting).__await__()


async def track(
    transfer: Transfer, progress: Callable[[int, int], object], every: float
) -> Report:
    """Awaits a transfer, and tells of its progress."""
    task = asyncio.ensure_future(_awaited(transfer))
    try:
        while True:
            done, _ = await asyncio.wait([task], timeout=every)
            if done:
                report = task.result()
                progress(report.nbytes, report.nbytes)
                return report
            progress(*transfer.progress)
    finally:
        # Where this task was cancelled, or the callback failed: the transfer ends with it.
        task.cancel()


async def _awaited(transfer: Transfer) -> Report:
    return await transfer


async def opened(opening: Dialling | NextConnection) -> Connection:
    """The connection that is dialled or accepted."""
    return await _reader().connection(opening)

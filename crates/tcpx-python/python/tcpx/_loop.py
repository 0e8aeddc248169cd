"""Awaiting transfers: one descriptor and one reader for each event loop."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING

from . import _tcpx

if TYPE_CHECKING:
    from ._tcpx import NextNotification, Report, Transfer

_readers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Reader] = (
    weakref.WeakKeyDictionary()
)


class _Reader:
    """The completions of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._completions = _tcpx.Completions()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._tokens = itertools.count(1)
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
            await self._told(transfer, token)

    async def notification(self, waiting: NextNotification) -> bytes:
        """The next notification. Another task may take the one that this one was woken for."""
        while True:
            token = next(self._tokens)
            message = waiting.watch(self._completions, token)
            if message is not None:
                return message
            await self._told(waiting, token)

    async def _told(self, watched: NextNotification | Transfer, token: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        try:
            await future
        finally:
            # Also where the task gave up: nobody waits under this token any more.
            self._waiting.pop(token, None)
            watched.unwatch(self._completions, token)


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

"""Awaiting: one descriptor and one reader for each event loop."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Protocol, TypeVar

from . import _tcpx

if TYPE_CHECKING:
    from ._tcpx import Closing, Completions, NextNotification, Report, Transfer

Result = TypeVar("Result", covariant=True)


class _Awaited(Protocol[Result]):
    """What can be awaited: a result that is there or will be."""

    def poll_once(self, completions: Completions) -> Result | None: ...
    def watch(self, completions: Completions, token: int) -> Result | None: ...
    def unwatch(self, completions: Completions, token: int) -> None: ...


_readers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Reader] = (
    weakref.WeakKeyDictionary()
)


class _Reader:
    """The completions of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.completions = _tcpx.Completions()
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self.tokens = itertools.count(1)
        # Descriptors of connections on which the program makes progress, and how many wait on each.
        self._driven: dict[int, int] = {}
        # The loop keeps the reader, and the reader not the loop.
        loop.add_reader(self.completions.fileno(), self._ended)

    def _ended(self) -> None:
        for token in self.completions.drain():
            future = self.waiting.pop(token, None)
            if future is not None and not future.done():
                future.set_result(None)

    def drive(
        self, awaited: Transfer | NextNotification, descriptor: int, future: asyncio.Future[None]
    ) -> Generator[object, None, None]:
        """Waits for the future, and makes progress meanwhile."""
        loop = asyncio.get_running_loop()
        self._driven[descriptor] = self._driven.get(descriptor, 0) + 1
        if self._driven[descriptor] == 1:
            loop.add_reader(descriptor, awaited.make_progress)
        try:
            # What can be done at once need not make the descriptor readable.
            while awaited.make_progress():
                pass
            yield from future
        finally:
            self._driven[descriptor] -= 1
            if self._driven[descriptor] == 0:
                del self._driven[descriptor]
                loop.remove_reader(descriptor)


# What may be on a connection on which the program makes progress.
_DRIVEN = (_tcpx.Transfer, _tcpx.NextNotification)


def result_of(awaited: _Awaited[Result]) -> Generator[object, None, Result]:
    """The ``__await__`` of everything."""
    loop = asyncio.get_running_loop()
    reader = _readers.get(loop)
    if reader is None:
        reader = _readers[loop] = _Reader(loop)
    found = awaited.poll_once(reader.completions)
    # Another task may take what this one was woken for.
    while found is None:
        token = next(reader.tokens)
        future = reader.waiting[token] = loop.create_future()
        try:
            found = awaited.watch(reader.completions, token)
            if found is None:
                driven: object = awaited
                if isinstance(driven, _DRIVEN) and (descriptor := driven.progress_fd()) is not None:
                    yield from reader.drive(driven, descriptor, future)
                else:
                    yield from future
        finally:
            # Also where the task gave up: nobody waits under this token any more.
            reader.waiting.pop(token, None)
            awaited.unwatch(reader.completions, token)
    return found


def closed(closing: Closing) -> Generator[object, None, None]:
    """The ``__await__`` of a close."""
    yield from result_of(closing)


def wait(transfer: Transfer) -> Generator[object, None, Report]:
    """The ``__await__`` of a transfer. A task that is cancelled cancels the transfer."""
    try:
        return (yield from result_of(transfer))
    except asyncio.CancelledError:
        transfer.cancel()
        raise


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

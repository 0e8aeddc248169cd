"""Exceptions of tcpx; each kind is a class, its facts are attributes."""

from __future__ import annotations

import builtins

__all__ = [
    "CancelledError",
    "ClosedError",
    "ConnectError",
    "ConnectionLost",
    "CorruptError",
    "Error",
    "MemoryError",
    "SettingError",
    "TimeoutError",
    "TooLargeError",
    "TransferError",
]


class Error(Exception):
    """Anything that tcpx could not do. The text says what failed, where, and what to do.

    Attributes:
        peer: ``host:port`` of the other side, if there is one.
        tag: What the transfer matched on, if it was one.
        delivered: How much of the message the destination holds, in words.
        check: The check of ``tcpx doctor`` that explains the error, such as ``TCPX-D037``.
    """

    peer: str | None = None
    tag: int | None = None
    delivered: str | None = None
    check: str | None = None


class TimeoutError(Error, builtins.TimeoutError):
    """A deadline has passed: of a transfer, of the set-up, or of the caller's own wait."""


class ConnectionLost(Error, builtins.ConnectionError):
    """The connection ended amid its work: the peer's process ended, or no path to it is left."""


class ConnectError(Error, builtins.ConnectionError):
    """No connection came about: nobody listens, another key, another version."""


class ClosedError(Error, builtins.ConnectionError):
    """The object was used after it had been closed."""


class CancelledError(Error):
    """This program cancelled the transfer."""


class TransferError(Error):
    """A transfer failed for another reason; the connection may live on."""


class TooLargeError(TransferError, builtins.ValueError):
    """The receive is smaller than the send. Nothing was written; both sides end with this."""


class CorruptError(TransferError):
    """Source and destination differ (level ``verified``)."""


class SettingError(Error, builtins.ValueError):
    """A setting cannot work."""


class MemoryError(Error, builtins.BufferError):
    """Memory is in use, read-only, not contiguous, cannot be reached or cannot be had."""


# A traceback names them as programs do.
for _name in __all__:
    globals()[_name].__module__ = "tcpx"

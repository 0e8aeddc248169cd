"""Move tensors and buffers between hosts over plain TCP.

An :class:`Endpoint` listens, :func:`connect` connects; a :class:`Connection` starts sends and
receives; a :class:`Transfer` ends exactly once, with a :class:`Report` or an exception. Whatever
takes time can be waited for (``.wait(timeout)``) or awaited (``await``):

    server = tcpx.Endpoint(":12345")
    print(server.pairing())                       # give this line to the other side
    conn = server.accept().wait()
    conn.recv(tensor, tag=7).wait()

    with tcpx.connect(line) as conn:              # the other side
        conn.send(tensor, tag=7).wait()

Puts and gets reach memory that the other side opened, without its program's part:

    window = conn.expose(cache)                       # give window.key to the other side
    conn.put(block, key, offset, notify=b"there").wait()
    message = await conn.notification()

Sizes are bytes, times are seconds. Memory may be a torch tensor, a numpy array, anything with the
buffer protocol or DLPack, or ``(address, bytes, device)``. While a transfer runs it owns the
memory: do not write a source, or touch a destination, before its end.
"""

from __future__ import annotations

import atexit

from . import _tcpx
from ._core import Accepting, Connecting, Connection, Endpoint, connect, generate_key
from ._errors import (
    CancelledError,
    ClosedError,
    ConnectError,
    ConnectionLost,
    CorruptError,
    Error,
    MemoryError,
    SettingError,
    TimeoutError,
    TooLargeError,
    TransferError,
)
from ._program import nccl_env, plugin_path, program_path
from ._tcpx import Batch, Report, Transfer, Window, __version__

# `MemoryError` and `TimeoutError` are not among them: `from tcpx import *` would hide Python's own.
__all__ = [
    "Accepting",
    "Batch",
    "CancelledError",
    "ClosedError",
    "ConnectError",
    "Connecting",
    "Connection",
    "ConnectionLost",
    "CorruptError",
    "Endpoint",
    "Error",
    "Report",
    "SettingError",
    "TooLargeError",
    "Transfer",
    "TransferError",
    "Window",
    "__version__",
    "connect",
    "generate_key",
    "nccl_env",
    "plugin_path",
    "program_path",
]

# The interpreter ends while peers may still use memory of its objects.
atexit.register(_tcpx.stop_releasing)

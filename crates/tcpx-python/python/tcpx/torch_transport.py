"""The transport ``tcpx`` of ``torch.distributed``: one-sided reads and writes of registered tensors.

torch finds it by itself where this package is installed; torch's interface for transports is private as yet and may
change with each of its minor versions, so that others than the tested ones are refused::

    from torch.distributed._transport import new_transport

    with new_transport("tcpx", "cpu") as transport:
        url = transport.bind()              # for the other side, by any trusted means
        transport.connect(peers_url)
        memory = transport.register_memory(tensor)
        transport.write(memory.to_view(), remote)
"""

from __future__ import annotations

from typing import Any

#: The minor versions of torch whose interface was tested.
TESTED = ("2.15",)


def new_transport(device: Any = None, **options: Any) -> Any:
    """What torch calls for ``new_transport("tcpx", device, **options)``.

    Args:
        device: ``"cpu"``, ``"cuda:N"``, or ``None`` for tensors of the host and, where there is one, the current GPU.
        options: ``listen="0.0.0.0:0"``, the address to listen on; ``host=None``, the name under which the peer
            reaches this host; ``encrypt=None``, as for :class:`tcpx.Endpoint`, and the same at both sides;
            ``timeout=30.0``, seconds for a wait that names none.

    Raises:
        RuntimeError: This torch is not one of :data:`TESTED`.
    """
    import torch

    minor = ".".join(torch.__version__.split(".")[:2])
    if minor not in TESTED:
        raise RuntimeError(
            f"the transport tcpx was tested with torch {', '.join(TESTED)}, and this is {torch.__version__}, whose "
            "private interface may differ: install a tested torch, or a tcpx that was tested with this one"
        )
    from ._torch_transport import TcpxTransport

    return TcpxTransport(device, **options)

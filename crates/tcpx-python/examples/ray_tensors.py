"""Tensors between actors of Ray over tcpx: its NIXL transport, with the backend TCPX in place of UCX.

    pip install ray torch nixl                    # beside tcpx
    python ray_tensors.py

A tensor stays with the actor that made it, and goes from there to the one that uses it, without Ray's object store.
"""

import sys

try:
    import ray
    import torch
    from ray.experimental import register_tensor_transport
    from ray.experimental.rdt.nixl_tensor_transport import NixlTensorTransport
    from ray.experimental.rdt.util import get_tensor_transport_manager
except ImportError as error:
    sys.exit(f"skipped: {error}")


class TcpxTensorTransport(NixlTensorTransport):
    """Ray's transport over NIXL, which would choose between UCX and LIBFABRIC."""

    def tensor_transport_backend(self) -> str:
        return "TCPX"

    def select_backend(self) -> str:
        return "TCPX"

    def actor_has_tensor_transport(self, actor) -> bool:
        def makes_an_agent(_) -> bool:
            return get_tensor_transport_manager("TCPX").get_nixl_agent() is not None

        call = actor.__ray_call__.options(concurrency_group="_ray_system")
        return ray.get(call.remote(makes_an_agent))


# Before the actors that name it.
register_tensor_transport("TCPX", ["cuda", "cpu"], TcpxTensorTransport, torch.Tensor)


@ray.remote
class Producer:
    @ray.method(tensor_transport="TCPX")
    def make(self, elements: int):
        return torch.arange(elements, dtype=torch.float32)


# An actor without methods that return tensors receives them only if it says so: else the thread
# that would receive is the one that waits.
@ray.remote(enable_tensor_transport=True)
class Consumer:
    def check(self, tensor) -> int:
        assert torch.equal(tensor, torch.arange(tensor.numel(), dtype=torch.float32))
        return tensor.nbytes

    def backends(self) -> list[str]:
        return list(get_tensor_transport_manager("TCPX").get_nixl_agent().backends)


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    producer, consumer = Producer.remote(), Consumer.remote()
    # The memory of one tensor is that of the next where it fits, and then is registered anew.
    for elements in (1, 1000, 1 << 22, 1000, 1 << 22):
        moved = ray.get(consumer.check.remote(producer.make.remote(elements)), timeout=120)
        print(f"{moved} bytes moved, every element compared")
    print(f"over {', '.join(ray.get(consumer.backends.remote()))}")
    ray.shutdown()


if __name__ == "__main__":
    main()

"""PyTorch over tcpx by a few variables: an all-reduce between the GPUs of this host.

    python torch_distributed.py

Needs torch with CUDA and at least two GPUs; else it says so and ends.
"""

import os
import sys

import tcpx


def worker(rank: int, world: int) -> None:
    import torch
    import torch.distributed

    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=world)
    ones = torch.ones(1 << 20, device="cuda")
    torch.distributed.all_reduce(ones)
    assert bool((ones == world).all())
    if rank == 0:
        print(f"all-reduce of {world} GPUs is right")
    torch.distributed.destroy_process_group()


def main() -> None:
    try:
        import torch
    except ImportError:
        sys.exit("skipped: torch is not installed")
    world = torch.cuda.device_count()
    if world < 2:
        sys.exit(f"skipped: two GPUs are needed, there are {world}")
    os.environ.update(tcpx.nccl_env())
    # GPUs of one host would not use the network otherwise.
    os.environ.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.multiprocessing.spawn(worker, args=(world,), nprocs=world)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""One of two processes on one GPU, in a run of real NCCL over whatever network the environment chose.

Started by scripts/gpu-nccl-one.sh with RANK and MASTER_PORT set. Checks all-reduces of fresh random
numbers between poisoned bytes, then times them. Rank 0 prints one JSON object on standard output.
"""

import argparse
import ctypes
import json
import os
import secrets
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# Elements on both sides of a buffer that must stay as they are.
GUARD = 1024
POISON = -12345.5


def nccl_version():
    """Of the library in use; PyTorch tells which one it was built with."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    number = version.value
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def numbers(elements, seed):
    """Random integers whose sums are exact in float32."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(-(1 << 20), 1 << 20, (elements,), generator=generator, device="cuda").to(torch.float32)


def check(store, rank, size, name):
    """One all-reduce of numbers that no earlier one had; both ranks know the sum."""
    if rank == 0:
        store.set(name, str(secrets.randbits(62)))
    seed = int(store.get(name))
    elements = size // 4
    parts = [numbers(elements, seed + each) for each in range(2)]
    whole = torch.full((elements + 2 * GUARD,), POISON, device="cuda")
    buffer = whole[GUARD:GUARD + elements]
    buffer.copy_(parts[rank])
    dist.all_reduce(buffer)
    torch.cuda.synchronize()
    wrong = int((buffer != parts[0] + parts[1]).sum())
    if wrong:
        raise SystemExit(f"all-reduce of {size} bytes: {wrong} of {elements} sums are wrong")
    if not bool((whole[:GUARD] == POISON).all() and (whole[GUARD + elements:] == POISON).all()):
        raise SystemExit(f"all-reduce of {size} bytes wrote outside of its buffer")


def seconds(buffer, repeats):
    """Of one all-reduce, all in flight together; the slower rank counts."""
    for _ in range(max(2, repeats // 4)):
        dist.all_reduce(buffer)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(buffer)
    torch.cuda.synchronize()
    spent = torch.tensor([(time.perf_counter() - start) / repeats], device="cuda")
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent[0])


def repeats_for(size):
    for limit, repeats in ((256 << 10, 300), (4 << 20, 60), (64 << 20, 12)):
        if size <= limit:
            return repeats
    return 5


def start(rank, number, channels):
    """Makes communicator `number` of this process, with so many channels, or as many as NCCL likes."""
    options = dist.ProcessGroupNCCL.Options()
    if channels:
        options.config.min_ctas = options.config.max_ctas = channels
    store = dist.TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]) + number, 2, rank == 0, timedelta(seconds=60)
    )
    dist.init_process_group(
        "nccl", rank=rank, world_size=2, timeout=timedelta(seconds=60), store=store,
        device_id=torch.device("cuda", 0), pg_options=options,
    )
    return store


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = lambda text: [int(size) for size in text.split(",") if size]
    parser.add_argument("--check", type=sizes, default=[], help="sizes in bytes to check, between commas")
    parser.add_argument("--time", type=sizes, default=[], help="sizes in bytes to time, between commas")
    parser.add_argument("--communicators", type=int, default=1, help="made one after the other, each timed")
    parser.add_argument("--channels", type=sizes, default=[0], help="a communicator for each number")
    arguments = parser.parse_args()

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(0)
    rows = []
    for number, channels in enumerate(arguments.channels * arguments.communicators):
        store = start(rank, number, channels)
        for size in arguments.check:
            for turn in range(3):
                check(store, rank, size, f"seed/{size}/{turn}")
        # Contents before times, whatever is timed.
        for size in arguments.time:
            check(store, rank, size, f"seed/{size}")
            buffer = torch.zeros(size // 4, device="cuda")
            rows.append({"bytes": size, "channels": channels, "us": seconds(buffer, repeats_for(size)) * 1e6})
        torch.cuda.synchronize()
        dist.destroy_process_group()
    if rank == 0:
        report = {"nccl": nccl_version(), "torch": torch.__version__, "checked": arguments.check, "rows": rows}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()

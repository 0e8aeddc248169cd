#!/usr/bin/env python3
"""One process of a run of real NCCL over whatever network the environment chose.

Started once for each GPU by scripts/gpu-nccl.sh and scripts/gpu-tcp-speed.sh, with RANK, WORLD_SIZE
and MASTER_PORT set. Checks the contents of every operation, then times send/recv and all-reduce; or
aborts a communicator, or loses a peer, amid a collective. Rank 0 prints one JSON object on standard
output.
"""

import argparse
import ctypes
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import struct
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from nccl_report import row, text, write

MIB = 1 << 20


def pattern(elements, rank, salt):
    """Small integers that differ by place, rank and use, exact in float32 sums."""
    at = torch.arange(elements, device="cuda", dtype=torch.int64)
    return ((at * 7 + rank * 13 + salt * 29) % 251).to(torch.float32)


def expect(what, size, found, wanted):
    if not torch.equal(found, wanted):
        bad = int((found != wanted).sum())
        raise SystemExit(f"{what} of {size} bytes: {bad} of {found.numel()} elements are wrong")


def operations(rank, world, size, salt):
    """Every operation once, the buffer of one rank being `size` bytes, contents compared."""
    n = size // 4
    # Pairs of neighbours; their number is even.
    peer = rank ^ 1
    for source in (rank & ~1, rank | 1):
        if rank == source:
            dist.send(pattern(n, source, salt), peer)
        else:
            buffer = torch.full((n,), -1.0, device="cuda")
            dist.recv(buffer, source)
            expect("send/recv", size, buffer, pattern(n, source, salt))
    # Both directions at once.
    buffer = torch.full((n,), -1.0, device="cuda")
    both = [
        dist.P2POp(dist.isend, pattern(n, rank, salt + 1), peer),
        dist.P2POp(dist.irecv, buffer, peer),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    expect("both ways", size, buffer, pattern(n, peer, salt + 1))

    everyone = [pattern(n, r, salt + 2) for r in range(world)]
    total = torch.stack(everyone).sum(0)
    buffer = everyone[rank].clone()
    dist.all_reduce(buffer)
    expect("all-reduce", size, buffer, total)

    buffer = everyone[1].clone() if rank == 1 else torch.full((n,), -1.0, device="cuda")
    dist.broadcast(buffer, 1)
    expect("broadcast", size, buffer, everyone[1])

    part = max(1, n // world)
    joined = torch.full((part * world,), -1.0, device="cuda")
    dist.all_gather_into_tensor(joined, everyone[rank][:part].contiguous())
    expect("all-gather", size, joined, torch.cat([e[:part] for e in everyone]))

    whole = [pattern(part * world, r, salt + 3) for r in range(world)]
    piece = torch.full((part,), -1.0, device="cuda")
    dist.reduce_scatter_tensor(piece, whole[rank])
    expect("reduce-scatter", size, piece, torch.stack(whole).sum(0)[rank * part : (rank + 1) * part])

    mixed = torch.full((part * world,), -1.0, device="cuda")
    dist.all_to_all_single(mixed, whole[rank])
    wanted = torch.cat([w[rank * part : (rank + 1) * part] for w in whole])
    expect("all-to-all", size, mixed, wanted)


def timed(body, repeats):
    """Seconds of one call, every call of the batch in flight together; the slower rank counts."""
    for _ in range(max(2, repeats // 4)):
        body()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        body()
    torch.cuda.synchronize()
    spent = torch.tensor([(time.perf_counter() - start) / repeats], device="cuda")
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent[0])


def ping_pong(rank, buffer, repeats):
    """Half of a round trip, seconds, median; each message synchronised."""
    spent = []
    for turn in range(repeats + repeats // 4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        if rank == 0:
            dist.send(buffer, 1)
            dist.recv(buffer, 1)
        else:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)
        torch.cuda.synchronize()
        if turn >= repeats // 4:
            spent.append((time.perf_counter() - start) / 2)
    spent.sort()
    return spent[len(spent) // 2]


def repeats_for(size):
    for limit, repeats in ((64 << 10, 1000), (4 * MIB, 40), (64 * MIB, 10), (256 * MIB, 5)):
        if size <= limit:
            return repeats
    return 3


def figures(rank, sizes, kinds, label):
    """Rows of a report (benchmarks/README.md), one run each."""
    rows = []

    def add(operation, size, unit, value):
        rows.append(row(f"{operation}, {text(size)}, {label}", unit, [value]))

    for size in sizes:
        buffer = torch.ones(size // 4, device="cuda")
        repeats = repeats_for(size)
        if size <= 64 << 10:
            seconds = ping_pong(rank, buffer, repeats)
            add("send/recv latency", size, "us", seconds * 1e6)
        one_way = lambda: dist.send(buffer, 1) if rank == 0 else dist.recv(buffer, 0)
        if size > 64 << 10:
            seconds = timed(one_way, repeats)
            add("send/recv", size, "GB/s", size / seconds / 1e9)
        if kinds == "send-recv":
            continue
        buffer.zero_()
        seconds = timed(lambda: dist.all_reduce(buffer), repeats)
        # Bus bandwidth of two ranks: 2 (n - 1) / n = 1.
        small = size <= 64 << 10
        add("all-reduce", size, "us" if small else "GB/s", seconds * 1e6 if small else size / seconds / 1e9)
    return rows


def start(rank, world, number):
    """Makes communicator `number` of this process; each has a store of its own."""
    dist.init_process_group(
        "nccl",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
        store=dist.TCPStore(
            "127.0.0.1", int(os.environ["MASTER_PORT"]) + number, world, rank == 0,
            timedelta(seconds=60),
        ),
    )


def abort(rank):
    """Rank 0 waits in a collective that the others never join; everybody aborts."""
    buffer = torch.ones(16 * MIB, device="cuda")
    dist.all_reduce(buffer)
    torch.cuda.synchronize()
    if rank == 0:
        dist.all_reduce(buffer, async_op=True)
    # Long enough that rank 0 is in the middle of it when everybody gives up together.
    time.sleep(1)
    began = time.perf_counter()
    dist.distributed_c10d._abort_process_group()
    torch.cuda.synchronize()
    return {"abort_seconds": time.perf_counter() - began}


def lose_peer(rank, moment):
    """Rank 1 dies amid all-reduces; the others must hear of it from NCCL. `moment`: a file."""
    buffer = torch.ones(16 * MIB, device="cuda")
    for _ in range(5):
        dist.all_reduce(buffer)
    torch.cuda.synchronize()
    work = [dist.all_reduce(buffer, async_op=True) for _ in range(50)]
    if rank == 1:
        moment.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            for one in work:
                one.wait()
            work = [dist.all_reduce(buffer, async_op=True) for _ in range(50)]
    except RuntimeError as error:
        seconds = time.time() - float(moment.read_text())
        lines = [line for line in str(error).splitlines() if line.strip()]
        return {"error_seconds": seconds, "error": lines[:4]}


class Cutter(threading.Thread):
    """Resets one of this process's busy TCP connections every `seconds`, as a network that fails would."""

    # Bytes that a connection moved since the last look, above which it carries payload.
    BUSY = 4 * MIB

    def __init__(self, seconds):
        super().__init__(daemon=True)
        self.seconds, self.cut, self.moved = seconds, 0, {}
        self.done = threading.Event()
        self.libc = ctypes.CDLL(None, use_errno=True)

    def run(self):
        while not self.done.wait(self.seconds):
            busy = list(self.busy())
            if busy:
                # struct sockaddr of AF_UNSPEC: the kernel resets the connection, whoever else holds
                # it.
                nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
                with random.choice(busy) as chosen:
                    self.cut += self.libc.connect(chosen.fileno(), nowhere, len(nowhere)) == 0
                for other in busy:
                    other.close()

    def busy(self):
        for name in os.listdir("/proc/self/fd"):
            try:
                inode = os.readlink(f"/proc/self/fd/{name}")
                if not inode.startswith("socket:"):
                    continue
                copy = socket.socket(fileno=os.dup(int(name)))
                if copy.type != socket.SOCK_STREAM or copy.family == socket.AF_UNIX:
                    copy.close()
                    continue
                # tcpi_bytes_acked and tcpi_bytes_received, linux/tcp.h.
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            except OSError:
                continue
            total = sum(struct.unpack_from("=QQ", info, 120))
            if total - self.moved.get(inode, 0) > self.BUSY:
                yield copy
            else:
                copy.close()
            self.moved[inode] = total

    def stop(self):
        self.done.set()
        self.join()
        return self.cut


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", default="", help="sizes in bytes to check, between commas")
    parser.add_argument("--time", default="", help="sizes in bytes to time, between commas")
    parser.add_argument("--operations", choices=["all", "send-recv"], default="all",
                        help="what is timed")
    parser.add_argument("--label", default=os.environ.get("NCCL_CHECK_LABEL", ""), help="who carries the bytes, in the names of the report's rows")
    parser.add_argument("--report", type=pathlib.Path, metavar="FILE", help="rank 0 writes the times there")
    parser.add_argument("--rounds", type=int, default=1, help="communicators made one after the other; each is checked and timed")
    parser.add_argument("--repeats", type=int, default=1, help="checks in each communicator")
    parser.add_argument("--cut-lanes", type=float, metavar="SECONDS",
                        help="rank 0 resets one of its busy connections so often; at least ten must fall")
    parser.add_argument("--abort", action="store_true", help="abort first, then check")
    parser.add_argument("--lose-peer", type=pathlib.Path, metavar="FILE",
                        help="rank 1 dies, and writes when into FILE")
    arguments = parser.parse_args()
    sizes = lambda text: [int(size) for size in text.split(",") if size]

    rank, world = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "2"))
    torch.cuda.set_device(rank)
    report = {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "torch": torch.__version__}
    if arguments.lose_peer:
        start(rank, world, 0)
        report |= lose_peer(rank, arguments.lose_peer)
        print(json.dumps(report), flush=True)
        # The communicator is beyond an orderly end.
        os._exit(0)
    number = 0
    if arguments.abort:
        start(rank, world, number)
        report |= abort(rank)
        number += 1
    checked = sizes(arguments.check)
    rows = []
    cutter = Cutter(arguments.cut_lanes) if arguments.cut_lanes and rank == 0 else None
    if cutter:
        cutter.start()
    # A second round destroys the communicator and makes a new one in the same process.
    for round_number in range(arguments.rounds):
        start(rank, world, number + round_number)
        for salt, size in enumerate(checked * arguments.repeats):
            operations(rank, world, size, salt + 100 * round_number)
        rows += figures(rank, sizes(arguments.time), arguments.operations, arguments.label)
        torch.cuda.synchronize()
        dist.destroy_process_group()
    if cutter:
        report["lanes_cut"] = cutter.stop()
        if report["lanes_cut"] < 10:
            raise SystemExit(f"only {report['lanes_cut']} connections were cut: too few to say anything")
    report["checked_bytes"] = checked
    if rank == 0:
        if arguments.report:
            # Times of several communicators of this start are one run: their median.
            by_name = {}
            for one in rows:
                by_name.setdefault((one["name"], one["unit"]), []).append(one["median"])
            rows = [row(name, unit, [statistics.median(values)]) for (name, unit), values in by_name.items()]
            notes = [f"NCCL {report['nccl']}, PyTorch {report['torch']}."]
            write(arguments.report, "NCCL", "scripts/nccl_check.py", rows, notes)
        print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

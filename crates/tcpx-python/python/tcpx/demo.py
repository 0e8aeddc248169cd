"""``python -m tcpx.demo``: two processes on this host move buffers, and every byte is compared."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import time

import tcpx

SIZES = (0, 1, 4096, 1 << 20, 64 << 20)
# One for each of the messages that are under way at once: tasks go on in no certain order.
TAGS = range(100, 300)


def _receiver(line: str) -> None:
    """The second process: receives all, and answers with the digest of each message."""

    async def answer(connection: tcpx.Connection, tag: int, size: int) -> None:
        buffer = bytearray(size)
        await connection.recv(buffer, tag)
        await connection.send(hashlib.sha256(buffer).digest(), tag)

    async def run() -> None:
        async with tcpx.connect(line) as connection:
            await asyncio.gather(*(answer(connection, tag, size) for tag, size in enumerate(SIZES)))
            await asyncio.gather(*(answer(connection, tag, 4096) for tag in TAGS))

    asyncio.run(run())


def _sender() -> bool:
    with tcpx.Endpoint("127.0.0.1:0") as server:
        # The key travels through the environment, where other users cannot read it.
        host, port = server.address
        child = subprocess.Popen(
            [sys.executable, "-m", "tcpx.demo", f"{host}:{port}"],
            env={**os.environ, "TCPX_KEY": server.key or ""},
        )
        try:
            with server.accept(timeout=30) as connection:
                print(f"connected: {connection.path}")
                passed = all(_check(connection, tag, size) for tag, size in enumerate(SIZES))
                passed = passed and asyncio.run(_many(connection))
            return child.wait(timeout=30) == 0 and passed
        finally:
            child.kill()
            child.wait()


def _check(connection: tcpx.Connection, tag: int, size: int) -> bool:
    data = os.urandom(size)
    digest = bytearray(32)
    answer = connection.recv(digest, tag)
    started = time.perf_counter()
    connection.send(data, tag).wait(60)
    seconds = time.perf_counter() - started
    answer.wait(60)
    same = digest == hashlib.sha256(data).digest()
    rate = f"{size / seconds / 1e9:7.2f} GB/s" if size >= 1 << 20 else " " * 12
    print(f"{size:>12,} bytes {rate}  {'every byte compared' if same else 'DIFFERENT'}")
    return same


async def _many(connection: tcpx.Connection) -> bool:
    async def one(tag: int, data: bytes) -> bool:
        digest = bytearray(32)
        answer = connection.recv(digest, tag)
        await connection.send(data, tag)
        await answer
        return digest == hashlib.sha256(data).digest()

    same = await asyncio.gather(*(one(tag, os.urandom(4096)) for tag in TAGS))
    print(f"{len(TAGS)} awaited messages of 4 KiB: {sum(same)} compared equal")
    return all(same)


def main() -> None:
    """Runs the demonstration; the exit status is 0 only if every byte arrived."""
    if len(sys.argv) == 2:
        _receiver(sys.argv[1])
        return
    print(f"tcpx {tcpx.__version__}")
    passed = _sender()
    print("PASSED" if passed else "FAILED")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()

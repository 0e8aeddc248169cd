"""Broadcast named arrays (a state_dict) from one process to several.

    python weights_broadcast.py serve COUNT       # prints a line, serves COUNT workers
    python weights_broadcast.py work 'TCPX_KEY=... HOST:PORT'

The sender describes the arrays in a small message; the bytes follow, one transfer an array, all in
flight at once, with a bar on standard error that counts them together. The values may as well be torch tensors on a
GPU: ``model.state_dict()``, with ``gpu=0`` at both sides.
"""

import asyncio
import json
import sys

import numpy

import tcpx

HEADER_TAG = 1
FIRST_TAG = 100


def weights() -> dict[str, numpy.ndarray]:
    random = numpy.random.default_rng(7)
    return {f"layer{at}.weight": random.random((512, 512), dtype=numpy.float32) for at in range(16)}


async def send_all(connection: tcpx.Connection, state: dict[str, numpy.ndarray]) -> None:
    header = json.dumps([[name, one.dtype.str, one.shape] for name, one in state.items()]).encode()
    await connection.send(len(header).to_bytes(8, "little"), HEADER_TAG)
    await connection.send(header, HEADER_TAG)
    await asyncio.gather(*(
        connection.send(one, FIRST_TAG + at) for at, one in enumerate(state.values())
    ))


async def receive_all(connection: tcpx.Connection) -> dict[str, numpy.ndarray]:
    length = bytearray(8)
    await connection.recv(length, HEADER_TAG)
    header = bytearray(int.from_bytes(length, "little"))
    await connection.recv(header, HEADER_TAG)
    state = {name: numpy.empty(shape, dtype) for name, dtype, shape in json.loads(header)}
    whole, arrived = sum(one.nbytes for one in state.values()), [0] * len(state)

    def progress(at: int, done: int) -> None:
        arrived[at] = done
        part = sum(arrived) / whole
        end = "\n" if part == 1 else ""
        print(f"\r[{'#' * int(part * 40):<40}] {part:4.0%}", end=end, file=sys.stderr, flush=True)

    await asyncio.gather(*(
        connection.recv(one, FIRST_TAG + at).track(lambda done, _, at=at: progress(at, done))
        for at, one in enumerate(state.values())
    ))
    return state


async def serve(count: int) -> None:
    with tcpx.Endpoint(":0") as server:
        print(server.pairing(), flush=True)
        workers = [await server.accept() for _ in range(count)]
        state = weights()
        await asyncio.gather(*(send_all(worker, state) for worker in workers))
        for worker in workers:
            worker.close()


async def work(line: str) -> None:
    async with tcpx.connect(line) as connection:
        state = await receive_all(connection)
    expected = weights()
    same = all(numpy.array_equal(state[name], one) for name, one in expected.items())
    print(f"{len(state)} arrays, {'equal' if same and len(state) == len(expected) else 'DIFFERENT'}")
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", count]:
            asyncio.run(serve(int(count)))
        case ["work", line]:
            asyncio.run(work(line))
        case _:
            sys.exit(__doc__)

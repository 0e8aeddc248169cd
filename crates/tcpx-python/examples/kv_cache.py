"""Blocks of one process's KV cache go to other places in another process's cache.

    python kv_cache.py decode                      # prints a line: the pairing
    python kv_cache.py prefill 'TCPX_KEY=... HOST:PORT'

The decoding side exposes its cache and takes no part in the transfers: it learns from a
notification that the blocks of a request are there.
"""

import json
import sys

import numpy

import tcpx

BLOCKS, BLOCK = 512, 72 * 1024
REQUESTS = 4


def contents(request: int, block: int) -> numpy.ndarray:
    """What the prefill of a request puts into one of its blocks."""
    return numpy.random.default_rng([request, block]).integers(0, 256, BLOCK, dtype=numpy.uint8)


def decode() -> None:
    cache = numpy.zeros((BLOCKS, BLOCK), dtype=numpy.uint8)
    with tcpx.Endpoint("0.0.0.0:0") as server:
        print(server.pairing(), flush=True)
        connection = server.accept().wait(timeout=60)
    with connection, connection.expose(cache, "put") as window:
        connection.notify(window.key).wait(timeout=60)
        for _ in range(REQUESTS):
            done = json.loads(connection.notification().wait(timeout=60))
            for number, block in enumerate(done["blocks"]):
                assert (cache[block] == contents(done["request"], number)).all()
            print(f"request {done['request']}: {len(done['blocks'])} blocks are right", flush=True)


def prefill(line: str) -> None:
    with tcpx.connect(line) as connection:
        key = connection.notification().wait(timeout=60)
        free = list(numpy.random.default_rng().permutation(BLOCKS))
        for request in range(REQUESTS):
            blocks = [int(free.pop()) for _ in range(BLOCKS // REQUESTS)]
            batch = connection.batch()
            for number, block in enumerate(blocks):
                batch.put(contents(request, number), key, block * BLOCK)
            told = json.dumps({"request": request, "blocks": blocks}).encode()
            report = batch.notify(told).start().wait(timeout=60)
            print(f"request {request}: {report.nbytes} bytes placed")


if __name__ == "__main__":
    if sys.argv[1:] == ["decode"]:
        decode()
    elif sys.argv[1:2] == ["prefill"] and len(sys.argv) == 3:
        prefill(sys.argv[2])
    else:
        sys.exit(__doc__)

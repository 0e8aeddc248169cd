"""Blocks of one process's KV cache go to other places in another process's cache.

    python kv_cache.py decode                      # prints a line: the pairing
    python kv_cache.py prefill 'TCPX_KEY=... HOST:PORT'

A block has a part in every layer, and the parts lie as far from each other as a layer is long: a block is a strided
list of pieces, and the blocks of a request are one batch. The decoding side exposes its cache and takes no part in
the transfers: it learns from a notification that the blocks of a request are there, and checks every byte.
"""

import json
import sys

import numpy

import tcpx

LAYERS, BLOCKS, PART = 8, 512, 9 * 1024
REQUESTS = 4


def contents(request: int, block: int) -> numpy.ndarray:
    """What the prefill of a request puts into one of its blocks: a part for each layer."""
    random = numpy.random.default_rng([request, block])
    return random.integers(0, 256, (LAYERS, PART), dtype=numpy.uint8)


def offset(layer: int, block: int) -> int:
    """Where a block's part is in the cache."""
    return (layer * BLOCKS + block) * PART


def decode() -> None:
    cache = numpy.zeros((LAYERS, BLOCKS, PART), dtype=numpy.uint8)
    with tcpx.Endpoint(":0") as server:
        print(server.pairing(), flush=True)
        # The endpoint stays open: lanes that were lost come back through it.
        with server.accept().wait(timeout=60) as connection, connection.expose(cache, "put") as window:
            connection.notify(window.key).wait(timeout=60)
            for _ in range(REQUESTS):
                done = json.loads(connection.notification().wait(timeout=60))
                for number, block in enumerate(done["blocks"]):
                    assert (cache[:, block] == contents(done["request"], number)).all()
                print(f"request {done['request']}: {len(done['blocks'])} blocks are right", flush=True)


def prefill(line: str) -> None:
    with tcpx.connect(line) as connection:
        key = connection.notification().wait(timeout=60)
        free = list(numpy.random.default_rng().permutation(BLOCKS))
        for request in range(REQUESTS):
            blocks = [int(free.pop()) for _ in range(BLOCKS // REQUESTS)]
            batch = connection.batch()
            for number, block in enumerate(blocks):
                for layer, part in enumerate(contents(request, number)):
                    batch.put(part, key, offset(layer, block))
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

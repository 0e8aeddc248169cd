"""What inference engines post: key-value caches of whole models, many requests in flight, beside UCX of the same wheel.

Shapes are those of the models. Blocks are a sixty-fourth of theirs, so that all of it takes seconds; the tests marked
slow take them whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from node import BACKEND, Node, Peer, nixl, pattern

# Between hosts without RDMA; read when UCX is loaded.
os.environ.setdefault("UCX_TLS", "tcp")
os.environ.setdefault("UCX_NET_DEVICES", "lo")

# Regions of one rank (a layer's keys and values apart, or both in one), and bytes of a block of 16
# tokens there.
MODELS = {
    "8B": (2 * 32, 32 << 10),
    "70B": (2 * 80, 4 << 10),
    "405B": (2 * 126, 4 << 10),
    "MLA": (61, 18 << 10),
}
# How each asks: vLLM names blocks of lists that it made once, by number; SGLang writes a list for
# each request and a little beside it, and says by other means that it is done; LMCache has one
# region, of pages that hold 256 tokens of all layers; Ray reads an object that has a region for
# each tensor.
ENGINES = [
    ("vLLM", "READ"),
    ("vLLM", "WRITE"),
    ("SGLang", "WRITE"),
    ("LMCache", "READ"),
    ("LMCache", "WRITE"),
    ("Ray", "READ"),
]
REQUESTS = 64
# UCX takes seconds for each: it shows that what is posted can be served, and not how fast.
BESIDE = ["UCX"] if BACKEND != "UCX" else []


class Cache:
    """A cache that a node has registered: regions, each of as many blocks."""

    def __init__(self, node: Peer, regions: int, blocks: int, block: int, seed: int) -> None:
        self.regions, self.blocks, self.block = regions, blocks, block
        self.number = node.alloc_regions(regions, blocks * block, seed)
        self.start = node.address(self.number)
        # Block after block, what it should hold.
        self.content = pattern(regions * blocks * block, seed).reshape(-1, block)

    def holds(self, node: Peer) -> bool:
        """Whether the node's memory is what it should be."""
        found = np.frombuffer(node.content(self.number), dtype=np.uint8)
        return bool((found == self.content.reshape(-1)).all())

    def numbers(self, regions: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """These blocks of these regions, region by region."""
        return (regions[:, None] * self.blocks + blocks[None, :]).reshape(-1)

    def pieces(self, numbers: np.ndarray) -> np.ndarray:
        sizes = np.full(numbers.size, self.block)
        addresses = self.start + numbers * self.block
        return np.stack([addresses, sizes, np.zeros(numbers.size)], axis=1).astype(np.uint64)

    def rows(self) -> np.ndarray:
        """All blocks, a row for each region: address, bytes, device, stride and count."""
        starts = self.start + np.arange(self.regions) * self.blocks * self.block
        row = [np.full(self.regions, one) for one in (self.block, 0, self.block, self.blocks)]
        return np.stack([starts, *row], axis=1).astype(np.uint64)


def plugins_of(backend: str) -> dict[str, str]:
    """Has NIXL find a backend that its wheel brings, in place of the one that is tried."""
    if backend == BACKEND:
        return {}
    folder = Path(nixl().__file__).parent.parent
    found = sorted(folder.glob(f".nixl*/plugins/libplugin_{backend}.so"))
    if not found:
        pytest.skip(f"this wheel of NIXL has no backend {backend}")
    return {"NIXL_PLUGIN_DIR": str(found[0].parent)}


@contextmanager
def two_ends(backend: str) -> Iterator[tuple[Peer, Peer]]:
    variables = plugins_of(backend)
    here, there = (Peer(name, variables, backend=backend) for name in ("here", "there"))
    yield here, there
    assert here.guards_hold() and there.guards_hold()
    assert here.end() == 0
    assert there.end() == 0


@pytest.mark.parametrize(
    ("backend", "model"), [*((BACKEND, model) for model in MODELS), *((one, "405B") for one in BESIDE)]
)
@pytest.mark.parametrize(("engine", "op"), ENGINES)
def test_requests_of_an_engine_in_flight_at_a_time(
    engine: str, op: str, backend: str, model: str
) -> None:
    """Each takes blocks that lie scattered at both ends, in every layer."""
    requests_of_an_engine(engine, op, backend, model, 64)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [BACKEND, *BESIDE])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("engine", "op"), ENGINES)
def test_requests_of_an_engine_with_whole_blocks(
    engine: str, op: str, backend: str, model: str
) -> None:
    if (engine, model) == ("LMCache", "8B"):
        pytest.skip("pages of 32 MiB, of which both ends and two copies take more than 8 GiB")
    requests_of_an_engine(engine, op, backend, model, 1)


def requests_of_an_engine(engine: str, op: str, backend: str, model: str, scale: int) -> None:
    regions, block = MODELS[model]
    block //= scale
    choose = np.random.default_rng(len(model))
    lengths = choose.integers(1, 9, REQUESTS)
    blocks = int(lengths.sum()) + 16
    if engine == "LMCache":
        regions, blocks, block = 1, REQUESTS + 4, 16 * regions * block
        lengths = np.full(REQUESTS, 1)
    each, tensors = np.arange(regions), regions
    if engine == "Ray":
        regions, blocks, block = REQUESTS * tensors, 1, 4 * block
    with two_ends(backend) as (here, there):
        ours, theirs = (
            Cache(node, regions, blocks, block, seed) for seed, node in enumerate((here, there), 1)
        )
        beside = [Cache(node, 1, REQUESTS, 256, 3) for node in (here, there)]
        here.add(there.metadata())
        if engine == "vLLM":
            here.list_blocks(ours.rows(), theirs.rows(), "there")
        order = [choose.permutation(blocks)[: lengths.sum()] for _ in range(2)]
        heard = []
        for request, end in enumerate(np.cumsum(lengths)):
            notice = b"" if engine == "SGLang" else f"request {request}:1".encode()
            heard += [("here", notice)] if notice else []
            if engine == "Ray":
                mine = remote = request * tensors + np.arange(tensors)
            else:
                mine, remote = (
                    ours.numbers(each, one[end - lengths[request] : end]) for one in order
                )
            if engine == "vLLM":
                state = here.post_listed(op, mine, remote, notice)
            else:
                lists = ours.pieces(mine), theirs.pieces(remote)
                state = here.post_and_leave(op, *lists, "there", notice)
            assert state in ("PROC", "DONE")
            if engine == "SGLang":
                little = (one.pieces(np.array([request])) for one in beside)
                assert here.post_and_leave(op, *little, "there", b"") in ("PROC", "DONE")
            if op == "READ":
                ours.content[mine] = theirs.content[remote]
            else:
                theirs.content[remote] = ours.content[mine]
        assert here.wait_all() == {"DONE"}
        assert ours.holds(here) and theirs.holds(there)
        assert sorted(there.wait_notifs(len(heard))) == sorted(heard)


@pytest.mark.parametrize(
    ("backend", "op"), [(BACKEND, "READ"), (BACKEND, "WRITE"), *((one, "READ") for one in BESIDE)]
)
def test_one_transfer_of_112000_pieces(backend: str, op: str) -> None:
    """A long prompt of the largest model."""
    regions, length, block = 252, 445, 64
    with two_ends(backend) as (here, there):
        ours = Cache(here, regions, 2 * length, block, 1)
        theirs = Cache(there, regions, 2 * length, block, 2)
        here.add(there.metadata())
        mine, remote = (
            one.numbers(np.arange(regions), np.random.default_rng(one.start).permutation(2 * length)[:length])
            for one in (ours, theirs)
        )
        assert here.transfer(op, ours.pieces(mine), theirs.pieces(remote), "there") == "DONE"
        if op == "READ":
            ours.content[mine] = theirs.content[remote]
        else:
            theirs.content[remote] = ours.content[mine]
        assert ours.holds(here) and theirs.holds(there)


def test_64_agents_use_the_memory_of_one() -> None:
    owner = Peer("owner")
    count, size = 64, 1 << 16
    remote = owner.alloc(count * size, 1)
    metadata, start = owner.metadata(), owner.address(remote)
    agents = [Node(f"agent {at}") for at in range(count)]
    for at, agent in enumerate(agents):
        agent.alloc(size, 100 + at)
        agent.add(metadata)
        ours, theirs = [(agent.address(0), size)], [(start + at * size, size)]
        assert agent.post_and_leave("WRITE", ours, theirs, "owner", b"written") in ("PROC", "DONE")
    for agent in agents:
        assert agent.wait(agent.handles[0]) == "DONE"
    assert sorted(owner.wait_notifs(count)) == sorted((agent.name, b"written") for agent in agents)
    assert owner.content(remote) == b"".join(agent.content(0) for agent in agents)
    for agent in agents:
        agent.close()
    assert owner.end() == 0

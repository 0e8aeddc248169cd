"""What inference engines post: key-value caches of whole models, many requests in flight, beside UCX of the same wheel.

Shapes are those of the models; blocks are a sixty-fourth of theirs, so that all of it takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from node import BACKEND, Node, Peer, nixl

# Between hosts without RDMA; read when UCX is loaded.
os.environ.setdefault("UCX_TLS", "tcp")
os.environ.setdefault("UCX_NET_DEVICES", "lo")

# Regions of one rank (a layer's keys and values apart, or both in one), and bytes of a block of 16 tokens there.
MODELS = {
    "8B": (2 * 32, 32 << 10),
    "70B": (2 * 80, 4 << 10),
    "405B": (2 * 126, 4 << 10),
    "MLA": (61, 18 << 10),
}
SCALE = 1 << 6
REQUESTS = 64
# UCX takes seconds for each: it shows that what is posted can be served, and not how fast.
BESIDE = [("UCX", "405B")] if BACKEND != "UCX" else []


class Cache:
    """A cache that a node has registered, a region for each layer."""

    def __init__(self, node: Peer, regions: int, blocks: int, block: int, seed: int) -> None:
        self.regions, self.blocks, self.block = regions, blocks, block
        self.number = node.alloc_regions(regions, blocks * block, seed)
        self.start = node.address(self.number)

    def pieces(self, blocks: np.ndarray) -> np.ndarray:
        """These blocks of every region, region by region."""
        layers = self.start + np.arange(self.regions)[:, None] * self.blocks * self.block
        addresses = (layers + blocks[None, :] * self.block).reshape(-1)
        sizes = np.full(addresses.size, self.block)
        return np.stack([addresses, sizes, np.zeros(addresses.size)], axis=1).astype(np.uint64)

    def shaped(self, content: bytes) -> np.ndarray:
        return np.frombuffer(content, dtype=np.uint8).reshape(self.regions, self.blocks, self.block)


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


@pytest.mark.parametrize("op", ["READ", "WRITE"])
@pytest.mark.parametrize(("backend", "model"), [*((BACKEND, model) for model in MODELS), *BESIDE])
def test_requests_of_a_model_in_flight_at_a_time(backend: str, model: str, op: str) -> None:
    """Each takes blocks that lie scattered at both ends, in every layer, and is notified of."""
    with two_ends(backend) as (here, there):
        requests_of_a_model(here, there, model, op)


def requests_of_a_model(here: Peer, there: Peer, model: str, op: str) -> None:
    regions, block = MODELS[model]
    choose = np.random.default_rng(len(model))
    lengths = choose.integers(1, 9, REQUESTS)
    blocks = int(lengths.sum()) + 16
    ours = Cache(here, regions, blocks, block // SCALE, 1)
    theirs = Cache(there, regions, blocks, block // SCALE, 2)
    here.add(there.metadata())
    order = [choose.permutation(blocks)[: lengths.sum()] for _ in range(2)]
    ends_of = np.cumsum(lengths)
    before = ours.shaped(here.content(ours.number)), theirs.shaped(there.content(theirs.number))
    for request, (end, length) in enumerate(zip(ends_of, lengths, strict=True)):
        here_blocks, there_blocks = (one[end - length : end] for one in order)
        local, remote = ours.pieces(here_blocks), theirs.pieces(there_blocks)
        notice = f"request {request}".encode()
        assert here.post_and_leave(op, local, remote, "there", notice) in ("PROC", "DONE")
    assert here.wait_all() == {"DONE"}
    told = sorted(there.wait_notifs(REQUESTS))
    assert told == sorted(("here", f"request {request}".encode()) for request in range(REQUESTS))
    mine, remote_cache = (one.copy() for one in before)
    if op == "READ":
        mine[:, order[0]] = remote_cache[:, order[1]]
    else:
        remote_cache[:, order[1]] = mine[:, order[0]]
    assert here.content(ours.number) == mine.tobytes()
    assert there.content(theirs.number) == remote_cache.tobytes()


@pytest.mark.parametrize(
    ("backend", "op"), [(BACKEND, "READ"), (BACKEND, "WRITE"), *((one, "READ") for one, _ in BESIDE)]
)
def test_one_transfer_of_112000_pieces(backend: str, op: str) -> None:
    """A long prompt of the largest model."""
    with two_ends(backend) as (here, there):
        one_long_prompt(here, there, op)


def one_long_prompt(here: Peer, there: Peer, op: str) -> None:
    regions, length, block = 252, 445, 64
    ours = Cache(here, regions, 2 * length, block, 1)
    theirs = Cache(there, regions, 2 * length, block, 2)
    here.add(there.metadata())
    chosen = [np.random.default_rng(seed).permutation(2 * length)[:length] for seed in (3, 4)]
    source = theirs.shaped(there.content(theirs.number)) if op == "READ" else ours.shaped(here.content(ours.number))
    assert here.transfer(op, ours.pieces(chosen[0]), theirs.pieces(chosen[1]), "there") == "DONE"
    if op == "READ":
        came = ours.shaped(here.content(ours.number))[:, chosen[0]]
        assert (came == source[:, chosen[1]]).all()
    else:
        came = theirs.shaped(there.content(theirs.number))[:, chosen[1]]
        assert (came == source[:, chosen[0]]).all()


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

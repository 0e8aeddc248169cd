"""The transport of `torch.distributed`, on tensors of the host."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import threading
import weakref
from datetime import timedelta
from importlib.metadata import entry_points
from multiprocessing import get_context

import pytest
from conftest import PATIENCE

from tcpx import torch_transport

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.__version__.split("+")[0].rsplit(".", 1)[0] not in torch_transport.TESTED:
    pytest.skip(f"torch {torch.__version__} was not tested", allow_module_level=True)

from torch.distributed import _transport  # noqa: E402

from tcpx import _torch_transport  # noqa: E402


def new(**options):
    options = {"listen": "127.0.0.1:0", "timeout": PATIENCE, **options}
    return torch_transport.new_transport("cpu", **options)


@pytest.fixture
def ends():
    """Two transports of this process, each connected to the other."""
    with new() as one, new() as other:
        urls = one.bind(), other.bind()
        assert one.bind() == urls[0]
        assert one.connect(urls[1]) == other.connect(urls[0]) == 0
        assert one.connected() and other.connected()
        yield one, other


def exchanged(memory):
    """A descriptor as it arrives at the other side."""
    descriptor = memory.to_remote_buffer()
    return type(descriptor).deserialize(descriptor.serialize())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_writes_and_reads_move_every_byte(ends, dtype):
    one, other = ends
    source = torch.randint(0, 2, (37, 1001)).to(dtype)
    target = torch.zeros_like(source)
    ours, theirs = one.register_memory(source), other.register_memory(target)
    remote = exchanged(theirs)
    assert one.write(ours.to_view(), remote) == 0
    assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))
    source.zero_()
    assert one.read(ours.to_mutable_view(), remote) == 0
    assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))


def test_parts_of_memory_are_moved_and_nothing_else(ends):
    one, other = ends
    source = torch.arange(256, dtype=torch.uint8)
    target = torch.zeros(100, dtype=torch.uint8)
    ours, theirs = one.register_memory(source), other.register_memory(target)
    remote = exchanged(theirs)
    one.write(ours.to_view(10, 20), remote)
    assert target.tolist() == list(range(10, 30)) + [0] * 80
    target[:] = 7
    one.read(ours.to_mutable_view(200, 5), remote)
    assert source.tolist() == list(range(200)) + [7] * 5 + list(range(205, 256))
    assert one.write(ours.to_view(256), remote) == 0
    assert ours.to_view().size() == 256 and ours.to_view(1, 2).size() == 2
    for wrong in ((-1, None), (257, None), (0, 257), (250, 7), (0, -1)):
        with pytest.raises(ValueError):
            ours.to_view(*wrong)
    with pytest.raises(ValueError, match="does not fit"):
        one.write(ours.to_view(), remote)
    # An empty tensor can be registered too.
    nothing = one.register_memory(torch.empty(0))
    assert one.write(nothing.to_view(), remote) == 0


def test_a_work_ends_with_a_future(ends):
    one, other = ends
    source, target = torch.rand(1 << 18), torch.zeros(1 << 18)
    ours, remote = one.register_memory(source), exchanged(other.register_memory(target))
    # The first has to learn the window's key, the second knows it.
    for _ in range(2):
        work = one.write(ours.to_view(), remote, async_op=True)
        future = work.get_future()
        assert future is work.get_future()
        assert future.wait() == [] and work.result() == []
        assert work.is_completed() and work.is_success() and work.exception() is None
        assert work.wait() is True
        assert torch.equal(source, target)
        target.zero_()
    # Nobody but the reader's thread looks at these. What overlaps may not run at a time.
    remotes = [exchanged(other.register_memory(target[at * 100 : at * 100 + 100])) for at in range(50)]
    works = [one.write(ours.to_view(0, 400), one_of, async_op=True) for one_of in remotes]
    told = threading.Semaphore(0)
    for work in works:
        work.get_future().add_done_callback(lambda _: told.release())
    for _ in works:
        assert told.acquire(timeout=PATIENCE)
    assert all(work.is_success() for work in works)
    assert not one._pending


def test_hundreds_of_transfers_are_awaited_at_once(ends):
    one, other = ends
    count, size = 200, 3000
    source = torch.randint(0, 256, (count, size), dtype=torch.uint8)
    target = torch.zeros_like(source)
    ours = one.register_memory(source)
    rows = [exchanged(other.register_memory(target[at])) for at in range(count)]
    back = torch.zeros_like(source)
    returned = one.register_memory(back)

    async def run():
        await asyncio.gather(
            *(one.write_async(ours.to_view(at * size, size), rows[at]) for at in range(count))
        )
        await asyncio.gather(
            *(one.read_async(returned.to_mutable_view(at * size, size), rows[at]) for at in range(count))
        )
        works = [
            one.write(ours.to_view(at * size, size), rows[at], async_op=True) for at in range(count)
        ]
        await _transport.wait_all(works, timeout=PATIENCE)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert torch.equal(source, target) and torch.equal(source, back)


def test_a_wait_that_runs_out_leaves_the_transfer_running(ends):
    one, other = ends
    source, target = torch.rand(1 << 22), torch.zeros(4, 1 << 22)
    ours = one.register_memory(source)
    remotes = [exchanged(other.register_memory(part)) for part in target]
    with pytest.raises(TimeoutError, match="pending"):
        one.write(ours.to_view(), remotes[0], timeout=0)
    work = one.write(ours.to_view(), remotes[1], async_op=True)
    with pytest.raises(TimeoutError):
        work.wait(timedelta(microseconds=1))
    work.wait()

    async def run():
        for remote in remotes[2:]:
            with pytest.raises(TimeoutError):
                await one.write_async(ours.to_view(), remote, timeout=0)

    asyncio.run(run())
    # The thread in the background sees to those that nobody waits for.
    for left in list(one._pending):
        left.wait(timedelta(seconds=PATIENCE))
    assert all(torch.equal(source, part) for part in target)
    remote = remotes[0]
    with pytest.raises(ValueError, match="timeout"):
        one.write(ours.to_view(), remote, timeout=-1)


def test_unregistered_memory_is_out_of_reach(ends):
    one, other = ends
    source, target = torch.ones(1000), torch.zeros(1000)
    ours, theirs = one.register_memory(source), other.register_memory(target)
    remote, unused = exchanged(theirs), other.register_memory(torch.zeros(10))
    never_used = exchanged(unused)
    one.write(ours.to_view(), remote)
    target.zero_()
    # The same memory is the same registration.
    assert exchanged(other.register_memory(target)) == remote
    for memory in (theirs, unused):
        other.unregister_memory(memory)
        other.unregister_memory(memory)
    for gone in (remote, never_used):
        size = gone.length
        with pytest.raises(Exception, match="revoked|not registered"):
            one.write(ours.to_view(0, size), gone)
        failed = one.write(ours.to_view(0, size), gone, async_op=True)
        with pytest.raises(Exception, match="revoked|not registered"):
            failed.get_future().wait()
        assert failed.is_completed() and not failed.is_success() and failed.exception()
    assert not target.any()
    for use in (theirs.to_view, theirs.to_remote_buffer):
        with pytest.raises(RuntimeError, match="unregistered"):
            use()
    again = other.register_memory(target)
    assert exchanged(again) != remote
    one.write(ours.to_view(), exchanged(again))
    assert target.all()


def test_unfit_arguments_are_refused(ends):
    one, other = ends
    memory = one.register_memory(torch.zeros(8))
    remote = exchanged(other.register_memory(torch.zeros(8)))
    with pytest.raises(ValueError, match="contiguous"):
        one.register_memory(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="meta"):
        one.register_memory(torch.zeros(4, device="meta"))
    with pytest.raises(TypeError):
        one.write(torch.zeros(8), remote)
    with pytest.raises(TypeError, match="mutable"):
        one.read(memory.to_view(), remote)
    with pytest.raises(TypeError):
        other.write(memory.to_view(), remote)
    with pytest.raises(TypeError):
        one.write(memory.to_view(), b"descriptor")
    with pytest.raises(ValueError, match="connected peer"):
        one.write(memory.to_view(), exchanged(memory))
    with pytest.raises(TypeError):
        one.unregister_memory(other.register_memory(torch.zeros(8)))
    with pytest.raises(RuntimeError, match="already connected"):
        one.connect(other.bind())
    tensor = torch.zeros(8)
    resized = one.register_memory(tensor)
    tensor.resize_(4000)
    with pytest.raises(RuntimeError, match="resized"):
        one.write(resized.to_view(), remote)


def test_a_hostile_url_is_refused():
    with new() as one, new() as other:
        good = json.loads(other.bind())
        for wrong in (
            b"", b"\xff", b"[]", b"null", b"{}",
            *(json.dumps({**good, name: value}).encode() for name, value in [
                ("version", 2), ("backend", "nixl"), ("endpoint", 1), ("addresses", []),
                ("addresses", [1]), ("addresses", "x"), ("key", None),
            ]),
        ):
            with pytest.raises(ValueError):
                one.connect(wrong)
        with pytest.raises(TypeError):
            one.connect("text")
        memory = one.register_memory(torch.zeros(1))
        with pytest.raises(RuntimeError, match="not connected"):
            one.write(memory.to_view(), exchanged(memory))


def test_nobody_reaches_memory_by_a_made_up_name(ends):
    one, other = ends
    target = torch.zeros(1000)
    remote = exchanged(other.register_memory(target))
    ours = one.register_memory(torch.ones(1000))
    guessed = type(remote)(remote.endpoint, "0" * len(remote.region), remote.length)
    with pytest.raises(RuntimeError, match="does not open"):
        one.write(ours.to_view(), guessed)
    # A descriptor that claims more than there is opens no more.
    larger = type(remote)(remote.endpoint, remote.region, 10**9)
    big = one.register_memory(torch.ones(2000))
    with pytest.raises(Exception, match="4000 bytes"):
        one.write(big.to_view(), larger)
    # What is no question at all is not answered, and harms nobody.
    for message in (b"", b"\xff", b"{}", b"[]", b'{"open": {}}', b'{"open": []}'):
        one._peer.connection.notify(message).wait(PATIENCE)
    assert one.write(ours.to_view(), remote) == 0 and target.all()


def test_several_peers_write_to_one():
    with new() as owner:
        url, target = owner.bind(), torch.zeros(4, 1000)
        remotes = [exchanged(owner.register_memory(target[at])) for at in range(4)]
        with new() as one, new() as two:
            for peer, first in ((one, 0), (two, 2)):
                peer.connect(url)
                for at in (first, first + 1):
                    memory = peer.register_memory(torch.full((1000,), at + 1.0))
                    peer.write(memory.to_view(), remotes[at])
            # Both know the same memory.
            one.write(one.register_memory(torch.full((1000,), 9.0)).to_view(), remotes[3])
        assert target[:, 0].tolist() == [1, 2, 3, 9] and bool((target == target[:, :1]).all())


def test_memory_is_let_go_when_its_transport_closes():
    one, other = new(), new()
    other.connect(one.bind())
    tensor = torch.zeros(1000)
    gone = weakref.ref(tensor)
    remote = exchanged(one.register_memory(tensor))
    other.write(other.register_memory(torch.ones(1000)).to_view(), remote)
    del tensor
    gc.collect()
    assert gone() is not None
    one.close()
    one.close()
    with pytest.raises(RuntimeError, match="closed"):
        one.register_memory(torch.zeros(1))
    other.close()
    del one, other
    # The thread in the background lets go in its own time.
    until = threading.Event()
    for _ in range(int(PATIENCE * 100)):
        gc.collect()
        if gone() is None:
            break
        until.wait(0.01)
    assert gone() is None


def test_closing_is_awaited_and_ends_what_the_peer_uses():
    one, other = new(), new()
    one.connect(other.bind())
    remote = exchanged(other.register_memory(torch.zeros(10)))
    ours = one.register_memory(torch.ones(1 << 22))
    big = exchanged(other.register_memory(torch.zeros(1 << 22)))

    async def run():
        running = one.write(ours.to_view(), big, async_op=True)
        await one.close_async(timeout=PATIENCE)
        assert running.is_success()

    asyncio.run(run())
    with pytest.raises(RuntimeError, match="unregistered"):
        one.write(ours.to_view(), remote)
    with pytest.raises(RuntimeError, match="closed"):
        one.connect(other.bind())
    with new() as third:
        third.connect(other.bind())
        memory = third.register_memory(torch.ones(10))
        third.write(memory.to_view(), remote)
        other.close()
        with pytest.raises(Exception):
            third.write(memory.to_view(), remote)
        assert not third.connected()


def _process(rank, pipe, options):
    def heard():
        assert pipe.poll(PATIENCE)
        return pipe.recv()

    with new(**options) as transport:
        pipe.send(transport.bind())
        transport.connect(heard())
        source = torch.arange(100_000, dtype=torch.float32) + rank
        target = torch.zeros_like(source)
        ours, theirs = transport.register_memory(source), transport.register_memory(target)
        pipe.send([memory.to_remote_buffer() for memory in (ours, theirs)])
        remote_source, remote_target = heard()
        transport.write(ours.to_view(), remote_target, async_op=True).wait()
        pipe.send("written")
        assert heard() == "written"
        expected = torch.arange(100_000, dtype=torch.float32) + (1 - rank)
        assert torch.equal(target, expected)
        target.zero_()
        transport.read(theirs.to_mutable_view(), remote_source)
        assert torch.equal(target, expected)
        pipe.send("finished")
        assert heard() == "finished"


@pytest.mark.parametrize("encrypt", [False, True])
def test_two_processes_write_and_read(encrypt):
    context = get_context("spawn")
    pipes = context.Pipe()
    processes = [
        context.Process(target=_process, args=(rank, pipes[rank], {"encrypt": encrypt}))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0


def test_ranks_meet_at_a_store():
    if "tcpx" not in _transport.available_transports():
        _transport.register_transport("tcpx", torch_transport.new_transport)
    store = torch.distributed.HashStore()
    made = [None, None]

    def meet(rank):
        made[rank] = _transport.new_transport_rank(
            "tcpx", "cpu", store=store, peer_rank=1 - rank, rank=rank, listen="127.0.0.1:0",
            bootstrap_timeout=PATIENCE,
        )

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, other = made
    with one, other:
        target = torch.zeros(10)
        remote = pickle.loads(pickle.dumps(other.register_memory(target).to_remote_buffer()))
        one.write(one.register_memory(torch.ones(10)).to_view(), remote)
        assert target.all()


def test_torch_finds_the_transport_by_its_entry_point():
    found = [one for one in entry_points(group="torch.distributed.transports") if one.name == "tcpx"]
    if not found:
        pytest.skip("the entry point is only in an installed package")
    transport = _transport.new_transport("TCPX", "cpu", listen="127.0.0.1:0")
    with transport:
        assert isinstance(transport, _torch_transport.TcpxTransport)
    with pytest.raises(RuntimeError, match="failed to create") as info:
        _transport.new_transport("tcpx", "cpu", timeout=-1)
    assert info.value.__cause__ is not None

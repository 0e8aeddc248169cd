"""Which objects can be sent from and received into."""

from __future__ import annotations

import array
import ctypes
import gc
import sys
import threading
import types
import weakref

import numpy
import pytest
from conftest import PATIENCE

import tcpx

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
          "float16", "float32", "float64", "complex64", "complex128", "S7", "datetime64[ns]"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_of_any_type_arrives(pair, dtype):
    client, server = pair
    random = numpy.random.default_rng(3)
    width = numpy.dtype(dtype).itemsize
    raw = random.integers(0, 2, 999 * width, dtype=numpy.uint8)
    source = raw.view(dtype).reshape(27, 37)
    destination = numpy.zeros_like(source)
    if dtype.startswith("datetime"):
        # Such arrays have no buffer interface; their integers do.
        source, destination = source.view("int64"), destination.view("int64")
    receive = server.recv(destination)
    client.send(source).wait(PATIENCE)
    assert receive.wait(PATIENCE).nbytes == source.nbytes
    assert destination.tobytes() == source.tobytes()


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 131_072, 131_073, 1 << 20, (16 << 20) + 3])
@pytest.mark.parametrize("level", ["sent", "placed", "verified"])
def test_a_message_of_any_size_arrives(pair, size, level):
    client, server = pair
    source = numpy.random.default_rng(size).integers(0, 256, size, dtype=numpy.uint8)
    destination = bytearray(b"\xee" * size)
    receive = server.recv(destination, level=level)
    report = client.send(source, level=level).wait(PATIENCE)
    assert (report.nbytes, report.level) == (size, level)
    assert receive.wait(PATIENCE).nbytes == size
    assert destination == source.tobytes()


def test_a_gibibyte_arrives(pair):
    client, server = pair
    source = numpy.arange(1 << 27, dtype=numpy.uint64)
    destination = numpy.zeros_like(source)
    receive = server.recv(destination)
    client.send(source).wait(PATIENCE)
    receive.wait(PATIENCE)
    assert numpy.array_equal(source, destination)


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda data: array.array("B", data)])
def test_the_buffer_protocol_is_enough(pair, make):
    client, server = pair
    destination = bytearray(3)
    receive = server.recv(destination)
    client.send(make(b"abc")).wait(PATIENCE)
    receive.wait(PATIENCE)
    assert destination == b"abc"


class OnlyDLPack:
    """An array library that offers nothing but DLPack."""

    def __init__(self, inner, versioned=True):
        self.inner, self.versioned = inner, versioned

    def __dlpack__(self, **arguments):
        if not self.versioned and arguments:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.inner.__dlpack__(**arguments)


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_is_enough(pair, versioned):
    client, server = pair
    source = numpy.arange(60, dtype=numpy.int32).reshape(3, 4, 5)
    destination = numpy.zeros_like(source)
    receive = server.recv(OnlyDLPack(destination, versioned))
    client.send(OnlyDLPack(source, versioned)).wait(PATIENCE)
    receive.wait(PATIENCE)
    assert numpy.array_equal(source, destination)


def test_an_address_is_enough(pair):
    client, server = pair
    source, destination = numpy.arange(100), numpy.zeros(100, dtype=int)
    receive = server.recv((destination.ctypes.data, destination.nbytes, "cpu"))
    client.send((source.ctypes.data, source.nbytes, "cpu")).wait(PATIENCE)
    receive.wait(PATIENCE)
    assert numpy.array_equal(source, destination)


@pytest.mark.parametrize(
    ("memory", "error", "words"),
    [
        (b"abc", tcpx.MemoryError, "read-only"),
        (numpy.zeros((4, 4))[:, 1], tcpx.MemoryError, "not contiguous"),
        (OnlyDLPack(numpy.zeros((4, 4))[:, 1]), tcpx.MemoryError, "not contiguous"),
        (object(), TypeError, "expected a tensor"),
        ((1, 2), TypeError, "(address, bytes, device)"),
        ((0, 8, "cpu"), tcpx.SettingError, "null"),
        ((0x123456000, 8, "cpu"), tcpx.MemoryError, "not all of that is readable memory"),
        ((4096, 8, "tpu:0"), tcpx.SettingError, "tpu:0"),
        ((4096, 8, "cuda:x"), tcpx.SettingError, "cuda:x"),
        ((4096, 8, "cuda:0"), tcpx.SettingError, "gpu=0"),
        ((4096, 8, 3), tcpx.SettingError, "gpu=3"),
    ],
)
def test_unfit_memory_is_refused_with_the_reason(pair, memory, error, words):
    _, server = pair
    with pytest.raises(error, match=words.replace("(", r"\(").replace(")", r"\)")):
        server.recv(memory)
    assert server.status() == []


def test_a_read_only_array_is_refused_for_a_receive(pair):
    _, server = pair
    frozen = numpy.zeros(8)
    frozen.flags.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        server.recv(frozen)


class Watched(bytearray):
    """A bytearray that can be watched."""


def test_memory_lives_while_bytes_may_move_and_no_longer(pair):
    client, server = pair
    destination = Watched(1000)
    gone = weakref.ref(destination)
    receive = server.recv(destination)
    del destination
    gc.collect()
    assert gone() is not None
    client.send(b"x" * 1000).wait(PATIENCE)
    receive.wait(PATIENCE)
    del receive
    # The engine lets go behind the answer; each round trip gives it a turn.
    for _ in range(1000):
        if gone() is None:
            break
        answer = server.recv(bytearray(1))
        client.send(b"y").wait(PATIENCE)
        answer.wait(PATIENCE)
        gc.collect()
    assert gone() is None


def test_a_bytearray_cannot_be_resized_under_a_transfer(pair):
    client, server = pair
    destination = bytearray(1000)
    receive = server.recv(destination)
    with pytest.raises(BufferError):
        destination.extend(b"more")
    client.send(b"x").wait(PATIENCE)
    receive.wait(PATIENCE)


def test_garbage_is_collected_amid_transfers(pair):
    client, server = pair
    stop = threading.Event()

    def collect():
        while not stop.is_set():
            gc.collect()

    collecting = threading.Thread(target=collect)
    collecting.start()
    try:
        for number in range(300):
            # Each part of a cycle that only the collector can free, with its memory in use.
            source, destination = Watched(number.to_bytes(2, "little") * 5000), Watched(10_000)
            receive, send = server.recv(destination), client.send(source)
            source.cycle = destination.cycle = [source, destination, receive, send]
            if number % 3 == 0:
                # Nobody waits: dropping it cancels it, or it was done already.
                del source, destination, receive, send
                continue
            del source, send
            try:
                receive.wait(PATIENCE)
            except (tcpx.CancelledError, tcpx.TransferError):
                continue
            assert destination[:2] == destination[-2:]
            del destination, receive
    finally:
        stop.set()
        collecting.join()
    assert server.closed is client.closed is False


def test_ten_thousand_transfers_leave_nothing(pair):
    client, server = pair
    watched = []
    for _ in range(10_000):
        destination = Watched(64)
        watched.append(weakref.ref(destination))
        receive = server.recv(destination)
        client.send(b"z" * 64).wait(PATIENCE)
        receive.wait(PATIENCE)
    del destination, receive
    for _ in range(1000):
        if not any(one() is not None for one in watched):
            break
        answer = server.recv(bytearray(1))
        client.send(b"y").wait(PATIENCE)
        answer.wait(PATIENCE)
        del answer
        gc.collect()
    assert not [one for one in watched if one() is not None]


class Tensor:
    """As much of a torch tensor as the package asks for; its storage can be exchanged."""

    device = types.SimpleNamespace(type="cpu", index=None)

    def __init__(self, storage):
        self.set_(storage)

    def set_(self, storage):
        self.storage = storage

    def untyped_storage(self):
        return self.storage

    def is_contiguous(self):
        return True

    @property
    def nbytes(self):
        return len(self.storage)

    def data_ptr(self):
        return ctypes.addressof(ctypes.c_char.from_buffer(self.storage))


class Parameter(Tensor):
    """A class of the program's own that is made from tensors."""


def test_subclasses_of_tensors_are_tensors_and_storages_live(pair, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor))
    client, server = pair
    tensor = Parameter(Watched(1000))
    gone = weakref.ref(tensor.storage)
    receive = server.recv(tensor)
    tensor.set_(Watched(1000))
    gc.collect()
    storage = gone()
    assert storage is not None
    client.send(Parameter(Watched(b"x" * 1000))).wait(PATIENCE)
    receive.wait(PATIENCE)
    assert storage == b"x" * 1000
    assert tensor.storage == bytes(1000)


def test_torch_tensors_arrive_and_unfit_ones_are_refused(pair):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    client, server = pair
    dtypes = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    moved = set()
    for dtype in dtypes:
        width = dtype.itemsize
        raw = torch.randint(0, 256, (33 * width,), dtype=torch.uint8)
        try:
            source, destination = raw.view(dtype), torch.zeros_like(raw).view(dtype)
        except (RuntimeError, TypeError, NotImplementedError):
            # torch has no plain tensors of it: quantized and sub-byte types.
            continue
        moved.add(dtype)
        receive = server.recv(destination)
        client.send(source).wait(PATIENCE)
        receive.wait(PATIENCE)
        assert torch.equal(raw, destination.view(torch.uint8)), dtype
    assert {torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.complex128} <= moved
    assert {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint64} <= moved
    with pytest.raises(BufferError, match="contiguous"):
        server.recv(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="meta"):
        server.recv(torch.zeros(4, device="meta"))
    assert issubclass(tcpx.TimeoutError, TimeoutError)

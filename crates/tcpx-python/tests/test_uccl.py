"""The names of UCCL's endpoint: what its scripts do, over tcpx."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
from conftest import PATIENCE, run_python

from tcpx import uccl


@pytest.fixture
def ends():
    """Two endpoints, and the number of their connection at each."""
    one, other = uccl.Endpoint(), uccl.Endpoint()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(other.accept)
        _, port, gpu = one.parse_metadata(other.get_metadata())
        # The host's own address need not be reachable where tests run.
        uccl._keys["127.0.0.1", port] = other._listener.key
        ok, there = one.connect("127.0.0.1", gpu, remote_port=port)
        assert ok
        ok, address, gpu, here = accepted.result()
    assert ok and address == "127.0.0.1" and gpu == -1
    yield (one, there), (other, here)
    one.close()
    other.close()


def registered(endpoint, array):
    ok, number = endpoint.reg(array.ctypes.data, array.nbytes)
    assert ok
    return number, array.ctypes.data, array.nbytes


def done(endpoint, started):
    ok, number = started
    assert ok
    while True:
        ok, is_done = endpoint.poll_async(number)
        assert ok
        if is_done:
            return


def random(count, size):
    return [numpy.frombuffer(bytearray(os.urandom(size)), dtype=numpy.uint8) for _ in range(count)]


def test_sends_meet_receives(ends):
    (one, there), (other, here) = ends
    sources, targets = random(4, 100_000), random(4, 100_000)
    ours = [registered(one, array) for array in sources]
    theirs = [registered(other, array) for array in targets]
    receive = other.recv_async(here, *theirs[0])
    assert one.send(there, *ours[0])
    done(other, receive)
    receive = other.recvv_async(here, *map(list, zip(*theirs[1:], strict=True)), 3)
    assert one.sendv(there, *map(list, zip(*ours[1:], strict=True)), 3)
    done(other, receive)
    for source, target in zip(sources, targets, strict=True):
        assert (source == target).all()


def test_advertised_memory_is_written_and_read(ends):
    (one, there), (other, here) = ends
    (source, back), (target, _) = random(2, 70_000), random(2, 70_000)
    ours, returned, theirs = registered(one, source), registered(one, back), registered(other, target)
    ok, item = other.advertise(here, *theirs)
    assert ok and len(item) == 64
    assert one.write(there, *ours, item)
    assert (source == target).all()
    done(one, one.read_async(there, *returned, item))
    assert (source == back).all()
    parts = [theirs[1] + 10_000 * at for at in range(7)]
    ok, items = other.advertisev(here, [theirs[0]] * 7, parts, [10_000] * 7, 7)
    assert ok and len(set(items)) == 7
    target[:] = 0
    mine = [ours[1] + 10_000 * at for at in range(7)]
    assert one.writev(there, [ours[0]] * 7, mine[::-1], [10_000] * 7, items, 7)
    assert (target.reshape(7, -1) == source.reshape(7, -1)[::-1]).all()


def test_tensors_are_transferred_by_descriptors(ends):
    (one, there), (other, here) = ends
    sources, targets = random(3, 5000), random(3, 5000)
    local = one.register_memory(sources)
    remote = other.register_memory(targets)
    described = one.deserialize_descs(other.get_serialized_descs(remote))
    done(one, one.transfer(there, "write", local, described))
    for source, target in zip(sources, targets, strict=True):
        assert (source == target).all()
        target[:] = 7
    done(one, one.transfer(there, "read", local, described))
    assert all((source == 7).all() for source in sources)
    assert other.deregister_memory(remote)
    ok, number = one.transfer(there, "write", local, described)
    while ok:
        ok, is_done = one.poll_async(number)
        assert not (ok and is_done)


def test_failures_are_told_by_the_first_of_the_tuple(ends, caplog):
    (one, there), (other, here) = ends
    source, target = random(2, 1000)
    ours, theirs = registered(one, source), registered(other, target)
    _, item = other.advertise(here, *theirs)
    assert one.write(99, *ours, item) is False
    assert one.write(there, 99, *ours[1:], item) is False
    assert one.write(there, ours[0], ours[1] + 1, ours[2], item) is False
    assert "outside of the registered memory" in caplog.text
    assert one.write(there, *ours, b"x" * 64) is False
    assert one.write(there, *ours, b"short") is False
    assert one.poll_async(12345) == (False, False)
    assert one.connect("127.0.0.1", 0, remote_port=1) == (False, 0)
    with pytest.raises(ValueError, match="metadata"):
        one.parse_metadata(b"nonsense")
    with pytest.raises(ValueError, match="descriptors"):
        one.deserialize_descs(b"[1]")
    assert other.dereg(theirs[0]) and not other.dereg(theirs[0])
    assert one.write(there, *ours, item) is False
    assert one.remove_remote_endpoint(there) and not one.remove_remote_endpoint(there)


def test_an_endpoint_accepts_by_itself():
    one, other = uccl.Endpoint(), uccl.Endpoint()
    other.start_passive_accept()
    _, port, _ = one.parse_metadata(other.get_metadata())
    uccl._keys["127.0.0.1", port] = other._listener.key
    for _ in range(2):
        assert one.connect("127.0.0.1", -1, port)[0]
    one.close()
    other.close()
    other._passive.join()


IPV6_ALONE = """
import threading
from tcpx import uccl
one, other = uccl.Endpoint(), uccl.Endpoint()
accepting = threading.Thread(target=lambda: print(other.accept()[:2]), daemon=True)
accepting.start()
ok, _ = one.add_remote_endpoint(other.get_metadata())
assert ok
accepting.join()
"""


def test_a_host_with_ipv6_alone_is_reached(ipv6_alone):
    with run_python(IPV6_ALONE, before=ipv6_alone) as program:
        out, err = program.communicate(timeout=PATIENCE)
    assert (out, program.returncode) == ("(True, 'fd77::1')\n", 0), err

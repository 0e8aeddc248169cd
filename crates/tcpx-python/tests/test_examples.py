"""Every example runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE

EXAMPLES = Path(__file__).parents[1] / "examples"


def start(name: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(program: subprocess.Popen[str], shows: str = "") -> str:
    out, err = program.communicate(timeout=PATIENCE)
    assert program.returncode == 0, out + err
    assert shows in err, err
    return out


def here(line: str) -> str:
    """The pairing line for this host: a name of the host need not be resolvable where tests run."""
    key, address = line.split()
    return f"{key} 127.0.0.1:{address.rsplit(':', 1)[1]}"


def test_a_tensor_is_sent():
    with start("send_tensor.py", "receive") as receiver:
        line = here(receiver.stdout.readline())
        sent = finish(start("send_tensor.py", "send", line), shows="100%")
        assert "4194304 bytes verified" in sent
        assert "first element 42.0" in finish(receiver, shows="100%")


def test_weights_are_broadcast():
    with start("weights_broadcast.py", "serve", "2") as server:
        line = here(server.stdout.readline())
        workers = [start("weights_broadcast.py", "work", line) for _ in range(2)]
        assert [finish(worker, shows="100%") for worker in workers] == ["16 arrays, equal\n"] * 2
        finish(server)


def test_blocks_of_a_cache_are_put_into_another():
    with start("kv_cache.py", "decode") as decode:
        line = here(decode.stdout.readline())
        placed = finish(start("kv_cache.py", "prefill", line))
        assert placed.count("9437184 bytes placed") == 4
        assert finish(decode).count("128 blocks are right") == 4


def test_a_server_answers_every_client():
    with start("async_server.py") as server:
        line = here(server.stdout.readline())
        try:
            for _ in range(2):
                assert finish(start("async_server.py", line)) == "HELLO\nFROM\nTCPX\n"
        finally:
            server.kill()


def test_torch_runs_over_the_plugin():
    out = subprocess.run(
        [sys.executable, str(EXAMPLES / "torch_distributed.py")], capture_output=True, text=True
    )
    if out.stderr.startswith("skipped: "):
        pytest.skip(out.stderr.strip().removeprefix("skipped: "))
    assert "is right" in out.stdout, out.stderr


def test_tensors_move_between_actors_of_ray():
    # Ray passes its actors on what it was started with; a token would have to lie in the home
    # folder.
    variables = {**os.environ, "RAY_AUTH_MODE": "disabled", "TCPX_SOCKET_IFNAME": "=lo"}
    out = subprocess.run(
        [sys.executable, str(EXAMPLES / "ray_tensors.py")], capture_output=True, text=True, env=variables
    )
    if out.stderr.startswith("skipped: "):
        pytest.skip(out.stderr.strip().removeprefix("skipped: "))
    assert out.stdout.count("every element compared") == 5, out.stdout + out.stderr
    assert "over TCPX" in out.stdout


def test_the_demo_passes():
    out = subprocess.run([sys.executable, "-m", "tcpx.demo"], capture_output=True, text=True)
    assert out.returncode == 0 and out.stdout.endswith("PASSED\n"), out.stdout + out.stderr

"""The program and the NCCL plugin that come with the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def program_path() -> Path:
    """The program ``tcpx``."""
    return _HERE / "bin" / "tcpx"


def plugin_path() -> Path:
    """The NCCL network plugin, for ``NCCL_NET_PLUGIN``."""
    return _HERE / "bin" / "libnccl-net-tcpx.so"


def nccl_env() -> dict[str, str]:
    """The variables that make NCCL, and so PyTorch, use tcpx on this host.

    Call ``os.environ.update(tcpx.nccl_env())`` before the first communicator is made. Variables
    that the environment sets already are left out.
    """
    command = [str(program_path()), "env", "nccl", "--plugin", str(plugin_path()), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise OSError(f"{' '.join(command)} failed: {answer.stderr.strip()}")
    told = json.loads(answer.stdout)["variables"]
    variables = {one["name"]: one["value"] for one in told}
    return {
        name: value
        for name, value in variables.items()
        if value is not None and name not in os.environ
    }


def main() -> None:
    """``tcpx`` on the command line."""
    program = str(program_path())
    os.execv(program, [program, *sys.argv[1:]])

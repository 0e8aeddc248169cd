"""What the build refuses before it builds anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[1] / "build"

# As an interpreter without the lock sees the backend.
PROGRAM = """
import sys, sysconfig, types
named = "build_sdist get_requires_for_build_sdist get_requires_for_build_wheel prepare_metadata_for_build_wheel"
named += " get_requires_for_build_editable prepare_metadata_for_build_editable"
sys.modules["maturin"] = types.SimpleNamespace(**dict.fromkeys(named.split()))
real = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: 1 if name == "Py_GIL_DISABLED" else real(name)
import tcpx_build
"""


def test_free_threaded_python_is_refused_with_the_reason() -> None:
    if not BUILD.is_dir():
        pytest.skip("the sources are not there")
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=BUILD, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "free-threaded Python" in ended.stderr and "Traceback" not in ended.stderr

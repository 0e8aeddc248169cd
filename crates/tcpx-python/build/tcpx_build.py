"""The build of the wheel: maturin's, with the program and the NCCL plugin built before it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import maturin
from maturin import (
    build_sdist,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

get_requires_for_build_editable = maturin.get_requires_for_build_editable
prepare_metadata_for_build_editable = maturin.prepare_metadata_for_build_editable

ROOT = Path(__file__).resolve().parents[3]
BIN = ROOT / "crates/tcpx-python/python/tcpx/bin"
PROFILE = "shipped"
# As Cargo names a file, and as users do.
FILES = {"tcpx": "tcpx", "libnccl_net_tcpx.so": "libnccl-net-tcpx.so"}


def _programs() -> None:
    """Builds the program and the plugin into the package."""
    command = ["cargo", "build", "--locked", "--profile", PROFILE, "--message-format", "json"]
    command += ["--package", "tcpx-cli", "--package", "tcpx-nccl"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    metadata = ["cargo", "metadata", "--no-deps", "--format-version", "1"]
    answer = subprocess.run(metadata, cwd=ROOT, check=True, capture_output=True, text=True)
    built = Path(json.loads(answer.stdout)["target_directory"]) / PROFILE
    BIN.mkdir(exist_ok=True)
    for source, name in FILES.items():
        target = BIN / name
        shutil.copy(built / source, target)
        # Without binutils the files work but stay larger.
        if shutil.which("strip"):
            subprocess.run(["strip", "--strip-unneeded", str(target)], check=True)


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, str] | None = None,
    metadata_directory: str | None = None,
) -> str:
    _programs()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, str] | None = None,
    metadata_directory: str | None = None,
) -> str:
    _programs()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)

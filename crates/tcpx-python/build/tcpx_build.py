"""The build of the wheel: maturin's, with the program and the plugins for NCCL and NIXL built before it."""

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
# What lands beside the package: NIXL looks for plugins in a folder of its own wheel.
DATA = ROOT / "crates/tcpx-python/data"
NIXL_PLUGIN = "libplugin_TCPX.so"
NIXL_WHEELS = ("nixl_cu12", "nixl_cu13")
PROFILE = "shipped"
# As Cargo names a file, and as users do.
FILES = {"tcpx": "tcpx", "libnccl_net_tcpx.so": "libnccl-net-tcpx.so"}

# Maturin asks for the folder with every one of its calls.
(DATA / "platlib").mkdir(parents=True, exist_ok=True)


def _programs() -> None:
    """Builds the program and the plugins into the package, and beside it."""
    command = ["cargo", "build", "--locked", "--profile", PROFILE, "--message-format", "json"]
    command += ["--package", "tcpx-cli", "--package", "tcpx-nccl"]
    command += ["--package", "tcpx-nixl"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    metadata = ["cargo", "metadata", "--no-deps", "--format-version", "1"]
    answer = subprocess.run(metadata, cwd=ROOT, check=True, capture_output=True, text=True)
    built = Path(json.loads(answer.stdout)["target_directory"]) / PROFILE
    BIN.mkdir(exist_ok=True)
    for source, name in FILES.items():
        _install(built / source, BIN / name)
    for wheel in NIXL_WHEELS:
        folder = DATA / "platlib" / f".{wheel}.mesonpy.libs" / "plugins"
        folder.mkdir(parents=True, exist_ok=True)
        _install(built / NIXL_PLUGIN, folder / NIXL_PLUGIN)


def _install(source: Path, target: Path) -> None:
    shutil.copy(source, target)
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

"""The build of the wheel: maturin's, with the program and the plugins for NCCL and NIXL built before it.

``TCPX_GLIBC=2.28 pip wheel --no-deps .`` makes a wheel for every Linux with that glibc or a newer one
(``manylinux_2_28``), by zig's linker, which ``pip`` fetches for it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import maturin
from maturin import (
    build_sdist,
    get_requires_for_build_sdist,
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
# The oldest glibc that the wheel is for; that of this host, where it is not set.
GLIBC = os.environ.get("TCPX_GLIBC")
TARGET = os.environ.get("CARGO_BUILD_TARGET", f"{os.uname().machine}-unknown-linux-gnu")
# The layouts of NIXL's interface are those of x86-64: elsewhere its backend is left out.
HAS_NIXL = TARGET.startswith("x86_64")
# As Cargo names a file, and as users do.
FILES = {"tcpx": "tcpx", "libnccl_net_tcpx.so": "libnccl-net-tcpx.so"}

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(
        "tcpx does not build for free-threaded Python: the module uses the stable interface, which such an interpreter "
        "does not have, and its objects were tested under the lock alone. Use the usual build, python3.11 or newer"
    )


def get_requires_for_build_wheel(config_settings: dict[str, str] | None = None) -> list[str]:
    wanted: list[str] = maturin.get_requires_for_build_wheel(config_settings)
    pinned = Path(__file__).with_name("requirements.txt").read_text().splitlines()
    return wanted + [one for one in pinned if not one.startswith("#")] if GLIBC else wanted


# Maturin asks for the folder with every one of its calls.
(DATA / "platlib").mkdir(parents=True, exist_ok=True)


def _name_commit() -> None:
    """What is built from a clone names its commit in handshakes, as all of `cargo xtask dist` does."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel", "HEAD"]
    answer = shutil.which("git") and subprocess.run(command, capture_output=True, text=True)
    # Not the repository that a source distribution was unpacked in.
    if answer and answer.returncode == 0 and Path(answer.stdout.split("\n")[0]) == ROOT:
        os.environ.setdefault("TCPX_COMMIT", answer.stdout.split("\n")[1])


_name_commit()


def _programs() -> None:
    """Builds the program and the plugins into the package, and beside it."""
    command = ["cargo", "zigbuild", "--target", f"{TARGET}.{GLIBC}"] if GLIBC else ["cargo", "build"]
    command += ["--locked", "--profile", PROFILE]
    command += ["--package", "tcpx-cli", "--package", "tcpx-nccl"]
    command += ["--package", "tcpx-nixl"] if HAS_NIXL else []
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    metadata = ["cargo", "metadata", "--no-deps", "--format-version", "1"]
    answer = subprocess.run(metadata, cwd=ROOT, check=True, capture_output=True, text=True)
    built = Path(json.loads(answer.stdout)["target_directory"]) / (TARGET if GLIBC else "") / PROFILE
    BIN.mkdir(exist_ok=True)
    for source, name in FILES.items():
        shutil.copy(built / source, BIN / name)
    # Those for another processor.
    shutil.rmtree(DATA / "platlib")
    if HAS_NIXL:
        _nixl_plugins(built)


def _nixl_plugins(built: Path) -> None:
    """One folder for each of NIXL's wheels."""
    folders = [DATA / "platlib" / f".{wheel}.mesonpy.libs" / "plugins" for wheel in NIXL_WHEELS]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(built / NIXL_PLUGIN, folders[0] / NIXL_PLUGIN)
    for folder in folders[1:]:
        _stand_in(folder, folders[0])


def _stand_in(folder: Path, real: Path) -> None:
    """A library without code, which loads the plugin from the folder beside it: wheels hold no links, and the plugin
    twice would be a fifth of the wheel."""
    command = ["cc", "-shared", "-nostdlib", "-x", "c", "/dev/null", "-o", str(folder / NIXL_PLUGIN)]
    command += [f"-L{real}", "-Wl,--no-as-needed", f"-l:{NIXL_PLUGIN}", "-Wl,--allow-shlib-undefined"]
    command += [f"-Wl,-rpath,$ORIGIN/{os.path.relpath(real, folder)}", "-Wl,--enable-new-dtags"]
    subprocess.run(command, check=True)


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, str] | None = None,
    metadata_directory: str | None = None,
) -> str:
    _programs()
    if GLIBC:
        tag = f"manylinux_{GLIBC.replace('.', '_')}"
        arguments = f"--zig --target {TARGET} --compatibility {tag}"
        config_settings = {**(config_settings or {}), "build-args": arguments}
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, str] | None = None,
    metadata_directory: str | None = None,
) -> str:
    _programs()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)

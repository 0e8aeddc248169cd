#!/usr/bin/env bash
# NIXL's backend TCPX beside UCX of the same wheel, GPU memory to GPU memory, on a host with GPUs:
# scripts/gpu-nixl.sh OUT_DIR
#
# Needs python3 with torch, numpy and a NIXL wheel, and libplugin_TCPX.so in TCPX_BIN (default .carry), which is put
# where the wheel looks for plugins. With several GPUs data moves from the first to the last, with one from it to itself.
# What arrives is compared. OUT_DIR gets nixl.json (format: benchmarks/README.md). ROUNDS (default
# 3); LIMIT, seconds after which a backend is left out, and the report says so (default 60).
# TCPX_BIN has the program tcpx, too.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 OUT_DIR" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
plugin=${TCPX_BIN:-$root/.carry}/libplugin_TCPX.so
[ -e "$plugin" ] || { echo "$plugin is missing: cargo build --release --package tcpx-nixl" >&2; exit 2; }
mkdir -p "$1"
out=$(realpath "$1")
folder=$(python3 - <<'PYTHON'
import importlib.util, pathlib
for wheel in ("nixl_cu13", "nixl_cu12"):
    found = importlib.util.find_spec(wheel)
    if found:
        print(pathlib.Path(found.origin).parent.parent / f".{wheel}.mesonpy.libs" / "plugins")
        break
else:
    raise SystemExit("no NIXL wheel is installed: pip install nixl")
PYTHON
)
cp "$plugin" "$folder/"
python3 "$root/crates/tcpx-python/python/tcpx/bench.py" --gpu --who nixl-tcpx,nixl-tcpx-read,nixl-ucx,nixl-ucx-read \
  --sizes 1MiB,16MiB,256MiB --in-flight 1 --lists 32768x32KiB,81920x4KiB,4096x72KiB \
  --rounds "${ROUNDS:-3}" --limit "${LIMIT:-60}" --program "$(dirname "$plugin")/tcpx" --json "$out/nixl.json"

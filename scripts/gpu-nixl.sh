#!/usr/bin/env bash
# NIXL's backend TCPX beside UCX of the same wheel, GPU memory to GPU memory, on a host with GPUs:
# scripts/gpu-nixl.sh OUT_DIR
#
# Needs python3 with torch, numpy and a NIXL wheel, and libplugin_TCPX.so in TCPX_BIN (default
# .carry), which is put where the wheel looks for plugins. With several GPUs data moves from the
# first to the last, with one from it to itself. What arrives is compared. OUT_DIR gets nixl.json
# (format: benchmarks/README.md). ROUNDS (default 3); LIMIT, seconds without an answer after which a
# backend is left out, and the report says so (default 60). TCPX_BIN has the program tcpx, too.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 OUT_DIR" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
bin=${TCPX_BIN:-$root/.carry}
plugin=$bin/libplugin_TCPX.so
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
last=$(($(nvidia-smi -L | grep -c '^GPU') - 1))
serve="python3 $root/crates/tcpx-python/python/tcpx/bench.py serve"
rm -rf "$out/runs"
mkdir "$out/runs"
# net NAME FLAGS...
net() {
  local name=$1
  shift
  "$bin/tcpx" bench net --from 0 --to "$last" --modes one --in-flight 1 --rounds "${ROUNDS:-3}" --timeout "${LIMIT:-60}s" \
    --op put,get --peer "nixl-tcpx=$serve nixl-tcpx gpu" --peer "nixl-ucx=$serve nixl-ucx gpu" --json "$@" >"$out/runs/$name.json"
}
net whole --sizes 1MiB,16MiB,256MiB
net 32k --sizes 1GiB --piece-bytes 32KiB
net 4k --sizes 320MiB --piece-bytes 4KiB
net 72k --sizes 288MiB --piece-bytes 72KiB
"$bin/tcpx" bench show "$out"/runs/*.json --json --subject 'NIXL over the backend TCPX and over UCX' >"$out/nixl.json"
"$bin/tcpx" bench show "$out/nixl.json"

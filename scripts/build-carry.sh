#!/usr/bin/env bash
# Builds what a GPU host needs and puts it into .carry/: programs, checks, plugin file. The GPU host
# needs no Cargo, no compiler and no network; it then runs scripts/gpu-transfer.sh,
# gpu-tcp-speed.sh, gpu-pieces.sh, gpu-memory.sh, gpu-local.sh, gpu-torch.sh or gpu-unpack.sh there,
# and `xtask gate FOLDER --own FOLDER --gpus 0,1` with the folders of two commits.
set -euo pipefail
cd "$(dirname "$0")/.."
out=.carry
target=${CARGO_TARGET_DIR:-target}

# find_target PROFILE NAME: how Cargo names the target that is one of the GPU checks.
find_target() {
  local file
  for file in {crates/*,tests}/examples/"$2"{.rs,/main.rs}; do
    [ -e "$file" ] && { echo "--example $2 $target/$1/examples/$2"; return; }
  done
  for file in crates/*/src/bin/"$2".rs tests/src/bin/"$2".rs; do
    [ -e "$file" ] && { echo "--bin $2 $target/$1/$2"; return; }
  done
  echo "no source file of $2 among the examples and programs of the workspace" >&2
  return 1
}

rm -rf "$out"
mkdir -p "$out"
cargo xtask dist --out "$out"
cargo build --release --locked --package xtask
cp "$target/release/xtask" "$out/xtask"
for check in gpu_check unpack engine_gpu_check local_gpu_check devmem_gpu_check; do
  # What measures is built as what is shipped.
  case $check in unpack) profile=shipped ;; *) profile=release ;; esac
  read -r kind name file < <(find_target "$profile" "$check") || exit 1
  cargo build --profile "$profile" --locked --workspace "$kind" "$name"
  cp "$file" "$out/$check"
done
# The double of Google's plugin, as the tests build it.
${CC:-cc} -std=gnu11 -O2 -fPIC -shared -pthread -fvisibility=hidden -o "$out/libtcpx_double.so" \
  tests/double/{google_double,connect,gpu,misbehave,pool,transfer}.c
# What ends amid transfers in C and in Python.
${CC:-cc} -std=c99 -O2 -I"$out" tests/c/gpu_ends.c -o "$out/gpu_ends" -L"$out" -ltcpx -ldl -Wl,-rpath,'$ORIGIN'
cargo xtask dist --wheel
cp "$target"/packages/tcpx-*.whl "$out/"
# The driver of the gate, and the plugin file under the name that Cargo gives it.
cargo build --profile shipped --locked --package tcpx-bench
cp "$target/shipped/tcpx-bench" "$out/"
ln -f "$out/libnccl-net-tcpx.so" "$out/libnccl_net_tcpx.so"
cp scripts/gpu-transfer.sh scripts/gpu-tcp-speed.sh scripts/gpu-unpack.sh scripts/gpu-pieces.sh scripts/gpu-memory.sh scripts/gpu-local.sh scripts/gpu-torch.sh \
  scripts/gpu_torch.py scripts/gpu_run.sh \
  scripts/nccl_check.py scripts/nccl_report.py scripts/nccl_environment.sh "$out/"
strip "$out/xtask" "$out/gpu_check" "$out/unpack" "$out/tcpx-bench" "$out/engine_gpu_check" "$out/local_gpu_check" "$out/devmem_gpu_check" "$out/libtcpx_double.so" || echo 'not stripped: the files are larger, nothing else'
du -sh "$out"

#!/usr/bin/env bash
# What the program's own use of a GPU feels of the library, on a host with a GPU:
# scripts/gpu-memory.sh OUT_DIR
#
# Needs gpu_check and engine_gpu_check in TCPX_BIN (default .carry), as scripts/build-carry.sh makes
# them, and nothing else. Addresses of the program, captures of CUDA graphs, connections that come
# and go beside a kernel, a reset of the GPU in the middle of transfers, and the checks of memory
# under NVIDIA's compute-sanitizer where that is installed. In less than four minutes; exits with 1
# if a step failed. OUT_DIR gets steps.txt and log.txt, where what set-up took is said.
set -uo pipefail

here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=gpu_run.sh
. "$here/gpu_run.sh"
begin 230 'gpu_check engine_gpu_check' "$@"
[ "$rehearse" = no ] || { echo 'captures need a GPU: there is nothing to rehearse' >&2; exit 2; }

step 'addresses are asked about, and moved or refused' 20 "$bin/gpu_check" pointers
step 'captures survive copies, memory and fences' 40 "$bin/gpu_check" capture
step 'set-up of connections, the first of a process' 30 "$bin/engine_gpu_check" --only set_up
step 'no copy waits for connections that come and go' 40 "$bin/engine_gpu_check" --only connections_come_and_go
step 'a reset amid transfers ends no process' 60 "$bin/engine_gpu_check" --only device_reset
grep -hE '^(ok|FAILED) ' "$log"
if command -v compute-sanitizer >/dev/null; then
  # A tool makes kernels many times slower, and initcheck each copy.
  export GPU_CHECK_LIMIT=60 GPU_CHECK_MOST_COPIES=100
  for tool in memcheck:40 initcheck:100 racecheck:40 synccheck:40; do
    limit=${tool#*:} tool=${tool%:*}
    step "kernels under $tool" "$limit" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$bin/gpu_check" checksums unpack_ copies_of_all_kinds
  done
fi
finish

#!/usr/bin/env bash
# Unpackers on a host with a GPU: scripts/gpu-unpack.sh OUT_DIR
#
# Needs the folder that scripts/build-carry.sh made (TCPX_BIN, default .carry). Every check of the
# memory crate with its long sweeps, the same under NVIDIA's compute-sanitizer where that is
# installed, then the figures. Its limits add up to less than 8 minutes; it goes on after a failed
# step, and exits with 1 if any failed. OUT_DIR gets unpack.json (format: benchmarks/README.md),
# steps.txt and log.txt.
set -uo pipefail

here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=gpu_run.sh
. "$here/gpu_run.sh"
begin 470 'unpack gpu_check' "$@"
[ "$rehearse" = no ] || { echo 'kernels need a GPU: there is nothing to rehearse' >&2; exit 2; }

step 'every check' 40 "$bin/gpu_check"
step 'every length, alignment and count, a million lists' 90 "$bin/gpu_check" sweep
if command -v compute-sanitizer >/dev/null; then
  # A tool makes kernels many times slower, so the checks are those of the kernels, with more time;
  # and initcheck takes milliseconds for each copy.
  export GPU_CHECK_LIMIT=60 GPU_CHECK_MOST_COPIES=300
  for tool in memcheck:40 initcheck:120 synccheck:40; do
    limit=${tool#*:} tool=${tool%:*}
    step "kernels under $tool" "$limit" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$bin/gpu_check" checksums unpack_ worker_restarts
  done
  unset GPU_CHECK_LIMIT GPU_CHECK_MOST_COPIES
else
  echo 'compute-sanitizer is not installed: its checks are left out' | tee -a "$steps"
fi
into=$out/unpack.json step 'figures' 120 "$bin/unpack"
finish

#!/usr/bin/env bash
# Unpackers on a host with a GPU: scripts/gpu-unpack.sh OUT_DIR
#
# Needs the folder that scripts/build-carry.sh made (TCPX_BIN, default .carry). Every check of the
# memory crate with its long sweeps, the same under NVIDIA's compute-sanitizer where that is
# installed, then the figures. Its limits add up to less than 8 minutes; it goes on after a failed step, and exits with 1
# if any failed. OUT_DIR gets unpack.json (format: benchmarks/README.md), steps.txt and
# log.txt.
set -uo pipefail

if [ $# -ne 1 ]; then
  echo "usage: $0 OUT_DIR" >&2
  exit 2
fi
bin=$(realpath "${TCPX_BIN:-.carry}")
mkdir -p "$1" || exit 2
out=$(realpath "$1")
for file in unpack_bench gpu_check; do
  [ -x "$bin/$file" ] || { echo "$bin/$file is missing: run scripts/build-carry.sh first" >&2; exit 2; }
done
log=$out/log.txt steps=$out/steps.txt failed=0
: >"$log"
: >"$steps"

# step NAME SECONDS COMMAND...
step() {
  local name=$1 seconds=$2 start=$SECONDS word=passed rc
  shift 2
  printf '\n== %s: %s\n' "$name" "$*" >>"$log"
  timeout --kill-after=5 "$seconds" "$@" >>"$log" 2>&1 </dev/null
  rc=$?
  if [ "$rc" -ne 0 ]; then
    word="FAILED ($rc)"
    failed=$((failed + 1))
  fi
  printf '%-58s %5d s  %s\n' "$name" $((SECONDS - start)) "$word" | tee -a "$steps"
}

step 'every check' 40 "$bin/gpu_check"
step 'every length, alignment and count, a million lists' 90 "$bin/gpu_check" sweep
if command -v compute-sanitizer >/dev/null; then
  # A tool makes kernels many times slower, so the checks are those of the kernels, with more time; and
  # initcheck takes milliseconds for each copy.
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
# shellcheck disable=SC2016 # expanded by the shell that runs it
step 'figures' 120 bash -c '"$0" >"$1/unpack.json"' "$bin/unpack_bench" "$out"

printf '\n%d steps failed; everything that was printed is in %s\n' "$failed" "$log"
[ "$failed" -eq 0 ]

#!/usr/bin/env bash
# GPU memory between processes of one host: scripts/gpu-local.sh OUT_DIR
#
# Needs local_gpu_check in TCPX_BIN (default .carry), as scripts/build-carry.sh makes it, and
# nothing else. Contents first, then owners of much memory that are killed, then figures in turns
# with TCP, with both processes on the GPU at once; about two minutes. Exits with 1 if a step
# failed. OUT_DIR gets steps.txt, log.txt, and figures-N.jsonl, a line of JSON a row.
set -uo pipefail

here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=gpu_run.sh
. "$here/gpu_run.sh"
begin 280 'local_gpu_check' "$@"
[ "$rehearse" = no ] || { echo 'memory between processes needs a GPU: there is nothing to rehearse' >&2; exit 2; }
step 'contents of both kinds of memory' 100 "$bin/local_gpu_check" contents
step 'memory of killed owners comes back' 120 "$bin/local_gpu_check" kills --gib 40 --rounds 20
share_gpu
turn=0
for local in auto off auto; do
  turn=$((turn + 1))
  into=$out/figures-$turn.jsonl step "figures, TCPX_LOCAL=$local" 60 \
    env TCPX_LOCAL="$local" "$bin/local_gpu_check" speed
done
finish

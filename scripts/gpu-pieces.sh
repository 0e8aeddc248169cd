#!/usr/bin/env bash
# Lists of pieces in GPU memory beside one put of as many bytes: scripts/gpu-pieces.sh [--rehearse]
# OUT_DIR
#
# Needs tcpx and engine_gpu_check in TCPX_BIN (default .carry), as scripts/build-carry.sh makes
# them: no Cargo, no compiler, no network. First the contents: lists of fresh random bytes at odd
# places of several regions, over poison, to and from GPU and host memory. Then the figures. OUT_DIR
# gets 18-gpu-pieces.json (format: benchmarks/README.md), runs/ with the report of each start, and
# log.txt. ROUNDS (default 5) sets how often everything is measured; it ends within 6 minutes and
# takes fewer rounds where those do not suffice. --rehearse moves fewer pieces.
set -uo pipefail

here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=gpu_run.sh
. "$here/gpu_run.sh"
begin 340 'tcpx engine_gpu_check' "$@"
runs=$out/runs scale=1
[ "$rehearse" = yes ] && scale=64
rm -rf "$runs"
mkdir "$runs" || exit 2

# -- correctness
if [ "$rehearse" = no ]; then
  step 'contents' 120 "$bin/engine_gpu_check" --gpus "$from,$to" --only batches --only lists_of_pieces ||
    { echo 'contents differ: nothing is measured' >&2; exit 1; }
fi

# -- figures: NAME, pieces, bytes of each. Rounds outermost, so that a slow minute does not fall on
# one row alone.
shapes='32k 32768 32768
4k 81920 4096
72k 4096 73728
256k 4096 262144'
for ((round = 1; round <= ${ROUNDS:-5}; round++)); do
  # A round that would be cut off is not begun.
  [ "$round" -gt 1 ] && [ $((SECONDS / (round - 1) + 10)) -gt "$(left)" ] && break
  while read -r name pieces bytes; do
    into=$runs/$name.$round.json step "$name.$round" 60 "$bin/tcpx" bench net --from "$from" --to "$to" --rounds 1 \
      --span 300ms --json --op put,get --piece-bytes "$bytes" --modes one --sizes $((pieces / scale * bytes)) --in-flight 1
  done <<<"$shapes"
done

collect 18-gpu-pieces.json "Lists of pieces, $what" "$runs" \
  'One message at a time; its pieces lie in one region at either end, and their list is in an order without neighbours.'
finish

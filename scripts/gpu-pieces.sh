#!/usr/bin/env bash
# Lists of pieces in GPU memory beside one put of as many bytes: scripts/gpu-pieces.sh [--rehearse] OUT_DIR
#
# Needs tcpx, engine_gpu_check and xtask in TCPX_BIN (default .carry), as scripts/build-carry.sh makes them: no Cargo, no
# compiler, no network. First the contents: lists of fresh random bytes at odd places of several regions, over poison, to and
# from GPU and host memory. Then the figures. OUT_DIR gets 18-gpu-pieces.json (format: benchmarks/README.md), runs/ with
# one JSON file for each measurement, and log.txt. ROUNDS (default 5) sets how often everything is measured; it ends
# within 6 minutes and takes fewer rounds where those do not suffice.
# --rehearse moves fewer pieces.
set -uo pipefail

here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=gpu_run.sh
. "$here/gpu_run.sh"
begin 340 'tcpx engine_gpu_check xtask' "$@"
runs=$out/runs scale=1
[ "$rehearse" = yes ] && scale=64
rm -rf "$runs"
mkdir "$runs" || exit 2

# -- correctness
if [ "$rehearse" = no ]; then
  step 'contents' 120 "$bin/engine_gpu_check" --gpus "$from,$to" --only batches --only lists_of_pieces ||
    { echo 'contents differ: nothing is measured' >&2; exit 1; }
fi

# -- figures: NAME, pieces, bytes of each. Rounds outermost, so that a slow minute does not fall on one row alone.
shapes='32k 32768 32768
4k 81920 4096
72k 4096 73728
256k 4096 262144'
for ((round = 1; round <= ${ROUNDS:-5}; round++)); do
  # A round that would be cut off is not begun.
  [ "$round" -gt 1 ] && [ $((SECONDS / (round - 1) + 10)) -gt "$(left)" ] && break
  while read -r name pieces bytes; do
    step "$name.$round" 60 "$bin/tcpx" bench net --from "$from" --to "$to" --rounds 1 --span 300ms \
      --op put,batch,get,batch-get --piece-bytes "$bytes" --layout shuffled --runs "$runs" \
      --case "$name=one:$((pieces / scale * bytes)):1"
  done <<<"$shapes"
done

rows=()
while read -r name pieces bytes; do
  for op in 'put:one put' 'batch:puts of the pieces' 'get:one get' 'batch of gets:gets of the pieces'; do
    found=("$runs/$name.tcpx-${op%%:*}".*.json)
    [ -e "${found[0]}" ] &&
      rows+=(--row "$((pieces / scale)) x $((bytes / 1024)) KiB, ${op#*:}" GB/s /gb_per_second "${found[@]}")
  done
done <<<"$shapes"
if [ "${#rows[@]}" -gt 0 ]; then
  "$bin/xtask" bench-collect --out "$out/18-gpu-pieces.json" --subject "Lists of pieces, $what" --date "$(date -u +%F)" \
    --machine "$machine" --command "$command" --cpu /cpu_seconds_per_gb \
    --note 'One message at a time; its pieces lie in one region at either end, and their list is in an order without neighbours.' \
    --note 'Both programs run on one host and share its cores and memory; the network is the loopback interface.' \
    "${rows[@]}" || failed=$((failed + 1))
fi
finish

#!/usr/bin/env bash
# Lists of pieces in GPU memory beside one put of as many bytes: scripts/gpu-pieces.sh [--rehearse] OUT_DIR
#
# Needs tcpx, engine_gpu_check and xtask in TCPX_BIN (default .carry), as scripts/build-carry.sh makes them: no Cargo, no
# compiler, no network. First the contents: lists of fresh random bytes at odd places of several regions, over poison, to and
# from GPU and host memory. Then the figures. OUT_DIR gets 18-gpu-pieces.json (format: benchmarks/README.md), runs/ with
# one JSON file for each measurement, and log.txt. ROUNDS (default 5) sets how often everything is measured; it ends
# within 6 minutes and takes fewer rounds where those do not suffice.
#
# With several GPUs data moves from the first to the second, with one from it to itself. --rehearse uses host memory and
# fewer pieces, to try the script itself on a host without a GPU.
set -uo pipefail

rehearse=no
[ "${1:-}" = --rehearse ] && { rehearse=yes; shift; }
if [ $# -ne 1 ]; then
  echo "usage: $0 [--rehearse] OUT_DIR" >&2
  exit 2
fi
bin=$(realpath "${TCPX_BIN:-.carry}")
mkdir -p "$1" || exit 2
out=$(realpath "$1")
for file in tcpx engine_gpu_check xtask; do
  [ -x "$bin/$file" ] || { echo "$bin/$file is missing: run scripts/build-carry.sh first" >&2; exit 2; }
done
runs=$out/runs log=$out/log.txt
rm -rf "$runs"
mkdir "$runs" || exit 2
: >"$log"
budget=340 status=0
left() { echo $((budget - SECONDS)); }

command='scripts/gpu-pieces.sh OUT_DIR' scale=1 gpus=0
if [ "$rehearse" = yes ]; then
  command='scripts/gpu-pieces.sh --rehearse OUT_DIR' scale=64
else
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
fi
case "$rehearse$gpus" in
  yes*) from=host to=host what='in host memory standing in for a GPU' ;;
  no0) echo 'no GPU here: nvidia-smi lists none (--rehearse tries the script with host memory)' >&2; exit 2 ;;
  no1) from=0 to=0 what='on one GPU' ;;
  *) from=0 to=1 what='between GPUs' ;;
esac

# step NAME SECONDS COMMAND...: everything that it prints into the log.
step() {
  local name=$1 limit=$2 start=$SECONDS rc
  shift 2
  [ "$limit" -gt "$(left)" ] && limit=$(left)
  if [ "$limit" -le 1 ]; then
    echo "$name: no time left" | tee -a "$log"
    return 1
  fi
  printf '\n$ %s\n' "$*" >>"$log"
  timeout --kill-after=5 "$limit" "$@" >>"$log" 2>&1 </dev/null
  rc=$?
  printf '%-28s %4d s  %s\n' "$name" $((SECONDS - start)) "$([ "$rc" -eq 0 ] && echo passed || echo "FAILED ($rc)")" |
    tee -a "$log"
  if [ "$rc" -ne 0 ]; then
    tail -n 3 "$log" >&2
    status=1
  fi
  return "$rc"
}

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

machine="$(nproc) cores, Linux $(uname -r), loopback TCP"
if [ "$gpus" -gt 0 ]; then
  machine="$gpus x $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1), \
driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1), $machine"
fi
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
    "${rows[@]}" || status=1
fi
exit "$status"

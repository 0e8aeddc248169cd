#!/usr/bin/env bash
# The embedded network between GPUs, every figure beside plain sockets of the same run:
# scripts/gpu-tcp-speed.sh [--rehearse] OUT_DIR
#
# Needs the folder that scripts/build-carry.sh made (TCPX_BIN, default .carry): no Cargo, no compiler,
# no network. OUT_DIR gets 15-gpu-tcp-speed.json (format: benchmarks/README.md), one JSON file for each
# run of a case, and log.txt. Each round starts both processes anew and runs all cases; contents are
# verified in poisoned destinations before anything is timed. ROUNDS (default 5) sets how many.
#
# With two GPUs data moves from GPU 0 to GPU 1, with one from GPU 0 to itself. --rehearse uses host
# memory and small sizes, to try the script itself on a host without a GPU.
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
for file in tcp_speed xtask; do
  [ -x "$bin/$file" ] || { echo "$bin/$file is missing: run scripts/build-carry.sh first" >&2; exit 2; }
done

command='scripts/gpu-tcp-speed.sh OUT_DIR' mib=$((1 << 20)) much=10
gpus=0
if [ "$rehearse" = yes ]; then
  command='scripts/gpu-tcp-speed.sh --rehearse OUT_DIR' mib=$((1 << 12)) much=1
else
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
fi
case "$rehearse$gpus" in
  yes*) from=host to=host what='in host memory standing in for a GPU' ;;
  no0) echo 'no GPU here: nvidia-smi lists none (--rehearse tries the script with host memory)' >&2; exit 2 ;;
  no1) from=0 to=0 what='on one GPU' ;;
  *) from=0 to=1 what='between GPUs' ;;
esac
cores=$(nproc) lanes=12
[ "$cores" -lt 24 ] && lanes=$((cores > 4 ? cores / 2 : 1))

timeout --kill-after=5 400 "$bin/tcp_speed" --from "$from" --to "$to" --rounds "${ROUNDS:-5}" --out "$out" \
  --case "ping-8=ping:8:$((200 * much))" \
  --case "ping-4k=ping:4096:$((200 * much))" \
  --case "4m-1=stream:$((4 * mib)):1:$((30 * much))" \
  --case "4m-8=stream:$((4 * mib)):8:$((100 * much))" \
  --case "64m-1=stream:$((64 * mib)):1:$((4 * much))" \
  --case "256m-1=stream:$((256 * mib)):1:$((3 * much))" \
  --case "256m-2=stream:$((256 * mib)):2:$((3 * much))" \
  --case "1g-1=stream:$((1024 * mib)):1:$much" \
  --case "both-256m=both:$((256 * mib)):2:$((2 * much))" \
  --case "plain-cold=plain:$lanes:$mib:$((1600 * much * mib)):$((256 * mib))" \
  --case "plain-hot=plain:$lanes:$mib:$((1600 * much * mib)):$((lanes * mib))" \
  >"$out/runs.jsonl" 2>"$out/log.txt" </dev/null
status=$?
[ "$status" -eq 0 ] || { echo "tcp_speed ended with $status; $out/log.txt says why" >&2; tail -3 "$out/log.txt" >&2; }

machine="$cores cores, Linux $(uname -r), loopback TCP"
if [ "$gpus" -gt 0 ]; then
  machine="$gpus x $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1), \
driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1), $machine"
fi

rows=()
# row NAME UNIT POINTER CASE: what the kept runs of a case say.
row() {
  local found=("$out/$4".*.json)
  [ -e "${found[0]}" ] && rows+=(--row "$1" "$2" "$3" "${found[@]}")
}
rate=/gb_per_second
row '8 B, half round trip, p50' us /latency_us/p50 ping-8
row '8 B, half round trip, p99' us /latency_us/p99 ping-8
row '4 KiB, half round trip, p50' us /latency_us/p50 ping-4k
row '4 KiB, half round trip, p99' us /latency_us/p99 ping-4k
row '4 MiB, one at a time' GB/s "$rate" 4m-1
row '4 MiB, 8 in flight' GB/s "$rate" 4m-8
row '64 MiB, one at a time' GB/s "$rate" 64m-1
row '256 MiB, one at a time' GB/s "$rate" 256m-1
row '256 MiB, 2 in flight' GB/s "$rate" 256m-2
row '1 GiB, one at a time' GB/s "$rate" 1g-1
row '256 MiB, both directions at once, 2 in flight each, sum' GB/s "$rate" both-256m
row "plain sockets, $lanes lanes, over 256 MiB of host memory" GB/s "$rate" plain-cold
row "plain sockets, $lanes lanes, each over 1 MiB of host memory" GB/s "$rate" plain-hot
if [ "${#rows[@]}" -gt 0 ]; then
  "$bin/xtask" bench-collect --out "$out/15-gpu-tcp-speed.json" \
    --subject "Embedded network, $what, beside plain sockets" --date "$(date -u +%F)" \
    --machine "$machine" --command "$command" --cpu /cpu_seconds_per_gb \
    --note 'A run is one start of both programs; the cases follow each other in each of them.' \
    --note 'Both programs run on one host and share its cores and memory; the network is the loopback interface.' \
    --note 'Plain sockets: a thread a lane and side, blocking calls of 1 MiB; they move host memory and no GPU is involved.' \
    "${rows[@]}" || status=1
fi
exit "$status"

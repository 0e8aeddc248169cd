#!/usr/bin/env bash
# The embedded network between GPUs, every figure beside plain sockets and NCCL's own of the same run:
# scripts/gpu-tcp-speed.sh [--rehearse] OUT_DIR
#
# Needs the folder that scripts/build-carry.sh made (TCPX_BIN, default .carry): no Cargo, no compiler,
# no network. OUT_DIR gets 15-gpu-tcp-speed.json (format: benchmarks/README.md), runs/ with one JSON file
# for each measurement, and log.txt. Each round starts all programs anew; `tcpx bench net` verifies contents
# in poisoned destinations before it times anything. ROUNDS (default 5) sets how many; it ends within 8
# minutes and takes fewer rounds where those do not suffice.
#
# With two GPUs and PyTorch (PYTHON, default python3) NCCL's send/recv over its own sockets takes part; with four GPUs,
# so does the full mesh of four. --rehearse takes small sizes.
set -uo pipefail

here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=gpu_run.sh
. "$here/gpu_run.sh"
begin 450 'tcpx xtask' "$@"
python=${PYTHON:-python3}
runs=$out/runs
rm -rf "$runs"
mkdir "$runs" || exit 2
mib=$((1 << 20)) span=300ms
[ "$rehearse" = yes ] && mib=$((1 << 12)) span=30ms
lanes=12
[ "$cores" -lt 24 ] && lanes=$((cores > 4 ? cores / 2 : 1))

# ours ROUND
ours() {
  into=$out/tcpx.$1.txt step "tcpx.$1" 120 "$bin/tcpx" bench net --from "$from" --to "$to" \
    --rounds 1 --span "$span" --peer raw --runs "$runs" \
    --case ping-8=latency:8 \
    --case ping-4k=latency:4096 \
    --case ping-64k=latency:65536 \
    --case "4m-1=one:$((4 * mib)):1" \
    --case "4m-8=one:$((4 * mib)):8" \
    --case "hot=one:$((lanes * mib)):1" \
    --case "64m-1=one:$((64 * mib)):1" \
    --case "256m-1=one:$((256 * mib)):1" \
    --case "256m-2=one:$((256 * mib)):2" \
    --case "both-256m=both:$((256 * mib)):2" \
    --case "1g-1=one:$((1024 * mib)):1"
}

# nccl NAME ROUND ENVIRONMENT...: a process for each of two GPUs.
port=29800
nccl() {
  local name=$1 round=$2
  shift 2
  port=$((port + 10))
  export MASTER_PORT=$port
  # shellcheck disable=SC2016 # the inner shell's own variables
  into=$out/$name.$round.txt step "$name.$round" 75 env WORLD_SIZE=2 "$@" bash -c '
    RANK=1 "$@" >&2 &
    other=$!
    trap "kill $other 2>/dev/null" EXIT
    RANK=0 "$@" && wait "$other"' - \
    "$python" "$here/nccl_check.py" --operations send-recv --time 8,4096,65536,268435456 || return
  grep '^{' "$out/$name.$round.txt" | tail -n 1 >"$runs/$name.$round.json"
}

others=no
if [ "$gpus" -lt 2 ]; then
  echo "no NCCL beside it: it needs two GPUs, not $gpus" | tee -a "$log"
elif ! "$python" -c 'import torch; assert torch.cuda.device_count() >= 2' 2>>"$log"; then
  echo "no NCCL beside it: $python has no PyTorch with two GPUs" | tee -a "$log"
else
  others=yes
  # shellcheck source-path=SCRIPTDIR source=nccl_environment.sh
  . "$here/nccl_environment.sh"
fi
# Rounds outermost, so that a slow minute of the machine does not fall on one row alone.
for ((round = 1; round <= ${ROUNDS:-5}; round++)); do
  ours "$round" || break
  # Starting NCCL takes several times as long as measuring it.
  if [ "$others" = yes ] && [ "$round" -le 3 ]; then
    nccl nccl-default "$round" "${sockets[@]}"
    nccl nccl-tuned "$round" "${tuned[@]}"
  fi
done
if [ "$gpus" -ge 4 ] || [ "$rehearse" = yes ]; then
  into=$runs/mesh.json step mesh 90 env CUDA_VISIBLE_DEVICES=0,1,2,3 \
    "$bin/tcpx" perf --size "$((256 * mib))" --rounds 10 --json || rm -f "$runs/mesh.json"
else
  echo "no mesh of four: it needs four GPUs, not $gpus" | tee -a "$log"
fi

rows=()
# row NAME UNIT POINTER CASE: what the kept runs of a case say, if each says it: few times have no p99.
row() {
  local found=("$runs/$4".*json)
  [ -e "${found[0]}" ] && ! grep -q "\"${3##*/}\": *null" "${found[@]}" && rows+=(--row "$1" "$2" "$3" "${found[@]}")
}
rate=/gb_per_second
for case in 'ping-8 8 B' 'ping-4k 4 KiB' 'ping-64k 64 KiB'; do
  size=${case#* }
  case=${case%% *}
  row "$size, half round trip, p50" us /latency_us/p50 "$case.tcpx"
  row "$size, half round trip, p99" us /latency_us/p99 "$case.tcpx"
  row "$size, half round trip, p50: plain sockets that sleep, host memory" us /latency_us/p50 "$case.raw"
  row "$size, half round trip, p50: plain sockets that spin, host memory" us /latency_us/p50 "$case.raw-spinning"
done
row '4 MiB, one at a time' GB/s "$rate" 4m-1.tcpx
row '4 MiB, 8 in flight' GB/s "$rate" 4m-8.tcpx
row '64 MiB, one at a time' GB/s "$rate" 64m-1.tcpx
row '256 MiB, one at a time' GB/s "$rate" 256m-1.tcpx
row '256 MiB, 2 in flight' GB/s "$rate" 256m-2.tcpx
row '1 GiB, one at a time' GB/s "$rate" 1g-1.tcpx
row '256 MiB, both directions at once, 2 in flight each, sum' GB/s "$rate" both-256m.tcpx
row "plain sockets, $lanes lanes, over 256 MiB of host memory" GB/s "$rate" 256m-1.raw
row "plain sockets, $lanes lanes, each over 1 MiB of host memory" GB/s "$rate" hot.raw
row "plain sockets, $lanes lanes, both directions at once over 512 MiB each, sum" GB/s "$rate" both-256m.raw
for name in default tuned; do
  how='as it comes'
  [ "$name" = tuned ] && how='as tuned best for large messages'
  row "NCCL over its own sockets, $how: 8 B, half round trip, p50" us /rows/0/us "nccl-$name"
  row "NCCL over its own sockets, $how: 4 KiB, half round trip, p50" us /rows/1/us "nccl-$name"
  row "NCCL over its own sockets, $how: 64 KiB, half round trip, p50" us /rows/2/us "nccl-$name"
  row "NCCL over its own sockets, $how: 256 MiB, streaming" GB/s /rows/3/gb_per_second "nccl-$name"
done
if [ -s "$runs/mesh.json" ]; then
  while IFS=$'\t' read -r at name; do
    row "full mesh, 256 MiB: $name" GB/s "/rows/$at/median" mesh
  done < <(python3 - "$runs/mesh.json" <<'PY'
import json, sys

rows = list(enumerate(json.load(open(sys.argv[1]))["rows"]))
at_once = [one for one in rows if one[1]["name"].endswith(", all at once")]
at, _ = min(at_once, key=lambda one: one[1]["median"])
print(at, f"the slowest of {len(at_once)} pairs at once", sep="\t")
for at, row in rows:
    if "->" not in row["name"]:
        print(at, row["name"], sep="\t")
PY
  )
fi
if [ "${#rows[@]}" -gt 0 ]; then
  "$bin/xtask" bench-collect --out "$out/15-gpu-tcp-speed.json" \
    --subject "Embedded network, $what, beside plain sockets" --date "$(date -u +%F)" \
    --machine "$machine" --command "$command" --cpu /cpu_seconds_per_gb \
    --note 'A run is one start of both programs with all cases; plain sockets follow each case.' \
    --note 'All programs run on one host and share its cores and memory; the network is the loopback interface.' \
    --note 'Plain sockets: one thread per lane and side, calls of at most 1 MiB, the same congestion control, host memory.' \
    "${rows[@]}" || failed=$((failed + 1))
fi
finish

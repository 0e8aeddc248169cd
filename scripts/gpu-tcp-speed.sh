#!/usr/bin/env bash
# The embedded network between GPUs, every figure beside plain sockets and NCCL's own of the same
# run: scripts/gpu-tcp-speed.sh [--rehearse] OUT_DIR
#
# Needs the folder that scripts/build-carry.sh made (TCPX_BIN, default .carry): no Cargo, no
# compiler, no network. OUT_DIR gets 15-gpu-tcp-speed.json (format: benchmarks/README.md), runs/
# with the report of each start, and log.txt. Each round starts all programs anew; `tcpx bench net`
# verifies contents in poisoned destinations before it times anything. ROUNDS (default 5) sets how
# many; it ends within 8 minutes and takes fewer rounds where those do not suffice.
#
# With two GPUs and PyTorch (PYTHON, default python3) NCCL's send/recv over its own sockets takes
# part. --rehearse takes small sizes.
set -uo pipefail

here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=gpu_run.sh
. "$here/gpu_run.sh"
begin 450 'tcpx' "$@"
python=${PYTHON:-python3}
runs=$out/runs
rm -rf "$runs"
mkdir "$runs" || exit 2
mib=$((1 << 20)) span=300ms
[ "$rehearse" = yes ] && mib=$((1 << 12)) span=30ms

# ours NAME ROUND FLAGS...
ours() {
  local name=$1.$2
  shift 2
  into=$runs/$name.json step "$name" 60 "$bin/tcpx" bench net --from "$from" --to "$to" \
    --rounds 1 --span "$span" --peer raw --json "$@"
}

# nccl NAME ROUND LABEL ENVIRONMENT...: a process for each of two GPUs.
port=29800
nccl() {
  local name=$1 round=$2 label=$3
  shift 3
  port=$((port + 10))
  export MASTER_PORT=$port
  # shellcheck disable=SC2016 # the inner shell's own variables
  step "$name.$round" 75 env WORLD_SIZE=2 "$@" bash -c '
    RANK=1 "$@" >&2 &
    other=$!
    trap "kill $other 2>/dev/null" EXIT
    RANK=0 "$@" && wait "$other"' - \
    "$python" "$here/nccl_check.py" --operations send-recv --time 8,4096,65536,268435456 \
    --label "$label" --report "$runs/$name.$round.json"
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
  ours latency "$round" --modes latency --sizes 8,4096,65536 || break
  ours sizes "$round" --modes one --sizes $((4 * mib)),$((64 * mib)),$((1024 * mib)) --in-flight 1,8 || break
  ours both "$round" --modes one,both --sizes $((256 * mib)) --in-flight 1,2 || break
  # Starting NCCL takes several times as long as measuring it.
  if [ "$others" = yes ] && [ "$round" -le 3 ]; then
    nccl nccl-default "$round" "NCCL's sockets, default" "${sockets[@]}"
    nccl nccl-tuned "$round" "NCCL's sockets, 16 channels" "${tuned[@]}"
  fi
done
collect 15-gpu-tcp-speed.json "Embedded network, $what, beside plain sockets" "$runs" \
  'A run is one start of all programs; plain sockets follow each case, with a thread for each end of each stream, over host memory.'
finish

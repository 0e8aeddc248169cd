#!/usr/bin/env bash
# Real NCCL over libnccl-net-tcpx.so on a host with two GPUs and PyTorch: scripts/gpu-nccl.sh
# OUT_DIR
#
# Contents first (with four GPUs also among four), with host pointers and with CUDA pointers, both
# also encrypted, and while connections are reset; then what ends badly: a communicator aborted and
# made again, a peer killed amid a collective. Then times: ours, ours with CUDA pointers, ours
# encrypted, NCCL's own sockets by default, and as tuned best. P2P and shared memory are off, so
# that every byte passes the network. TCPX_BIN (default .carry) is the folder with
# libnccl-net-tcpx.so and tcpx; PYTHON (default python3) has PyTorch. Ends within 8 minutes and
# exits with 1 if anything failed. OUT_DIR gets 40-nccl.json (format: benchmarks/README.md) and the
# logs. ROUNDS (default 3) sets how often times are taken; TCPX_NCCL_QUICK=1 checks small sizes only
# and takes one round of times; TCPX_NCCL_ONLY=check-cuda,ours,... takes those steps alone.
set -uo pipefail

if [ $# -ne 1 ]; then
  echo "usage: $0 OUT_DIR" >&2
  exit 2
fi
here=$(dirname "$(realpath "$0")")
bin=$(realpath "${TCPX_BIN:-.carry}")
plugin=$bin/libnccl-net-tcpx.so
python=${PYTHON:-python3}
mkdir -p "$1" || exit 2
out=$(realpath "$1")
[ -r "$plugin" ] || { echo "$plugin is missing: set TCPX_BIN to its folder" >&2; exit 2; }
"$python" -c 'import torch; assert torch.cuda.device_count() >= 2' || {
  echo 'needs PyTorch and two GPUs' >&2
  exit 2
}

# shellcheck source-path=SCRIPTDIR source=nccl_environment.sh
. "$here/nccl_environment.sh"
budget=${TCPX_NCCL_SECONDS:-460} port=29600 failed=0
ours=(NCCL_NET_PLUGIN="$plugin" NCCL_NET=TCPX)
# Without the second variable a kernel's first launch amid a collective stops both for ever
# (docs/nccl.md).
cuda=("${ours[@]}" TCPX_NET_DEVICE=cuda CUDA_MODULE_LOADING=EAGER)

# A key of its own for this run.
rm -f "$out/key"
"$bin/tcpx" key "$out/key" >/dev/null || exit 2
sealed=(TCPX_KEY="$(cat "$out/key")" TCPX_ENCRYPT=1)
rm "$out/key"

# is_wanted STEP: whether TCPX_NCCL_ONLY, if there is one, names it.
is_wanted() { [[ -z "${TCPX_NCCL_ONLY:-}" || ",$TCPX_NCCL_ONLY," == *",$1,"* ]]; }

# ranks COUNT NAME SECONDS "WORDS" ENVIRONMENT...: a process for each GPU, all of which must
# succeed, but for the second where NAME is killed.
ranks() {
  local world=$1 name=$2 seconds=$3 words=$4 rc=0 one rank pids=() start=$SECONDS
  shift 4
  # Left out: neither passed nor failed.
  is_wanted "${name%%.*}" || return 2
  [ "$seconds" -gt $((budget - SECONDS)) ] && seconds=$((budget - SECONDS))
  if [ "$seconds" -le 1 ]; then
    echo "$name: no time left" | tee -a "$out/steps.txt"
    failed=$((failed + 1))
    return 1
  fi
  port=$((port + 10))
  for ((rank = 0; rank < world; rank++)); do
    # Words on purpose: options and sizes hold no spaces of their own.
    # shellcheck disable=SC2086
    env "$@" RANK="$rank" WORLD_SIZE="$world" MASTER_PORT="$port" \
      timeout --kill-after=5 "$seconds" \
      "$python" "$here/nccl_check.py" $words >"$out/$name.$rank.out" 2>"$out/$name.$rank.err" &
    pids+=($!)
  done
  for ((rank = 0; rank < world; rank++)); do
    one=0
    wait "${pids[$rank]}" || one=$?
    [ "$name.$rank.$one" = killed.1.137 ] || [ "$one" -eq 0 ] || rc=$one
  done
  if [ "$rc" -ne 0 ]; then
    failed=$((failed + 1))
    for ((rank = 0; rank < world; rank++)); do tail -n 25 "$out/$name.$rank".{out,err}; done
  else
    grep '^{' "$out/$name.0.out" | tail -n 1 >"$out/$name.json"
  fi
  printf '%-28s %4d s  %s\n' "$name" $((SECONDS - start)) \
    "$([ "$rc" -eq 0 ] && echo passed || echo "FAILED ($rc)")" | tee -a "$out/steps.txt"
  return "$rc"
}

# pair NAME SECONDS "WORDS" ENVIRONMENT...
pair() { ranks 2 "$@"; }

# says TEXT: NCCL's log of the last step has such a line; the log is kept.
says() {
  if ! grep -h -m 1 "$1" "$out"/nccl.*.log; then
    echo "NCCL's log has no line with: $1" | tee -a "$out/steps.txt"
    failed=$((failed + 1))
  fi
  cat "$out"/nccl.*.log >>"$out/nccl.txt"
  rm -f "$out"/nccl.*.log
}

: >"$out/steps.txt"
: >"$out/nccl.txt"
small=8,24,1000,65532,65536,1048576,4194304
large=8,4096,65536,1048576,16777216,67108864,268435456,1073741824
times=1048576,16777216,67108864,268435456,1073741824
short=8,4096,65536
rounds=${ROUNDS:-3} communicators=4
if [ -n "${TCPX_NCCL_QUICK:-}" ]; then large=$small rounds=1 communicators=1; fi

pair check 120 "--check $large" "${ours[@]}" NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$out/nccl.%p.log"
if is_wanted check; then says 'Using network TCPX'; fi
pair check-cuda 120 "--check $large" "${cuda[@]}" NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$out/nccl.%p.log"
if is_wanted check-cuda; then says 'via NET/TCPX/./GDRDMA'; fi
pair encrypted 60 "--check $large" "${ours[@]}" "${sealed[@]}"
pair encrypted-cuda 60 "--check $small,67108864" "${cuda[@]}" "${sealed[@]}"
# The last communicator ends and a new one begins in the same processes. NCCL unloads the plugin in
# between and then looks for a file of the default name, hence the link and the search path.
ln -sf "$plugin" "$out/libnccl-net.so"
pair recreate 60 "--check $small --rounds 2" -u NCCL_NET_PLUGIN NCCL_NET=TCPX LD_LIBRARY_PATH="$out:${LD_LIBRARY_PATH:-}"
pair recreate-kept 60 "--check $small --rounds 2" "${ours[@]}" NCCL_NET_PLUGIN_REF_COUNT=1
rm -f "$out/libnccl-net.so"

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -ge 4 ]; then
  ranks 4 check4 90 "--check $small,67108864" "${ours[@]}"
fi
# A lane that is reset loses nothing, whatever is under way on it.
for name in cut encrypted-cut; do
  how=("${ours[@]}" NCCL_DEBUG=WARN)
  [ "$name" = cut ] || how+=("${sealed[@]}")
  if pair "$name" 60 "--check 67108864,268435456 --repeats 8 --cut-lanes 0.1" "${how[@]}"; then
    "$python" -c 'import json, sys
print("  %d connections reset amid collectives" % json.load(open(sys.argv[1]))["lanes_cut"])' \
      "$out/$name.json" | tee -a "$out/steps.txt"
  fi
done
# PyTorch must not end the process that hears first of the other's abort.
if pair abort 60 "--abort --check $small" "${ours[@]}" NCCL_NET_PLUGIN_REF_COUNT=1 \
  TORCH_NCCL_ASYNC_ERROR_HANDLING=0; then
  "$python" -c 'import json, sys
print("  aborted amid an all-reduce in %.1f s" % json.load(open(sys.argv[1]))["abort_seconds"])' \
    "$out/abort.json" | tee -a "$out/steps.txt"
fi
# The survivor reports how long it took to hear of the death, and in which words.
rm -f "$out/killed.at"
if pair killed 60 "--lose-peer $out/killed.at" "${ours[@]}" TORCH_NCCL_BLOCKING_WAIT=1 \
  TORCH_NCCL_ASYNC_ERROR_HANDLING=0 NCCL_DEBUG=WARN; then
  "$python" - "$out/killed.json" <<'END' | tee -a "$out/steps.txt"
import json, sys
report = json.load(open(sys.argv[1]))
print(f"  a dead peer is an error of NCCL after {report['error_seconds']:.1f} s: {report['error']}")
sys.exit(report["error_seconds"] > 30)
END
  [ "${PIPESTATUS[0]}" -eq 0 ] || failed=$((failed + 1))
fi

# Rounds outermost, so that a slow minute of the machine does not fall on one row alone. Which cores
# NCCL's threads get when a communicator is made changes a short message's time by half or more,
# whoever carries it, so those are taken over several communicators of each start.
rm -rf "$out/runs"
mkdir "$out/runs"
# timed NAME ROUND WORDS LABEL ENVIRONMENT...
timed() {
  local name=$1.$2 words=$3 label=$4
  shift 4
  # The label has spaces: it goes by the environment.
  pair "$name" 60 "$words --report $out/runs/$name.json" NCCL_CHECK_LABEL="$label" "$@"
}
for ((round = 1; round <= rounds; round++)); do
  timed ours "short$round" "--time $short --rounds $communicators" "tcpx, untuned" "${ours[@]}" NCCL_NET_PLUGIN_REF_COUNT=1
  timed default "short$round" "--time $short --rounds $communicators" "NCCL's sockets, default" "${sockets[@]}"
  timed tuned "short$round" "--time $short --rounds $communicators" "NCCL's sockets, 16 channels" "${tuned[@]}"
  timed cuda "short$round" "--time $short --rounds $communicators" "tcpx, CUDA pointers" "${cuda[@]}" NCCL_NET_PLUGIN_REF_COUNT=1
  timed sealed "short$round" "--time $short --rounds $communicators" "tcpx, encrypted" "${ours[@]}" "${sealed[@]}" NCCL_NET_PLUGIN_REF_COUNT=1
done
for ((round = 1; round <= rounds; round++)); do
  timed ours "$round" "--time $times" "tcpx, untuned" "${ours[@]}"
  timed cuda "$round" "--time $times" "tcpx, CUDA pointers" "${cuda[@]}"
  timed sealed "$round" "--time $times" "tcpx, encrypted" "${ours[@]}" "${sealed[@]}"
  timed default "$round" "--time $times" "NCCL's sockets, default" "${sockets[@]}"
  timed tuned "$round" "--time $times" "NCCL's sockets, 16 channels" "${tuned[@]}"
done

if is_wanted ours || is_wanted cuda || is_wanted sealed || is_wanted default || is_wanted tuned; then
  "$bin/tcpx" bench show "$out"/runs/*.json --json --subject 'NCCL over this network and over its own sockets' \
    --machine "$gpus x $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1), $(nproc) cores, Linux $(uname -r), loopback TCP" \
    --command 'scripts/gpu-nccl.sh OUT_DIR' \
    --note 'P2P and shared memory are off, so that every byte passes the network. All-reduce: bus bandwidth of two ranks. A run is one start of both ranks.' \
    --note 'Both processes run on one host and share its cores; the network is the loopback interface.' \
    >"$out/40-nccl.json" && "$bin/tcpx" bench show "$out/40-nccl.json" || failed=$((failed + 1))
fi
echo "$failed steps failed"
[ "$failed" -eq 0 ]

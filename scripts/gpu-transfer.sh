#!/usr/bin/env bash
# Correctness, then figures, on a host with GPUs: scripts/gpu-transfer.sh [--rehearse] OUT_DIR
#
# Needs the folder that scripts/build-carry.sh made (TCPX_BIN, default .carry), and nothing else: no
# Cargo, no compiler, no network. Ends within 8 minutes, goes on after a failed step, and exits with
# 1 if any failed. OUT_DIR gets one JSON file for each subject (format: benchmarks/README.md), the
# table of steps (steps.txt) and everything that was printed (log.txt).
# --rehearse takes small sizes.
set -uo pipefail

here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=gpu_run.sh
. "$here/gpu_run.sh"
begin 460 'tcpx xtask libnccl-net-tcpx.so' "$@"
plugin=$bin/libnccl-net-tcpx.so
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT

# Where `tcpx perf --json` has its figures.
rate=/gb_per_second
latency=/latency_us/p50
cpu=/cpu_seconds_per_gb

port=23450
small=4KiB large=64MiB huge=256MiB odd=67108867 rounds=5
[ "$rehearse" = yes ] && large=1MiB huge=4MiB odd=1048579 rounds=2
memory() { if [ "$1" = host ]; then echo '--host'; else echo "--gpu $1"; fi; }

# A server's key, which both sides may use.
keys=$(mktemp -d)
"$bin/tcpx" key "$keys/key" >/dev/null || exit 1
TCPX_KEY=$(cat "$keys/key")
rm -r "$keys"
export TCPX_KEY

# listening PORT PID: waits until a socket listens there, the process ends, or 30 s are over.
listening() {
  local wanted end=$((SECONDS + 30))
  wanted=$(printf ':%04X' "$1")
  while [ "$SECONDS" -lt "$end" ] && kill -0 "$2" 2>/dev/null; do
    cat /proc/net/tcp /proc/net/tcp6 2>/dev/null |
      awk -v port="$wanted" '$4 == "0A" && $2 ~ port "$" { found = 1 } END { exit !found }' && return
    sleep 0.05
  done
  echo "nothing listened on port $1" >>"$log"
  return 1
}

# pair LIMIT STDOUT SERVER_WORDS CLIENT_WORDS: two tcpx processes, both of which must succeed. The
# client's standard output goes to the file STDOUT, and to the log.
pair() {
  local seconds=$1 stdout=$2 server=$3 client=$4 server_pid server_rc client_rc=1 end
  port=$((port + 1))
  local common=(--port "$port" --timeout 20s)
  printf '\n$ tcpx %s\n$ tcpx %s\n' "$server" "$client" >>"$log"
  # Words on purpose: the arguments hold no spaces of their own.
  # shellcheck disable=SC2086
  timeout --kill-after=5 "$(limit "$seconds")" "$bin/tcpx" $server --bind 127.0.0.1 --wait 60s \
    "${common[@]}" >"$runs/server" 2>&1 </dev/null &
  server_pid=$!
  if listening "$port" "$server_pid"; then
    # shellcheck disable=SC2086
    timeout --kill-after=5 "$(limit "$seconds")" "$bin/tcpx" $client \
      "${common[@]}" >"$stdout" 2>"$runs/client" </dev/null
    client_rc=$?
  fi
  if [ "$client_rc" -ne 0 ]; then
    # Time to say why, not more: it may be waiting for a client that will not come.
    end=$((SECONDS + 5))
    while [ "$SECONDS" -lt "$end" ] && kill -0 "$server_pid" 2>/dev/null; do sleep 0.1; done
    kill "$server_pid" 2>/dev/null
  fi
  wait "$server_pid"
  server_rc=$?
  cat "$runs/server" "$runs/client" "$stdout" >>"$log" 2>/dev/null
  [ "$client_rc" -ne 0 ] && return "$client_rc"
  return "$server_rc"
}

# transfer NAME EXTRA_WORDS: the greeting, then an odd number of bytes, from $from to $to.
transfer() {
  local name=$1 extra=$2 start bytes rc
  for bytes in 23 "$odd"; do
    start=$SECONDS
    UCCL_TCPX_PAYLOAD_BYTES=$bytes pair 60 "$runs/transfer" \
      "transfer server $(memory "$to") $extra" "transfer 127.0.0.1 $(memory "$from") $extra"
    rc=$?
    record "transfer, $name, $bytes bytes" $((SECONDS - start)) "$rc"
  done
}

# perf ID SIZE ITERATIONS FROM TO EXTRA_WORDS: one run, kept as $runs/ID.ROUND.json if it succeeded.
perf() {
  local id=$1 file=$runs/$1.$round.json
  UCCL_TCPX_PERF_SIZE=$2 UCCL_TCPX_PERF_ITERS=$3 pair 40 "$file" \
    "perf server $5 $6" "perf client 127.0.0.1 $4 --json $6" && return
  rm -f "$file"
  echo "$id" >>"$runs/failures"
}

# collect FILE SUBJECT COMMAND -- NAME UNIT POINTER ID ...: a benchmark file out of the kept runs.
collect() {
  local file=$1 subject=$2 command=$3 arguments=() found
  shift 4
  while [ $# -ge 4 ]; do
    found=("$runs/$4".*.json)
    if [ -e "${found[0]}" ]; then
      arguments+=(--row "$1" "$2" "$3" "${found[@]}")
    fi
    shift 4
  done
  step "write $file" 20 "$bin/xtask" bench-collect --out "$out/$file" --subject "$subject" \
    --date "$(date -u +%F)" --machine "$machine" --command "$command" --cpu "$cpu" \
    --note "One row is the median over separate starts of both programs; contents are verified in each." \
    --note "Both programs run on one host and share its cores; the network is the loopback interface." \
    "${arguments[@]}"
}

echo "$machine"
echo "from $from to $to"
echo

# -- correctness
step 'devices' 30 "$bin/tcpx" devices
if [ "$gpus" -gt 0 ]; then
  step 'memory, copies and unpackers (gpu_check)' 60 "$bin/gpu_check"
  step 'engine over tcp (engine_gpu_check)' 60 "$bin/engine_gpu_check" --gpus "$from,$to" --large
  step 'device memory of a GPU, a fake kernel for the card (devmem_gpu_check)' 60 "$bin/devmem_gpu_check" "$from"
  export TCPX_NET_DEVICE=unpack
  for pool in pinned gpu; do
    export TCPX_NET_POOL=$pool
    step "engine over the plugin, $pool pool (engine_gpu_check)" 60 "$bin/engine_gpu_check" --plugin "$plugin"
  done
  unset TCPX_NET_DEVICE TCPX_NET_POOL
fi
step 'demo' 90 "$bin/tcpx" demo --size "$huge" --plugin "$plugin"
transfer 'tcp' '--network tcp'
for unpack in host d2d kernel; do
  transfer "plugin, $unpack" "--network plugin --plugin $plugin --unpack $unpack"
done
if [ "$gpus" -gt 0 ]; then
  export TCPX_NET_POOL=gpu
  transfer 'plugin, kernel, pool in GPU memory' "--network plugin --plugin $plugin --unpack kernel"
  unset TCPX_NET_POOL
fi
if [ "$gpus" -gt 1 ]; then
  from=1 to=0 transfer 'tcp, back' '--network tcp'
  from=0 to=0 transfer 'tcp, one GPU' '--network tcp'
fi

# -- figures: rounds outermost, so that a slow minute of the machine does not fall on one row alone
start=$SECONDS
: >"$runs/failures"
for ((round = 1; round <= rounds; round++)); do
  # A round that would be cut off is not begun.
  [ "$round" -gt 1 ] && [ $(((SECONDS - start) / (round - 1) + 30)) -gt "$(left)" ] && break
  perf tcp-small "$small" 1000 "$from" "$to" '--network tcp'
  perf tcp-large "$large" 20 "$from" "$to" '--network tcp'
  perf tcp-huge "$huge" 10 "$from" "$to" '--network tcp'
  perf host-small "$small" 1000 host host '--network tcp'
  perf host-huge "$huge" 10 host host '--network tcp'
  for unpack in host d2d kernel; do
    perf "plugin-$unpack" "$large" 5 "$from" "$to" "--network plugin --plugin $plugin --unpack $unpack"
  done
done
rc=0
[ -s "$runs/failures" ] && rc=1
record "figures, $((round - 1)) rounds" $((SECONDS - start)) "$rc"
sort "$runs/failures" | uniq -c | sed 's/^/  failed runs: /' | tee -a "$steps"

collect 10-gpu-tcp.json "Embedded network, $what" "$command" -- \
  "$small, one transfer, p50" us "$latency" tcp-small \
  "$large" GB/s "$rate" tcp-large \
  "$huge" GB/s "$rate" tcp-huge
collect 20-gpu-plugin.json "Own plugin in device-unpack mode, $what" "$command" -- \
  "$large, unpacked by host" GB/s "$rate" plugin-host \
  "$large, unpacked by d2d" GB/s "$rate" plugin-d2d \
  "$large, unpacked by kernel" GB/s "$rate" plugin-kernel
collect 30-host-tcp.json 'Embedded network, host memory to host memory' "$command" -- \
  "$small, one transfer, p50" us "$latency" host-small \
  "$huge" GB/s "$rate" host-huge

# What is handed back stays small, however much was printed.
if [ "$(stat -c %s "$log")" -gt 8000000 ]; then
  tail -c 8000000 "$log" >"$runs/tail" && cp "$runs/tail" "$log"
fi
finish

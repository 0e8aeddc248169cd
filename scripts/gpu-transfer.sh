#!/usr/bin/env bash
# Correctness on a host with GPUs: scripts/gpu-transfer.sh [--rehearse] OUT_DIR
#
# Needs the folder that scripts/build-carry.sh made (TCPX_BIN, default .carry), and nothing else: no
# Cargo, no compiler, no network. Ends within 8 minutes, goes on after a failed step, and exits with
# 1 if any failed. OUT_DIR gets the table of steps (steps.txt) and everything that was printed
# (log.txt). --rehearse takes small sizes.
set -uo pipefail

here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=gpu_run.sh
. "$here/gpu_run.sh"
begin 460 'tcpx libnccl-net-tcpx.so libtcpx_double.so' "$@"
plugin=$bin/libnccl-net-tcpx.so
# A plugin that scatters payload over a pool, as Google's does.
double=$bin/libtcpx_double.so
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT

port=23450
huge=256MiB odd=67108867
[ "$rehearse" = yes ] && huge=4MiB odd=1048579
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

echo "$machine"
echo "from $from to $to"
echo

step 'devices' 30 "$bin/tcpx" devices
if [ "$gpus" -gt 0 ]; then
  step 'memory, copies and unpackers (gpu_check)' 60 "$bin/gpu_check"
  step 'engine over tcp (engine_gpu_check)' 60 "$bin/engine_gpu_check" --gpus "$from,$to" --large
  step 'device memory of a GPU, a fake kernel for the card (devmem_gpu_check)' 60 "$bin/devmem_gpu_check" "$from"
  for pool in pinned gpu; do
    step "engine over a plugin that scatters, $pool pool (engine_gpu_check)" 60 \
      env TCPX_DOUBLE_POOL="$pool" "$bin/engine_gpu_check" --plugin "$double"
  done
fi
step 'demo' 90 "$bin/tcpx" demo --size "$huge" --plugin "$plugin"
transfer 'tcp' '--network tcp'
transfer 'our plugin' "--network plugin --plugin $plugin"
pools='pinned gpu'
if [ "$gpus" -eq 0 ]; then
  # Host memory takes the GPU's place.
  export TCPX_NET_STANDIN=host
  pools=host
fi
for pool in $pools; do
  [ "$pool" = host ] || export TCPX_DOUBLE_POOL=$pool
  for unpack in host d2d kernel; do
    transfer "a plugin that scatters, $pool pool, $unpack" "--network plugin --plugin $double --unpack $unpack"
  done
done
unset TCPX_DOUBLE_POOL TCPX_NET_STANDIN
if [ "$gpus" -gt 1 ]; then
  from=1 to=0 transfer 'tcp, back' '--network tcp'
  from=0 to=0 transfer 'tcp, one GPU' '--network tcp'
fi

# What is handed back stays small, however much was printed.
if [ "$(stat -c %s "$log")" -gt 8000000 ]; then
  tail -c 8000000 "$log" >"$runs/tail" && cp "$runs/tail" "$log"
fi
finish

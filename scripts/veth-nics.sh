#!/usr/bin/env bash
# Several network cards between two hosts, made of virtual cables: scripts/veth-nics.sh [--rehearse] OUT_DIR
#
# Needs root, ip, tc, and the programs `tcpx` and `xtask` (TCPX_BIN, default target/release). Makes two network
# namespaces with four cables between them, shaped far below what the host can do, so that their rates and not
# its cores decide; both go at the end, whatever happens. OUT_DIR gets 50-veth-nics.json (format:
# benchmarks/README.md). Exits with 1 if a step failed, or if the cards together carried less than 0.9 of their
# sum. --rehearse does one round with small sizes.
set -uo pipefail

rounds=5 size=256 file=1024
[ "${1:-}" = --rehearse ] && { shift; rounds=1 size=32 file=256; }
if [ $# -ne 1 ]; then
  echo "usage: $0 [--rehearse] OUT_DIR" >&2
  exit 2
fi
bin=$(realpath "${TCPX_BIN:-target/release}")
for program in tcpx xtask; do
  [ -x "$bin/$program" ] || { echo "$bin/$program is missing: cargo build --release -p tcpx-cli -p xtask" >&2; exit 2; }
done
mkdir -p "$1" || exit 2
out=$(realpath "$1")

# Of a card, and of the slow one, in Mb/s.
rate=800 slow=80
a=tcpx-veth-$$-a b=tcpx-veth-$$-b
work=$(mktemp -d)
server='' cutter=''
clean() {
  [ -n "$server" ] && kill "$server" 2>/dev/null
  [ -n "$cutter" ] && kill "$cutter" 2>/dev/null
  ip netns del "$a" 2>/dev/null
  ip netns del "$b" 2>/dev/null
  rm -rf "$work"
}
trap clean EXIT
fail() { echo "$*" >&2; exit 1; }

shape() { # NIC MBIT
  for host in "$a" "$b"; do
    tc -n "$host" qdisc replace dev "$1" root tbf rate "$2mbit" burst 256k latency 20ms || fail "tc refused to shape $1"
  done
}
for host in "$a" "$b"; do
  ip netns add "$host" && ip -n "$host" link set lo up || fail 'no network namespace: this needs root'
done
for n in 0 1 2 3; do
  ip link add "nic$n" netns "$a" type veth peer name "nic$n" netns "$b" || fail "no cable $n"
  for end in "$a 1" "$b 2"; do
    set -- $end
    ip -n "$1" addr add "10.77.$n.$2/24" dev "nic$n" && ip -n "$1" link set "nic$n" up || fail "no address for cable $n"
  done
  shape "nic$n" "$rate"
done

# A server's key, which both sides may use.
keys=$(mktemp -d)
"$bin/tcpx" key "$keys/key" >/dev/null || exit 1
TCPX_KEY=$(cat "$keys/key")
rm -r "$keys"
export TCPX_KEY

# serve ARGUMENT...: a server on host b, until it listens.
serve() {
  ip netns exec "$b" timeout 120 "$bin/tcpx" "$@" >"$work/server" 2>&1 &
  server=$!
  for _ in $(seq 100); do
    grep -q '^listening on' "$work/server" && return
    sleep 0.1
  done
  cat "$work/server" >&2
  fail 'the server does not listen'
}
served() {
  wait "$server" || { cat "$work/server" >&2; fail 'the server failed'; }
  server=
}
# perf FILE MIB ARGUMENT...: what verified transfers of so many MiB reach.
perf() {
  local to=$1 mib=$2
  shift 2
  serve perf server host
  ip netns exec "$a" timeout 120 "$bin/tcpx" perf client 10.77.0.2 host --size "${mib}MiB" --iterations 3 --json "$@" >"$to" ||
    fail 'the client failed'
  served
}
# part OF FACTOR ONE TO: the rate in OF as a part of FACTOR times that in ONE.
part() {
  awk -v factor="$2" '
    { if (match($0, /"gb_per_second": *[0-9.e+-]+/)) { split(substr($0, RSTART, RLENGTH), field, ":"); rate[FILENAME] = field[2] } }
    END { printf "{\"part\": %.4f}\n", rate[ARGV[1]] / (factor * rate[ARGV[2]]) }' "$1" "$3" >"$4"
}
carried() { ip netns exec "$a" cat "/sys/class/net/$1/statistics/tx_bytes"; }

# lose NIC TO: how long a file takes that loses a card on its way; it arrives only if its digest is right.
lose() {
  local nic=$1 before started ended
  mkdir "$work/arrived"
  serve transfer server --out "$work/arrived"
  before=$(carried "$nic")
  (
    # A quarter of the card's share has gone.
    until [ $(($(carried "$nic") - before)) -gt $((file * 65536)) ]; do sleep 0.01; done
    ip -n "$a" link set "$nic" down
    ip -n "$b" link set "$nic" down
    touch "$2.was-cut"
  ) &
  cutter=$!
  started=$(date +%s%N)
  ip netns exec "$a" timeout 120 "$bin/tcpx" transfer 10.77.0.2 --file "$work/file" >"$work/client" 2>&1 ||
    { cat "$work/client" >&2; fail 'the transfer did not survive the cut'; }
  ended=$(date +%s%N)
  served
  [ -e "$2.was-cut" ] || fail 'the transfer ended before the cut'
  wait "$cutter"
  cutter=
  cmp "$work/file" "$work/arrived/file" || fail 'something else arrived'
  rm -r "$work/arrived"
  awk -v ns=$((ended - started)) 'BEGIN { printf "{\"seconds\": %.3f}\n", ns / 1e9 }' >"$2"
  for host in "$a" "$b"; do ip -n "$host" link set "$nic" up; done
}

head -c "${file}M" /dev/urandom >"$work/file" || fail 'no room for a file'
for round in $(seq "$rounds"); do
  echo "round $round of $rounds"
  perf "$work/one.$round" $((size / 4)) --interfaces =nic0
  perf "$work/four.$round" "$size"
  part "$work/four.$round" 4 "$work/one.$round" "$work/four-part.$round"
  shape nic3 "$slow"
  perf "$work/slow.$round" "$size"
  part "$work/slow.$round" 3.1 "$work/one.$round" "$work/slow-part.$round"
  shape nic3 "$rate"
  lose nic2 "$work/cut.$round"
  # The one that the control connection is on.
  lose nic0 "$work/control.$round"
done

runs() { for round in $(seq "$rounds"); do printf '%s ' "$work/$1.$round"; done; }
# shellcheck disable=SC2046 # every run is a word
"$bin/xtask" bench-collect --out "$out/50-veth-nics.json" \
  --subject 'Several network cards of one host (virtual cables)' \
  --date "$(date -u +%F)" \
  --machine "host memory, $(nproc) cores, Linux $(uname -r), 4 cables between two network namespaces, $rate Mb/s each" \
  --command 'scripts/veth-nics.sh OUT_DIR' \
  --note "Cables are shaped (tbf) far below what the cores can do. A row is the median over starts of both programs; perf verifies contents first, a file's digest is compared at its end." \
  --note "The sum is what one card reached alone in the same round, times four, or times 3.1 with one of a tenth of the rate." \
  --row "one card, $((size / 4)) MiB" GB/s /gb_per_second $(runs one) \
  --row "four cards, $size MiB" GB/s /gb_per_second $(runs four) \
  --row 'four cards: part of the sum' 'x' /part $(runs four-part) \
  --row "three cards and one of a tenth of the rate, $size MiB" GB/s /gb_per_second $(runs slow) \
  --row 'three cards and one of a tenth: part of the sum' 'x' /part $(runs slow-part) \
  --row "file of $file MiB over four cards of which one is cut in the middle" s /seconds $(runs cut) \
  --row "the same, and the cut card is that of the control connection" s /seconds $(runs control) || exit 1
awk '/"name"/ { short = /part of the sum/ } /"median"/ && short { split($0, field, /[:,]/); if (field[2] < 0.9) { print "less than 0.9 of the sum: " field[2]; bad = 1 } } END { exit bad }' \
  "$out/50-veth-nics.json"

#!/usr/bin/env bash
# Real NCCL over libnccl-net-tcpx.so with both ranks on one GPU: scripts/gpu-nccl-one.sh OUT_DIR
#
# For each release of NCCL in TCPX_BIN (default .carry; scripts/carry-nccl.sh fills it): contents
# first, with what NCCL chose for each size; then times of all-reduces, with our tuner and without
# it, beside NCCL's own sockets by default and as tuned for large messages. Last, with the newest
# release, times for fixed numbers of channels and for protocol LL, by which the tuner's table is
# chosen. Needs NCCL 2.30 or newer, PyTorch (PYTHON, default python3), and the multi-process
# service, without which two processes take turns of 2 ms at a GPU. Releases may come by several
# copies: what lies in TCPX_BIN is copied to KEEP (default /root/nccl), and VERSIONS (default: all
# in KEEP) are measured.
#
# Ends within 9 minutes (BUDGET, seconds) and exits with 1 if a step failed or a figure missed its
# mark. OUT_DIR gets nccl-one.json, table.txt, steps.txt and the logs. ROUNDS (default 2) sets how
# often times are taken, ONLY=STEP,... takes those steps alone (check, ours, untuned, default,
# tuned, channels, ll). --unpack ends once the releases are in KEEP.
set -uo pipefail

unpack=no
[ "${1:-}" = --unpack ] && { unpack=yes; shift; }
if [ $# -ne 1 ] && [ "$unpack" = no ]; then
  echo "usage: $0 [--unpack] OUT_DIR" >&2
  exit 2
fi
here=$(dirname "$(realpath "$0")")
bin=$(realpath "${TCPX_BIN:-.carry}")
keep=${KEEP:-/root/nccl}
python=${PYTHON:-python3}
mkdir -p "$keep" || exit 2

cp "$bin"/nccl-* "$bin/libnccl-net-tcpx.so" "$keep" 2>/dev/null
for sum in "$keep"/nccl-*.sha256; do
  version=$(basename "$sum" .sha256)
  version=${version#nccl-}
  [ -e "$keep/$version/libnccl.so.2" ] && continue
  mkdir -p "$keep/$version"
  if cat "$keep/nccl-$version".xz.* | "$python" -c 'import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer, 1 << 20)' >"$keep/$version/libnccl.so.2" 2>"$keep/unpack.txt" &&
    (cd "$keep/$version" && sha256sum --check --quiet "$sum"); then
    echo "NCCL $version is in $keep"
  else
    rm -rf "${keep:?}/$version"
    echo "NCCL $version is not whole yet: $(tail -n 1 "$keep/unpack.txt")"
  fi
done
[ "$unpack" = yes ] && exit 0

mkdir -p "$1" || exit 2
out=$(realpath "$1")
plugin=$keep/libnccl-net-tcpx.so
[ -r "$plugin" ] || { echo "$plugin is missing: run scripts/carry-nccl.sh first" >&2; exit 2; }
versions=${VERSIONS:-$(cd "$keep" && ls -d [0-9]* 2>/dev/null | sort -V)}
[ -n "$versions" ] || { echo "no release of NCCL in $bin: run scripts/carry-nccl.sh first" >&2; exit 2; }
"$python" -c 'import torch; assert torch.cuda.device_count()' || { echo 'needs PyTorch and a GPU' >&2; exit 2; }

# shellcheck source-path=SCRIPTDIR source=nccl_environment.sh
. "$here/nccl_environment.sh"
# shellcheck source-path=SCRIPTDIR source=gpu_run.sh
. "$here/gpu_run.sh"
export NCCL_MULTI_RANK_GPU_ENABLE=1
budget=${BUDGET:-530} port=29600 failed=0
: >"$out/steps.txt"
ours=(NCCL_NET_PLUGIN="$plugin" NCCL_NET=TCPX)
untuned=("${ours[@]}" NCCL_TUNER_PLUGIN=none)
simple=("${untuned[@]}" NCCL_PROTO=Simple)
low_latency=("${untuned[@]}" NCCL_PROTO=LL)
socket_threads=("${sockets[@]}" NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 NCCL_MIN_NCHANNELS=4)

share_gpu

# pair NAME VERSION SECONDS "WORDS" ENVIRONMENT...: both ranks, which must succeed.
pair() {
  local name=$1-$2 version=$2 seconds=$3 words=$4 rc=0 one rank pids=() start=$SECONDS
  if [[ -n "${ONLY:-}" && ",$ONLY," != *",${1%%.*},"* ]]; then return 0; fi
  shift 4
  [ "$seconds" -gt $((budget - SECONDS)) ] && seconds=$((budget - SECONDS))
  if [ "$seconds" -le 5 ]; then
    echo "$name: no time left" | tee -a "$out/steps.txt"
    failed=$((failed + 1))
    return 1
  fi
  port=$((port + 10))
  for rank in 0 1; do
    # Words on purpose: options and sizes hold no spaces of their own.
    # shellcheck disable=SC2086
    env "$@" RANK="$rank" MASTER_PORT="$port" NCCL_HOSTID="host$rank" LD_PRELOAD="$keep/$version/libnccl.so.2" \
      timeout --kill-after=5 "$seconds" \
      "$python" "$here/nccl_one.py" $words >"$out/$name.$rank.out" 2>"$out/$name.$rank.err" &
    pids+=($!)
  done
  for rank in 0 1; do
    one=0
    wait "${pids[$rank]}" || one=$?
    [ "$one" -eq 0 ] || rc=$one
  done
  if [ "$rc" -ne 0 ]; then
    failed=$((failed + 1))
    for rank in 0 1; do tail -n 25 "$out/$name.$rank".{out,err}; done
  else
    grep '^{' "$out/$name.0.out" | tail -n 1 >"$out/$name.json"
  fi
  printf '%-28s %4d s  %s\n' "$name" $((SECONDS - start)) \
    "$([ "$rc" -eq 0 ] && echo passed || echo "FAILED ($rc)")" | tee -a "$out/steps.txt"
  return "$rc"
}

sizes=65536,1048576,16777216,268435456
for version in $versions; do
  rm -f "$out"/chosen.*.log
  pair check "$version" 90 "--check $sizes,8,1000,4194304" "${ours[@]}" NCCL_DEBUG=INFO \
    NCCL_DEBUG_SUBSYS=INIT,NET,TUNING NCCL_DEBUG_FILE="$out/chosen.%p.log"
  cat "$out"/chosen.*.log >"$out/chosen-$version.txt" 2>/dev/null
  rm -f "$out"/chosen.*.log
done
# Rounds outermost, so that a slow minute of the machine does not fall on one network alone.
for ((round = 1; round <= ${ROUNDS:-2}; round++)); do
  for version in $versions; do
    pair "ours.$round" "$version" 60 "--time $sizes --communicators 2" "${ours[@]}"
    pair "default.$round" "$version" 60 "--time $sizes --communicators 2" "${sockets[@]}"
    pair "untuned.$round" "$version" 60 "--time $sizes --communicators 2" "${untuned[@]}"
    pair "tuned.$round" "$version" 60 "--time $sizes --communicators 2" "${socket_threads[@]}"
  done
done
newest=$(printf '%s\n' $versions | tail -n 1)
pair channels "$newest" 90 "--time 16384,$sizes,4194304,67108864 --channels 1,2,4,6,8,12,16" "${simple[@]}"
pair ll "$newest" 60 "--time 16384,65536,131072,262144,1048576 --channels 1,2,4,8" "${low_latency[@]}"

"$python" "$here/nccl_one_table.py" "$out" | tee "$out/table.txt"
[ "${PIPESTATUS[0]}" -eq 0 ] || failed=$((failed + 1))
echo "$failed steps failed"
[ "$failed" -eq 0 ]

#!/usr/bin/env bash
# Two builds of the embedded network between GPUs in turns, an earlier one and this one:
# scripts/gpu-turns.sh [--rehearse] BASE_BIN OUT_DIR
#
# BASE_BIN is the folder that scripts/build-carry.sh made of the earlier commit, TCPX_BIN (default
# .carry) that of this one. Each round runs base, this, this, base, with all programs started anew;
# `tcpx bench net` verifies contents in poisoned destinations before it times anything. OUT_DIR gets
# runs/ with one JSON file for each measurement, turns.json and log.txt. The last lines are a table:
# medians over all turns, and how many times as good this build is as the base. ROUNDS (default 3); ONLY, what the names
# of the cases begin with, such as ping or 4m.
#
# With two GPUs data moves from GPU 0 to GPU 1, with one from GPU 0 to itself. --rehearse uses host
# memory and small sizes, to try the script itself on a host without a GPU.
set -uo pipefail

rehearse=no
[ "${1:-}" = --rehearse ] && { rehearse=yes; shift; }
if [ $# -ne 2 ]; then
  echo "usage: $0 [--rehearse] BASE_BIN OUT_DIR" >&2
  exit 2
fi
base=$(realpath "$1") own=$(realpath "${TCPX_BIN:-.carry}")
mkdir -p "$2" || exit 2
out=$(realpath "$2")
for file in "$base/tcpx" "$own/tcpx"; do
  [ -x "$file" ] || { echo "$file is missing: run scripts/build-carry.sh first" >&2; exit 2; }
done
log=$out/log.txt
: >"$log"
rm -rf "$out/runs"
mib=$((1 << 20)) span=300ms from=0 to=1
if [ "$rehearse" = yes ]; then
  mib=$((1 << 12)) span=30ms from=host to=host
elif [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -lt 2 ]; then
  to=0
fi

cases=()
for case in ping-8=latency:8 ping-4k=latency:4096 ping-64k=latency:65536 \
  "256k-1=one:$((mib / 4)):1" "1m-1=one:$mib:1" "4m-1=one:$((4 * mib)):1" "4m-8=one:$((4 * mib)):8" \
  "256m-1=one:$((256 * mib)):1" "both-256m=both:$((256 * mib)):2" "1g-1=one:$((1024 * mib)):1"; do
  [[ $case == "${ONLY:-}"* ]] && cases+=(--case "$case")
done
[ "${#cases[@]}" -gt 0 ] || { echo "no case begins with $ONLY" >&2; exit 2; }

# turn WHO PROGRAM NUMBER
turn() {
  local runs=$out/runs/$1.$3
  mkdir -p "$runs"
  timeout --kill-after=5 120 "$2" bench net --from "$from" --to "$to" --rounds 1 --span "$span" \
    --runs "$runs" "${cases[@]}" >>"$log" 2>&1 </dev/null
}

status=0
for ((round = 1; round <= ${ROUNDS:-3}; round++)); do
  turn base "$base/tcpx" "$round-1" && turn this "$own/tcpx" "$round-1" &&
    turn this "$own/tcpx" "$round-2" && turn base "$base/tcpx" "$round-2" || { status=1; break; }
done
[ "$status" -eq 0 ] || tail -n 5 "$log" >&2

python3 - "$out" <<'PY' || status=1
import glob, json, os, statistics, sys

out = sys.argv[1]
seen = {}
for path in glob.glob(os.path.join(out, "runs", "*", "*.json")):
    who = os.path.basename(os.path.dirname(path)).split(".")[0]
    run = json.load(open(path))
    if run["who"] == "tcpx" and run["verified"]:
        seen.setdefault(run["case"], {}).setdefault(who, []).append(run)

rows = []
for case, runs in sorted(seen.items()):
    latency = case.startswith("ping")
    value = (lambda run: run["latency_us"]["p50"]) if latency else (lambda run: run["gb_per_second"])
    median = lambda who, of: statistics.median(map(of, runs[who]))
    cpu = lambda run: run["cpu_seconds_per_gb"]
    if not {"base", "this"} <= set(runs):
        continue
    base, this = median("base", value), median("this", value)
    rows.append({
        "case": case,
        "unit": "us" if latency else "GB/s",
        "base": base,
        "this": this,
        "ratio": base / this if latency else this / base,
        "cpu_ratio": median("base", cpu) / median("this", cpu),
        "turns": {who: sorted(map(value, runs[who])) for who in runs},
    })
json.dump({"schema": "tcpx-gpu-turns/1", "rows": rows}, open(os.path.join(out, "turns.json"), "w"), indent=1)
print(f"{'case':10} {'unit':5} {'base':>9} {'this':>9} {'ratio':>7} {'cpu':>7}")
for row in rows:
    print("{case:10} {unit:5} {base:9.3f} {this:9.3f} {ratio:7.3f} {cpu_ratio:7.3f}".format(**row))
sys.exit(0 if rows else 1)
PY
exit "$status"

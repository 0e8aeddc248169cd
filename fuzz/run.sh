#!/bin/sh
# Runs every fuzz target for some seconds and fails at the first crash.
#
#   fuzz/run.sh [SECONDS] [TARGET...]      default: 60 seconds, all targets
#   FUZZ_AT_ONCE=1                         targets at a time; default: one for each core
#   FUZZ_SANITIZER=none                    without the address sanitizer: for many executions
#
# Needs Rust and a C++ compiler (for libFuzzer, which is built from a crate), nothing else.
# The checked-in corpus is only read; new inputs go to fuzz/target/corpus, crashes to
# fuzz/artifacts.
set -eu

seconds=${1:-60}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- handshake records lane_seal frames descriptors chunk_header cmsg netlink \
    nccl_records nccl_comm nccl_lane window_key pieces nixl advert \
    status_request status_answer key_text files file_contents plugin_file

cd "$(dirname "$0")"
host=$(rustc -vV | sed -n 's/^host: //p')

# The address sanitizer is the one flag that a stable compiler accepts only with this switch.
export RUSTC_BOOTSTRAP=1
case ${FUZZ_SANITIZER:-address} in
none) sanitizer='' built=target/none ;;
*) sanitizer=-Zsanitizer=address built=target ;;
esac
export RUSTFLAGS="$sanitizer -Ccodegen-units=1 --cfg fuzzing \
-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
# With a target named, the flags do not reach build scripts.
cargo build --release --target "$host" --target-dir "$built"

one='
mkdir -p "target/corpus/$2" "artifacts/$2"
"$0/$2" -max_total_time="$1" -max_len=4096 \
    -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="artifacts/$2/" \
    "target/corpus/$2" "corpus/$2" 2>"target/$2.log" || {
    tail -40 "target/$2.log"
    echo "fuzz/run.sh: $2 failed; the input is in fuzz/artifacts/$2" >&2
    exit 255
}
awk -v target="$2" "
    /stat::number_of_executed_units/ { all = \$2 }
    /stat::average_exec_per_sec/ { rate = \$2 }
    /stat::new_units_added/ { print target \": \" all \" executions, \" rate \" a second, \" \$2 \" new inputs\" }
" "target/$2.log"'
# An exit status of 255 has xargs start no more.
printf '%s\n' "$@" | xargs -P "${FUZZ_AT_ONCE:-$(nproc)}" -n 1 sh -c "$one" "$built/$host/release" "$seconds"
for target in "$@"; do cat "target/$target.log"; done |
    awk '/stat::number_of_executed_units/ { sum += $2 } END { printf "%d executions in sum\n", sum }'

#!/bin/sh
# Runs every fuzz target for some seconds and fails at the first crash.
#
#   fuzz/run.sh [SECONDS] [TARGET...]      default: 60 seconds, all targets
#
# Needs Rust and a C++ compiler (for libFuzzer, which is built from a crate), nothing else.
# The checked-in corpus is only read; new inputs go to fuzz/target/corpus, crashes to
# fuzz/artifacts.
set -eu

seconds=${1:-60}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- handshake records lane_seal frames descriptors chunk_header cmsg companion netlink \
    private_request nccl_records nccl_comm nccl_lane window_key pieces nixl \
    status_request

cd "$(dirname "$0")"
host=$(rustc -vV | sed -n 's/^host: //p')

# The address sanitizer is the one flag that a stable compiler accepts only with this switch.
export RUSTC_BOOTSTRAP=1
export RUSTFLAGS="-Zsanitizer=address -Ccodegen-units=1 --cfg fuzzing \
-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
# With a target named, the flags do not reach build scripts.
cargo build --release --target "$host" --target-dir target

# One for each core at a time; the first that fails ends with 255, and no other is begun.
export seconds host
printf '%s\n' "$@" | xargs -n 1 -P "$(nproc)" sh -c '
    target=$1
    mkdir -p "target/corpus/$target" "artifacts/$target"
    "target/$host/release/$target" -max_total_time="$seconds" -max_len=4096 \
        -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="artifacts/$target/" \
        "target/corpus/$target" "corpus/$target" 2>"target/$target.log" || {
        tail -40 "target/$target.log"
        echo "fuzz/run.sh: $target failed; the input is in fuzz/artifacts/$target" >&2
        exit 255
    }
    statistics=$(grep -E "stat::(number_of_executed_units|average_exec_per_sec|new_units_added)" \
        "target/$target.log")
    printf "== %s: %s s\n%s\n" "$target" "$seconds" "$statistics"
' sh || exit 1

#!/usr/bin/env bash
# Tests under Miri and ThreadSanitizer: scripts/sanitize.sh [memory|threads]. Needs a nightly
# toolchain: `rustup toolchain install nightly -c miri -c rust-src`.
set -euo pipefail
cd "$(dirname "$0")/.."
unset CARGO RUSTC RUSTDOC RUSTUP_TOOLCHAIN CARGO_MANIFEST_DIR
which=${1:-all}

# Undefined behaviour, by Miri: it interprets each instruction, so two random cases of a property
# have to do. Isolated programs have no folder; the fake driver keeps addresses as numbers, and its
# threads to the end. Not among the tests: those that load the GPU's driver, call C code, stream
# past the caches, protect pages or set signals, which Miri knows nothing of.
if [ "$which" != threads ]; then
  CARGO_TARGET_DIR=target/miri PROPTEST_CASES=2 PROPTEST_DISABLE_FAILURE_PERSISTENCE=1 \
    MIRIFLAGS='-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks' \
    rustup run nightly cargo miri test --locked --package tcpx-memory --lib -- \
    awake:: bounce:: fence:: kind:: lease:: pinned:: region:: slice:: worker::queue \
    worker::tests::a_sink worker::tests::copies
fi

# Races, by ThreadSanitizer. It must see every lock, so the standard library is built with it, too,
# and every system call, so rustix calls the C library: memory that one thread has unmapped and
# another has mapped again is not shared. A connection is reset by connecting its socket to no
# address, while the loop of its other direction uses it; for ThreadSanitizer each `connect` makes
# the descriptor anew. Not among the crates: tcpx-nccl, whose tests look at a buffer while a lane
# fills it, and tcpx-net, of whose tests some take longer so than a lane may stand still; its
# threads run under those of tcpx.
if [ "$which" != memory ]; then
  mkdir -p target
  echo race:connect_unspec >target/no-races
  CARGO_TARGET_DIR=target/sanitize TSAN_OPTIONS="suppressions=$PWD/target/no-races" \
    RUSTFLAGS='-Zsanitizer=thread --cfg=rustix_use_libc' \
    rustup run nightly cargo test --locked --no-fail-fast -Zbuild-std --target x86_64-unknown-linux-gnu \
    --lib --tests --package tcpx-lanes --package tcpx-memory --package tcpx
fi

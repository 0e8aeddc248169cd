//! Checks this crate on a real GPU against plain oracles, and prints what it found as JSON.
//!
//! `cargo run --release -p tcpx-memory --example gpu_check`. Ends with 0 only if everything
//! matched; a host without a GPU is a failure here. Takes less than a minute and about 11 GiB of
//! GPU memory. Words choose checks by name; those of [`LONG`] run only so. `GPU_CHECK_LIMIT` is the
//! time in seconds that one job may take, and `GPU_CHECK_MOST_COPIES` the longest random list that
//! is also unpacked by one copy for each fragment: for runs under a tool that slows both down.

mod contexts;
mod copies;
mod dma_buf;
mod far;
mod order;
mod pointers;
mod small;
mod support;
mod sweep;
mod unpack;
mod user;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Bench, Outcome};
use tcpx_memory::CopyWorker;
use tcpx_memory::driver::{DriverStatus, probe};

/// A check by its name.
type Check = (&'static str, fn(&Bench) -> Outcome);

const CHECKS: [Check; 24] = [
    ("contexts", contexts::contexts),
    ("typed_errors", copies::typed_errors),
    ("blocking_access", copies::blocking_access),
    ("copies_of_all_kinds", copies::all_kinds),
    ("foreign_memory", copies::foreign_memory),
    ("checksums", copies::checksums),
    ("pinned_slots", copies::pinned_slots),
    ("peer_gpus", copies::peers),
    ("unpack_alignments", unpack::alignments),
    ("unpack_random_lists", unpack::random_lists),
    ("dma_buf", dma_buf::exported),
    ("fence_stream", order::after_stream),
    ("fence_event", order::after_event),
    ("fence_default_streams", order::after_default_streams),
    ("fence_does_not_hold_up_others", order::others_go_on),
    ("spinning_kernel", order::spinning_kernel),
    ("graph_capture", order::graph_capture),
    ("captures_beside_copies", order::captures_beside_copies),
    ("pointers", pointers::pointers),
    ("small_copies_both_ways", small::both_ways),
    ("small_copies_fresh_bytes", small::fresh_bytes),
    ("small_copies_full_gpu", small::full_gpu),
    ("small_copies_whole_device", small::whole_device),
    ("beyond_4_gib", far::destinations_and_sources),
];

/// Checks that run only when they are named.
const LONG: [Check; 3] = [
    ("sweep_lengths", sweep::lengths),
    ("sweep_counts", sweep::counts),
    ("sweep_random_lists", sweep::random_lists),
];

/// Longest wait for the worker to do what was asked of it.
const LAST_WAIT: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    let code = check();
    // The driver is torn down when this function returns: no thread may be inside it then.
    if CopyWorker::wait_until_idle(LAST_WAIT) {
        return code;
    }
    println!("FAILED the worker was not done within {LAST_WAIT:?}");
    ExitCode::FAILURE
}

fn check() -> ExitCode {
    let start = Instant::now();
    let status = probe();
    println!("driver: {status:?}");
    if let DriverStatus::Missing { why } = status {
        println!("{}", json!({ "ok": false, "error": why.to_string() }));
        return ExitCode::FAILURE;
    }
    let bench = match Bench::open() {
        Ok(bench) => bench,
        Err(error) => {
            println!("{}", json!({ "ok": false, "error": error }));
            return ExitCode::FAILURE;
        }
    };
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|one| name.contains(one));
    let mut checks = Vec::new();
    let mut failed = 0;
    let long = LONG.into_iter().filter(|_| !wanted.is_empty());
    let chosen = CHECKS.into_iter().chain(long);
    for (name, check) in chosen.filter(|(name, _)| is_wanted(name)) {
        let (ok, result) = run(name, || check(&bench));
        failed += usize::from(!ok);
        checks.push(result);
    }
    let gpu = bench.gpu.info().name.clone();
    let kernel_error = bench.worker.kernel_error().map(ToString::to_string);
    if is_wanted("worker_restarts") {
        let (ok, result) = run("worker_restarts", || copies::worker_restarts(bench));
        failed += usize::from(!ok);
        checks.push(result);
    }
    let summary = json!({
        "ok": failed == 0,
        "failed": failed,
        "gpu": gpu,
        "kernel_error": kernel_error,
        "seconds": start.elapsed().as_secs_f64(),
        "checks": checks,
    });
    println!("{summary}");
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn run(name: &str, check: impl FnOnce() -> Outcome) -> (bool, Value) {
    let start = Instant::now();
    let outcome =
        catch_unwind(AssertUnwindSafe(check)).unwrap_or_else(|_| Err("panicked".to_owned()));
    let seconds = start.elapsed().as_secs_f64();
    let (ok, detail) = match outcome {
        Ok(detail) => (true, detail),
        Err(detail) => (false, detail),
    };
    println!(
        "{} {name} ({seconds:.2} s): {detail}",
        if ok { "ok    " } else { "FAILED" }
    );
    (
        ok,
        json!({ "name": name, "ok": ok, "seconds": seconds, "detail": detail }),
    )
}

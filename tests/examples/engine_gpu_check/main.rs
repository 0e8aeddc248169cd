//! Checks the engine on real GPUs:
//! `engine_gpu_check [--plugin FILE] [--gpus A,B] [--large] [--only CHECK]...`.
//!
//! Both ends run in this process. Without `--plugin` the embedded network moves memory of GPU A to
//! GPU B; with it, the plugin file moves memory of GPU A (its environment must be set before).
//! Every check uses fresh random data and poisoned destinations. Prints one line a check and a JSON
//! summary; exit code 0 only if every check passed.

mod bench;
mod order;
mod quiet;
mod transfers;
#[expect(dead_code, reason = "the check of the memory crate uses all of it")]
#[path = "../../../crates/tcpx-memory/examples/gpu_check/user.rs"]
mod user;
mod windows;

use std::process::ExitCode;
use std::time::Instant;

use bench::{Bench, Outcome};

type Check = (&'static str, fn(&Bench) -> Outcome);

/// Only made where it is named, by itself: nothing works after it.
const LAST: &str = "device_reset";

const CHECKS: [Check; 14] = [
    ("set_up", quiet::set_up),
    ("connections_come_and_go", quiet::connections_come_and_go),
    ("sizes", transfers::sizes),
    ("kinds_of_memory", transfers::kinds),
    ("both_directions", transfers::both_directions),
    ("many_at_once", transfers::many_at_once),
    ("source_still_written", order::source_still_written),
    (
        "destination_still_written",
        order::destination_still_written,
    ),
    ("spinning_kernel", order::spinning_kernel),
    ("puts_and_gets", windows::puts_and_gets),
    ("batches", windows::batches),
    ("lists_of_pieces", windows::lists_of_pieces),
    ("large", transfers::large),
    (LAST, quiet::device_reset),
];

fn main() -> ExitCode {
    let bench = match Bench::from_arguments(std::env::args().skip(1)) {
        Ok(bench) => bench,
        Err(error) => {
            eprintln!("engine_gpu_check: {error}");
            return ExitCode::from(2);
        }
    };
    println!("{}", bench.describe());
    if let Some(unknown) = bench
        .only
        .iter()
        .find(|one| CHECKS.iter().all(|(name, _)| name != one))
    {
        eprintln!("engine_gpu_check: there is no check {unknown}");
        return ExitCode::from(2);
    }
    let mut failed = 0;
    let mut lines = Vec::new();
    let is_wanted = |name: &str| match bench.only.is_empty() {
        true => name != LAST,
        false => bench.only.iter().any(|one| one == name),
    };
    for (name, check) in CHECKS.into_iter().filter(|(name, _)| is_wanted(name)) {
        let start = Instant::now();
        let outcome = check(&bench);
        let seconds = start.elapsed().as_secs_f64();
        let (word, text) = match &outcome {
            Ok(text) => ("ok    ", text),
            Err(text) => ("FAILED", text),
        };
        println!("{word} {name} ({seconds:.2} s): {text}");
        failed += usize::from(outcome.is_err());
        lines.push(format!(
            "{{\"name\":\"{name}\",\"ok\":{},\"seconds\":{seconds:.3}}}",
            outcome.is_ok()
        ));
    }
    println!(
        "{{\"what\":\"{}\",\"failed\":{failed},\"checks\":[{}]}}",
        bench.describe(),
        lines.join(",")
    );
    ExitCode::from(u8::from(failed > 0))
}

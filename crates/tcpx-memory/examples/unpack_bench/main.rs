//! Compares the unpackers with copies and with a plain kernel on one GPU:
//!
//!     cargo run --release -p tcpx-memory --example unpack_bench [GPU [ROUNDS]] >benchmarks/unpack.json
//!
//! Standard output gets a file of `benchmarks/`, standard error a line for each target. Ends with 1 where a
//! target that must be reached was not.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "figures with a few digits, sizes that fit"
)]

use std::process::ExitCode;

use serde_json::{Value, json};
use tcpx_memory::driver::{DriverStatus, probe};

use self::cases::{Bench, Outcome};
use self::targets::Verdict;
use self::ways::Way;

mod cases;
mod targets;
mod ways;
mod yardstick;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const NOTES: [&str; 7] = [
    "From the call until the bytes are visible, bytes counted once. Each run is a round over all cases in one start of the program, itself the median of up to 200 calls; every way was verified on fresh random data and a poisoned destination before.",
    "In a round the ways of a case take four turns each. Shares are of the same round, so that a machine's slow hour weighs on both sides; figures in GB/s and us are this machine's, with its own copy beside them.",
    "Four sets of 64 MiB take turns, so that neither end is in the GPU's cache, except in the cases that say so. Lists are shuffled; 1,448-byte fragments begin 3 bytes behind an aligned address.",
    "The time of 1 byte is what the launch and the way back cost: no unpack can take less.",
    "`one copy` is the copy engine; from pinned memory a kernel's reads cross the bus in smaller requests, which bounds it at about nine tenths of the copy engine.",
    "`unpacker` does the worker's jobs on the thread that waits; `worker` hands the job to the copy worker's thread, as the engine does.",
    "`plain kernel` is one warp a fragment with 16-byte loads, its descriptors in the launch or in mapped memory as the unpacker's.",
];

fn main() -> Result<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    let gpu = arguments.next().map_or(Ok(0), |text| text.parse())?;
    let rounds = arguments.next().map_or(Ok(5), |text| text.parse())?;
    let mut bench = Bench::open(gpu)?;
    let outcomes = bench.run(rounds)?;
    let verdicts = targets::verdicts(&outcomes);
    let mut rows: Vec<Value> = verdicts.iter().map(Verdict::row).collect();
    for one in &outcomes {
        let name = format!("{}: {}", one.case, one.way);
        rows.push(row(&name, "us", &one.micros, ""));
        let rates: Vec<f64> = one.micros.iter().map(|us| rate(one.bytes, *us)).collect();
        rows.push(row(&name, "GB/s", &rates, &of_copy(one, &outcomes)));
    }
    let file = json!({
        "schema": 1, "subject": "Unpack", "date": today(), "machine": machine(&bench),
        "command": format!("cargo run --release -p tcpx-memory --example unpack_bench {gpu} {rounds}"),
        "rows": rows, "notes": NOTES,
    });
    println!("{}", serde_json::to_string_pretty(&file)?);
    let mut code = ExitCode::SUCCESS;
    for one in &verdicts {
        let (median, least, most) = one.spread();
        let (what, unit, verdict) = (&one.what, one.unit, one.verdict());
        eprintln!("{verdict:12} {median:9.2} ({least:.2} to {most:.2}) {unit:6} {what}");
        if verdict == "SHORT" {
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

/// How a way stands to one copy of the same case: the median over the rounds.
fn of_copy(one: &Outcome, outcomes: &[Outcome]) -> String {
    let is_copy = |other: &&Outcome| other.case == one.case && other.way == Way::Copy.name();
    let Some(copy) = outcomes.iter().find(is_copy) else {
        return String::new();
    };
    let shares = copy.micros.iter().zip(&one.micros);
    let shares: Vec<f64> = shares.map(|(copy, own)| copy / own).collect();
    let own = rate(copy.bytes, spread(&copy.micros).0);
    let share = spread(&shares).0;
    format!("{share:.2} of one copy's rate, {own:.1} GB/s.")
}

/// A row of a file of `benchmarks/`.
fn row(name: &str, unit: &str, values: &[f64], notes: &str) -> Value {
    let digits = |value: f64| (value * 1e3).round() / 1e3;
    let (median, min, max) = spread(values);
    json!({
        "name": name, "unit": unit, "median": digits(median), "min": digits(min),
        "max": digits(max), "runs": values.len(), "notes": notes,
    })
}

/// Median, least and most.
fn spread(values: &[f64]) -> (f64, f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = |index: usize| sorted.get(index).copied().unwrap_or_default();
    let last = sorted.len().saturating_sub(1);
    (at(last / 2).midpoint(at(sorted.len() / 2)), at(0), at(last))
}

/// 10^9 bytes a second.
fn rate(bytes: u64, micros: f64) -> f64 {
    bytes as f64 / micros / 1e3
}

fn machine(bench: &Bench) -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let driver = match probe() {
        DriverStatus::Present { version, .. } => format!("driver for CUDA {version}"),
        DriverStatus::Missing { .. } => "no driver".to_owned(),
    };
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let (gpu, kernel) = (&bench.gpu().info().name, kernel.trim());
    format!("{gpu}, {cores} cores, {driver}, Linux {kernel}")
}

/// The date in UTC, as `date` says it.
fn today() -> String {
    let said = std::process::Command::new("date")
        .args(["-u", "+%F"])
        .output();
    let said = said
        .ok()
        .and_then(|said| String::from_utf8(said.stdout).ok());
    said.map_or_else(|| "1970-01-01".to_owned(), |date| date.trim().to_owned())
}

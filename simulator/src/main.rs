//! Runs the engine on a simulated system, from seeds:
//! `tcpx-simulator --seeds N [--from S] [--replay SEED]`.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("the simulator makes system calls of Linux on x86-64");

mod fair;
mod liar;
mod log;
mod memory;
mod plan;
mod programs;
mod random;
mod runs;
mod system;
mod tally;

use std::process::ExitCode;

fn main() -> ExitCode {
    // What is freed stays with this process: to get pages again and again takes a good part of a
    // run. SAFETY: this process has one thread.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 512 << 20);
    }
    let mut seeds = 200;
    let mut from = 0;
    let mut most = 20;
    let mut replay = None;
    let mut without = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|text| text.parse::<u64>().ok());
        let given = match argument.as_str() {
            "--seeds" => number().map(|given| seeds = given),
            "--from" => number().map(|given| from = given),
            "--first" => {
                most = 1;
                Some(())
            }
            "--replay" => number().map(|given| replay = Some(given)),
            "--without" => arguments.next().map(|list| {
                without = list.split(',').filter_map(|one| one.parse().ok()).collect();
            }),
            _ => None,
        };
        if given.is_none() {
            eprintln!(
                "usage: tcpx-simulator [--seeds N] [--from SEED] [--first], or --replay SEED [--without ITEM,...]"
            );
            return ExitCode::from(2);
        }
    }
    let passed = match replay {
        Some(seed) => runs::replay(seed, &without),
        None => runs::all(from, seeds, most),
    };
    match passed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

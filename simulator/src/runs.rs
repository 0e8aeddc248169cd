//! Each seed runs in a process of its own, which ends with it.

use std::io::{Read, Seek, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::plan::Plan;
use crate::{log, programs, system};

/// Longest run of a seed on this machine; a run that takes longer stands still.
const LIMIT: Duration = Duration::from_secs(60);

/// How a run ended.
struct Outcome {
    passed: bool,
    output: String,
}

struct Run {
    seed: u64,
    process: libc::pid_t,
    output: std::fs::File,
    started: Instant,
}

fn start(seed: u64, without: &[usize], verbose: bool) -> std::io::Result<Run> {
    // SAFETY: a name that ends; the descriptor is new.
    let output = unsafe {
        let fd = libc::memfd_create(c"output".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        std::fs::File::from_raw_fd(fd)
    };
    // SAFETY: this process has one thread.
    let process = unsafe { libc::fork() };
    if process < 0 {
        return Err(std::io::Error::last_os_error());
    }
    if process == 0 {
        if !verbose {
            // SAFETY: both descriptors are open.
            unsafe { libc::dup2(output.as_raw_fd(), 2) };
        }
        drop(output);
        live(seed, without, verbose);
    }
    Ok(Run {
        seed,
        process,
        output,
        started: Instant::now(),
    })
}

fn live(seed: u64, without: &[usize], verbose: bool) -> ! {
    // SAFETY: a limit of this process, and a signal that nobody else handles.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        std::env::set_var("TCPX_STATUS", "0");
        // Threads that run one at a time do so fastest on one core.
        let core =
            libc::getpid() as usize % std::thread::available_parallelism().map_or(1, usize::from);
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
    let plan = Plan::new(seed, &|item| without.contains(&item), verbose);
    if verbose {
        eprintln!("{plan:#?}");
        log::begin();
    }
    system::begin(plan.system.clone());
    programs::run(&plan);
    let micros = system::now() / 1_000 - 1_000_000_000;
    let text = format!("{}, {micros} us\n", system::trail());
    // SAFETY: the text lives for the call.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    system::exit(0);
}

impl Run {
    /// How it ended, if it has; one that takes too long is ended.
    fn ended(&mut self, wait: bool) -> Option<Outcome> {
        let mut status = 0;
        let flags = if wait { 0 } else { libc::WNOHANG };
        // SAFETY: our own child.
        let ended = unsafe { libc::waitpid(self.process, &raw mut status, flags) };
        if ended == 0 {
            if self.started.elapsed() > LIMIT {
                // SAFETY: our own child.
                unsafe { libc::kill(self.process, libc::SIGKILL) };
                return self.ended(true);
            }
            return None;
        }
        let mut output = String::new();
        let _ = self.output.rewind();
        let mut bytes = Vec::new();
        let _ = self.output.read_to_end(&mut bytes);
        output.push_str(&String::from_utf8_lossy(&bytes));
        let passed = libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
        if libc::WIFSIGNALED(status) {
            output += &format!("FAILED: ended by signal {}\n", libc::WTERMSIG(status));
        }
        Some(Outcome { passed, output })
    }
}

fn outcome(seed: u64, without: &[usize], verbose: bool) -> std::io::Result<Outcome> {
    let mut run = start(seed, without, verbose)?;
    loop {
        if let Some(outcome) = run.ended(false) {
            return Ok(outcome);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What kind of failure it is: its first line without numbers.
fn kind(output: &str) -> String {
    let line = output
        .lines()
        .find(|line| line.contains("FAILED") || line.contains("panicked"));
    line.unwrap_or_default()
        .chars()
        .filter(|letter| !letter.is_ascii_digit())
        .take(200)
        .collect()
}

/// Leaves out what the failure does not need.
fn shrink(seed: u64, failure: &str) -> std::io::Result<Vec<usize>> {
    let items = Plan::new(seed, &|_| false, false).items;
    let wanted = kind(failure);
    let mut without: Vec<usize> = Vec::new();
    let mut size = items.div_ceil(2);
    let until = Instant::now() + Duration::from_secs(60);
    while size > 0 && Instant::now() < until {
        let mut at = 0;
        while at < items {
            let mut tried = without.clone();
            tried.extend((at..(at + size).min(items)).filter(|item| !without.contains(item)));
            if tried.len() > without.len() {
                let outcome = outcome(seed, &tried, false)?;
                if !outcome.passed && kind(&outcome.output) == wanted {
                    without = tried;
                }
            }
            at += size;
        }
        size /= 2;
    }
    without.sort_unstable();
    Ok(without)
}

pub fn replay(seed: u64, without: &[usize]) -> ExitCode {
    match outcome(seed, without, true) {
        Ok(outcome) => {
            print!("{}", outcome.output);
            if outcome.passed {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs seeds until so `many` have failed.
pub fn all(from: u64, seeds: u64, jobs: u64, many: usize) -> ExitCode {
    let started = Instant::now();
    let mut next = from;
    let mut running: Vec<Run> = Vec::new();
    let mut failed: Vec<(u64, String)> = Vec::new();
    let mut passed = 0u64;
    while (next < from + seeds && failed.len() < many) || !running.is_empty() {
        while next < from + seeds && (running.len() as u64) < jobs && failed.len() < many {
            match start(next, &[], false) {
                Ok(run) => running.push(run),
                Err(error) => {
                    eprintln!("{error}");
                    return ExitCode::FAILURE;
                }
            }
            next += 1;
        }
        let mut at = 0;
        while at < running.len() {
            match running[at].ended(false) {
                None => at += 1,
                Some(outcome) => {
                    let run = running.swap_remove(at);
                    if outcome.passed {
                        passed += 1;
                    } else {
                        println!("seed {} failed: {}", run.seed, kind(&outcome.output));
                        let _ = std::io::stdout().flush();
                        failed.push((run.seed, outcome.output));
                    }
                }
            }
        }
        std::thread::sleep(Duration::from_micros(300));
    }
    for (seed, output) in failed.iter().take(1) {
        print!("\nseed {seed}:\n{output}");
        if many > 1
            && let Ok(without) = shrink(*seed, output)
        {
            let list: Vec<_> = without.iter().map(ToString::to_string).collect();
            println!(
                "replay: cargo xtask simulate --replay {seed} --without {}",
                list.join(",")
            );
        }
    }
    println!(
        "{passed} seeds passed, {} failed, in {:.1} s",
        failed.len(),
        started.elapsed().as_secs_f64()
    );
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

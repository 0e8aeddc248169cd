//! Each seed runs in a process of its own, which ends with it.

use std::io::{Read, Seek, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::time::{Duration, Instant};

use crate::plan::Plan;
use crate::{fair, log, programs, system, tally};

/// Seconds of a core that the run of a seed takes at most, and seconds on a machine that does other
/// things too: one that takes longer stalls.
const MOST_SECONDS: (u64, libc::c_uint) = (60, 600);

/// Among so many seeds everything has occurred that a seed can choose.
const MANY: u64 = 1_000;

/// How a run ended.
struct Outcome {
    passed: bool,
    output: String,
}

struct Run {
    seed: u64,
    core: usize,
    process: libc::pid_t,
    output: std::fs::File,
}

fn start(seed: u64, core: usize, without: &[usize], verbose: bool) -> std::io::Result<Run> {
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
        live(seed, core, without, verbose);
    }
    Ok(Run {
        seed,
        core,
        process,
        output,
    })
}

fn live(seed: u64, core: usize, without: &[usize], verbose: bool) -> ! {
    // SAFETY: limits of this process, and signals that nobody else handles.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        let most = libc::rlimit {
            rlim_cur: MOST_SECONDS.0,
            rlim_max: MOST_SECONDS.0,
        };
        libc::setrlimit(libc::RLIMIT_CPU, &raw const most);
        libc::alarm(MOST_SECONDS.1);
        std::env::set_var("TCPX_STATUS", "0");
        // Threads that run one at a time do so fastest on one core.
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
    let plan = Plan::new(seed, &|item| without.contains(&item), verbose);
    if verbose {
        eprintln!("{plan:#?}");
        log::begin();
    }
    let network = &plan.system.network;
    for (name, is_so) in [
        ("one byte at a time", network.pieces == [1]),
        ("tiny window", network.window < 1_000),
        ("several peers", plan.connections.len() > 1),
    ] {
        if is_so {
            tally::saw(name);
        }
    }
    system::begin(plan.system.clone());
    if plan.is_fair {
        fair::run(&plan);
    } else {
        programs::run(&plan);
    }
    tally::needed(system::needed());
    let micros = system::now() / 1_000 - 1_000_000_000;
    let text = format!("{}, {micros} us\n", system::trail());
    // SAFETY: the text lives for the call.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    system::exit(0);
}

impl Run {
    /// How it ended: its process has, with this status.
    fn outcome(mut self, status: libc::c_int) -> Outcome {
        let mut bytes = Vec::new();
        // What cannot be read is not shown.
        let _ = self.output.rewind();
        let _ = self.output.read_to_end(&mut bytes);
        let mut output = String::from_utf8_lossy(&bytes).into_owned();
        if libc::WIFSIGNALED(status) {
            output += &format!("FAILED: ended by signal {}\n", libc::WTERMSIG(status));
        }
        Outcome {
            passed: libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
            output,
        }
    }
}

/// Waits until one of these has ended.
fn one_ended(running: &mut Vec<Run>) -> std::io::Result<(u64, usize, Outcome)> {
    let mut status = 0;
    // SAFETY: this process has no other children.
    let ended = unsafe { libc::waitpid(-1, &raw mut status, 0) };
    let Some(at) = running.iter().position(|run| run.process == ended) else {
        return Err(std::io::Error::last_os_error());
    };
    let run = running.swap_remove(at);
    Ok((run.seed, run.core, run.outcome(status)))
}

fn outcome(seed: u64, without: &[usize], verbose: bool) -> std::io::Result<Outcome> {
    let mut running = vec![start(seed, 0, without, verbose)?];
    one_ended(&mut running).map(|(_, _, outcome)| outcome)
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

/// Whether it passed.
pub fn replay(seed: u64, without: &[usize]) -> std::io::Result<bool> {
    let outcome = outcome(seed, without, true)?;
    print!("{}", outcome.output);
    Ok(outcome.passed)
}

/// Runs seeds until so `many` have failed, one at a time on each core; whether all passed.
pub fn all(from: u64, seeds: u64, many: usize) -> std::io::Result<bool> {
    tally::begin()?;
    let started = Instant::now();
    let mut left = from..from + seeds;
    let mut cores: Vec<usize> =
        (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
    let mut running: Vec<Run> = Vec::new();
    let mut failed: Vec<(u64, String)> = Vec::new();
    let mut passed = 0u64;
    loop {
        while failed.len() < many
            && !cores.is_empty()
            && let Some(seed) = left.next()
            && let Some(core) = cores.pop()
        {
            running.push(start(seed, core, &[], false)?);
        }
        if running.is_empty() {
            break;
        }
        let (seed, core, outcome) = one_ended(&mut running)?;
        cores.push(core);
        if outcome.passed {
            passed += 1;
        } else {
            println!("seed {seed} failed: {}", kind(&outcome.output));
            std::io::stdout().flush()?;
            failed.push((seed, outcome.output));
        }
    }
    if let Some((seed, output)) = failed.first() {
        print!("\nseed {seed}:\n{output}");
        if many > 1 {
            let without = shrink(*seed, output)?;
            let list: Vec<_> = without.iter().map(ToString::to_string).collect();
            println!(
                "replay: cargo xtask simulate --replay {seed} --without {}",
                list.join(",")
            );
        }
    }
    let tally = tally::all();
    let counts: Vec<_> = tally
        .iter()
        .map(|(seeds, name)| format!("{name} {seeds}"))
        .collect();
    println!("seeds with a {}", counts.join(", "));
    println!(
        "at most {} KiB were allocated for an end of a connection",
        tally::most_needed() >> 10
    );
    println!(
        "{passed} seeds passed, {} failed, in {:.1} s",
        failed.len(),
        started.elapsed().as_secs_f64()
    );
    if let Some((0, never)) = tally.first()
        && passed > MANY
    {
        println!("a {never} has never occurred");
        return Ok(false);
    }
    Ok(failed.is_empty())
}

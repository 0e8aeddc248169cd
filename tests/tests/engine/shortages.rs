//! A process to which the system gives too little: its transfers are slower or fail, each end says
//! why and ends, and no byte is wrong.

use std::ffi::OsStr;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use tcpx_tests::instructions::{Carrier, Instructions};
use tcpx_tests::process::{Ended, Peer};
use tcpx_tests::scenario::{Scenario, Side};

const PEER: &str = env!("CARGO_BIN_EXE_peer");
/// What a transfer may stall, and the peer be silent, where it has too little.
const SHORT: Duration = Duration::from_secs(5);
/// Far beyond what anything here takes.
const LONG: Duration = Duration::from_secs(120);
const SIZES: [u64; 3] = [100, 1 << 20, 20 << 20];

fn command(line: &[&str]) -> Command {
    let mut words = line.iter().copied().chain([PEER]);
    let mut command = Command::new(words.next().expect("a program"));
    // Without memory for one, the process waits for ever for the lock that it holds to write it.
    command.args(words).env_remove("RUST_BACKTRACE");
    command
}

/// Whether this is root and may do what `line` does, and still finds the peer's program; without it
/// the test is skipped.
fn is_allowed(test: &str, line: &[&str]) -> bool {
    let (program, arguments) = line.split_first().expect("a program");
    let tried = Command::new(program)
        .args(arguments)
        .args(["test", "-x", PEER])
        .output();
    let works = tried.is_ok_and(|output| output.status.success());
    if !works {
        use std::io::Write;
        let line = line.join(" ");
        // A line that cannot be written is not missed.
        let _ = writeln!(
            std::io::stderr(),
            "skipped: {test}: `{line}` does not work here"
        );
    }
    works
}

/// Both ends of a pair of which one is started by `line`: the one with too little first. Either
/// bears `silence`.
fn pair(
    line: &[&str],
    needy: Side,
    variables: &[(&str, &OsStr)],
    silence: Duration,
) -> (Ended, Ended) {
    let scenario = Scenario::each(line.len() as u64, &SIZES);
    let mut instructions = Instructions::new(Carrier::Tcp, scenario);
    instructions.channels = 4;
    instructions.stall = silence;
    instructions.dead_after = silence;
    let mut short = command(line);
    short.envs(variables.iter().copied());
    let usual = Command::new(PEER);
    match needy {
        Side::Server => {
            let server = Peer::start_as(short, &instructions);
            instructions.connect = Some(server.address());
            let client = Peer::start_as(usual, &instructions);
            let client = client.finish(LONG);
            // One that never had its client goes on listening.
            if client.summary().set_up.is_some() && !server.has_ended() {
                server.signal(Signal::KILL);
            }
            (server.finish(LONG), client)
        }
        Side::Client => {
            let server = Peer::start_as(usual, &instructions);
            instructions.connect = Some(server.address());
            let client = Peer::start_as(short, &instructions).finish(LONG);
            if client
                .summary
                .as_ref()
                .is_none_or(|summary| summary.set_up.is_some())
            {
                server.signal(Signal::KILL);
            }
            (client, server.finish(LONG))
        }
    }
}

/// Each end that was not ended by the test says why it failed, and has no wrong byte; whether all
/// went well.
fn ends_well_or_says_why(what: &str, ended: &Ended, needy: bool) -> bool {
    let Some(summary) = &ended.summary else {
        // No memory even for the error.
        let aborted = needy && ended.log.contains("memory allocation of");
        let said = ended.log.contains("Error: ") || ended.log.contains("panicked");
        assert!(
            aborted || said || ended.was_killed(),
            "{what}: {}: {}",
            ended.status,
            ended.log
        );
        return false;
    };
    assert_eq!(summary.defects, [""; 0], "{what}: {summary:#?}");
    let errors = summary.failures.iter().map(|failure| &failure.error);
    let mut errors = errors.chain(&summary.set_up).chain(&summary.close);
    assert!(errors.all(|error| error.len() > 20), "{what}: {summary:#?}");
    summary.is_good()
}

/// The more there is, the further it comes; with `enough` everything must go well.
fn with_less_and_less(test: &str, prefix: &[&str], limit: impl Fn(u64) -> String, steps: &[u64]) {
    let enough = steps.iter().max().expect("a step");
    let probe = limit(*enough);
    if !is_allowed(test, &[prefix, &["prlimit", &probe]].concat()) {
        return;
    }
    for step in steps {
        for needy in [Side::Server, Side::Client] {
            let limit = limit(*step);
            let what = format!("{needy:?} with {limit}");
            let line = [prefix, &["prlimit", &limit]].concat();
            if needy == Side::Server && step != enough {
                // It may not come to listening at all, which is nothing that a client sees.
                continue;
            }
            let silence = if step == enough { LONG / 2 } else { SHORT };
            let (short, other) = pair(&line, needy, &[], silence);
            let good = ends_well_or_says_why(&what, &short, true)
                & ends_well_or_says_why(&what, &other, false);
            println!(
                "{what}: {}",
                if good { "went well" } else { "failed in order" }
            );
            assert!(good || step != enough, "{what}: {short:?} {other:?}");
        }
    }
}

#[test]
fn no_descriptors() {
    let limit = |count| format!("--nofile={count}:{count}");
    with_less_and_less(
        "no_descriptors",
        &[],
        limit,
        &[4, 8, 10, 12, 14, 18, 22, 256],
    );
}

#[test]
fn no_memory() {
    let limit = |mebibytes| format!("--as={}", mebibytes << 20);
    with_less_and_less("no_memory", &[], limit, &[40, 60, 80, 100, 140, 8192]);
}

#[test]
fn no_threads() {
    let user = ["setpriv", "--reuid=64321", "--clear-groups"];
    let limit = |count| format!("--nproc={count}:{count}");
    with_less_and_less("no_threads", &user, limit, &[1, 2, 3, 5, 8, 256]);
}

#[test]
fn no_proc_and_no_tmp() {
    for folder in ["/proc", "/tmp"] {
        let hide =
            format!("mount -t tmpfs -o size=0,nr_inodes=1,mode=0 none {folder} && exec \"$@\"");
        let line = ["unshare", "--mount", "sh", "-c", &hide, "sh"];
        if !is_allowed("no_proc_and_no_tmp", &line) {
            continue;
        }
        for needy in [Side::Server, Side::Client] {
            let (short, other) = pair(&line, needy, &[], LONG / 2);
            short.good();
            other.good();
        }
    }
}

#[test]
fn a_wall_clock_that_goes_back() {
    let clock = OsStr::new(env!("TCPX_CLOCK_SO"));
    for needy in [Side::Server, Side::Client] {
        let (short, other) = pair(&["env"], needy, &[("LD_PRELOAD", clock)], LONG / 2);
        short.good();
        other.good();
    }
}

//! Peer programs: started, watched, and never left behind.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::instructions::{Answer, Instructions, Summary};
use crate::support::wait;

/// Longest wait for a program to come up, on a machine that is busy with other tests.
const START: Duration = Duration::from_secs(60);
/// Longest life of a process that a test started again.
const PATIENCE: Duration = Duration::from_secs(300);
/// Pause between looks at something that has no event.
const PAUSE: Duration = Duration::from_millis(2);

/// A program of this package, given where Cargo made it: beside the test where both were carried
/// elsewhere.
///
/// # Panics
/// When the system does not say where the test is.
pub fn program(made: &str) -> PathBuf {
    let made = Path::new(made);
    let test = std::env::current_exe().expect("the system tells");
    let beside = test.with_file_name(made.file_name().unwrap_or_default());
    if beside.exists() {
        beside
    } else {
        made.to_owned()
    }
}

/// A running program; dropping it kills it.
#[derive(Debug)]
pub struct Running(pub Child);

impl Running {
    /// How it ended, if it does in time.
    pub fn ended(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            match self.0.try_wait().expect("it is our child") {
                None if Instant::now() < deadline => std::thread::sleep(PAUSE),
                ended => return ended,
            }
        }
    }

    /// It ends, and well.
    ///
    /// # Panics
    /// It does not.
    #[track_caller]
    pub fn succeeds(mut self) {
        let ended = self.ended(PATIENCE).expect("it ends in time");
        assert!(ended.success(), "it ended with {ended}");
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// It has ended, and was waited for.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("it is our child");
    }

    /// Stops it by a signal, and waits until it is.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        self.wait_stopped(START);
    }

    /// Waits until it is stopped by a signal.
    pub fn wait_stopped(&self, limit: Duration) {
        wait(limit, "the program to stop", || {
            self.state()?.starts_with('T').then_some(())
        });
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.state().is_none_or(|state| state.starts_with('Z'))
    }

    /// What the system says of it, the state first.
    fn state(&self) -> Option<String> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).ok()?;
        // The state follows the name, which is in parentheses.
        Some(stat.rsplit_once(") ")?.1.to_owned())
    }
}

impl std::ops::Deref for Peer {
    type Target = Running;

    fn deref(&self) -> &Running {
        &self.child
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already; it is our child, so its number is not another's.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running peer program; dropping it kills it.
#[derive(Debug)]
pub struct Peer {
    child: Running,
    answers: Receiver<Answer>,
    log: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
    /// Where it listens.
    address: Option<SocketAddr>,
}

/// How a peer program ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit status.
    pub status: ExitStatus,
    /// What it said last, if it came to that.
    pub summary: Option<Summary>,
    /// What it logged.
    pub log: String,
}

impl Peer {
    /// Starts `program` with instructions; a listening one is listening when this returns.
    pub fn start(program: impl AsRef<Path>, instructions: &Instructions) -> Self {
        let mut command = Command::new(program.as_ref());
        command.env("RUST_BACKTRACE", "1");
        Self::start_as(command, instructions)
    }

    /// As [`Self::start`], of a command that leads to the program.
    pub fn start_as(mut command: Command, instructions: &Instructions) -> Self {
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("TCPX_") || text.starts_with("NCCL_") {
                command.env_remove(&name);
            }
        }
        let mut child = command
            .envs(instructions.carrier.environment().iter().copied())
            // What happens to lanes happens to payload on them.
            .env("TCPX_LOCAL", "off")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the peer program starts");
        let mut line = serde_json::to_vec(instructions).expect("instructions are plain data");
        line.push(b'\n');
        let mut stdin = child.stdin.take().expect("it is piped");
        // One that lacks something may end before it reads them; its end says so.
        if let Err(error) = stdin.write_all(&line) {
            assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
        }
        drop(stdin);
        let (sender, answers) = channel();
        let stdout = child.stdout.take().expect("it is piped");
        let stderr = child.stderr.take().expect("it is piped");
        let log = Arc::new(Mutex::new(String::new()));
        let readers = vec![
            std::thread::spawn(move || read_answers(stdout, |answer| sender.send(answer).is_ok())),
            std::thread::spawn({
                let log = Arc::clone(&log);
                move || read_log(stderr, &log)
            }),
        ];
        let mut peer = Self {
            child: Running(child),
            answers,
            log,
            readers,
            address: None,
        };
        if instructions.connect.is_none() {
            match peer.answers.recv_timeout(START) {
                Ok(Answer::Listening(address)) => peer.address = Some(address),
                other => panic!("the server does not listen: {other:?}\n{}", peer.log()),
            }
        }
        peer
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address.expect("it is a server")
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        self.log
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Waits for its end, and fails if that does not come in time.
    pub fn finish(mut self, limit: Duration) -> Ended {
        let Some(status) = self.child.ended(limit) else {
            let log = self.log();
            panic!("the program did not end within {limit:?}; it logged:\n{log}");
        };
        for reader in self.readers.drain(..) {
            reader.join().expect("readers do not panic");
        }
        let summary = self.answers.try_iter().find_map(|answer| match answer {
            Answer::Summary(summary) => Some(summary),
            Answer::Listening(_) => None,
        });
        Ended {
            status,
            summary,
            log: self.log(),
        }
    }
}

impl Ended {
    /// The summary of a program that was not killed.
    pub fn summary(&self) -> &Summary {
        match &self.summary {
            Some(summary) => summary,
            None => panic!("no summary, {}; it logged:\n{}", self.status, self.log),
        }
    }

    /// The summary of a program that did everything it should.
    pub fn good(&self) -> &Summary {
        let summary = self.summary();
        assert!(
            summary.is_good() && self.status.success(),
            "{summary:#?}; it logged:\n{}",
            self.log
        );
        summary
    }

    /// It was killed.
    pub fn was_killed(&self) -> bool {
        self.status.signal() == Some(libc::SIGKILL)
    }
}

/// Runs a server and a client to their ends.
pub fn run_pair(
    program: impl AsRef<Path>,
    instructions: &Instructions,
    limit: Duration,
) -> (Ended, Ended) {
    let server = Peer::start(program.as_ref(), instructions);
    let client = Instructions {
        connect: Some(server.address()),
        ..instructions.clone()
    };
    let client = Peer::start(program, &client);
    let client = client.finish(limit);
    (server.finish(limit), client)
}

fn read_answers(stdout: ChildStdout, mut take: impl FnMut(Answer) -> bool) {
    for line in BufReader::new(stdout).lines() {
        let Ok(line) = line else { return };
        let answer = serde_json::from_str(&line).expect("peers answer in JSON");
        if !take(answer) {
            return;
        }
    }
}

fn read_log(mut stderr: ChildStderr, log: &Mutex<String>) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = stderr.read(&mut bytes) {
        log.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_str(&String::from_utf8_lossy(&bytes[..count]));
    }
}

//! Starting the program, reading what it prints, and never waiting without an end.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tcpx_tests::process;

/// Far more than the slowest of these steps takes on two busy cores.
const LIMIT: Duration = Duration::from_secs(300);

/// The program with none of the variables that this host may have set.
pub(crate) fn tcpx(arguments: &[&str]) -> Command {
    program(Command::new(env!("CARGO_BIN_EXE_tcpx")), arguments)
}

/// The same, by a command that starts it.
pub(crate) fn program(mut command: Command, arguments: &[&str]) -> Command {
    command.args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["TCPX_", "UCCL_TCPX_", "NCCL_", "RUST_LOG"]
            .iter()
            .any(|start| text.starts_with(start))
        {
            command.env_remove(name);
        }
    }
    command
}

/// How a program ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    #[track_caller]
    pub(crate) fn assert_code(&self, code: i32) -> &Self {
        assert_eq!(
            self.code,
            Some(code),
            "{}\n--- stderr\n{}",
            self.stdout,
            self.stderr
        );
        self
    }

    #[track_caller]
    pub(crate) fn assert_says(&self, text: &str) -> &Self {
        assert!(
            self.stdout.contains(text),
            "no `{text}` in\n{}\n--- stderr\n{}",
            self.stdout,
            self.stderr
        );
        self
    }

    #[track_caller]
    pub(crate) fn assert_complains(&self, text: &str) -> &Self {
        assert!(
            self.stderr.contains(text),
            "no `{text}` in\n{}\n--- stdout\n{}",
            self.stderr,
            self.stdout
        );
        self
    }
}

/// Runs it to its end.
pub(crate) fn run(command: Command) -> Ended {
    Running::start(command).end()
}

/// Runs the program to its end.
pub(crate) fn ask(arguments: &[&str]) -> Ended {
    run(tcpx(arguments))
}

/// Both ends of a server and its client, which are good.
#[track_caller]
pub(crate) fn passes((server, client): (Ended, Ended)) -> (Ended, Ended) {
    server.assert_code(0);
    client.assert_code(0);
    (server, client)
}

/// A running program; killed when dropped.
#[derive(Debug)]
pub(crate) struct Running {
    child: process::Running,
    stdout: Receiver<String>,
    stderr: Receiver<String>,
    seen: String,
}

impl Running {
    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.0.id()
    }

    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let stdout = lines(child.stdout.take().expect("a pipe"));
        let stderr = lines(child.stderr.take().expect("a pipe"));
        Self {
            child: process::Running(child),
            stdout,
            stderr,
            seen: String::new(),
        }
    }

    /// The same with standard output in a file.
    pub(crate) fn start_aside(mut command: Command, stdout: std::fs::File) -> Self {
        let mut child = command
            .stdout(stdout)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let lines_for_people = lines(child.stderr.take().expect("a pipe"));
        Self {
            child: process::Running(child),
            stdout: lines_for_people,
            stderr: mpsc::channel().1,
            seen: String::new(),
        }
    }

    /// The next line of standard output that `wanted` takes something from.
    pub(crate) fn find<T>(&mut self, wanted: impl Fn(&str) -> Option<T>) -> T {
        let until = Instant::now() + LIMIT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(line) = self.stdout.recv_timeout(left) else {
                let complaint: Vec<_> = self.stderr.try_iter().collect();
                panic!(
                    "not printed; before it:\n{}\n--- stderr\n{}",
                    self.seen,
                    complaint.join("\n")
                );
            };
            self.seen.push_str(&line);
            self.seen.push('\n');
            if let Some(found) = wanted(&line) {
                return found;
            }
        }
    }

    /// Waits for a line of standard error.
    pub(crate) fn find_aside(&mut self, is_it: impl Fn(&str) -> bool) {
        let until = Instant::now() + LIMIT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.stderr.recv_timeout(left) {
                Ok(line) if is_it(&line) => return,
                Ok(_) => {}
                Err(_) => panic!("not on standard error; on the other:\n{}", self.seen),
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.child.signal(signal);
    }

    /// Waits for the end.
    pub(crate) fn end(self) -> Ended {
        self.end_after(&"nothing else")
    }

    /// Waits for the end; if there is none, shows `before`.
    fn end_after(mut self, before: &impl std::fmt::Debug) -> Ended {
        let until = Instant::now() + LIMIT;
        let mut stdout = std::mem::take(&mut self.seen);
        // The pipes end with the process, so the wait for it below is short.
        stdout.push_str(&drain(&self.stdout, until, before));
        let stderr = drain(&self.stderr, until, before);
        let code = self.child.0.wait().expect("it ends").code();
        Ended {
            code,
            stdout,
            stderr,
        }
    }
}

fn drain(lines: &Receiver<String>, until: Instant, before: &impl std::fmt::Debug) -> String {
    let mut text = String::new();
    loop {
        match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                text.push_str(&line);
                text.push('\n');
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return text,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                panic!("it does not end; so far:\n{text}\nbefore it: {before:?}")
            }
        }
    }
}

fn lines(stream: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

/// A server that listens on loopback.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) running: Running,
    pub(crate) key: Option<String>,
    pub(crate) port: String,
    /// The line that it printed for the other side.
    pub(crate) invitation: String,
}

impl Server {
    /// Starts `command` with a free port and reads the line that it prints for the other side.
    pub(crate) fn start(mut command: Command) -> Self {
        if !command.get_args().any(|word| word == "--bind") {
            command.args(["--bind", "127.0.0.1"]);
        }
        command.args(["--port", "0"]);
        let has_variable =
            (command.get_envs()).any(|(name, value)| name == "TCPX_KEY" && value.is_some());
        let mut running = Running::start(command);
        let invitation =
            running.find(|line| line.starts_with("  ").then(|| line.trim().to_owned()));
        let word_after = |word: &str| {
            let mut words = invitation
                .split(' ')
                .skip_while(move |found| *found != word);
            words
                .nth(1)
                .unwrap_or_else(|| panic!("no {word} in `{invitation}`"))
                .to_owned()
        };
        let port = word_after("--port");
        // Only a key that nobody else has yet is printed, in a line of its own.
        let has_fresh_key = !has_variable
            && !invitation.contains("--insecure")
            && !invitation.contains("--key-file");
        let key = has_fresh_key.then(|| {
            running.find(|line| {
                line.strip_prefix("key, which it asks for: ")
                    .map(str::to_owned)
            })
        });
        Self {
            running,
            key,
            port,
            invitation,
        }
    }

    /// A client of this server: `before` stands in front of the address, `after` behind it.
    pub(crate) fn client(&self, before: &[&str], after: &[&str]) -> Command {
        let arguments = [before, &["127.0.0.1"], after, &["--port", &self.port]].concat();
        let mut command = tcpx(&arguments);
        if let Some(key) = &self.key {
            command.env("TCPX_KEY", key);
        }
        command
    }

    /// Runs a client to its end, then waits for the server's.
    pub(crate) fn finish(self, client: Command) -> (Ended, Ended) {
        let client = Running::start(client).end();
        (self.running.end_after(&client), client)
    }
}

/// A plugin that scatters payload over a pool: the double of Google's.
pub(crate) mod scattering {
    use super::Command;

    pub(crate) fn path() -> &'static str {
        tcpx_tests::double::path().to_str().expect("text")
    }

    /// It is given host memory in a GPU's place.
    pub(crate) fn takes_host_memory(mut command: Command) -> Command {
        command.env("TCPX_NET_STANDIN", "host");
        command
    }
}

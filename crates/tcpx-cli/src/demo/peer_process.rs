//! The second process, seen from the first: started, told what to do, listened to, and ended.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::orders::{Order, Reply, SendOrder};
use crate::args::link::MemoryArgs;
use crate::environment;
use crate::error::Error;
use crate::output::say::is_debug;

/// How long the process may take to end once its input has ended.
const ENDING: Duration = Duration::from_secs(10);

/// How often its end is looked for.
const LOOK: Duration = Duration::from_millis(5);

/// The process; ended when dropped.
#[derive(Debug)]
pub(crate) struct PeerProcess {
    child: Child,
    input: Option<ChildStdin>,
    replies: Receiver<String>,
    limit: Duration,
}

impl PeerProcess {
    /// Starts it and has it choose its memory.
    pub(crate) fn start(memory: &MemoryArgs, limit: Duration) -> Result<Self, Error> {
        let failed = |source| Error::Process {
            doing: "start the second process",
            source,
        };
        let mut command = Command::new(environment::own_program());
        if is_debug() {
            command.arg("--debug");
        }
        let mut child = command
            .arg("demo-peer")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let input = child.stdin.take();
        let (sender, replies) = mpsc::channel();
        if let Some(output) = child.stdout.take() {
            // Ends with the pipe, which ends with the process.
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        let mut process = Self {
            child,
            input,
            replies,
            limit,
        };
        let timeout_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        process.order(&Order::Start {
            gpu: memory.gpu,
            host: memory.host,
            timeout_ms,
        })?;
        Ok(process)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The memory that it chose, for a person. Opening a GPU takes seconds on some hosts.
    pub(crate) fn memory(&mut self) -> Result<String, Error> {
        match self.reply(self.limit + Duration::from_secs(30))? {
            Reply::Started { memory } => Ok(memory),
            other => Err(unexpected("its memory", &other)),
        }
    }

    /// Has it fill its source; returns when it is about to connect.
    pub(crate) fn prepare(&mut self, order: SendOrder) -> Result<(), Error> {
        let limit = self.limit + filling(order.bytes);
        self.order(&Order::Send(order))?;
        match self.reply(limit)? {
            Reply::Prepared => Ok(()),
            other => Err(unexpected("that its source is filled", &other)),
        }
    }

    /// What it says about the transfer: time, checksum of the source, and the source's first bytes.
    pub(crate) fn sent(&mut self, bytes: u64) -> Result<(Duration, u32, Vec<u8>), Error> {
        match self.reply(self.limit + filling(bytes))? {
            Reply::Sent {
                elapsed_us,
                crc32c,
                head,
            } => Ok((Duration::from_micros(elapsed_us), crc32c, head)),
            other => Err(unexpected("that it has sent", &other)),
        }
    }

    /// Ends its input and waits for its end.
    pub(crate) fn end(mut self) -> Result<(), Error> {
        drop(self.input.take());
        let until = Instant::now() + ENDING;
        loop {
            let ended = self.child.try_wait().map_err(|source| Error::Process {
                doing: "wait",
                source,
            })?;
            match ended {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(died(&status.to_string())),
                None if Instant::now() >= until => return Err(died("nothing: it does not end")),
                None => std::thread::sleep(LOOK),
            }
        }
    }

    fn order(&mut self, order: &Order) -> Result<(), Error> {
        let failed = |source| Error::Process {
            doing: "tell the second process what to do",
            source,
        };
        let mut line = serde_json::to_string(order).map_err(|error| failed(error.into()))?;
        line.push('\n');
        match &mut self.input {
            Some(input) => input
                .write_all(line.as_bytes())
                .and_then(|()| input.flush())
                .map_err(failed),
            None => Err(died("an order after the last")),
        }
    }

    fn reply(&mut self, limit: Duration) -> Result<Reply, Error> {
        let line = match self.replies.recv_timeout(limit) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => return Err(died("nothing in time")),
            Err(RecvTimeoutError::Disconnected) => {
                let status = self
                    .child
                    .wait()
                    .map_or_else(|error| error.to_string(), |status| status.to_string());
                return Err(died(&status));
            }
        };
        match serde_json::from_str(&line) {
            Ok(Reply::Failed { what, hint }) => Err(Error::Peer { what, hint }),
            Ok(reply) => Ok(reply),
            Err(error) => Err(Error::Unexpected {
                expected: "a reply of the demo",
                arrived: error.to_string(),
            }),
        }
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Time to fill or to checksum `bytes` on a slow host: 100 MB/s.
fn filling(bytes: u64) -> Duration {
    Duration::from_secs(bytes / 100_000_000)
}

fn died(how: &str) -> Error {
    Error::Failed {
        what: format!("the second process gave {how}"),
        hint: "look for its messages above; --debug shows its log lines",
    }
}

fn unexpected(expected: &'static str, reply: &Reply) -> Error {
    Error::Unexpected {
        expected,
        arrived: format!("{reply:?}"),
    }
}

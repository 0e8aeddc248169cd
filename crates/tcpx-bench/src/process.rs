//! Processes that are watched, and those that measure on command, a line of JSON for each case and
//! one for its answer: the driver of a commit, or whoever is measured beside tcpx.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How often an end is looked for.
const LOOK: Duration = Duration::from_millis(5);

/// How long one that was killed may take: the kernel ends it later where it waits inside a driver.
const GRACE: Duration = Duration::from_secs(5);

/// A process; killed when dropped.
#[derive(Debug)]
pub struct Child(pub std::process::Child);

impl Child {
    /// Waits for its end for at most `limit`.
    ///
    /// # Errors
    /// The system's.
    pub fn end(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let until = Instant::now() + limit;
        loop {
            match self.0.try_wait()? {
                None if Instant::now() < until => std::thread::sleep(LOOK),
                ended => return Ok(ended),
            }
        }
    }

    /// Ends it.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.end(GRACE);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A figure of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Median time in microseconds.
    P50,
    /// 99th percentile in microseconds.
    P99,
    /// 10^9 bytes a second.
    Rate,
    /// Processor seconds of both ends for 10^9 bytes.
    Cpu,
    /// KiB of both ends.
    Memory,
    /// Of both ends.
    Descriptors,
}

/// What a case gave.
pub type Figures = BTreeMap<Metric, f64>;

/// What a process answers to a case.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Answer {
    /// What it measured.
    pub figures: Figures,
    /// Why it could not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// It polls while it has no turn: it should be stopped meanwhile.
    pub polls: bool,
}

/// What a process says, a line of JSON at a time.
#[derive(Debug)]
pub struct Lines(Receiver<io::Result<String>>);

impl Lines {
    /// Listens.
    pub fn of(output: impl Read + Send + 'static) -> Self {
        let (heard, from) = channel();
        // Ends with the process, or with whoever listens.
        std::thread::spawn(move || {
            let mut lines = BufReader::new(output).lines();
            lines.try_for_each(|line| heard.send(line))
        });
        Self(from)
    }

    /// Waits for the next line.
    ///
    /// # Errors
    /// The process is gone, says nothing within the limit, or something else.
    pub fn next_line<T: DeserializeOwned>(&self, limit: Duration) -> io::Result<T> {
        let line = self.0.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                let why = format!("no answer within {} s", limit.as_secs_f64());
                io::Error::new(ErrorKind::TimedOut, why)
            }
            RecvTimeoutError::Disconnected => {
                io::Error::new(ErrorKind::UnexpectedEof, "the process has gone")
            }
        })??;
        Ok(serde_json::from_str(&line)?)
    }
}

/// It runs; killed when dropped.
#[derive(Debug)]
pub struct Process {
    /// As the system knows it.
    pub child: Child,
    to: ChildStdin,
    from: Lines,
    /// As it last [said](Answer::polls).
    pub polls: bool,
}

impl Process {
    /// Starts it.
    ///
    /// # Errors
    /// The system's.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = Child(command.spawn()?);
        let (Some(to), Some(output)) = (child.0.stdin.take(), child.0.stdout.take()) else {
            return Err(ErrorKind::BrokenPipe.into());
        };
        Ok(Self {
            child,
            to,
            from: Lines::of(output),
            polls: false,
        })
    }

    /// Writes a line to it.
    ///
    /// # Errors
    /// It is gone.
    pub fn send_line(&mut self, line: &Value) -> io::Result<()> {
        self.to.write_all(format!("{line}\n").as_bytes())
    }

    /// Waits for its next line.
    ///
    /// # Errors
    /// Those of [`Lines::next_line`].
    pub fn next_line(&mut self, limit: Duration) -> io::Result<Value> {
        self.from.next_line(limit)
    }

    /// Has it measure a case. It is killed if it does not answer: what it would say later is of
    /// another case.
    ///
    /// # Errors
    /// Its own, or why there is no answer.
    pub fn measure(&mut self, case: &Value, limit: Duration) -> io::Result<Figures> {
        let answer = self
            .send_line(case)
            .and_then(|()| self.from.next_line(limit));
        let Answer {
            figures,
            error,
            polls,
        } = answer.inspect_err(|_| {
            self.child.kill();
        })?;
        self.polls = polls;
        match error {
            Some(why) => Err(io::Error::other(why)),
            None => Ok(figures),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_does_not_answer_is_an_error() {
        let start = |script: &str| {
            let mut command = Command::new("sh");
            Process::start(command.args(["-c", script])).unwrap()
        };
        let limit = Duration::from_secs(60);
        let error = |script: &str, limit| {
            let error = start(script).measure(&Value::Null, limit).unwrap_err();
            error.to_string()
        };
        let silent = error("exec sleep 1000", Duration::from_millis(10));
        assert!(silent.contains("no answer"), "{silent}");
        assert!(error("read line", limit).contains("has gone"));
        assert_eq!(error(r#"read line; echo '{"error":"no"}'"#, limit), "no");
        let mut right = start(r#"read line; echo '{"figures":{"rate":2}}'"#);
        let figures = right.measure(&Value::Null, limit).unwrap();
        assert_eq!(figures, Figures::from([(Metric::Rate, 2.0)]));
    }
}

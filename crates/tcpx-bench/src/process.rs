//! A process that measures on command, a line of JSON for each case and one for its answer: the driver of a commit, or
//! whoever is measured beside tcpx.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

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

/// It runs; killed when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    to: ChildStdin,
    from: Receiver<io::Result<String>>,
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
        let mut child = command.spawn()?;
        let (Some(to), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(ErrorKind::BrokenPipe.into());
        };
        let (heard, from) = channel();
        // Ends with the process, or with whoever listens.
        std::thread::spawn(move || {
            let mut lines = BufReader::new(output).lines();
            lines.try_for_each(|line| heard.send(line))
        });
        Ok(Self {
            child,
            to,
            from,
            polls: false,
        })
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.child.id()
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
    /// It is gone, says nothing within the limit, or no JSON.
    pub fn hear(&mut self, limit: Duration) -> io::Result<Value> {
        let line = self
            .from
            .recv_timeout(limit)
            .map_err(|error| match error {
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

    /// Has it measure a case. It is killed if it does not answer: what it would say later is of another case.
    ///
    /// # Errors
    /// Its own, or why there is no answer.
    pub fn measure(&mut self, case: &Value, limit: Duration) -> io::Result<Figures> {
        let answer = self.send_line(case).and_then(|()| self.hear(limit));
        let answer = answer.and_then(|answer| Ok(serde_json::from_value(answer)?));
        let Answer {
            figures,
            error,
            polls,
        } = answer.inspect_err(|_| {
            let _ = self.child.kill();
        })?;
        self.polls = polls;
        match error {
            Some(why) => Err(io::Error::other(why)),
            None => Ok(figures),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
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

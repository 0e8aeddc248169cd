//! The driver of `cargo xtask gate`: two processes that run cases of speed on command.
//!
//! `tcpx-gate run` starts `tcpx-gate serve` as its other end, reads one case a line (JSON) from its
//! standard input, runs it with the other end, and answers with one line of JSON. It uses public
//! interfaces only, so that the same source builds against earlier commits.

mod case;
mod engine;
mod facts;
mod plugin;
mod relay;

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

use case::{Answer, Case, Kind, Part};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["run", rest @ ..] => run(rest),
        ["serve"] => serve(),
        _ => bail!("usage: tcpx-gate run [PREFIX OF THE OTHER END'S COMMAND...]"),
    }
}

/// The other end, and the lines between the two.
pub(crate) struct OtherEnd {
    child: Child,
    to: ChildStdin,
    from: Lines<BufReader<ChildStdout>>,
}

impl OtherEnd {
    fn start(prefix: &[&str]) -> Result<Self> {
        let own = std::env::current_exe()?;
        let mut command = match prefix.split_first() {
            Some((program, rest)) => {
                let mut command = Command::new(program);
                command.args(rest).arg(own);
                command
            }
            None => Command::new(own),
        };
        command
            .arg("serve")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start the other end")?;
        let to = child.stdin.take().context("no pipe to the other end")?;
        let from = child.stdout.take().context("no pipe from the other end")?;
        Ok(Self {
            child,
            to,
            from: BufReader::new(from).lines(),
        })
    }

    /// Tells the other end its part.
    pub(crate) fn tell(&mut self, part: &Part) -> Result<()> {
        let mut line = serde_json::to_string(part)?;
        line.push('\n');
        self.to
            .write_all(line.as_bytes())
            .context("the other end has gone")
    }

    /// The other end's next answer.
    pub(crate) fn hear(&mut self) -> Result<Answer> {
        let line = self.from.next().context("the other end has gone")??;
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for OtherEnd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(prefix: &[&str]) -> Result<()> {
    let mut other = OtherEnd::start(prefix)?;
    let mut engine = engine::Client::default();
    let mut plugin = plugin::Client::default();
    for line in std::io::stdin().lines() {
        let case: Case = serde_json::from_str(&line?)?;
        let figures = match case.kind {
            Kind::Plugin { .. } => plugin.run(&case, &mut other),
            _ => engine.run(&case, &mut other),
        };
        let answer = match figures {
            Ok(figures) => serde_json::json!({ "figures": figures }),
            Err(error) => serde_json::json!({ "error": format!("{error:#}") }),
        };
        say(&answer)?;
    }
    Ok(())
}

fn serve() -> Result<()> {
    let mut engine = engine::Server::default();
    let mut plugin = plugin::Server::default();
    for line in std::io::stdin().lines() {
        let part: Part = serde_json::from_str(&line?)?;
        let answer = match part {
            Part::Plugin(part) => plugin.run(part),
            part => engine.run(part),
        };
        let answer = answer.unwrap_or_else(|error| Answer::Failed(format!("{error:#}")));
        if !matches!(answer, Answer::Nothing) {
            say(&answer)?;
        }
    }
    Ok(())
}

pub(crate) fn say<T: serde::Serialize>(answer: &T) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, answer)?;
    out.write_all(b"\n")?;
    out.flush()?;
    Ok(())
}

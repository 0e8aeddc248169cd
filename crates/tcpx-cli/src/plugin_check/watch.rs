//! Watching the process that starts the plugin: its events, its end, and its time.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, ErrorKind, PipeReader, Read};
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tcpx_bench::process::{Child, Lines};
use tcpx_memory::lock;

use super::events::Event;
use crate::environment;
use crate::error::Error;
use crate::output::say::{aside, is_debug, one_line};
use crate::plugin_check::PluginArgs;
use crate::vendor_environment::{Origin, Setting};

/// Lines of the plugin's log that are kept to be shown beside a failure.
const KEPT_LINES: usize = 12;
/// Of a longer line this much counts as one.
const MAX_LINE_BYTES: u64 = 4096;
/// What a step may take beyond its limit: the process itself notices most ends.
const GRACE: Duration = Duration::from_secs(5);
/// How long what the process wrote last is waited for once it has ended.
const LAST_WORDS: Duration = Duration::from_secs(2);

type Log = Arc<Mutex<VecDeque<String>>>;

/// The process.
#[derive(Debug)]
pub(super) struct Watched {
    child: Child,
    events: Lines,
    log: Log,
    /// Ends when the output was read to its end; nothing is sent.
    reader: Receiver<()>,
    limit: Duration,
    step: String,
}

impl Watched {
    /// Starts the process with the variables that the plugin needs.
    pub(super) fn start(args: &PluginArgs, settings: &[Setting]) -> Result<Self, Error> {
        let failed = Error::process("start the process for the plugin");
        let (heard, told) = io::pipe().map_err(failed)?;
        let (output, printed) = io::pipe().map_err(failed)?;
        let mut command = Command::new(environment::own_program());
        command.arg("plugin-part");
        if let Some(abi) = args.abi {
            command.arg(format!("--abi={abi}"));
        }
        command.arg(if is_debug() { "--debug" } else { "--verbose" });
        command
            .arg("--")
            // The dynamic linker looks elsewhere for a name without a folder.
            .arg(args.path.canonicalize().map_err(failed)?)
            .envs(
                settings
                    .iter()
                    .filter(|setting| setting.origin != Origin::Yours)
                    .map(|setting| (setting.name, &setting.value)),
            )
            // Its input takes the events: what a plugin prints is no event then.
            .stdin(told)
            .stdout(printed.try_clone().map_err(failed)?)
            .stderr(printed);
        let child = command.spawn().map(Child).map_err(failed)?;
        // It holds our copies of the pipes' other ends, and they would have no end.
        drop(command);
        let log = Log::default();
        let (open, reader) = mpsc::channel::<()>();
        let (kept, show) = (Arc::clone(&log), is_debug());
        std::thread::spawn(move || {
            let _open = open;
            keep_lines(output, &kept, show)
        });
        Ok(Self {
            child,
            events: Lines::of(heard),
            log,
            reader,
            limit: args.timeout.0,
            step: "starting".into(),
        })
    }

    /// What the plugin was last asked to do.
    pub(super) fn step(&self) -> &str {
        &self.step
    }

    /// The next event; an error once the plugin failed, the process ended or a step takes too long.
    pub(super) fn next(&mut self) -> Result<Event, Error> {
        loop {
            match self.events.next_line(self.limit + GRACE) {
                Ok(Event::Doing { step }) => self.step = step,
                Ok(Event::Failed { what, hint }) => return Err(Error::failed(what, hint)),
                Ok(event) => return Ok(event),
                Err(error) => return Err(self.ended(error.kind() == ErrorKind::TimedOut)),
            }
        }
    }

    /// Ends the process; the last lines that the plugin logged or printed.
    pub(super) fn log(&mut self) -> Vec<String> {
        self.child.kill();
        // They may still lie in the pipe, which a process of the plugin's own may hold open.
        let _ = self.reader.recv_timeout(LAST_WORDS);
        let log = lock(&self.log);
        log.iter().cloned().collect()
    }

    /// Its events ended without a last word, or none came in time.
    fn ended(&mut self, is_late: bool) -> Error {
        let (step, limit) = (&self.step, self.limit);
        let grace = if is_late { Duration::ZERO } else { GRACE };
        match self.child.end(grace) {
            // A process of the plugin's own may hold the pipe open for longer than this one lives.
            Ok(Some(status)) => self.died(status),
            _ if is_late => Error::failed(
                format!("the plugin did not come back from \"{step}\" within {limit:?}"),
                format!(
                    "it waits for something without an end: see its log; --timeout gives it more time{}",
                    mark(step)
                ),
            ),
            _ => Error::failed(
                format!("the plugin closed the program's files in \"{step}\""),
                "use another build of the plugin",
            ),
        }
    }

    fn died(&self, status: ExitStatus) -> Error {
        let hint = if status.code().is_some() {
            "the plugin ended the process by itself, as Google's does without a GPU or without a socket of the buffer daemon: see its log"
        } else {
            "the plugin crashed: see its log, and use another build of it"
        };
        let what = format!("the process ended inside \"{}\": {status}", self.step);
        Error::failed(what, format!("{hint}{}", mark(&self.step)))
    }
}

/// Names the check that explains trouble in a step.
fn mark(step: &str) -> &'static str {
    match step {
        "loading the file" => " [TCPX-D011]",
        "init" => " [TCPX-D033]",
        _ => "",
    }
}

/// Keeps the last lines until the output ends, which it does with the process.
fn keep_lines(output: PipeReader, log: &Log, show: bool) -> io::Result<()> {
    let mut reader = BufReader::new(output);
    loop {
        let mut bytes = Vec::new();
        let mut line = reader.by_ref().take(MAX_LINE_BYTES);
        if line.read_until(b'\n', &mut bytes)? == 0 {
            return Ok(());
        }
        let line = one_line(String::from_utf8_lossy(&bytes).trim_end());
        if show {
            aside!("{line}");
        }
        let mut log = lock(log);
        if log.len() == KEPT_LINES {
            log.pop_front();
        }
        log.push_back(line);
    }
}

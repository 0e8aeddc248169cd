//! Watching the process that starts the plugin: its events, its end, and its time.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tcpx_memory::lock;

use super::events::Event;
use crate::child::Child;
use crate::environment;
use crate::error::Error;
use crate::output::say::{aside, is_debug, one_line};
use crate::plugin_check::PluginArgs;
use crate::vendor_environment::{Origin, Setting};

/// Lines of the plugin's log that are kept to be shown beside a failure.
const KEPT_LINES: usize = 12;
/// Longest line that is read: an event with every device that a plugin may have.
const MAX_LINE_BYTES: u64 = 8 << 20;
/// Characters of a line that are kept.
const KEPT_CHARACTERS: usize = 4096;
/// How often the process's end is looked for while no event comes.
const LOOK: Duration = Duration::from_millis(100);
/// What a step may take beyond its limit: the process itself notices most ends.
const GRACE: Duration = Duration::from_secs(5);
/// How long what the process wrote last is waited for once it has ended.
const LAST_WORDS: Duration = Duration::from_secs(2);

type Lines = Arc<Mutex<VecDeque<String>>>;

/// The process.
#[derive(Debug)]
pub(super) struct Watched {
    child: Child,
    events: Receiver<Event>,
    log: Lines,
    /// Ends when both outputs were read to their end; nothing is sent.
    readers: Receiver<()>,
    limit: Duration,
    step: String,
}

impl Watched {
    /// Starts the process with the variables that the plugin needs.
    pub(super) fn start(args: &PluginArgs, settings: &[Setting]) -> Result<Self, Error> {
        let failed = Error::process("start the process for the plugin");
        let (heard, told) = std::io::pipe().map_err(failed)?;
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
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = Child::start(&mut command).map_err(failed)?;
        // It holds our copy of the pipe's other end, and the events would have no end.
        drop(command);
        let (sender, events) = mpsc::channel();
        let log = Lines::default();
        let (reader, readers) = mpsc::channel::<()>();
        let show = is_debug();
        // The threads end with the pipes, which end with the process.
        std::thread::spawn(move || {
            each_line(heard, |line| match Event::from_line(&line) {
                Some(event) => sender.send(event).is_ok(),
                None => true,
            });
        });
        let outputs: [Option<Box<dyn Read + Send>>; 2] = [
            child.0.stdout.take().map(|output| Box::new(output) as _),
            child.0.stderr.take().map(|output| Box::new(output) as _),
        ];
        for output in outputs.into_iter().flatten() {
            let (log, reader) = (Arc::clone(&log), reader.clone());
            std::thread::spawn(move || {
                let _reader = reader;
                each_line(output, |line| keep(&log, line, show));
            });
        }
        drop(reader);
        Ok(Self {
            child,
            events,
            log,
            readers,
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
        let mut deadline = Instant::now() + self.limit + GRACE;
        loop {
            let event = match self.events.recv_timeout(LOOK) {
                Ok(event) => event,
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
                // A process of the plugin's own may hold the pipe open for longer than this one lives.
                Err(RecvTimeoutError::Timeout) => match self.child.end(Duration::ZERO) {
                    Ok(Some(status)) => match self.events.recv_timeout(LOOK) {
                        Ok(event) => event,
                        Err(_) => return Err(self.died(status)),
                    },
                    _ if Instant::now() < deadline => continue,
                    _ => {
                        let (step, mark) = (&self.step, mark(&self.step));
                        return Err(Error::failed(
                            format!(
                                "the plugin did not come back from \"{step}\" within {:?}",
                                self.limit
                            ),
                            format!(
                                "it waits for something without an end: see its log; --timeout gives it more time{mark}"
                            ),
                        ));
                    }
                },
            };
            match event {
                Event::Doing { step } => {
                    self.step = step;
                    deadline = Instant::now() + self.limit + GRACE;
                }
                Event::Failed { what, hint } => return Err(Error::failed(what, hint)),
                event => return Ok(event),
            }
        }
    }

    /// Ends the process; the last lines that the plugin logged or printed.
    pub(super) fn log(&mut self) -> Vec<String> {
        self.child.kill();
        // They may still lie in the pipes, which a process of the plugin's own may hold open.
        let _ = self.readers.recv_timeout(LAST_WORDS);
        let log = lock(&self.log);
        log.iter().cloned().collect()
    }

    /// Its events ended without a last word.
    fn ended(&mut self) -> Error {
        if let Ok(Some(status)) = self.child.end(GRACE) {
            return self.died(status);
        }
        let what = format!("the plugin closed the program's files in \"{}\"", self.step);
        Error::failed(what, "use another build of the plugin")
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

/// Calls `take` with each line, until it says no or the output ends.
fn each_line(output: impl Read, mut take: impl FnMut(String) -> bool) {
    let mut reader = BufReader::new(output);
    loop {
        let mut bytes = Vec::new();
        let mut line = reader.by_ref().take(MAX_LINE_BYTES);
        match line.read_until(b'\n', &mut bytes) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if !take(String::from_utf8_lossy(&bytes).trim_end().to_owned()) {
            return;
        }
    }
}

fn keep(log: &Lines, line: String, show: bool) -> bool {
    let line = one_line(&line);
    if show {
        aside!("{line}");
    }
    let short = line.chars().take(KEPT_CHARACTERS).collect();
    let mut log = lock(log);
    if log.len() == KEPT_LINES {
        log.pop_front();
    }
    log.push_back(short);
    true
}

//! `tcpx transfer`: a greeting, or files and directories, from one host's memory to another's.

pub(crate) mod digest;
pub(crate) mod greeting;
pub(crate) mod manifest;
mod receiver;
mod sender;
pub(crate) mod store;
mod talk;

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tcpx::Connection;

use crate::args::link::MemoryArgs;
use crate::args::transfer::TransferArgs;
use crate::error::Error;
use crate::interrupt;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice};
use crate::messages::{self, REQUEST, Request};
use crate::output::json::Told;
use crate::output::say::{self, Voice, aside, say};
use crate::sizes::{Size, rate, time};
use manifest::{Entry, Found};
use receiver::Out;

/// What the JSON of a server that stays is called, a line for each client.
const SCHEMA: &str = "tcpx.transfer";

/// Runs one side; the word `server` instead of an address means the server's.
pub(crate) fn run(args: &TransferArgs) -> Result<Told, Error> {
    let is_server = args.peer == "server";
    if is_server && out(args).is_standard_output() && !say::is_quiet() {
        say::set_voice(Voice::Aside);
    }
    interrupt::listen()?;
    check_sides(args, is_server)?;
    match is_server {
        true => serve(args),
        false => connect(args).map(|done| Told::Fields(done.fields())),
    }
}

/// Flags of the other side are a mistake that would otherwise go unnoticed.
fn check_sides(args: &TransferArgs, is_server: bool) -> Result<(), Error> {
    let wrong = |what: &str, hint: &str| Err(Error::usage(what, hint));
    match (is_server, &*args.file, &args.out) {
        (true, [_, ..], _) => wrong(
            "--file belongs to the client",
            "tcpx transfer <SERVER_IP> --file PATH",
        ),
        (false, _, Some(_)) => wrong(
            "--out belongs to the server",
            "tcpx transfer server --out DIR",
        ),
        _ if args.plain && args.link.network.encrypt => wrong(
            "--plain and --encrypt (or TCPX_ENCRYPT) contradict each other",
            "leave one of them out: contents are encrypted without either",
        ),
        _ => Ok(()),
    }
}

/// What was moved.
#[derive(Debug)]
pub(crate) enum Done {
    Greeting { bytes: u64 },
    Files(Summary),
}

/// How a transfer of files ended.
#[derive(Debug)]
pub(crate) struct Summary {
    what: String,
    entries: usize,
    bytes: u64,
    skipped: u64,
    took: Duration,
    /// Of a single file its own BLAKE3 digest.
    single: Option<String>,
    /// Over the manifest and all contents.
    pub(crate) digest: String,
}

impl Summary {
    fn new(
        entries: &[Entry],
        skipped: u64,
        took: Duration,
        contents: &[sender::Content],
        digest: String,
    ) -> Self {
        Self {
            what: manifest::describe(entries),
            entries: entries.len(),
            bytes: contents.iter().map(|&(_, bytes)| bytes).sum(),
            skipped,
            took,
            single: match (entries, contents) {
                ([_], [(only, _)]) => Some(only.to_string()),
                _ => None,
            },
            digest,
        }
    }

    fn say(&self, verb: &str, place: &str) {
        let moved = self.bytes.saturating_sub(self.skipped);
        let speed = rate(moved, self.took).filter(|_| moved >= 1 << 20);
        let speed = speed.map_or_else(String::new, |speed| {
            format!(", {speed:.2} GB/s with reading, digest and writing")
        });
        say!(
            "{verb} {} {place}in {}{speed}",
            Size(self.bytes),
            time(self.took)
        );
        match &self.single {
            Some(digest) => say!("BLAKE3 {digest}, the same at both ends"),
            None => say!(
                "BLAKE3 {} over {} entries, the same at both ends",
                self.digest,
                self.entries
            ),
        }
    }
}

impl Done {
    /// What its JSON holds.
    fn fields(&self) -> Value {
        match self {
            Self::Greeting { bytes } => json!({ "kind": "greeting", "bytes": bytes }),
            Self::Files(files) => json!({
                "kind": "files", "what": files.what, "entries": files.entries, "bytes": files.bytes,
                "bytes_there_before": files.skipped, "seconds": files.took.as_secs_f64(),
                "blake3": files.single.as_ref().unwrap_or(&files.digest),
            }),
        }
    }
}

fn out(args: &TransferArgs) -> Out<'_> {
    Out {
        directory: args.out.as_deref(),
        overwrite: args.overwrite,
    }
}

/// Files go through host memory, unless a GPU or a plugin, whose memory it may need, was asked for.
fn choose_memory(args: &TransferArgs, is_files: bool) -> Result<MemoryChoice, Error> {
    let is_tcp = link::is_tcp(&args.link.network);
    let host = MemoryArgs {
        gpu: None,
        host: true,
    };
    if is_files && is_tcp && args.memory.gpu.is_none() && !args.memory.host {
        return Ok(MemoryChoice::host("as files come and go through it"));
    }
    let choice = if args.memory.host {
        &host
    } else {
        &args.memory
    };
    Devices::probe().choose(choice, 0)
}

/// A link that encrypts the contents, and a line that says so where it does not.
fn link(args: &TransferArgs, memory: &MemoryChoice, is_server: bool) -> Result<Link, Error> {
    let link = Link::new(&args.link, memory, is_server)?;
    let why_not = if args.link.network.encrypt {
        // Whether that is possible the network says.
        None
    } else if args.plain {
        Some("--plain was given")
    } else if args.link.insecure {
        Some("there is no key")
    } else if !link::is_tcp(&args.link.network) {
        Some("only the network tcp encrypts")
    } else {
        None
    };
    let Some(why_not) = why_not else {
        return Ok(link.encrypted());
    };
    aside!("note: contents travel in the clear, as {why_not}: anyone on the path can read them");
    Ok(link)
}

fn serve(args: &TransferArgs) -> Result<Told, Error> {
    if let Some(directory) = &args.out
        && !out(args).is_standard_output()
        && !directory.is_dir()
    {
        return Err(Error::usage(
            format!("--out {} is not a directory", directory.display()),
            "create it first, or name another one",
        ));
    }
    let memory = choose_memory(args, args.out.is_some())?;
    let mut link = link(args, &memory, true)?;
    if args.out.is_none() {
        link = link.through_data_channels();
    }
    if args.keep {
        link = link.for_many();
    }
    let mut command = String::from("transfer SERVER_IP");
    if args.out.is_some() {
        command.push_str(" --file PATH");
    }
    if args.plain {
        command.push_str(" --plain");
    }
    link.invite(&args.link, &command)?;
    if !args.keep {
        let connection = link.accept(Some(args.link.wait.0))?;
        return session(args, &link, &memory, connection).map(|done| Told::Fields(done.fields()));
    }
    link.serve_each(SCHEMA, |connection| {
        session(args, &link, &memory, connection).map(|done| done.fields())
    })
}

/// One client.
fn session(
    args: &TransferArgs,
    link: &Link,
    memory: &MemoryChoice,
    connection: Connection,
) -> Result<Done, Error> {
    say!("{}", link.describe(&connection, memory));
    let limit = args.link.timeout.0;
    let result = (|| {
        let expected = messages::expect(&connection, REQUEST, limit)?;
        let request = expected.wait("a request to transfer")?;
        match request {
            Request::Greeting { bytes, seed } => {
                greeting::receive(&connection, memory, bytes, seed)?;
                Ok(Done::Greeting { bytes })
            }
            Request::Files { bytes, digest, key } => {
                let offer = receiver::Offer { bytes, digest, key };
                let files = receiver::receive(&connection, memory, &offer, out(args), limit)?;
                let place = args.out.as_ref().map_or_else(String::new, |directory| {
                    format!("into {} ", directory.display())
                });
                files.say("wrote", &place);
                Ok(Done::Files(files))
            }
            Request::Measure => Err(messages::refuse(
                &connection,
                "a request to transfer",
                &request,
                "tcpx perf server",
            )),
            Request::Nothing => Err(messages::refuse(
                &connection,
                "a request to transfer",
                &request,
                "tcpx connection server",
            )),
        }
    })();
    link::part_after(connection, result)
}

fn connect(args: &TransferArgs) -> Result<Done, Error> {
    // Looked at before connecting: a name that is wrong should not cost the server its one session.
    let found: Vec<Found> = manifest::collect(&args.file, &args.name)?;
    let memory = choose_memory(args, !found.is_empty())?;
    let mut link = link(args, &memory, false)?;
    if found.is_empty() {
        link = link.through_data_channels();
    }
    let started = Instant::now();
    let connection = link.connect(&args.link, &args.peer)?;
    tracing::debug!(took = ?started.elapsed(), "connected");
    say!("{}", link.describe(&connection, &memory));
    let limit = args.link.timeout.0;
    let sent = if found.is_empty() {
        let bytes = args.payload_bytes.0;
        greeting::send(&connection, &memory, bytes, limit).map(|()| Done::Greeting { bytes })
    } else {
        sender::send(&connection, &memory, found, limit).map(|files| {
            files.say("sent", "");
            Done::Files(files)
        })
    };
    link::part_after(connection, sent)
}

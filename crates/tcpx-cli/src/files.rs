//! `tcpx send` and `tcpx receive`: files and directories from one host to another's folder.

pub(crate) mod digest;
pub(crate) mod manifest;
pub(crate) mod receiver;
mod sender;
pub(crate) mod store;
mod talk;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use manifest::{Entry, LeftOut, Rules, Selection};
use receiver::Out;
use rustix::fs::{Access, AtFlags, CWD, accessat};
use sender::Opening;
use serde_json::{Value, json};
use tcpx::Connection;

use crate::args::link::{LinkArgs, MemoryArgs};
use crate::error::Error;
use crate::interrupt;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice};
use crate::messages::{self, OFFER, Offered, REQUEST, Reason, Request, Wanted};
use crate::output::json::Told;
use crate::output::progress::rate;
use crate::output::say::{self, aside, say};
use crate::sizes::{Amount, Size, time};

#[derive(Args, Debug)]
#[command(
    override_usage = "tcpx send FILE... HOST [OPTIONS]\n       tcpx send --serve DIR [OPTIONS]"
)]
pub(crate) struct SendArgs {
    /// Files and directories, and last the host that runs `tcpx receive`.
    #[arg(value_name = "FILE... HOST", required_unless_present = "serve")]
    pub(crate) paths: Vec<PathBuf>,
    /// Share this directory instead: clients fetch from it with `tcpx receive HOST:PATH`, until a
    /// signal ends it.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["paths", "follow", "include", "exclude", "dry_run"])]
    pub(crate) serve: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) selection: SelectionArgs,
    #[command(flatten)]
    pub(crate) way: WayArgs,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

#[derive(Args, Debug)]
#[command(
    override_usage = "tcpx receive [--out DIR] [OPTIONS]\n       tcpx receive HOST:PATH... [--out DIR] [OPTIONS]"
)]
pub(crate) struct ReceiveArgs {
    /// Fetch these files and directories of a host that runs `tcpx send --serve DIR`; `HOST:.` is
    /// all of DIR. Without one, wait for `tcpx send`.
    #[arg(value_name = "HOST:PATH")]
    pub(crate) sources: Vec<String>,
    /// Put everything into this directory.
    #[arg(short, long, value_name = "DIR", default_value = ".")]
    pub(crate) out: PathBuf,
    /// Replace files that are there and differ.
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Stay for more clients, several at once, until a signal ends it.
    #[arg(short, long, conflicts_with = "sources")]
    pub(crate) keep: bool,
    #[command(flatten)]
    pub(crate) selection: SelectionArgs,
    #[command(flatten)]
    pub(crate) way: WayArgs,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

/// What is sent, as the client says it.
#[derive(Args, Clone, Debug)]
pub(crate) struct SelectionArgs {
    /// Send what links point to in their place. Without it, links are kept, but for those to files
    /// outside of what is sent.
    #[arg(short = 'L', long = "copy-links")]
    pub(crate) follow: bool,
    /// Send only files that match, such as '*.safetensors'; with a / in it, the path below what is
    /// sent must match. May be given again.
    #[arg(long, value_name = "PATTERN")]
    pub(crate) include: Vec<String>,
    /// Leave out files and directories that match. May be given again, and wins over --include.
    #[arg(long, value_name = "PATTERN")]
    pub(crate) exclude: Vec<String>,
    /// Compare both ends and say what would be moved; move and write nothing.
    #[arg(short = 'n', long)]
    pub(crate) dry_run: bool,
}

/// How contents travel.
#[derive(Args, Clone, Debug)]
pub(crate) struct WayArgs {
    /// Let contents travel in the clear, at both sides: anyone on the path can read them. Otherwise
    /// they are encrypted, where there is a key and the network is tcp.
    #[arg(long)]
    pub(crate) plain: bool,
    /// Move at most so many bytes a second, such as 50MB.
    #[arg(long, value_name = "SIZE")]
    pub(crate) bwlimit: Option<Size>,
}

/// `tcpx send`.
pub(crate) fn send(args: &SendArgs) -> Result<Told, Error> {
    interrupt::listen()?;
    match &args.serve {
        Some(folder) => share(args, folder),
        None => push(args),
    }
}

/// `tcpx receive`.
pub(crate) fn receive(args: &ReceiveArgs) -> Result<Told, Error> {
    interrupt::listen()?;
    if !args.out.is_dir() {
        return Err(Error::usage(
            format!("--out {} is not a directory", args.out.display()),
            "create it first, or name another one",
        ));
    }
    let write = Access::WRITE_OK | Access::EXEC_OK;
    if let Err(error) = accessat(CWD, &args.out, write, AtFlags::EACCESS) {
        return Err(Error::usage(
            format!("--out {} cannot be written: {error}", args.out.display()),
            "choose a directory that this user may write",
        ));
    }
    match args.sources.is_empty() {
        true => wait(args),
        false => pull(args),
    }
}

/// What one side has for a transfer, whichever end of it that is.
#[derive(Clone, Copy, Debug)]
struct Terms<'a> {
    memory: &'a MemoryChoice,
    limit: Duration,
    /// Bytes a second.
    most: Option<u64>,
    /// The person who asked for the transfer is here.
    is_client: bool,
    /// Others go on beside it.
    is_one_of_many: bool,
}

impl<'a> Terms<'a> {
    fn new(way: &WayArgs, link: &LinkArgs, memory: &'a MemoryChoice) -> Result<Self, Error> {
        let limit = link.timeout.0;
        let most = way.bwlimit.map(|size| size.0);
        // A peer waits for whole pieces.
        let least = (talk::PIECE as u128 * 2_000).div_ceil(limit.as_millis().max(1));
        if most.is_some_and(|most| u128::from(most) < least) {
            return Err(Error::usage(
                format!(
                    "--bwlimit is too low: the peer would see nothing for half of --timeout {}",
                    time(limit)
                ),
                format!("give at least {least}, or a longer --timeout at both sides"),
            ));
        }
        Ok(Self {
            memory,
            limit,
            most,
            is_client: false,
            is_one_of_many: false,
        })
    }
}

/// Files go through host memory, unless a GPU or a plugin, whose memory it may need, was asked for.
fn choose_memory(memory: &MemoryArgs, link: &LinkArgs) -> Result<MemoryChoice, Error> {
    if link::is_tcp(&link.network) && memory.gpu.is_none() && !memory.host {
        return Ok(MemoryChoice::host("as files come and go through it"));
    }
    let host = MemoryArgs::host();
    Devices::probe().choose(if memory.host { &host } else { memory }, 0)
}

fn out(args: &ReceiveArgs) -> Out<'_> {
    Out {
        directory: &args.out,
        overwrite: args.overwrite,
        asked: None,
        dry_run: args.selection.dry_run,
    }
}

/// The line for the other side, with what it has to say as well.
fn invitation(command: &str, way: &WayArgs) -> String {
    format!("{command}{}", if way.plain { " --plain" } else { "" })
}

/// Ends a connection whose transfer has ended; what the JSON holds.
fn end(
    connection: Connection,
    done: Result<Summary, Error>,
    verb: &str,
    place: &str,
) -> Result<Told, Error> {
    let done = link::part_after(connection, done)?;
    done.print_summary(verb, place);
    Ok(match done.left_out.count {
        0 => Told::Fields(done.fields()),
        count => Told::Bad(done.fields(), Error::LeftOut { count }),
    })
}

fn log(link: &Link, connection: &Connection, memory: &MemoryChoice) {
    tracing::info!("{}", say::one_line(&link.describe(connection, memory)));
}

/// Sends to a host that waits.
fn push(args: &SendArgs) -> Result<Told, Error> {
    let usage = |what: String| {
        let hint = "tcpx send FILE... HOST; the receiver says where files go (--out DIR)";
        Err(Error::usage(what, hint))
    };
    let Some((host, paths @ [_, ..])) = args.paths.split_last() else {
        return usage("the host to send to is missing behind the file".to_owned());
    };
    let Some(host) = host.to_str().filter(|host| !host.contains('/')) else {
        return usage(format!("{} is a path, and no host", host.display()));
    };
    let select = &args.selection;
    let rules = Rules::new(select.follow, &select.include, &select.exclude, None)?;
    // Looked at before connecting: a name that is wrong should not cost the server its one session.
    let selection = manifest::collect(paths, &rules)?;
    if selection.found.is_empty() {
        return Err(Error::usage(
            "the patterns leave nothing to send",
            "see --include and --exclude: `tcpx send --help` says what a pattern matches",
        ));
    }
    let memory = choose_memory(&args.memory, &args.link)?;
    let (connection, terms) = dial(&args.way, &args.link, &memory, host)?;
    let sent = sender::send(&connection, terms, selection, Opening::Push, select.dry_run);
    end(connection, sent, "sent", &format!(" to {host}"))
}

/// Shares a folder with all clients that come.
fn share(args: &SendArgs, folder: &Path) -> Result<Told, Error> {
    let root = folder.canonicalize().ok().filter(|path| path.is_dir());
    let Some(root) = root else {
        return Err(Error::usage(
            format!("--serve {} is not a directory", folder.display()),
            "name one that is there",
        ));
    };
    let memory = choose_memory(&args.memory, &args.link)?;
    let terms = Terms {
        is_one_of_many: true,
        ..Terms::new(&args.way, &args.link, &memory)?
    };
    let link = Link::for_contents(&args.link, args.way.plain, &memory, true)?.for_many();
    link.invite(&args.link, &invitation("receive SERVER_IP:PATH", &args.way))?;
    link.serve_together("tcpx.send", |connection| {
        log(&link, &connection, &memory);
        let peer = connection.peer().address;
        let sent = give(&connection, terms, &root);
        end(connection, sent, "sent", &format!(" to {peer}"))
    })
}

/// One client that fetches.
fn give(connection: &Connection, terms: Terms<'_>, root: &Path) -> Result<Summary, Error> {
    let expected = "a request to fetch files";
    let request = messages::expect(connection, REQUEST, terms.limit)?.wait(expected)?;
    let Request::Pull(wanted) = request else {
        return Err(messages::refuse(connection, expected, &request));
    };
    let selection = choose(&wanted, root).map_err(|error| {
        let reason = Reason::from(&error);
        messages::refused(connection, OFFER, reason, error)
    })?;
    sender::send(connection, terms, selection, Opening::Pull, wanted.dry_run)
}

/// What of the folder a client gets.
fn choose(wanted: &Wanted, root: &Path) -> Result<Selection, Error> {
    let paths = manifest::shared(root, &wanted.paths)?;
    let within = Some(root.to_owned());
    let rules = Rules::new(wanted.follow, &wanted.include, &wanted.exclude, within)?;
    let selection = manifest::collect(&paths, &rules)?;
    match selection.found.is_empty() {
        true => Err(Error::failed(
            "there is nothing to send",
            "look at the patterns, and at the folder that is shared",
        )),
        false => Ok(selection),
    }
}

/// Waits for clients that send.
fn wait(args: &ReceiveArgs) -> Result<Told, Error> {
    let select = &args.selection;
    if select.follow || select.dry_run || !select.include.is_empty() || !select.exclude.is_empty() {
        return Err(Error::usage(
            "the sender says what is sent: -L, --include, --exclude and --dry-run are its flags",
            "give them to `tcpx send`, or name what to fetch: tcpx receive HOST:PATH",
        ));
    }
    let memory = choose_memory(&args.memory, &args.link)?;
    let terms = Terms {
        is_one_of_many: args.keep,
        ..Terms::new(&args.way, &args.link, &memory)?
    };
    let mut link = Link::for_contents(&args.link, args.way.plain, &memory, true)?;
    if args.keep {
        link = link.for_many();
    }
    link.invite(&args.link, &invitation("send FILE... SERVER_IP", &args.way))?;
    let session = |connection: Connection| {
        log(&link, &connection, &memory);
        let peer = connection.peer().address;
        let received = take(&connection, terms, out(args));
        end(connection, received, "received", &format!(" from {peer}"))
    };
    match args.keep {
        true => link.serve_together("tcpx.receive", session),
        false => session(link.accept(Some(args.link.wait.0))?),
    }
}

/// One client that sends.
fn take(connection: &Connection, terms: Terms<'_>, out: Out<'_>) -> Result<Summary, Error> {
    let expected = "a request to send files";
    let request = messages::expect(connection, REQUEST, terms.limit)?.wait(expected)?;
    match request {
        Request::Push(offer) => receiver::receive(connection, terms, &offer, out),
        other => Err(messages::refuse(connection, expected, &other)),
    }
}

/// A client's connection, and its terms.
fn dial<'a>(
    way: &WayArgs,
    link: &LinkArgs,
    memory: &'a MemoryChoice,
    host: &str,
) -> Result<(Connection, Terms<'a>), Error> {
    let terms = Terms {
        is_client: true,
        ..Terms::new(way, link, memory)?
    };
    let dialled = Link::for_contents(link, way.plain, memory, false)?;
    let connection = dialled.connect(link, host)?;
    log(&dialled, &connection, memory);
    Ok((connection, terms))
}

/// Fetches from a host that shares a folder.
fn pull(args: &ReceiveArgs) -> Result<Told, Error> {
    let (host, paths) = sources(&args.sources)?;
    let select = &args.selection;
    // A wrong pattern is told here, too.
    Rules::new(select.follow, &select.include, &select.exclude, None)?;
    let memory = choose_memory(&args.memory, &args.link)?;
    let (connection, terms) = dial(&args.way, &args.link, &memory, host)?;
    let received = fetch(&connection, terms, args, paths);
    end(connection, received, "received", &format!(" from {host}"))
}

fn fetch(
    connection: &Connection,
    terms: Terms<'_>,
    args: &ReceiveArgs,
    paths: Vec<String>,
) -> Result<Summary, Error> {
    let select = &args.selection;
    let wanted = Wanted {
        paths: paths.clone(),
        follow: select.follow,
        include: select.include.clone(),
        exclude: select.exclude.clone(),
        dry_run: select.dry_run,
    };
    // The server looks at all that it will send.
    let answer = messages::expect(connection, OFFER, messages::LONGEST_TRANSFER)?;
    messages::send_message(connection, REQUEST, &Request::Pull(wanted))?;
    let offer = answer.wait::<Offered>("what the server sends")??;
    let out = Out {
        asked: Some(&paths),
        ..out(args)
    };
    receiver::receive(connection, terms, &offer, out)
}

/// The host of `HOST:PATH`, which is the same in all of them, and the paths.
fn sources(all: &[String]) -> Result<(&str, Vec<String>), Error> {
    let mut hosts = Vec::new();
    let mut paths = Vec::new();
    for source in all {
        let address_end = source.strip_prefix('[').and_then(|rest| rest.find("]:"));
        let split = match address_end {
            Some(end) => Some((&source[..end + 2], &source[end + 3..])),
            None => source.split_once(':'),
        };
        let Some((host, path)) = split.filter(|(host, _)| !host.is_empty()) else {
            return Err(Error::usage(
                format!("`{source}` is not HOST:PATH"),
                "tcpx receive HOST:PATH fetches it from a host that runs `tcpx send --serve DIR`",
            ));
        };
        let path = path.trim_start_matches("./").trim_end_matches('/');
        hosts.push(host);
        paths.push(if path.is_empty() { "." } else { path }.to_owned());
    }
    match hosts.iter().find(|&&host| host != hosts[0]) {
        Some(other) => Err(Error::usage(
            format!("{} and {other} are two hosts", hosts[0]),
            "fetch from one host after the other",
        )),
        None => Ok((hosts[0], paths)),
    }
}

/// How a transfer ended.
#[derive(Debug)]
struct Summary {
    what: String,
    entries: usize,
    bytes: u64,
    /// Bytes of these that were there before.
    there: u64,
    took: Duration,
    left_out: LeftOut,
    /// Over the manifest and all contents, or of a single file its own; none where nothing was to
    /// be moved.
    digest: Option<String>,
}

impl Summary {
    fn new(
        entries: &[Entry],
        left_out: LeftOut,
        there: u64,
        took: Duration,
        ended: Option<(&[sender::Content], blake3::Hash)>,
    ) -> Self {
        let moved = |(contents, _): (&[sender::Content], _)| -> u64 {
            contents.iter().map(|&(_, bytes)| bytes).sum()
        };
        Self {
            what: manifest::describe(entries),
            entries: entries.len(),
            bytes: ended.map_or_else(|| manifest::total(entries), moved),
            there,
            took,
            left_out,
            digest: ended.map(|(contents, overall)| match (entries, contents) {
                ([_], [(only, _)]) => only.to_string(),
                _ => overall.to_string(),
            }),
        }
    }

    fn print_summary(&self, verb: &str, place: &str) {
        let moved = self.bytes.saturating_sub(self.there);
        let there = match self.there {
            0 => String::new(),
            there => format!("; {} were there already", Amount(there)),
        };
        let (what, took) = (&self.what, time(self.took));
        let speed = Amount(rate(moved, self.took));
        match &self.digest {
            None => say!("dry run: {what}{place}: {} to move{there}", Amount(moved)),
            Some(digest) => {
                let how = match moved {
                    0 => "nothing moved".to_owned(),
                    _ => format!("{} moved in {took}, {speed}/s", Amount(moved)),
                };
                say!("{verb} {what}{place}: {how}{there}");
                match self.entries {
                    // All that was to be sent was left out.
                    0 => {}
                    1 => say!("BLAKE3 {digest}, the same at both ends"),
                    count => say!("BLAKE3 {digest} over {count} entries, the same at both ends"),
                }
            }
        }
        let lines = self.left_out.lines();
        for line in &lines {
            aside!("left out: {line}");
        }
        let more = self.left_out.count.saturating_sub(lines.len() as u64);
        if more > 0 {
            aside!("left out: {more} more");
        }
    }

    /// What its JSON holds.
    fn fields(&self) -> Value {
        json!({
            "what": self.what, "entries": self.entries, "bytes": self.bytes,
            "bytes_there_before": self.there, "seconds": self.took.as_secs_f64(),
            "blake3": self.digest, "dry_run": self.digest.is_none(),
            "left_out": self.left_out.count, "first_left_out": self.left_out.lines(),
        })
    }
}

/// Says of each file whether it would be moved; `there` knows how many bytes of it need not be.
fn say_plan(entries: &[Entry], there: impl Fn(usize) -> Option<u64>) {
    for (index, entry) in entries.iter().enumerate() {
        if !manifest::is_content(entry) {
            continue;
        }
        let (name, bytes) = (manifest::shown(&entry.path), Amount(entry.bytes()));
        match there(index) {
            None => say!("  to move  \"{name}\" ({bytes})"),
            Some(there) if there == entry.bytes() => say!("  there    \"{name}\" ({bytes})"),
            Some(there) => say!(
                "  to move  \"{name}\" ({bytes}, {} are there)",
                Amount(there)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_name_one_host_and_paths_below_a_folder() {
        let read = |all: &[&str]| {
            let all: Vec<_> = all.iter().map(|&text| text.to_owned()).collect();
            let found = sources(&all).map(|(host, paths)| (host.to_owned(), paths.join(" ")));
            found.ok()
        };
        let is = |host: &str, paths: &str| Some((host.to_owned(), paths.to_owned()));
        assert_eq!(read(&["a:x/y", "a:z/"]), is("a", "x/y z"));
        assert_eq!(read(&["[fe80::1%eth0]:x"]), is("[fe80::1%eth0]", "x"));
        for all in ["a:", "a:.", "a:./"] {
            assert_eq!(read(&[all]), is("a", "."));
        }
        for wrong in [&["a"][..], &[":x"], &["a:x", "b:x"]] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
    }
}

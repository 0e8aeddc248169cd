//! `tcpx demo`: the other commands at work on one host, between this process, which sends, and a
//! second one.

use std::path::PathBuf;

use clap::Args;
use nccl_net::AbiVersion;
use serde_json::{Value, json};
use tcpx_bench::{Mode, Op, Run};

use crate::args::link::{LinkArgs, MemoryArgs};
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice, short};
use crate::output::json::Told;
use crate::output::progress::Busy;
use crate::output::say::{self, say};
use crate::output::{indented, table};
use crate::perf::Place;
use crate::plugin_file::{Places, PluginFile, PluginFileError};
use crate::second_process::{Second, place_for_second};
use crate::sizes::{Limit, Size, grouped, rate};
use crate::transfer::greeting::{self, GREETING};
use crate::{key, measuring};

#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// Bytes of each large transfer.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub(crate) size: Size,
    /// Plugin file for the historic path [default: our own, beside the program].
    #[arg(long, value_name = "PATH")]
    pub(crate) plugin: Option<PathBuf>,
    /// Fail if there is no progress for this long.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub(crate) timeout: Limit,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

/// A network with its settings, and what is moved over it.
struct Network {
    name: &'static str,
    args: LinkArgs,
    /// In so many pieces.
    moves: &'static [Move],
}

/// A transfer whose every byte was right, or what went wrong.
struct Row {
    network: &'static str,
    moves: Move,
    result: Result<Moved, Error>,
}

/// Who moves the bytes, in how many pieces.
type Move = (Op, u64);

fn name((op, pieces): Move) -> String {
    match pieces {
        1 => op.to_string(),
        _ => format!("batch of {op}s"),
    }
}

struct Moved {
    gb_per_second: Option<f64>,
    fragments: u64,
}

/// Shows everything; an error unless every byte of every transfer was right.
pub(crate) fn run(args: &DemoArgs) -> Result<Told, Error> {
    let devices = Devices::probe();
    let memory = devices.choose(&args.memory, 0)?;
    let there = match args.memory.gpu {
        Some(number) => Place::Gpu(number),
        None => place_for_second(&memory, devices.count()),
    };
    say!("tcpx demo: two processes on this host, connected over 127.0.0.1");
    let plugin = find_plugin(args)?;
    let plain = plain_link(args)?;
    let second = Second::start(&greeting_server(there), &plain)?;
    say!(
        "  sender    process {}: {}",
        std::process::id(),
        memory.describe()
    );
    say!(
        "  receiver  process {}: {}",
        second.id(),
        match there {
            Place::Gpu(number) => format!("GPU {number}"),
            Place::Host => "host memory".to_owned(),
        }
    );
    if devices.count() == 1 && memory.gpu.is_some() {
        say!("            both processes share the one GPU of this host");
    }
    say!("  networks  tcp: embedded, plain TCP, the default");
    match &plugin {
        Some(plugin) => say!(
            "            plugin: {} ({})",
            plugin.path.display(),
            plugin.why
        ),
        None => say!(
            "            plugin: left out, as {}",
            match cfg!(target_feature = "crt-static") {
                true => "a static program loads none",
                false => "its file is not beside this program (--plugin PATH)",
            }
        ),
    }
    say!("\nas `tcpx transfer` does:");
    greet(second, &plain, &memory)?;

    say!(
        "\nas `tcpx perf` does, {} over each path, every byte compared in both directions before one is timed:",
        Size(args.size.0)
    );
    let mut rows = Vec::new();
    for network in networks(&plain, plugin.as_ref()) {
        network.run(&memory, there, args.size.0, &mut rows);
    }
    let route = match (short(memory.name()), there) {
        (from, Place::Gpu(number)) if from != format!("GPU {number}") => {
            format!("{from} -> GPU {number}")
        }
        (from, _) => from.to_owned(),
    };
    say!("{}", summary(&rows, &route).trim_end());
    let fields = json!({ "bytes": args.size.0, "memory": route, "transfers": fields(&rows) });
    let failed = rows.iter().filter(|row| row.result.is_err()).count();
    if failed == 0 {
        return Ok(Told::Fields(fields));
    }
    let error = Error::failed(
        format!("{failed} of {} transfers failed", rows.len()),
        "read the errors above; --debug shows the log lines",
    );
    Ok(Told::Bad(fields, error))
}

/// `None` where nobody named a file and there is none: the embedded network needs no plugin.
fn find_plugin(args: &DemoArgs) -> Result<Option<PluginFile>, Error> {
    let places = Places::of_process();
    match &args.plugin {
        Some(path) => Ok(Some(places.find(Some(path))?)),
        // A static program can load none.
        None if cfg!(target_feature = "crt-static") => Ok(None),
        None => match places.own() {
            Err(PluginFileError::NotFound(_)) => Ok(None),
            found => Ok(Some(found?)),
        },
    }
}

/// The embedded network with its defaults.
fn plain_link(args: &DemoArgs) -> Result<LinkArgs, Error> {
    let mut link = LinkArgs::defaults()?;
    link.timeout = args.timeout;
    link.own_key = Some(key::fresh()?);
    Ok(link)
}

fn greeting_server(there: Place) -> Vec<String> {
    let mut command = vec!["transfer".to_owned(), "server".to_owned()];
    match there {
        Place::Gpu(number) => command.push(format!("--gpu={number}")),
        Place::Host => command.push("--host".to_owned()),
    }
    command
}

/// The 23 bytes, shown at both ends.
fn greet(second: Second, link: &LinkArgs, memory: &MemoryChoice) -> Result<(), Error> {
    let limit = link.timeout.0;
    // The second process runs `tcpx transfer server`, which encrypts.
    let link = Link::new(link, memory, false)?;
    let link = link.through_data_channels().encrypted();
    let connection = link.connect_to(second.address())?;
    let bytes = GREETING.len() as u64;
    let sent = greeting::send(&connection, memory, bytes, limit);
    link::part_after(connection, sent)?;
    let id = second.id();
    say!("process {id}:");
    for line in second.finish()? {
        say!("  {}", say::one_line(&line));
    }
    Ok(())
}

/// The embedded network, then the plugin.
fn networks(plain: &LinkArgs, plugin: Option<&PluginFile>) -> Vec<Network> {
    let mut networks = vec![Network {
        name: "tcp",
        args: plain.clone(),
        moves: &[(Op::Send, 1), (Op::Put, 1), (Op::Get, 1), (Op::Put, 64)],
    }];
    networks.extend(plugin.map(|plugin| {
        let mut args = plain.clone();
        args.network.plugin = Some(plugin.path.clone());
        args.network.abi = Some(AbiVersion::V7);
        Network {
            name: "plugin",
            args,
            moves: &[(Op::Send, 1)],
        }
    }));
    networks
}

impl Network {
    /// Adds a row for each operation; none after one that failed.
    fn run(&self, memory: &MemoryChoice, there: Place, bytes: u64, rows: &mut Vec<Row>) {
        let (network, moves) = (self.name, self.moves);
        let mut left = moves.iter();
        let row = |moves, result| Row {
            network,
            moves,
            result,
        };
        let done = self.measure(memory, there, bytes, |one, moved| {
            left.next();
            rows.push(row(one, Ok(moved)));
        });
        if let Err(error) = done {
            let one = left.next().copied().unwrap_or(moves[moves.len() - 1]);
            say!("  {network}, {}: failed", name(one));
            say::failure(&error);
            rows.push(row(one, Err(error)));
        }
    }

    fn measure(
        &self,
        memory: &MemoryChoice,
        there: Place,
        bytes: u64,
        mut done: impl FnMut(Move, Moved),
    ) -> Result<(), Error> {
        let limit = self.args.timeout.0;
        let server = ["perf".to_owned(), "server".to_owned(), there.to_string()];
        let second = Second::start(&server, &self.args)?;
        let link = Link::new(&self.args, memory, false)?;
        let connection = link.connect_to(second.address())?;
        let moved = measuring::measure(&connection, memory, limit, |meter| {
            for &(op, pieces) in self.moves {
                let busy = Busy::new(&format!("{}, {}", self.name, name((op, pieces))));
                let piece = if pieces > 1 {
                    bytes.div_ceil(pieces)
                } else {
                    0
                };
                let run = Run {
                    piece,
                    ..Run::new(Mode::One, op, bytes, 1, 1)
                };
                meter.verify(&run)?;
                let sample = meter.run(&run, limit)?;
                drop(busy);
                let moved = Moved {
                    gb_per_second: rate(bytes, sample.part.elapsed),
                    fragments: sample.theirs.spent.fragments,
                };
                done((op, pieces), moved);
            }
            Ok(())
        });
        link::part_after(connection, moved)?;
        second.finish().map(drop)
    }
}

/// What the JSON holds of each transfer.
fn fields(rows: &[Row]) -> Vec<Value> {
    let row = |row: &Row| {
        let moved = row.result.as_ref().ok();
        json!({
            "network": row.network, "moved_by": name(row.moves),
            "gb_per_second": moved.and_then(|one| one.gb_per_second),
            "fragments": moved.map(|one| one.fragments),
            "verified": moved.is_some(),
            "error": row.result.as_ref().err().map(Error::what),
        })
    };
    rows.iter().map(row).collect()
}

fn summary(rows: &[Row], memory: &str) -> String {
    let header = [
        "network",
        "moved by",
        "memory",
        "GB/s",
        "fragments",
        "verified",
    ];
    let mut list = table(&header, &[3, 4]);
    for row in rows {
        let dash = || "-".to_owned();
        let (speed, fragments, verified) = match &row.result {
            Ok(moved) => (
                moved
                    .gb_per_second
                    .map_or_else(dash, |rate| format!("{rate:.2}")),
                match moved.fragments {
                    0 => "in place".to_owned(),
                    count => grouped(count),
                },
                "every byte",
            ),
            Err(Error::Contents(_)) => (dash(), dash(), "WRONG"),
            Err(_) => (dash(), dash(), "FAILED"),
        };
        list.add_row([
            row.network.to_owned(),
            name(row.moves),
            memory.to_owned(),
            speed,
            fragments,
            verified.to_owned(),
        ]);
    }
    indented(&list, "  ")
}

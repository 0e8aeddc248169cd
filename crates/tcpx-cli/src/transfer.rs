//! `tcpx transfer`: a greeting or a file, from one host's memory to another's.

pub(crate) mod file_client;
pub(crate) mod file_name;
pub(crate) mod file_server;
pub(crate) mod greeting;
pub(crate) mod partial_file;

use crate::args::transfer::TransferArgs;
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::Devices;
use crate::messages::{self, REQUEST, Request};
use crate::output::say::say;

/// Runs one side; the word `server` instead of an address means the server's.
pub(crate) fn run(args: &TransferArgs) -> Result<(), Error> {
    let is_server = args.peer == "server";
    check_sides(args, is_server)?;
    if is_server {
        serve(args)
    } else {
        connect(args)
    }
}

/// Flags of the other side are a mistake that would otherwise go unnoticed.
fn check_sides(args: &TransferArgs, is_server: bool) -> Result<(), Error> {
    let wrong = |what: &str, hint: &str| {
        Err(Error::Usage {
            what: what.into(),
            hint: hint.into(),
        })
    };
    match (is_server, &args.file, &args.out) {
        (true, Some(_), _) => wrong(
            "--file belongs to the client",
            "tcpx transfer <SERVER_IP> --file FILE",
        ),
        (false, _, Some(_)) => wrong(
            "--out belongs to the server",
            "tcpx transfer server --out DIR",
        ),
        _ => Ok(()),
    }
}

fn serve(args: &TransferArgs) -> Result<(), Error> {
    if let Some(out) = &args.out
        && !out.is_dir()
    {
        return Err(Error::Usage {
            what: format!("--out {} is not a directory", out.display()),
            hint: "create it first, or name another one".into(),
        });
    }
    let memory = Devices::probe().choose(&args.memory, 0)?;
    let link = Link::new(&args.link, &memory, true)?.through_data_channels();
    let command = if args.out.is_some() {
        "transfer SERVER_IP --file FILE"
    } else {
        "transfer SERVER_IP"
    };
    let connection = link.serve(&args.link, command, false)?;
    say!("{}", link.describe(&connection, &memory));
    let limit = args.link.timeout.0;
    let request = messages::expect(&connection, REQUEST, limit)?.wait("a request to transfer")?;
    let result = match request {
        Request::Greeting { bytes, seed } => greeting::receive(&connection, &memory, bytes, seed),
        Request::File {
            name,
            bytes,
            piece_bytes,
        } => {
            let offer = file_server::Offer {
                name,
                bytes,
                piece_bytes,
            };
            let out = file_server::Out {
                directory: args.out.as_deref(),
                overwrite: args.overwrite,
            };
            file_server::receive(&connection, &memory, &offer, out, limit)
        }
        other @ (Request::Perf { .. } | Request::Nothing) => {
            let instead = match other {
                Request::Perf { .. } => "tcpx perf server",
                _ => "tcpx connection server",
            };
            Err(messages::refuse(
                &connection,
                "a request to transfer",
                &other,
                instead,
            ))
        }
    };
    link::part_after(connection, result)
}

fn connect(args: &TransferArgs) -> Result<(), Error> {
    let memory = Devices::probe().choose(&args.memory, 0)?;
    // Opened before connecting: a name that is wrong should not cost the server its one session.
    let source = args
        .file
        .as_deref()
        .map(file_client::Source::open)
        .transpose()?;
    let link = Link::new(&args.link, &memory, false)?.through_data_channels();
    let connection = link.connect(&args.link, &args.peer)?;
    say!("{}", link.describe(&connection, &memory));
    let limit = args.link.timeout.0;
    let sent = match source {
        None => greeting::send(&connection, &memory, args.payload_bytes.0, limit),
        Some(source) => file_client::send(&connection, &memory, source, limit),
    };
    link::part_after(connection, sent)
}

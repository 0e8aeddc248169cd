//! `tcpx transfer`: a greeting from one host's memory to another's, shown and compared.

pub(crate) mod greeting;

use serde_json::json;
use tcpx::Connection;

use crate::args::link::MemoryArgs;
use crate::args::transfer::TransferArgs;
use crate::error::Error;
use crate::interrupt;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice};
use crate::messages::{self, REQUEST, Request};
use crate::output::json::Told;
use crate::output::say::say;

/// Runs one side; the word `server` instead of an address means the server's.
pub(crate) fn run(args: &TransferArgs) -> Result<Told, Error> {
    let is_server = args.peer == "server";
    interrupt::listen()?;
    let choice = match args.memory.host {
        true => &MemoryArgs::host(),
        false => &args.memory,
    };
    let memory = Devices::probe().choose(choice, 0)?;
    let link = Link::for_contents(&args.link, args.plain, &memory, is_server)?;
    let link = link.through_data_channels();
    let connection = if is_server {
        let plain = if args.plain { " --plain" } else { "" };
        link.serve(&args.link, &format!("transfer SERVER_IP{plain}"))?
    } else {
        link.connect(&args.link, &args.peer)?
    };
    say!("{}", link.describe(&connection, &memory));
    let moved = if is_server {
        receive(&connection, &memory, args)
    } else {
        let bytes = args.payload_bytes.0;
        greeting::send(&connection, &memory, bytes, args.link.timeout.0).map(|()| bytes)
    };
    let bytes = link::part_after(connection, moved)?;
    Ok(Told::Fields(json!({ "kind": "greeting", "bytes": bytes })))
}

/// What a client sends; how many bytes.
fn receive(
    connection: &Connection,
    memory: &MemoryChoice,
    args: &TransferArgs,
) -> Result<u64, Error> {
    let expected = "a request to send a greeting";
    let request = messages::expect(connection, REQUEST, args.link.timeout.0)?.wait(expected)?;
    match request {
        Request::Greeting { bytes, seed } => {
            greeting::receive(connection, memory, bytes, seed)?;
            Ok(bytes)
        }
        other => Err(messages::refuse(connection, expected, &other)),
    }
}

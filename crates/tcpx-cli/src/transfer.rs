//! `tcpx transfer`: a greeting from one host's memory to another's, shown and compared.

pub(crate) mod greeting;

use clap::Args;
use serde_json::json;
use tcpx::Connection;

use crate::args::link::{LinkArgs, MemoryArgs};
use crate::error::Error;
use crate::interrupt;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice};
use crate::messages::{self, REQUEST, Request};
use crate::output::json::Told;
use crate::output::say::say;
use crate::sizes::Size;

#[derive(Args, Debug)]
pub(crate) struct TransferArgs {
    /// The word `server`, or the address of the server to connect to.
    #[arg(value_name = "server|SERVER_IP")]
    pub(crate) peer: String,
    /// Let the greeting travel in the clear, at both sides. Otherwise it is encrypted, where there
    /// is a key and the network is tcp.
    #[arg(long)]
    pub(crate) plain: bool,
    /// Client: bytes of the greeting; bytes beyond its 23 are random.
    #[arg(
        long,
        value_name = "SIZE",
        env = "UCCL_TCPX_PAYLOAD_BYTES",
        default_value = "23"
    )]
    pub(crate) payload_bytes: Size,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

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

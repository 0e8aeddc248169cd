//! `tcpx connection`: the handshake and the data channels alone.

use std::time::{Duration, Instant};

use clap::Args;
use tcpx::Connection;

use crate::args::link::{LinkArgs, MemoryArgs};
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::Devices;
use crate::messages::{self, ANSWER, REQUEST, Request, refuse};
use crate::output::json::Told;
use crate::output::say::say;
use crate::sizes::{Size, time};

#[derive(Args, Debug)]
#[command(
    override_usage = "tcpx connection server [OPTIONS]\n       tcpx connection <SERVER_IP> [OPTIONS]"
)]
pub(crate) struct ConnectionArgs {
    /// The word `server`, or the address of the server to connect to.
    #[arg(value_name = "server|SERVER_IP")]
    pub(crate) peer: String,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

/// Runs one side; the word `server` instead of an address means the server's.
pub(crate) fn run(args: &ConnectionArgs) -> Result<Told, Error> {
    let memory = Devices::probe().choose(&args.memory, 0)?;
    let is_server = args.peer == "server";
    let link = Link::new(&args.link, &memory, is_server)?;
    let started = Instant::now();
    let connection = if is_server {
        link.serve(&args.link, "connection SERVER_IP")?
    } else {
        link.connect(&args.link, &args.peer)?
    };
    let took = started.elapsed();
    // One word each way: each side knows that the other one is set up before either says goodbye.
    if let Err(error) = greet(&connection, is_server, args.link.timeout.0) {
        return link::part_after(connection, Err(error));
    }
    say!("{}", link.describe(&connection, &memory));
    let peer = connection.peer().clone();
    say!(
        "  agreed   {} data channel{}, chunks of {}",
        peer.channels,
        if peer.channels == 1 { "" } else { "s" },
        Size(peer.chunk_bytes.into()),
    );
    if !is_server {
        say!("  set up   in {}", time(took));
    }
    let done = serde_json::json!({
        "peer": peer.address.to_string(), "peer_software": peer.software,
        "network": peer.network, "channels": peer.channels, "chunk_bytes": peer.chunk_bytes,
        "path": connection.path(), "seconds": (!is_server).then_some(took.as_secs_f64()),
    });
    link::part(connection).map(|()| Told::Fields(done))
}

/// One word each way.
fn greet(connection: &Connection, is_server: bool, limit: Duration) -> Result<(), Error> {
    if !is_server {
        let answer = messages::expect(connection, ANSWER, limit)?;
        messages::send_message(connection, REQUEST, &Request::Nothing)?;
        return messages::ready(answer);
    }
    let request = messages::expect(connection, REQUEST, limit)?.wait("a request to connect")?;
    if request != Request::Nothing {
        let expected = "a request to connect";
        return Err(refuse(connection, expected, &request));
    }
    messages::tell_ready(connection)
}

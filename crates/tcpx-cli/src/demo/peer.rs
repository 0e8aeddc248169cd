//! The sending process: obeys one order after the other until its standard input ends.

use std::io::{self, BufRead, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tcpx::{Auth, Deadlines, Endpoint, Options, Rights};

use super::networks::Networks;
use super::one_sided;
use super::orders::{How, Order, Reply, SendOrder};
use crate::args::link::MemoryArgs;
use crate::error::Error;
use crate::link;
use crate::memory_choice::{self, Devices, MemoryChoice};
use crate::messages::{self, ANSWER, PAYLOAD};
use crate::transfer::greeting::Payload;

/// How much of the source is shown.
const SHOWN: usize = 32;

/// Reads orders; returns when there are no more.
pub(crate) fn run() -> Result<(), Error> {
    let mut sender = None;
    for line in io::stdin().lock().lines() {
        let line = line.map_err(|source| Error::Process {
            doing: "read an order",
            source,
        })?;
        let reply = match obey(&line, &mut sender) {
            Ok(reply) => reply,
            Err(error) => Reply::Failed {
                what: error.what(),
                hint: error.hint(),
            },
        };
        answer(&reply)?;
    }
    Ok(())
}

fn answer(reply: &Reply) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, reply)
        .map_err(io::Error::from)
        .and_then(|()| out.write_all(b"\n"))
        .and_then(|()| out.flush())
        .map_err(|source| Error::Process {
            doing: "answer an order",
            source,
        })
}

fn obey(line: &str, sender: &mut Option<Sender>) -> Result<Reply, Error> {
    let order = serde_json::from_str(line).map_err(|error| Error::Unexpected {
        expected: "an order of the demo",
        arrived: error.to_string(),
    })?;
    match (order, sender) {
        (
            Order::Start {
                gpu,
                host,
                timeout_ms,
            },
            sender,
        ) => {
            // With two GPUs the second one sends: bytes really go from one to the other.
            let memory = Devices::probe().choose(&MemoryArgs { gpu, host }, 1)?;
            let text = memory.name().to_owned();
            let limit = Duration::from_millis(timeout_ms);
            *sender = Some(Sender {
                memory,
                limit,
                networks: Networks::default(),
            });
            Ok(Reply::Started { memory: text })
        }
        (Order::Send(order), Some(sender)) => sender.send(&order),
        (Order::Send(_), None) => Err(Error::Unexpected {
            expected: "an order to start",
            arrived: "an order to send".into(),
        }),
    }
}

struct Sender {
    memory: MemoryChoice,
    limit: Duration,
    networks: Networks,
}

impl Sender {
    fn send(&mut self, order: &SendOrder) -> Result<Reply, Error> {
        let auth = Auth::parse(&order.key).map_err(|_| Error::Unexpected {
            expected: "the key of the session",
            arrived: "something else".into(),
        })?;
        let mut options = Options::new(self.networks.get(&order.network, &self.memory)?, auth);
        options.deadlines = Deadlines {
            stall: self.limit,
            total: None,
        };
        options.connect_timeout = self.limit;
        // The smallest payload takes the data path too: that is what is shown here.
        options.eager_limit = 0;
        options.gpu = self.memory.gpu.clone();
        let source = self.memory.allocate_pages(order.bytes)?;
        Payload {
            bytes: order.bytes,
            seed: order.seed,
        }
        .write(&source)?;
        let length = usize::try_from(order.bytes).unwrap_or(usize::MAX);
        let slice = source
            .slice(..length)
            .map_err(Error::memory("start the send"))?;
        answer(&Reply::Prepared)?;

        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, order.port));
        let connection = Endpoint::connect(address, &options)?;
        // The receive is posted when this comes, so that the time measures the transfer alone.
        let elapsed = match order.how {
            How::Send => {
                let ready = messages::expect(&connection, ANSWER, self.limit)?;
                messages::ready(ready)?;
                let report = connection.send(slice, PAYLOAD).start()?.wait()?;
                report.elapsed
            }
            How::Put => one_sided::put(&connection, slice, 1)?,
            How::Batch => one_sided::put(&connection, slice, one_sided::PIECES)?,
            How::Get => {
                one_sided::lend(&connection, slice, Rights::Get)?;
                Duration::ZERO
            }
        };
        link::part(connection)?;
        Ok(Reply::Sent {
            elapsed_us: u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX),
            crc32c: source
                .checksum(..length)
                .map_err(Error::memory("checksum the source"))?,
            head: memory_choice::head(&source, order.bytes, SHOWN)?,
        })
    }
}

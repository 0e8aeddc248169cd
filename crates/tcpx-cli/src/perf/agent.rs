//! A host of the list: receives at one port for each memory, and sends when it is told to.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tcpx::{Connection, Endpoint};

use super::client::{self, Amount, Work};
use super::orders::{Memory, Order, Reply, unexpected};
use crate::args::link::LinkArgs;
use crate::args::perf::{PerfAgentArgs, Place};
use crate::bench::net::orders::Mode;
use crate::bench::net::server;
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice, short};
use crate::messages::{self, ANSWER, REQUEST};
use crate::output::say::{aside, say};

/// Most sessions at a time; further ones are closed at once.
const MOST_SESSIONS: usize = 128;

/// How long an accept waits before it looks at the clock.
const LOOK: Duration = Duration::from_secs(1);

/// A memory that takes part, and how it is reached.
struct Part {
    memory: MemoryChoice,
    link: Link,
    port: u16,
}

/// What all sessions of the agent use.
struct Agent {
    parts: Vec<Part>,
    limit: Duration,
    sessions: AtomicUsize,
    /// Sessions that ever began: somebody still uses this agent.
    begun: AtomicUsize,
}

/// Serves until nobody has come for a while.
pub(super) fn run(args: &PerfAgentArgs) -> Result<(), Error> {
    let devices = Devices::probe();
    let mut places = args.places.clone();
    if places.is_empty() {
        let gpus = u32::try_from(devices.count()).unwrap_or(0);
        places = (0..gpus).map(Place::Gpu).collect();
    }
    if places.is_empty() {
        places.push(Place::Host);
    }
    let host = devices.choose(&Place::Host.memory(), 0)?;
    let control = Link::new(&args.link, &host, true)?.for_many();
    let endpoint = control.listen(&args.link, args.link.port)?;
    let bound = endpoint.local_addr();
    let mut same_key = args.link.clone();
    same_key.own_key = control.key();
    let (parts, receivers) = parts(&devices, &places, &same_key, bound.port())?;

    say!("listening on {bound}; on the other hosts run:");
    say!(
        "\n  {}\n",
        control.invitation_to_serve(&args.link, "perf agent", bound)
    );
    say!("and where all of them are listed, one address a line:");
    say!(
        "\n  {}\n",
        control.invitation(&args.link, "perf --hosts FILE", bound)
    );
    for part in &parts {
        say!("{} receives on port {}", part.memory.name(), part.port);
    }
    control.warn(&args.link);

    let agent = Arc::new(Agent {
        parts,
        limit: args.link.timeout.0,
        sessions: AtomicUsize::new(0),
        begun: AtomicUsize::new(0),
    });
    for (index, endpoint) in receivers.into_iter().enumerate() {
        let agent = Arc::clone(&agent);
        // Ends with the process, which ends when the loop below does.
        std::thread::spawn(move || {
            loop {
                agent.accept(&endpoint, index, |agent, connection, index| {
                    let memory = &agent.parts[index].memory;
                    let served = server::serve(&connection, memory, agent.limit, false);
                    link::part_after(connection, served).map(drop)
                });
            }
        });
    }
    let (mut idle, mut seen) = (Instant::now(), 0);
    loop {
        agent.accept(&endpoint, 0, |agent, connection, _| {
            let done = agent.obey(&connection);
            link::part_after(connection, done)
        });
        let begun = agent.begun.load(Ordering::Relaxed);
        if begun != seen || agent.sessions.load(Ordering::Relaxed) > 0 {
            (idle, seen) = (Instant::now(), begun);
        } else if idle.elapsed() >= args.link.wait.0 {
            aside!("nobody came for {}", crate::sizes::time(args.link.wait.0));
            return Ok(());
        }
    }
}

/// Opens the memories, each with a port of its own: behind `port` in order, so that a firewall can know them.
fn parts(
    devices: &Devices,
    places: &[Place],
    args: &LinkArgs,
    port: u16,
) -> Result<(Vec<Part>, Vec<Endpoint>), Error> {
    let mut parts = Vec::new();
    let mut endpoints = Vec::new();
    for (index, place) in (1u16..).zip(places) {
        let memory = devices.choose(&place.memory(), 0)?;
        let link = Link::new(args, &memory, true)?.for_many();
        let wanted = if args.port == 0 {
            0
        } else {
            port.saturating_add(index)
        };
        let endpoint = link.listen(args, wanted)?;
        parts.push(Part {
            memory,
            link,
            port: endpoint.local_addr().port(),
        });
        endpoints.push(endpoint);
    }
    Ok((parts, endpoints))
}

impl Agent {
    /// Takes the next session and has a thread of its own see to it.
    fn accept(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        index: usize,
        work: impl FnOnce(&Self, Connection, usize) -> Result<(), Error> + Send + 'static,
    ) {
        let connection = match endpoint.accept(LOOK) {
            Ok(connection) => connection,
            // Nobody came, or whoever came did not finish the set-up: the log says who.
            Err(error) => {
                tracing::debug!(%error, "no session");
                return;
            }
        };
        let peer = connection.peer().address;
        if self.sessions.fetch_add(1, Ordering::AcqRel) >= MOST_SESSIONS {
            self.sessions.fetch_sub(1, Ordering::AcqRel);
            aside!("{peer}: turned away, {MOST_SESSIONS} sessions are running");
            return;
        }
        self.begun.fetch_add(1, Ordering::Relaxed);
        let agent = Arc::clone(self);
        std::thread::spawn(move || {
            let ending = Ending(&agent.sessions);
            if let Err(error) = work(&agent, connection, index) {
                aside!("{peer}: {}", crate::output::say::one_line(&error.what()));
            }
            drop(ending);
        });
    }

    /// Does what it is told, until the other side has gone.
    fn obey(&self, connection: &Connection) -> Result<(), Error> {
        loop {
            let order = messages::expect(connection, REQUEST, messages::LONGEST_TRANSFER)?;
            let reply = match order.wait("an order")? {
                Order::End => return Ok(()),
                Order::Describe => Ok(Reply::Memories {
                    memories: self.memories(),
                }),
                Order::Send {
                    from,
                    ip,
                    port,
                    bytes,
                    iterations,
                } => self.send(
                    connection,
                    from,
                    SocketAddr::new(ip, port),
                    (bytes, iterations),
                ),
                Order::Go => Err(unexpected(
                    "an order to send before the one to go",
                    &Reply::Proven,
                )),
            };
            let reply = reply.unwrap_or_else(|error| Reply::Failed {
                why: messages::brief(&error.what()),
                hint: messages::brief(&error.hint()),
            });
            messages::tell(connection, ANSWER, &reply)?;
        }
    }

    fn memories(&self) -> Vec<Memory> {
        let memory = |part: &Part| Memory {
            name: short(part.memory.name()).to_owned(),
            port: part.port,
        };
        self.parts.iter().map(memory).collect()
    }

    fn send(
        &self,
        told_by: &Connection,
        from: u16,
        to: SocketAddr,
        (bytes, iterations): (u64, u32),
    ) -> Result<Reply, Error> {
        let part = self
            .parts
            .get(usize::from(from))
            .ok_or_else(|| Error::Unexpected {
                expected: "the number of a memory that takes part",
                arrived: from.to_string(),
            })?;
        if bytes == 0 || iterations == 0 {
            return Err(Error::Unexpected {
                expected: "transfers of 1 byte or more",
                arrived: format!("{iterations} of {bytes} bytes"),
            });
        }
        let work = Work {
            bytes,
            mode: Mode::One,
            in_flight: 1,
            amount: Amount::Transfers(iterations),
            interval: None,
            warm_up: Duration::ZERO,
            limit: self.limit,
        };
        let connection = part.link.connect_to(to)?;
        let summary = client::one(connection, &part.memory, &work, || {
            let order = messages::expect(told_by, REQUEST, messages::LONGEST_TRANSFER)?;
            messages::tell(told_by, ANSWER, &Reply::Proven)?;
            match order.wait_at_most(self.limit, "the order to go")? {
                Order::Go => Ok(()),
                other => Err(Error::Unexpected {
                    expected: "the order to go",
                    arrived: format!("{other:?}"),
                }),
            }
        })?;
        Ok(Reply::Measured {
            summary: Box::new(summary),
        })
    }
}

/// Counts a session down, whatever came of it.
struct Ending<'a>(&'a AtomicUsize);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

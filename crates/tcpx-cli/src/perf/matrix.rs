//! Every pair of hosts and GPUs: one after the other, then all at once.

use std::net::{IpAddr, SocketAddr};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use serde_json::json;
use tcpx::Connection;

mod results;

use self::results::{Absent, Results};
use super::orders::{Order, Reply, ask, part, unexpected};
use super::summary::Summary;
use super::{hosts, memory_limit};
use crate::args::perf::MatrixArgs;
use crate::error::Error;
use crate::link::Link;
use crate::memory_choice::Devices;
use crate::output::json::{self, Told};
use crate::output::say::{self, aside, say};
use crate::second_process::Second;
use crate::{addresses, key};

/// A memory of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
struct End {
    /// As the list names it.
    host: String,
    /// Where the host's agent takes orders.
    agent: SocketAddr,
    /// Place of the memory in the agent's list.
    index: u16,
    name: String,
    /// Where the memory receives.
    port: u16,
}

impl End {
    fn title(&self, one_host: bool) -> String {
        if one_host {
            self.name.clone()
        } else {
            format!("{} {}", self.host, self.name)
        }
    }
}

/// What sends to what.
struct Pair<'a> {
    from: &'a End,
    to: &'a End,
}

/// What the pair's measurement gave, or why there is nothing.
struct Measured<'a> {
    pair: &'a Pair<'a>,
    outcome: Result<Summary, Error>,
}

/// Measures and prints the matrix.
pub(super) fn run(args: &MatrixArgs) -> Result<Told, Error> {
    if args.size.0 == 0 {
        return Err(Error::Usage {
            what: "a size of 0 has no rate".into(),
            hint: "give --size 1 or more".into(),
        });
    }
    let mut link_args = args.link.clone();
    let (listed, started) = match &args.hosts {
        Some(path) => {
            let listed = hosts::read(path)?;
            if let [only] = listed.as_slice() {
                return Err(Error::Usage {
                    what: format!(
                        "{} lists {only} alone, which has nobody to talk to",
                        path.display()
                    ),
                    hint: "list two hosts or more; without --hosts this host's GPUs are measured"
                        .into(),
                });
            }
            (listed, Vec::new())
        }
        None => {
            // Two processes, so that every byte leaves one and reaches another.
            link_args.own_key = Some(key::fresh()?);
            link_args.insecure = false;
            let start = || Second::start(&["perf", "agent"], &link_args);
            let started = vec![start()?, start()?];
            let listed = started.iter().map(|one| one.address().to_string());
            (listed.collect(), started)
        }
    };
    let host = Devices::probe().choose(&crate::args::perf::Place::Host.memory(), 0)?;
    let matrix = Matrix {
        link: Link::new(&link_args, &host, false)?,
        args,
        limit: args.link.timeout.0,
    };
    let one_host = args.hosts.is_none();
    let (hosts, absent) = matrix.describe_all(&listed)?;
    let pairs = pairs(&hosts, one_host);
    let mut alone = Vec::new();
    for pair in &pairs {
        if !say::is_json() {
            aside!(
                "measuring {} -> {}",
                pair.from.title(one_host),
                pair.to.title(one_host)
            );
        }
        let outcome = matrix.measure(pair, || {});
        if let Err(error) = &outcome {
            aside!("  {}", say::one_line(&error.what()));
        }
        alone.push(Measured { pair, outcome });
    }
    let (at_once, span) = matrix.all_at_once(&pairs);
    let measured = at_once.iter().filter(|one| one.outcome.is_ok()).count();
    let sum = rate(args.size.0 * u64::from(args.rounds) * measured as u64, span);
    let limit = one_host.then(memory_limit::copy_rate);
    drop(started);
    let results = Results {
        one_host,
        alone,
        at_once,
        sum,
        limit,
        absent,
    };
    if !say::is_json() {
        say!("{}", results.text(args));
        return results.complete().map(|()| Told::Nothing);
    }
    let file = results.json(args);
    if let Err(error) = results.complete() {
        return Ok(Told::Bad(json!({ "measured": file }), error));
    }
    json::print_text(&file.text())?;
    Ok(Told::Nothing)
}

/// Every ordered pair of different memories; of one host the first agent sends and the second receives. A single
/// memory is paired with itself.
fn pairs(hosts: &[Vec<End>], one_host: bool) -> Vec<Pair<'_>> {
    let mut pairs = Vec::new();
    for (sender, from_host) in hosts.iter().enumerate() {
        for (receiver, to_host) in hosts.iter().enumerate() {
            let wanted = if one_host {
                (sender, receiver) == (0, 1)
            } else {
                sender != receiver
            };
            if !wanted {
                continue;
            }
            for from in from_host {
                let others = to_host
                    .iter()
                    .filter(|to| !one_host || from_host.len() == 1 || to.index != from.index);
                pairs.extend(others.map(|to| Pair { from, to }));
            }
        }
    }
    pairs
}

struct Matrix<'a> {
    link: Link,
    args: &'a MatrixArgs,
    limit: Duration,
}

impl Matrix<'_> {
    /// Connects to an agent, at the first of its addresses that answers.
    fn agent(&self, address: &str) -> Result<(Connection, SocketAddr), Error> {
        let mut last = None;
        for at in addresses::resolve(address, self.args.link.port)? {
            if matches!(at.ip(), IpAddr::V6(v6) if v6.is_unicast_link_local()) {
                return Err(Error::Address {
                    address: address.to_owned(),
                    why: "an address of one link means something else to every host".into(),
                });
            }
            match self.link.connect_to(at) {
                Ok(connection) => return Ok((connection, at)),
                Err(error) => last = Some(error),
            }
        }
        let why = last.map_or_else(
            || "the name has no address".to_owned(),
            |error| error.what(),
        );
        Err(Error::Address {
            address: address.to_owned(),
            why: format!("{why} (does `tcpx perf agent` run there?)"),
        })
    }

    /// The memories of every host that answers, and why others do not.
    ///
    /// # Errors
    /// None answers, or two lines of the list are the same host.
    fn describe_all(&self, listed: &[String]) -> Result<(Vec<Vec<End>>, Vec<Absent>), Error> {
        let mut hosts: Vec<Vec<End>> = Vec::new();
        let mut absent = Vec::new();
        for host in listed {
            let ends = match self.describe(host) {
                Ok(ends) => ends,
                Err(error) => {
                    aside!("{host}: {}", say::one_line(&error.what()));
                    absent.push(Absent {
                        host: host.clone(),
                        error,
                    });
                    continue;
                }
            };
            let known = hosts.iter().flatten().find(|known| {
                let is_same = |end: &End| end.agent == known.agent;
                ends.iter().any(is_same)
            });
            if let Some(known) = known {
                return Err(Error::Usage {
                    what: format!("{host} and {} are the same host", known.host),
                    hint: "list each host once".into(),
                });
            }
            hosts.push(ends);
        }
        match absent.pop() {
            Some(last) if hosts.is_empty() => Err(last.error),
            last => {
                absent.extend(last);
                Ok((hosts, absent))
            }
        }
    }

    fn describe(&self, address: &str) -> Result<Vec<End>, Error> {
        let (connection, at) = self.agent(address)?;
        let described = ask(&connection, &Order::Describe, self.limit);
        let reply = part(connection, described)?;
        let Reply::Memories { memories } = reply else {
            return Err(unexpected("the agent's memories", &reply));
        };
        let end = |(index, memory): (u16, super::orders::Memory)| End {
            host: address.to_owned(),
            agent: at,
            index,
            // What a peer writes must not drive the terminal.
            name: say::one_line(&memory.name),
            port: memory.port,
        };
        Ok((0u16..).zip(memories).map(end).collect())
    }

    /// Time to prove the contents of one pair, or of all of them at once.
    fn patience(&self) -> Duration {
        self.limit * 4 + Duration::from_secs(self.args.size.0 / 10_000_000)
    }

    /// Has a pair proven, waits for `start`, and has it measured.
    fn measure(&self, pair: &Pair<'_>, start: impl FnOnce()) -> Result<Summary, Error> {
        let ready = self.prove(pair);
        // Whoever else waits for the start must not wait for this pair in vain.
        start();
        let connection = ready?;
        let measured = ask(&connection, &Order::Go, crate::messages::LONGEST_TRANSFER);
        let reply = part(connection, measured)?;
        match reply {
            Reply::Measured { summary } => Ok(*summary),
            other => Err(unexpected("figures", &other)),
        }
    }

    fn prove(&self, pair: &Pair<'_>) -> Result<Connection, Error> {
        let connection = self.link.connect_to(pair.from.agent)?;
        let order = Order::Send {
            from: pair.from.index,
            ip: pair.to.agent.ip(),
            port: pair.to.port,
            bytes: self.args.size.0,
            iterations: self.args.rounds,
        };
        match ask(&connection, &order, self.patience())? {
            Reply::Proven => Ok(connection),
            other => Err(unexpected("that the contents are proven", &other)),
        }
    }

    /// All pairs together; the time from the common start to the end of the last.
    fn all_at_once<'p>(&self, pairs: &'p [Pair<'p>]) -> (Vec<Measured<'p>>, Duration) {
        if !say::is_json() {
            aside!("measuring all {} pairs at once", pairs.len());
        }
        let barrier = Barrier::new(pairs.len() + 1);
        std::thread::scope(|scope| {
            let running: Vec<_> = pairs
                .iter()
                .map(|pair| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        self.measure(pair, || {
                            barrier.wait();
                        })
                    })
                })
                .collect();
            barrier.wait();
            let started = Instant::now();
            let ended = running
                .into_iter()
                .zip(pairs)
                .map(|(one, pair)| {
                    let outcome = one.join().unwrap_or_else(|_| {
                        Err(Error::Failed {
                            what: "a measuring thread ended before its time".into(),
                            hint: "its message stands above",
                        })
                    });
                    Measured { pair, outcome }
                })
                .collect();
            (ended, started.elapsed())
        })
    }
}

/// 10^9 bytes a second.
#[expect(clippy::cast_precision_loss, reason = "three digits are printed")]
fn rate(bytes: u64, span: Duration) -> f64 {
    bytes as f64 / span.as_secs_f64().max(1e-9) / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(host: &str, index: u16) -> End {
        End {
            host: host.to_owned(),
            agent: SocketAddr::from(([127, 0, 0, 1], 1)),
            index,
            name: format!("GPU {index}"),
            port: 2,
        }
    }

    fn titles(pairs: &[Pair<'_>], one_host: bool) -> Vec<String> {
        let title =
            |pair: &Pair<'_>| format!("{} {}", pair.from.title(one_host), pair.to.title(one_host));
        pairs.iter().map(title).collect()
    }

    #[test]
    fn one_host_is_a_full_mesh_without_loops() {
        let gpus = |host| vec![end(host, 0), end(host, 1), end(host, 2)];
        let hosts = [gpus("a"), gpus("b")];
        let pairs = pairs(&hosts, true);
        assert_eq!(pairs.len(), 6);
        assert!(
            pairs
                .iter()
                .all(|pair| pair.from.index != pair.to.index && pair.from.host == "a")
        );
    }

    #[test]
    fn a_single_memory_is_paired_with_itself() {
        let hosts = [vec![end("a", 0)], vec![end("b", 0)]];
        assert_eq!(titles(&pairs(&hosts, true), true), ["GPU 0 GPU 0"]);
    }

    #[test]
    fn of_several_hosts_every_memory_meets_every_other_hosts() {
        let hosts = [
            vec![end("a", 0), end("a", 1)],
            vec![end("b", 0)],
            vec![end("c", 0)],
        ];
        let all = titles(&pairs(&hosts, false), false);
        assert_eq!(all.len(), 2 * 2 + 2 + 1 + 2 + 1);
        assert!(
            all.contains(&"a GPU 1 c GPU 0".to_owned())
                && !all.contains(&"a GPU 0 a GPU 1".to_owned())
        );
    }
}

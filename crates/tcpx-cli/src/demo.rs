//! `tcpx demo`: the whole flow on one host, between this process, which receives, and a second one, which sends.

mod networks;
mod one_sided;
mod orders;
pub(crate) mod peer;
mod peer_process;
mod receive;

use std::time::Duration;

use serde_json::{Value, json};
use tcpx::UnpackMethod;

use self::orders::{How, NetworkOrder};
use self::peer_process::PeerProcess;
use self::receive::{Received, Receiver, Step};
use crate::args::demo::DemoArgs;
use crate::error::Error;
use crate::memory_choice::{self, Devices};
use crate::output::json::Told;
use crate::output::say::{self, say};
use crate::output::table::{indented, table};
use crate::plugin_file::{Places, PluginFile, PluginFileError};
use crate::sizes::{Size, grouped, rate};
use crate::transfer::greeting::GREETING;

/// Shows everything; an error unless every byte of every transfer was right.
pub(crate) fn run(args: &DemoArgs) -> Result<Told, Error> {
    let devices = Devices::probe();
    let memory = devices.choose(&args.memory, 0)?;
    say!("tcpx demo: two processes on this host, connected over 127.0.0.1");
    let plugin = find_plugin(args)?;
    let mut peer = PeerProcess::start(&args.memory, args.timeout.0)?;
    let sender = peer.memory()?;
    say!(
        "  sender    process {}: {}",
        peer.id(),
        say::one_line(&sender)
    );
    say!(
        "  receiver  process {}: {}",
        std::process::id(),
        memory.name()
    );
    say!("  memory    {}", memory.describe());
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
            "            plugin: left out, as its file is not beside this program (--plugin PATH)"
        ),
    }

    let route = route(&sender, memory.name());
    let mut receiver = Receiver::new(memory, args.timeout.0);
    greet(&mut receiver, &mut peer)?;

    say!(
        "\n{} over each path, fresh contents each time, every byte compared with the source:",
        Size(args.size.0)
    );
    let mut failures = 0;
    let mut rows = Vec::new();
    for step in steps(args.size.0, plugin.as_ref()) {
        let result = receiver.receive(&step, &mut peer);
        if let Err(error) = &result {
            failures += 1;
            say!(
                "  {} {} {}: failed",
                step.network.short(),
                step.how.name(),
                step.unpack_name()
            );
            say::failure(error);
        }
        rows.push((step, result));
    }
    say!("{}", summary(&rows, &route).trim_end());
    if let Some(line) = receiver.first_fragments() {
        say!("  {line}\n");
    }
    peer.end()?;
    let fields = json!({ "bytes": args.size.0, "memory": route, "transfers": fields(&rows) });
    if failures == 0 {
        return Ok(Told::Fields(fields));
    }
    let error = Error::Failed {
        what: format!("{failures} of {} transfers failed", rows.len()),
        hint: "read the errors above; --debug shows the log lines of both processes",
    };
    Ok(Told::Bad(fields, error))
}

/// What the JSON holds of each transfer.
fn fields(rows: &[(Step, Result<Received, Error>)]) -> Vec<Value> {
    let row = |(step, result): &(Step, Result<Received, Error>)| {
        let received = result.as_ref().ok();
        json!({
            "network": step.network.short(), "moved_by": step.how.name(),
            "unpack": step.unpack.map(|method| method.to_string()),
            "gb_per_second": received.and_then(|one| rate(one.bytes, one.elapsed)),
            "fragments": received.map(|one| one.fragments),
            "verified": received.is_some(),
            "error": result.as_ref().err().map(Error::what),
        })
    };
    rows.iter().map(row).collect()
}

/// `None` where nobody named a file and there is none: the embedded network needs no plugin.
fn find_plugin(args: &DemoArgs) -> Result<Option<PluginFile>, Error> {
    let places = Places::of_process();
    match &args.plugin {
        Some(path) => Ok(Some(places.find(Some(path))?)),
        None => match places.own() {
            Err(PluginFileError::NotFound(_)) => Ok(None),
            found => Ok(Some(found?)),
        },
    }
}

/// The 23 bytes, shown at both ends.
fn greet(receiver: &mut Receiver, peer: &mut PeerProcess) -> Result<(), Error> {
    let step = Step {
        network: NetworkOrder::Tcp,
        unpack: None,
        how: How::Send,
        bytes: GREETING.len() as u64,
        label: "greeting".into(),
        show: true,
    };
    let greeting = receiver.receive(&step, peer)?;
    say!("\ngreeting over {}, tag 42", greeting.path);
    say!(
        "  sent by process {}:\n{}",
        peer.id(),
        greeting.sent_dump.trim_end()
    );
    say!(
        "  received by process {}:\n{}",
        std::process::id(),
        greeting.received_dump.trim_end()
    );
    Ok(())
}

/// The large transfers: the embedded network, then the plugin with each unpacker.
fn steps(bytes: u64, plugin: Option<&PluginFile>) -> Vec<Step> {
    let over_tcp = |how: How| Step {
        network: NetworkOrder::Tcp,
        unpack: None,
        how,
        bytes,
        label: format!("tcp, {}", how.name()),
        show: false,
    };
    let mut steps = [How::Send, How::Put, How::Get, How::Batch]
        .map(over_tcp)
        .to_vec();
    let Some(plugin) = plugin else {
        return steps;
    };
    for unpack in [UnpackMethod::Host, UnpackMethod::D2d, UnpackMethod::Kernel] {
        steps.push(Step {
            network: NetworkOrder::Plugin {
                path: plugin.path.clone(),
            },
            unpack: Some(unpack),
            how: How::Send,
            bytes,
            label: format!("plugin, {unpack}"),
            show: false,
        });
    }
    steps
}

fn summary(rows: &[(Step, Result<Received, Error>)], memory: &str) -> String {
    let mut list = table(
        &[
            "network",
            "moved by",
            "unpack",
            "memory",
            "GB/s",
            "fragments",
            "verified",
        ],
        &[4, 5],
    );
    for (step, result) in rows {
        let (speed, fragments, verified) = match result {
            Ok(received) => (
                speed(received.bytes, received.elapsed),
                if received.fragments == 0 {
                    "in place".to_owned()
                } else {
                    grouped(received.fragments)
                },
                "every byte",
            ),
            Err(Error::Contents(_)) => ("-".into(), "-".into(), "WRONG"),
            Err(_) => ("-".into(), "-".into(), "FAILED"),
        };
        list.add_row([
            step.network.short().to_owned(),
            step.how.name().to_owned(),
            step.unpack_name(),
            memory.to_owned(),
            speed,
            fragments,
            verified.to_owned(),
        ]);
    }
    indented(&list, "  ")
}

/// From which memory to which, for the table.
fn route(sender: &str, receiver: &str) -> String {
    let (from, to) = (memory_choice::short(sender), memory_choice::short(receiver));
    if from == to {
        from.to_owned()
    } else {
        format!("{from} -> {to}")
    }
}

fn speed(bytes: u64, elapsed: Duration) -> String {
    rate(bytes, elapsed).map_or_else(|| "-".to_owned(), |rate| format!("{rate:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_route_names_both_ends_where_they_differ() {
        let gpu = |index: u32| format!("GPU {index} (NVIDIA H200, PCI 0000:0{index}:00.0)");
        assert_eq!(route(&gpu(1), &gpu(0)), "GPU 1 -> GPU 0");
        assert_eq!(route(&gpu(0), &gpu(0)), "GPU 0");
        assert_eq!(route("host memory", "host memory"), "host");
    }
}

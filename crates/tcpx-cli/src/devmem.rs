//! `tcpx devmem`: what processes have changed on network cards, and undoing it.

use clap::{Args, Subcommand};
use serde_json::json;
use tcpx_devmem::{Devmem, DevmemError, HoldStatus, Holder, Released, Status};
use tcpx_net::NetworkError;
use tcpx_net::interfaces::interfaces;

use crate::error::Error;
use crate::output::json::Told;
use crate::output::say::{aside, say};

#[derive(Args, Debug)]
pub(crate) struct DevmemArgs {
    #[command(subcommand)]
    pub(crate) what: DevmemCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DevmemCommand {
    /// Show which processes hold queues of network cards, and what they changed there.
    Status,
    /// Undo what dead processes left on network cards.
    Release(ReleaseArgs),
}

#[derive(Args, Debug)]
pub(crate) struct ReleaseArgs {
    /// This interface alone.
    #[arg(value_name = "INTERFACE")]
    pub(crate) interface: Option<String>,
}

pub(crate) fn run(args: &DevmemArgs) -> Result<Told, Error> {
    match &args.what {
        DevmemCommand::Status => status(),
        DevmemCommand::Release(args) => release(args),
    }
}

/// The kernel's refusals as errors of the program.
fn refused(error: DevmemError) -> Error {
    tcpx::Error::from(NetworkError::from(error)).into()
}

fn status() -> Result<Told, Error> {
    let found = Devmem::system().status().map_err(refused)?;
    if found.is_empty() {
        say!("no network card is changed");
    }
    let mut some_dead = false;
    for status in &found {
        some_dead |= status.holds.iter().any(|hold| hold.holder == Holder::Dead);
        show(status);
    }
    if some_dead {
        say!("`tcpx devmem release` undoes what the dead ones left");
    }
    Ok(Told::Fields(json!({ "cards": found })))
}

fn life(hold: &HoldStatus) -> &'static str {
    match hold.holder {
        Holder::Alive => "alive",
        Holder::Dead => "dead",
        Holder::Unknown => "of another namespace of processes",
    }
}

fn show(status: &Status) {
    let place = if status.here {
        ""
    } else {
        " (of another network namespace, or an earlier boot)"
    };
    say!("{}{place}", status.interface);
    for hold in &status.holds {
        say!("  {}", sentence(hold));
        for rule in &hold.rules {
            say!("    rule: {rule}");
        }
    }
    for change in &status.changes {
        say!("  {change}");
    }
}

fn sentence(hold: &HoldStatus) -> String {
    let life = life(hold);
    let memory = match hold.dmabuf_id {
        Some(id) => format!("bound to memory {id}"),
        None => "not bound yet".to_owned(),
    };
    format!(
        "queue {}: {memory} by process {} ({}), {life}",
        hold.queue, hold.pid, hold.program
    )
}

fn release(args: &ReleaseArgs) -> Result<Told, Error> {
    let released = Devmem::system()
        .release(args.interface.as_deref())
        .map_err(refused)?;
    let mut failed = 0;
    let mut undone = 0;
    for one in &released {
        undone += usize::from(one.left.as_ref() != Some(&one.before));
        failed += one.failed.len();
        print_released(one);
    }
    if let (Some(name), [], Ok(all)) = (&args.interface, &*released, interfaces())
        && !all.iter().any(|one| one.name == *name)
    {
        return Err(Error::usage(
            format!("there is no interface {name}"),
            "`tcpx devices` lists them, `tcpx devmem status` those that are changed",
        ));
    }
    if undone == 0 && failed == 0 {
        say!("nothing to release");
    }
    let interfaces = released.iter().map(|one| {
        json!({
            "interface": one.before.interface, "undone": one.left.is_none(),
            "failed": one.failed.iter().map(ToString::to_string).collect::<Vec<_>>(),
        })
    });
    let fields = json!({ "interfaces": interfaces.collect::<Vec<_>>() });
    Ok(match failed {
        0 => Told::Fields(fields),
        count => Told::Bad(
            fields,
            Error::failed(
                format!("{count} changes could not be undone"),
                "run it as root, in the network namespace of the card",
            ),
        ),
    })
}

fn print_released(released: &Released) {
    let interface = &released.before.interface;
    for error in &released.failed {
        aside!("{interface}: {error}");
    }
    match &released.left {
        None => {
            say!("{interface}: put back as it was");
            for change in &released.before.changes {
                say!("  {change}; undone");
            }
            for hold in &released.before.holds {
                for rule in &hold.rules {
                    say!("  rule: {rule}; removed");
                }
            }
        }
        Some(left) => {
            let holders = left.holds.iter().filter(|hold| hold.holder != Holder::Dead);
            let holders: Vec<_> = holders.map(|hold| hold.pid.to_string()).collect();
            if !holders.is_empty() {
                say!(
                    "{interface}: still held by process {}; its changes stay",
                    holders.join(", ")
                );
            }
        }
    }
}

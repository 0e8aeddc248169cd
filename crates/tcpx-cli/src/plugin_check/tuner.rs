//! What the file's tuner makes NCCL choose.

use nccl_net::Plugin;
use nccl_net::tuner::{Selection, usual_costs};

use super::events::{Choice, Event, Taken, Tuner, of_call, of_host};
use super::part::{doing, tell};
use crate::error::Error;

/// All-reduces that are asked about.
const SIZES: [usize; 5] = [8, 64 << 10, 1 << 20, 16 << 20, 256 << 20];
/// Hosts of the communicator that it is told of.
const NODES: usize = 2;

/// Asks it, if the file has one.
pub(super) fn run(plugin: &Plugin) -> Result<(), Error> {
    doing("init of the tuner");
    let Some(tuner) = plugin.tuner(NODES).map_err(of_host)? else {
        return Ok(());
    };
    doing("getCollInfo of the tuner");
    let choices = SIZES.map(|bytes| {
        let offered = usual_costs(bytes);
        let answer = tuner.all_reduce(bytes, &offered).map_err(of_call)?;
        let takes = Selection::ALL.map(|selection| {
            let way = selection.choose(&offered, &answer.costs);
            Taken {
                nccl: selection.versions().to_owned(),
                algorithm: way.map(|way| way.algorithm().to_owned()),
                protocol: way.map(|way| way.protocol().to_owned()),
            }
        });
        Ok(Choice {
            bytes,
            channels: answer.channels,
            takes: takes.into(),
        })
    });
    tell(&Event::Tuner(Tuner {
        version: tuner.version(),
        name: tuner.name().to_owned(),
        choices: choices.into_iter().collect::<Result<_, Error>>()?,
    }));
    doing("destroy of the tuner");
    drop(tuner);
    Ok(())
}

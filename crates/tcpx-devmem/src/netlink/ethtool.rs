//! The family `ethtool`: whether headers are split from payload.

use super::{NetlinkError, Request, attributes};

use super::client::{CallError, Client};
use crate::error::DevmemError;
use crate::kernel::Kernel;

const RINGS_GET: u8 = 15;
const RINGS_SET: u8 = 16;
/// Told to [`MONITOR`] when ring settings have changed; the number of a request that answers have
/// too.
const RINGS_CHANGED: u8 = 17;
const MONITOR: &str = "monitor";

const HEADER: u16 = 1;
const HEADER_IFINDEX: u16 = 1;
const TCP_DATA_SPLIT: u16 = 11;
const THRESHOLD: u16 = 17;

/// `tcp-data-split auto`: the driver decides.
pub(crate) const SPLIT_AUTO: u8 = 0;
/// `tcp-data-split off`.
pub(crate) const SPLIT_OFF: u8 = 1;
/// `tcp-data-split on`.
pub(crate) const SPLIT_ON: u8 = 2;

/// What a card says about splitting headers from payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeaderSplit {
    /// 1 off, 2 on; `None` when the driver has no such setting.
    pub(crate) split: Option<u8>,
    /// Packets up to this many bytes are not split; `None` when the driver has no such setting.
    pub(crate) threshold: Option<u32>,
}

/// One setting to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingsChange {
    Split(u8),
    Threshold(u32),
}

/// Reads the settings.
pub(crate) fn header_split(kernel: &dyn Kernel, ifindex: u32) -> Result<HeaderSplit, CallError> {
    let (mut client, family) = open(kernel)?;
    let request = Request::new(family, RINGS_GET)
        .nested(HEADER, |header| header.u32(HEADER_IFINDEX, ifindex));
    let mut found = HeaderSplit::default();
    client.send_request(&request, family, |attribute| {
        match attribute.kind {
            HEADER => check(attribute.bytes)?,
            TCP_DATA_SPLIT => found.split = Some(attribute.u8()?),
            THRESHOLD => found.threshold = Some(attribute.u32()?),
            _ => {}
        }
        Ok(())
    })?;
    Ok(found)
}

/// Changes one setting.
pub(crate) fn set_header_split(
    kernel: &dyn Kernel,
    ifindex: u32,
    change: RingsChange,
) -> Result<(), CallError> {
    let (mut client, family) = open(kernel)?;
    let request = Request::new(family, RINGS_SET)
        .nested(HEADER, |header| header.u32(HEADER_IFINDEX, ifindex));
    let request = match change {
        RingsChange::Split(split) => request.u8(TCP_DATA_SPLIT, split),
        RingsChange::Threshold(bytes) => request.u32(THRESHOLD, bytes),
    };
    client.send_request(&request, family, |_| Ok(()))
}

/// Turns a split off that is off, and says whether that was left to the driver before.
///
/// The kernel tells what the card does, not what was set. But it announces a change of what was
/// set, and makes none where that is the same; and what is the same is never refused.
pub(crate) fn fix_split_off(kernel: &dyn Kernel, ifindex: u32) -> Result<bool, CallError> {
    let mut client = Client::open(kernel)?;
    let family = client.family("ethtool")?;
    let monitor = family.groups.iter().find(|(name, _)| name == MONITOR);
    let (_, group) = monitor.ok_or_else(|| CallError::missing("the group monitor"))?;
    client.join(*group)?;
    let request = Request::new(family.id, RINGS_SET)
        .nested(HEADER, |header| header.u32(HEADER_IFINDEX, ifindex))
        .u8(TCP_DATA_SPLIT, SPLIT_OFF);
    let mut changed = false;
    let hear = |command, object: &[u8]| {
        if command == RINGS_CHANGED {
            for attribute in attributes(object) {
                let attribute = attribute?;
                if attribute.kind == HEADER {
                    changed |= interface_of(attribute.bytes)? == Some(ifindex);
                }
            }
        }
        Ok(())
    };
    let outcome = client.call_and_hear(&request, family.id, |_| Ok(()), hear);
    match outcome {
        Ok(()) => Ok(changed),
        Err(CallError::Refused(refusal))
            if !matches!(refusal.errno, libc::EPERM | libc::EACCES) =>
        {
            Ok(true)
        }
        Err(error) => Err(error),
    }
}

fn interface_of(header: &[u8]) -> Result<Option<u32>, NetlinkError> {
    for one in attributes(header) {
        let one = one?;
        if one.kind == HEADER_IFINDEX {
            return one.u32().map(Some);
        }
    }
    Ok(None)
}

fn open(kernel: &dyn Kernel) -> Result<(Client, u16), DevmemError> {
    let mut client = Client::open(kernel)?;
    let family = client.family("ethtool")?;
    Ok((client, family.id))
}

/// The answer's header is read only to know that it is whole.
fn check(header: &[u8]) -> Result<(), NetlinkError> {
    attributes(header).try_for_each(|one| one.map(drop))
}

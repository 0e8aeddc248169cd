//! The family `ethtool`: whether headers are split from payload.

use super::{NetlinkError, Request, attributes};

use super::client::{CallError, Client};
use crate::error::DevmemError;
use crate::kernel::Kernel;

const RINGS_GET: u8 = 15;
const RINGS_SET: u8 = 16;

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

fn open(kernel: &dyn Kernel) -> Result<(Client, u16), DevmemError> {
    let mut client = Client::open(kernel)?;
    let family = client.family("ethtool")?;
    Ok((client, family.id))
}

/// The answer's header is read only to know that it is whole.
fn check(header: &[u8]) -> Result<(), NetlinkError> {
    attributes(header).try_for_each(|one| one.map(drop))
}

//! The threshold of the header split, which the `ethtool` of the machine does not know.

use anyhow::{Context, Result, bail};
use tcpx_devmem::kernel::{Kernel, Linux};
use tcpx_devmem::netlink::{Answer, CONTROL_FAMILY, Request, attributes, messages};

const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
const RINGS_GET: u8 = 15;
const RINGS_SET: u8 = 16;
const HEADER: u16 = 1;
const HEADER_IFINDEX: u16 = 1;
const THRESHOLD: u16 = 17;

/// Sets it, in bytes.
pub(crate) fn set(interface: &str, bytes: u32) -> Result<()> {
    let request = Request::new(family()?, RINGS_SET)
        .nested(HEADER, |header| {
            header.u32(HEADER_IFINDEX, index(interface))
        })
        .u32(THRESHOLD, bytes);
    ask_kernel(&request, 0).map(drop)
}

/// Reads it, in bytes.
pub(crate) fn read(interface: &str) -> Result<u32> {
    let request = Request::new(family()?, RINGS_GET).nested(HEADER, |header| {
        header.u32(HEADER_IFINDEX, index(interface))
    });
    let found = ask_kernel(&request, THRESHOLD)?.context("the card tells no threshold")?;
    Ok(u32::from_ne_bytes(found[..].try_into()?))
}

fn index(interface: &str) -> u32 {
    Linux.interface_index(interface).unwrap_or(0)
}

fn family() -> Result<u16> {
    let request = Request::new(CONTROL_FAMILY, GET_FAMILY).text(FAMILY_NAME, "ethtool");
    let found = ask_kernel(&request, FAMILY_ID)?.context("no family ethtool")?;
    Ok(u16::from_ne_bytes(found[..].try_into()?))
}

/// The attribute of this kind in the answer.
fn ask_kernel(request: &Request, kind: u16) -> Result<Option<Vec<u8>>> {
    let mut socket = Linux.netlink()?;
    socket.send(&request.encode(1))?;
    let mut found = None;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let length = socket.receive(&mut buffer)?;
        for message in messages(&buffer[..length]) {
            match message?.answer {
                Answer::End { errno: 0, .. } => return Ok(found),
                Answer::End { errno, words } => bail!("refused with {errno}: {words:?}"),
                Answer::Object {
                    attributes: inside, ..
                } => {
                    for attribute in attributes(inside) {
                        let attribute = attribute?;
                        if attribute.kind == kind {
                            found = Some(attribute.bytes.to_vec());
                        }
                    }
                }
            }
        }
    }
}

//! The kernel's configuration over generic netlink: its families `nlctrl`, `netdev` and `ethtool`.
//!
//! [`Request`] encodes a question; [`messages`] and [`attributes`] take answers apart, any bytes at all.
//! Integers are in the host's byte order. The layout is that of linux/netlink.h and linux/genetlink.h.

mod client;
mod ethtool;
mod netdev;
mod reply;
mod request;

pub(super) use ethtool::{
    HeaderSplit, RingsChange, SPLIT_AUTO, SPLIT_OFF, SPLIT_ON, fix_split_off, header_split,
    set_header_split,
};
pub(super) use netdev::Netdev;
pub use netdev::QueueUse;
pub use reply::{
    Answer, Attribute, Attributes, Message, Messages, NetlinkError, attributes, messages,
};
pub use request::Request;

/// The family that names the others.
pub const CONTROL_FAMILY: u16 = 16;

const HEADER: usize = 16;
const GENERIC_HEADER: usize = 4;
const ATTRIBUTE_HEADER: usize = 4;

const fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

#[cfg(test)]
mod tests;

//! The kernel's configuration over generic netlink: its families `nlctrl`, `netdev` and `ethtool`.
//!
//! [`Request`] encodes a question; [`messages`] and [`attributes`] take answers apart, any bytes at
//! all. The crate `netlink-packet-core` knows headers and attributes; the rest of the layout is
//! that of linux/genetlink.h.

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
/// Why bytes are no answer.
pub use netlink_packet_core::DecodeError as NetlinkError;
pub use reply::{Answer, Attribute, Message, attributes, messages};
pub use request::Request;

/// The family that names the others.
pub const CONTROL_FAMILY: u16 = 16;

const HEADER: usize = 16;
const GENERIC_HEADER: usize = 4;

const fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

#[cfg(test)]
mod tests;

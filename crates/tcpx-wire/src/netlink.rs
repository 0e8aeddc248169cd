//! Generic netlink messages, as the kernel's families `nlctrl`, `netdev` and `ethtool` speak them.
//!
//! [`Request`] encodes a question; [`messages`] and [`attributes`] take answers apart, any bytes at all.
//! Integers are in the host's byte order. The layout is that of linux/netlink.h and linux/genetlink.h.

mod reply;
mod request;

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

//! The kernel's configuration over generic netlink.

mod client;
mod ethtool;
mod netdev;

pub(super) use ethtool::{
    HeaderSplit, RingsChange, SPLIT_AUTO, SPLIT_OFF, SPLIT_ON, fix_split_off, header_split,
    set_header_split,
};
pub(super) use netdev::Netdev;
pub use netdev::QueueUse;

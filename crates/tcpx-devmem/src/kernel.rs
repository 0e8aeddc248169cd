//! Every system call that setting up device memory makes, behind one trait, so that tests can stand
//! in for the kernel.

#[cfg(test)]
pub(crate) mod fake;
mod linux;

use std::fmt;
use std::io;

use super::rule::Rule;

pub use linux::Linux;

/// The kernel's configuration interfaces. Interface names are those of the calling thread's network
/// namespace; errors are the system's, with its numbers.
pub trait Kernel: Send + Sync + fmt::Debug {
    /// Opens a generic netlink socket. What is bound through it ends when it is dropped.
    fn netlink(&self) -> io::Result<Box<dyn NetlinkSocket>>;

    /// The number of an interface.
    /// Fails with `ENODEV` when there is none of that name.
    fn interface_index(&self, interface: &str) -> io::Result<u32>;

    /// The name of an interface by its number; `None` when there is none.
    fn interface_name(&self, ifindex: u32) -> io::Result<Option<String>>;

    /// The driver's name.
    /// Fails with `EOPNOTSUPP` when no driver stands behind the interface.
    fn driver(&self, interface: &str) -> io::Result<String>;

    /// How many receive queues are in use.
    fn receive_queues(&self, interface: &str) -> io::Result<u32>;

    /// Whether flow rules are on.
    fn flow_rules_on(&self, interface: &str) -> io::Result<bool>;

    /// Turns flow rules on or off.
    fn turn_flow_rules(&self, interface: &str, on: bool) -> io::Result<()>;

    /// The table that spreads packets over queues: a queue for each hash value.
    /// Fails with `EOPNOTSUPP` when the card has none.
    fn indirection(&self, interface: &str) -> io::Result<Vec<u32>>;

    /// Replaces that table; an empty one stands for the driver's own.
    fn set_indirection(&self, interface: &str, table: &[u32]) -> io::Result<()>;

    /// The flow rules there are.
    /// Fails with `EOPNOTSUPP` when the card has none.
    fn rules(&self, interface: &str) -> io::Result<RuleTable>;

    /// Makes a rule, at a place that must be free or, with `None`, one that the driver chooses.
    fn insert_rule(&self, interface: &str, rule: &Rule, at: Option<u32>) -> io::Result<u32>;

    /// Removes the rule at a place.
    fn delete_rule(&self, interface: &str, at: u32) -> io::Result<()>;

    /// When a process was started, in the kernel's clock ticks since boot; `None` when there is no
    /// such process.
    fn process_start(&self, pid: u32) -> io::Result<Option<u64>>;

    /// Where this process runs.
    fn place(&self) -> io::Result<Namespaces>;
}

/// A generic netlink socket. Errors are the system's.
pub trait NetlinkSocket: Send + fmt::Debug {
    /// Sends one message.
    fn send(&mut self, message: &[u8]) -> io::Result<()>;

    /// Joins a group, whose messages come like answers from then on.
    fn join(&mut self, group: u32) -> io::Result<()>;

    /// Receives into the buffer and returns the bytes. It waits, but not for ever.
    /// Fails with [`io::ErrorKind::WouldBlock`] when nothing came in time, and
    /// [`io::ErrorKind::InvalidData`] when more came than fits.
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize>;
}

/// A card's flow rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleTable {
    /// How many places there are, where the driver says so.
    pub places: u32,
    /// The driver chooses the place itself.
    pub driver_places: bool,
    /// Each rule's place, and the rule when it is one of a TCP flow to a queue.
    pub rules: Vec<(u32, Option<Rule>)>,
}

/// What a process's numbers and an interface's name mean something in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespaces {
    /// This boot of the host.
    pub boot: String,
    /// The network namespace.
    pub network: u64,
    /// The namespace of process numbers.
    pub processes: u64,
    /// This process.
    pub pid: u32,
}

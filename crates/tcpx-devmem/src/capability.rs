//! What a card can do for device memory, and what stands in the way, found out without changing
//! anything.

use super::bind::Devmem;
use super::error::DevmemError;
use super::netlink::{Netdev, QueueUse, SPLIT_ON};

/// Drivers that give single receive queues other memory, in some version of theirs.
const DRIVERS: [&str; 4] = ["gve", "bnxt_en", "mlx5_core", "fbnic"];

/// What this kernel can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelCapability {
    /// It has the command to bind memory to a receive queue.
    pub receive: bool,
    /// It has the command to bind memory for sending.
    pub send: bool,
}

/// What one interface says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// The interface.
    pub interface: String,
    /// Its driver.
    pub driver: String,
    /// Receive queues in use.
    pub queues: u32,
    /// Whether headers are split from payload; `None` when the driver has no such setting.
    pub header_split: Option<bool>,
    /// Packets up to this many bytes are not split; `None` when the driver has no such setting.
    pub threshold: Option<u32>,
    /// Whether flow rules are on; `None` when the card has none.
    pub flow_rules: Option<bool>,
    /// Whether a queue can be taken out of the spread of ordinary packets.
    pub has_table: bool,
    /// Queues with a use of their own.
    pub used: Vec<(u32, QueueUse)>,
}

impl Capability {
    /// Each thing that is missing and that no setting brings, as a sentence.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if self.header_split.is_none() {
            missing.push(format!(
                "the driver {} has no setting to split headers from payload (tcp-data-split)",
                self.driver
            ));
        }
        if self.flow_rules.is_none() {
            missing.push("the card has no flow rules (ntuple-filters)".to_owned());
        }
        if !self.has_table {
            missing.push("the card has no table that spreads packets over queues (RSS)".to_owned());
        }
        if self.queues < 2 {
            missing.push(format!(
                "{} receive queue is too few (`ethtool -L {} combined 2`)",
                self.queues, self.interface
            ));
        }
        missing
    }

    /// Whether the driver is known to be able; others may be, and only binding shows it.
    pub fn is_known_driver(&self) -> bool {
        DRIVERS.contains(&self.driver.as_str())
    }
}

impl Devmem {
    /// What this kernel can do. Needs no privilege.
    ///
    /// # Errors
    /// [`Why::OldKernel`](crate::Why::OldKernel) when it has not even the family of these commands.
    pub fn kernel_capability(&self) -> Result<KernelCapability, DevmemError> {
        let netdev = Netdev::open(&*self.kernel)?;
        Ok(KernelCapability {
            receive: netdev.can_bind_receive(),
            send: netdev.can_bind_send(),
        })
    }

    /// What an interface says about itself. Needs no privilege.
    ///
    /// # Errors
    /// [`Why::NoInterface`](crate::Why::NoInterface); [`Why::NoDriver`](crate::Why::NoDriver) for
    /// interfaces of software alone; or the kernel's refusal.
    pub fn capability(&self, interface: &str) -> Result<Capability, DevmemError> {
        let ifindex = self.ifindex(interface)?;
        let subject = self.subject(interface, ifindex);
        let driver = self
            .kernel
            .driver(interface)
            .map_err(|error| subject.failed("device memory", &error))?;
        let split = subject.header_split()?;
        let queues = self.kernel.receive_queues(interface).unwrap_or(1);
        let mut used = Vec::new();
        if let Ok(mut netdev) = Netdev::open(&*self.kernel) {
            for queue in 0..queues {
                // A card that is down says nothing about its queues.
                match netdev.queue_use(ifindex, queue) {
                    Ok(QueueUse::Free) => {}
                    Ok(by) => used.push((queue, by)),
                    Err(_) => break,
                }
            }
        }
        Ok(Capability {
            interface: interface.to_owned(),
            driver,
            queues,
            header_split: split.split.map(|split| split == SPLIT_ON),
            threshold: split.threshold,
            // The switch is there on every card; only one with rules counts them.
            flow_rules: match self.kernel.rules(interface) {
                Ok(_) => subject.flow_rules()?,
                Err(_) => None,
            },
            has_table: subject.indirection()?.is_some(),
            used,
        })
    }
}

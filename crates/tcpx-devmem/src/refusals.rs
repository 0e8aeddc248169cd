//! From the kernel's answer to the error that says how to fix it.

use std::{fmt, io};

use super::error::{DevmemError, Refusal, Why};
use super::kernel::Kernel;

/// An interface, as errors name it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject<'a> {
    pub(super) kernel: &'a dyn Kernel,
    pub(super) interface: &'a str,
    pub(super) ifindex: u32,
}

/// A call without words of the kernel.
pub(super) fn refusal(error: &io::Error) -> Refusal {
    Refusal::of(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Whether the answer is "there is no such thing here".
pub(super) fn is_absence(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS)
    )
}

fn because(why: Why, what: String, refusal: Refusal, fix: impl fmt::Display) -> DevmemError {
    DevmemError::new(why, format!("{what}: {refusal}; {fix}"))
}

impl Subject<'_> {
    /// Of any request.
    pub(super) fn refused(&self, operation: &'static str, refusal: Refusal) -> DevmemError {
        let interface = self.interface;
        let (why, what, fix) = match refusal.errno {
            libc::EPERM | libc::EACCES => (
                Why::NoPermission,
                format!("{operation} on {interface} is not permitted"),
                "run as root, or give the program the right: setcap cap_net_admin+ep PROGRAM",
            ),
            libc::ENODEV => return DevmemError::no_interface(interface),
            libc::EOPNOTSUPP => return self.no_driver(operation, refusal),
            _ => (
                Why::Other,
                format!("{operation} on {interface} was refused"),
                "look at the kernel's log (dmesg) for the driver's reason",
            ),
        };
        because(why, what, refusal, fix)
    }

    /// Of a system call.
    pub(super) fn failed(&self, operation: &'static str, error: &io::Error) -> DevmemError {
        self.refused(operation, refusal(error))
    }

    /// Of binding memory to a receive queue.
    pub(super) fn bind_receive(&self, queue: u32, refusal: Refusal) -> DevmemError {
        let interface = self.interface;
        let words = refusal.words.clone().unwrap_or_default();
        let says = |part: &str| words.contains(part);
        let queues = self.kernel.receive_queues(interface).ok();
        match refusal.errno {
            _ if says("tcp-data-split") => self.bad_header_split(refusal),
            _ if says("hds-thresh") || says("split-thresh") => self.bad_threshold(refusal),
            _ if says("AF_XDP") => because(
                Why::AfXdp,
                format!("queue {queue} of {interface} belongs to an AF_XDP socket"),
                refusal,
                "stop the program that has it (`ss --xdp -p`), or take another queue",
            ),
            _ if says("XDP program") => self.xdp(refusal),
            libc::EBUSY if says("leased") || says("peered") || says("virtual netdev") => because(
                Why::QueueLeased,
                format!("queue {queue} of {interface} is leased to a virtual interface"),
                refusal,
                "bind it through that one, or take another queue",
            ),
            libc::EEXIST => self.queue_taken(queue, "another program's memory", refusal),
            libc::EINVAL | libc::ERANGE if queues.is_some_and(|queues| queue >= queues) => {
                let queues = queues.unwrap_or(0);
                because(
                    Why::QueueOutOfRange,
                    format!("{interface} has no queue {queue}, only {queues}"),
                    refusal,
                    format!(
                        "take one of 0..{queues}, or make more (`ethtool -L {interface} combined N`)"
                    ),
                )
            }
            libc::EINVAL if says("dmabuf") || says("aligned") => self.bad_pool(refusal),
            libc::EOPNOTSUPP => self.unsupported(refusal),
            _ => self.refused("binding memory to a receive queue", refusal),
        }
    }

    /// Of binding memory for sending.
    pub(super) fn bind_send(&self, refusal: Refusal) -> DevmemError {
        match refusal.errno {
            libc::EOPNOTSUPP => because(
                Why::NoSend,
                format!("{} cannot send from device memory", self.interface),
                refusal,
                "sends go through host memory instead",
            ),
            libc::EINVAL => self.bad_pool(refusal),
            _ => self.refused("binding memory for sending", refusal),
        }
    }

    /// Headers are not split from payload.
    pub(super) fn bad_header_split(&self, refusal: Refusal) -> DevmemError {
        let interface = self.interface;
        because(
            Why::HeaderSplitOff,
            format!("{interface} does not split headers from payload"),
            refusal,
            format!(
                "run `ethtool -G {interface} tcp-data-split on`, or use a card and driver that can"
            ),
        )
    }

    /// Small packets are not split.
    pub(super) fn bad_threshold(&self, refusal: Refusal) -> DevmemError {
        let interface = self.interface;
        because(
            Why::HeaderThreshold,
            format!("{interface} leaves small packets unsplit"),
            refusal,
            format!("run `ethtool -G {interface} hds-thresh 0`"),
        )
    }

    /// An XDP program is attached.
    pub(super) fn xdp(&self, refusal: Refusal) -> DevmemError {
        let interface = self.interface;
        because(
            Why::Xdp,
            format!("{interface} has an XDP program, which cannot see device memory"),
            refusal,
            format!("run `ip link set dev {interface} xdp off`"),
        )
    }

    /// Somebody has the queue.
    pub(super) fn queue_taken(&self, queue: u32, by: &str, refusal: Refusal) -> DevmemError {
        because(
            Why::QueueTaken,
            format!("queue {queue} of {} is taken by {by}", self.interface),
            refusal,
            "take another queue, or end its owner (`tcpx devmem status`)",
        )
    }

    /// The card holds so many rules, and no more.
    pub(super) fn rules_full(&self, rules: usize, refusal: Refusal) -> DevmemError {
        let interface = self.interface;
        because(
            Why::RulesFull,
            format!("{interface} has no room for another flow rule ({rules} there are)"),
            refusal,
            format!("use fewer channels, or remove rules (`ethtool -n {interface}`)"),
        )
    }

    fn bad_pool(&self, refusal: Refusal) -> DevmemError {
        because(
            Why::BadPool,
            format!("{} cannot use this pool", self.interface),
            refusal,
            "make its pages whole and physically aligned, or use another kind of memory",
        )
    }

    fn no_driver(&self, operation: &str, refusal: Refusal) -> DevmemError {
        because(
            Why::NoDriver,
            format!("{} has no driver that can do {operation}", self.interface),
            refusal,
            "device memory needs a physical card, see `tcpx devices`",
        )
    }

    fn unsupported(&self, refusal: Refusal) -> DevmemError {
        let interface = self.interface;
        let words = refusal.words.as_deref();
        let no_dma = words.is_some_and(|words| words.contains("DMA"));
        match self.kernel.driver(interface) {
            Ok(driver) if no_dma => because(
                Why::NoDma,
                format!("{interface} ({driver}) does no DMA of its own"),
                refusal,
                "use a physical card, see `tcpx devices`",
            ),
            Ok(driver) => because(
                Why::NoQueueOperations,
                format!(
                    "the driver of {interface} ({driver}) has no queue operations, so it cannot put payload into device memory"
                ),
                refusal,
                "drivers that can: gve, bnxt_en, mlx5_core, fbnic (Linux 6.16 and later)",
            ),
            Err(_) => self.no_driver("device memory", refusal),
        }
    }
}

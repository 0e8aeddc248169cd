//! From the kernel's answer to the error that says how to mend it.

use std::io;

use super::error::{DevmemError, Refusal};
use super::kernel::Kernel;

/// An interface, as errors name it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject<'a> {
    pub(super) kernel: &'a dyn Kernel,
    pub(super) interface: &'a str,
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

impl Subject<'_> {
    /// Of any request.
    pub(super) fn refused(&self, operation: &'static str, refusal: Refusal) -> DevmemError {
        let interface = self.interface.to_owned();
        match refusal.errno {
            libc::EPERM | libc::EACCES => DevmemError::NoPermission {
                interface,
                operation,
                refusal,
            },
            libc::ENODEV => DevmemError::NoInterface { interface },
            libc::EOPNOTSUPP => DevmemError::NoDriver {
                interface,
                operation,
                refusal,
            },
            _ => DevmemError::Refused {
                interface,
                operation,
                refusal,
                hint: "look at the kernel's log (dmesg) for the driver's reason",
            },
        }
    }

    /// Of a system call.
    pub(super) fn failed(&self, operation: &'static str, error: &io::Error) -> DevmemError {
        self.refused(operation, refusal(error))
    }

    /// Of binding memory to a receive queue.
    pub(super) fn bind_receive(&self, queue: u32, refusal: Refusal) -> DevmemError {
        let interface = self.interface.to_owned();
        let words = refusal.words.as_deref().unwrap_or_default();
        let says = |part: &str| words.contains(part);
        let errno = refusal.errno;
        let queues = self.kernel.receive_queues(&interface).ok();
        match errno {
            _ if says("tcp-data-split") => DevmemError::HeaderSplitOff { interface, refusal },
            _ if says("hds-thresh") || says("split-thresh") => {
                DevmemError::HeaderThreshold { interface, refusal }
            }
            _ if says("AF_XDP") => DevmemError::AfXdp {
                interface,
                queue,
                refusal,
            },
            _ if says("XDP program") => DevmemError::Xdp { interface, refusal },
            libc::EBUSY if says("leased") || says("peered") || says("virtual netdev") => {
                DevmemError::QueueLeased {
                    interface,
                    queue,
                    refusal,
                }
            }
            libc::EEXIST => DevmemError::QueueTaken {
                interface,
                queue,
                by: "another program's memory".to_owned(),
                refusal,
            },
            libc::EINVAL | libc::ERANGE if queues.is_some_and(|queues| queue >= queues) => {
                DevmemError::QueueOutOfRange {
                    interface,
                    queue,
                    queues: queues.unwrap_or(0),
                    refusal,
                }
            }
            libc::EINVAL if says("dmabuf") || says("aligned") => {
                DevmemError::BadPool { interface, refusal }
            }
            libc::EOPNOTSUPP => self.unsupported(refusal),
            _ => self.refused("binding memory to a receive queue", refusal),
        }
    }

    /// Of binding memory for sending.
    pub(super) fn bind_send(&self, refusal: Refusal) -> DevmemError {
        let interface = self.interface.to_owned();
        match refusal.errno {
            libc::EOPNOTSUPP => DevmemError::NoSend { interface, refusal },
            libc::EINVAL => DevmemError::BadPool { interface, refusal },
            _ => self.refused("binding memory for sending", refusal),
        }
    }

    fn unsupported(&self, refusal: Refusal) -> DevmemError {
        let interface = self.interface.to_owned();
        let no_dma = refusal
            .words
            .as_deref()
            .is_some_and(|words| words.contains("DMA"));
        match self.kernel.driver(self.interface) {
            Ok(driver) if no_dma => DevmemError::NoDma {
                interface,
                driver,
                refusal,
            },
            Ok(driver) => DevmemError::NoQueueOperations {
                interface,
                driver,
                refusal,
            },
            Err(_) => DevmemError::NoDriver {
                interface,
                operation: "device memory",
                refusal,
            },
        }
    }
}

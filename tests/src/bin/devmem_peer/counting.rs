//! The real system calls, with tokens counted: those that the kernel handed out, and those that it
//! says are free again.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use tcpx_devmem::cmsg::{Dialect, SOL_SOCKET};
use tcpx_devmem::{Arrival, LinuxSockets, SocketCalls};
use tcpx_lanes::control_messages::ControlMessages;
use tcpx_memory::RegionSlice;

#[derive(Debug, Default)]
pub(crate) struct Counting {
    handed_out: AtomicU64,
    freed: AtomicU64,
}

impl Counting {
    /// Tokens handed out, and tokens freed, until now.
    pub(crate) fn tokens(&self) -> (u64, u64) {
        (
            self.handed_out.load(Ordering::Relaxed),
            self.freed.load(Ordering::Relaxed),
        )
    }
}

impl SocketCalls for Counting {
    fn receive(
        &self,
        socket: BorrowedFd<'_>,
        into: &RegionSlice,
        control: &mut [u8],
    ) -> io::Result<Arrival> {
        let arrival = LinuxSockets.receive(socket, into, control)?;
        let records = ControlMessages::new(&control[..arrival.control_bytes])
            .filter_map(Result::ok)
            .filter(|one| (one.level, one.kind) == (SOL_SOCKET, Dialect::Mainline.device_type()));
        self.handed_out
            .fetch_add(records.count() as u64, Ordering::Relaxed);
        Ok(arrival)
    }

    fn give_back(
        &self,
        socket: BorrowedFd<'_>,
        level: i32,
        option: i32,
        tokens: &[u8],
    ) -> io::Result<i32> {
        let answer = LinuxSockets.give_back(socket, level, option, tokens)?;
        self.freed
            .fetch_add(u64::try_from(answer).unwrap_or(0), Ordering::Relaxed);
        Ok(answer)
    }
}

//! Host memory that is sent from where it lies (`MSG_ZEROCOPY`): what the kernel still reads, and whether
//! the way is worth going. No system calls here.
//!
//! Where the kernel copies after all, as it does for a receiver on the same host, a send costs more than a
//! plain one; it says so in its reports, and then the lane copies from the start.

use std::collections::VecDeque;
use std::io;

use tcpx_lanes::zero_copy::{BadReport, Done, InKernel};

use super::transmit_table::Outgoing;

/// Pinning the pages of fewer bytes costs more than copying them.
const LEAST: usize = 64 << 10;

/// Sends of one lane without a copy.
#[derive(Debug, Default)]
pub(super) struct Uncopied {
    /// Further sends may go this way.
    usable: bool,
    in_kernel: InKernel<()>,
    /// Chunks that were written to their last byte, with the number of their last call; oldest first.
    held: VecDeque<(u32, Outgoing)>,
}

impl Uncopied {
    /// `usable`: the socket reports on such sends.
    pub(super) fn new(usable: bool) -> Self {
        Self {
            usable,
            ..Self::default()
        }
    }

    /// Whether so many bytes should go this way.
    pub(super) fn takes(&self, bytes: usize) -> bool {
        self.usable && bytes >= LEAST
    }

    /// A call was made; its number.
    pub(super) fn sent(&mut self) -> u32 {
        let number = self.in_kernel.next();
        self.in_kernel.sent(());
        number
    }

    /// The system refused a call; what it would have sent is to be copied.
    pub(super) fn refused(&mut self, error: &io::Error) {
        // Pinned pages and reports have limits; some are given back with each report.
        let is_full = error.raw_os_error() == Some(libc::ENOBUFS);
        if !is_full || self.in_kernel.is_empty() {
            self.usable = false;
            tracing::info!(%error, "the system sends host memory with a copy");
        }
    }

    /// Whether the kernel may still read what the call of this number sent.
    fn reads(&self, number: u32) -> bool {
        let place = number.wrapping_sub(self.in_kernel.oldest());
        place < self.in_kernel.next().wrapping_sub(self.in_kernel.oldest())
    }

    /// A chunk was written, with this last call: gives it back if the kernel is done with it.
    pub(super) fn hold(&mut self, number: Option<u32>, chunk: Outgoing) -> Option<Outgoing> {
        match number.filter(|number| self.reads(*number)) {
            Some(number) => {
                self.held.push_back((number, chunk));
                None
            }
            None => Some(chunk),
        }
    }

    /// The kernel is done with some calls; the answer is how many of them it did not copy.
    ///
    /// # Errors
    /// The report cannot be.
    pub(super) fn reported(&mut self, done: Done) -> Result<u64, BadReport> {
        self.in_kernel.done(done)?;
        if !done.copied {
            return Ok(u64::from(done.last.wrapping_sub(done.first)) + 1);
        }
        if std::mem::replace(&mut self.usable, false) {
            tracing::info!("the kernel copies what it sends on this route; so do we from now on");
        }
        Ok(0)
    }

    /// The next chunk that was held and that the kernel is done with.
    pub(super) fn release(&mut self) -> Option<Outgoing> {
        let (number, _) = self.held.front()?;
        if self.reads(*number) {
            return None;
        }
        self.held.pop_front().map(|(_, chunk)| chunk)
    }

    /// Whether the kernel reads nothing any more.
    pub(super) fn is_idle(&self) -> bool {
        self.in_kernel.is_empty()
    }

    /// Takes the chunks that are held, oldest first, of a lane that is gone.
    pub(super) fn abandon(&mut self) -> VecDeque<(u32, Outgoing)> {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use tcpx_memory::Region;
    use tcpx_wire::chunk_header::ChunkHeader;

    use super::*;
    use crate::error::ChunkPosition;

    fn chunk(slot: u16) -> Outgoing {
        Outgoing {
            slot,
            header: [0; ChunkHeader::BYTES],
            position: ChunkPosition {
                sequence: slot.into(),
                transfer: 0,
                offset: 0,
                length: 1,
                done: 0,
            },
            payload: Region::host(1).expect("memory").all(),
            attempt: 0,
            permit: None,
            spliced: None,
        }
    }

    fn done(first: u32, last: u32, copied: bool) -> Done {
        Done {
            first,
            last,
            copied,
        }
    }

    #[test]
    fn a_chunk_is_held_until_the_kernel_has_reported_its_last_call() {
        let mut uncopied = Uncopied::new(true);
        assert!(uncopied.takes(LEAST) && !uncopied.takes(LEAST - 1));
        uncopied.sent();
        let last = uncopied.sent();
        assert!(uncopied.hold(Some(last), chunk(0)).is_none());
        let last = uncopied.sent();
        assert!(uncopied.hold(Some(last), chunk(1)).is_none());
        assert!(uncopied.hold(None, chunk(2)).is_some(), "it was copied");
        assert_eq!(uncopied.reported(done(0, 0, false)), Ok(1));
        assert!(uncopied.release().is_none(), "half of it is in the kernel");
        assert_eq!(uncopied.reported(done(1, 2, false)), Ok(2));
        let released = std::iter::from_fn(|| uncopied.release());
        assert_eq!(released.map(|chunk| chunk.slot).collect::<Vec<_>>(), [0, 1]);
        assert!(uncopied.is_idle() && uncopied.takes(LEAST));
        let last = uncopied.sent();
        assert_eq!(uncopied.reported(done(last, last, false)), Ok(1));
        assert!(uncopied.hold(Some(last), chunk(3)).is_some(), "reported");
        assert!(uncopied.reported(done(last, last, false)).is_err());
    }

    #[test]
    fn a_copy_that_the_kernel_makes_ends_the_way_but_not_what_is_under_way() {
        let mut uncopied = Uncopied::new(true);
        let (first, last) = (uncopied.sent(), uncopied.sent());
        assert!(uncopied.hold(Some(last), chunk(0)).is_none());
        assert_eq!(uncopied.reported(done(first, first, true)), Ok(0));
        assert!(!uncopied.takes(1 << 20));
        assert!(uncopied.release().is_none());
        assert_eq!(uncopied.reported(done(last, last, true)), Ok(0));
        assert!(uncopied.release().is_some());
    }

    #[test]
    fn a_full_limit_is_waited_out_and_one_that_nothing_fills_ends_the_way() {
        let full = io::Error::from_raw_os_error(libc::ENOBUFS);
        let mut uncopied = Uncopied::new(true);
        let call = uncopied.sent();
        uncopied.refused(&full);
        assert!(uncopied.takes(LEAST));
        uncopied
            .reported(done(call, call, false))
            .expect("a report");
        uncopied.refused(&full);
        assert!(!uncopied.takes(LEAST));
        let mut uncopied = Uncopied::new(true);
        uncopied.sent();
        uncopied.refused(&io::ErrorKind::InvalidInput.into());
        assert!(!uncopied.takes(LEAST));
    }

    #[test]
    fn chunks_of_a_lane_that_died_come_back_whatever_the_kernel_says() {
        let mut uncopied = Uncopied::new(true);
        for slot in 0..3 {
            let number = uncopied.sent();
            assert!(uncopied.hold(Some(number), chunk(slot)).is_none());
        }
        let back = uncopied.abandon();
        let slots: Vec<_> = back.iter().map(|(_, chunk)| chunk.slot).collect();
        assert_eq!(slots, [0, 1, 2]);
        assert!(!uncopied.is_idle());
    }
}

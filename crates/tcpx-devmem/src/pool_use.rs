//! How much of a pool is kept from the network card.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fs, io};

use tcpx_lanes::socket::set_option;

/// Pages of one pool whose tokens are not given back, counted over all channels that share it. A
/// page that several fragments share counts for each of them.
#[derive(Clone, Debug)]
pub(super) struct PoolUse {
    pinned: Arc<AtomicU64>,
    enough: u64,
    /// Bytes that the card takes from a pool at a time: a page of this kernel. A fragment keeps
    /// every page that it touches.
    page: u64,
}

impl PoolUse {
    /// For a pool of so many bytes.
    ///
    /// From a quarter of it on, chunks are not waited for: what has come of them is handed on, so
    /// that it can be unpacked and given back. The rest of the pool is for the card's ring, for
    /// what waits in the sockets, and for what is being unpacked.
    pub(super) fn of(pool_bytes: u64) -> Self {
        Self::in_pages(pool_bytes, rustix::param::page_size() as u64)
    }

    fn in_pages(pool_bytes: u64, page: u64) -> Self {
        Self {
            pinned: Arc::default(),
            enough: (pool_bytes / 4).max(1),
            page: page.max(1),
        }
    }

    /// Bytes of pages that may wait in the queue of each of `more` channels that are to share the
    /// pool with those that do already. The rest, half of it all, is for what is being received.
    pub(super) fn part_for(&self, pool_bytes: u64, more: u64) -> u64 {
        // One reference is the network's own.
        let sharing = (Arc::strong_count(&self.pinned) as u64).saturating_sub(1);
        pool_bytes / 2 / (sharing + more).max(1)
    }

    /// Bytes of the pages under a fragment.
    pub(super) fn pages(&self, pool_offset: u64, length: u32) -> u64 {
        let start = pool_offset / self.page * self.page;
        let end = pool_offset.saturating_add(u64::from(length));
        end.saturating_sub(start)
            .checked_next_multiple_of(self.page)
            .unwrap_or(u64::MAX)
    }

    pub(super) fn pin(&self, bytes: u64) {
        self.pinned.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn unpin(&self, bytes: u64) {
        self.pinned.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Whether so much is kept that nothing should be kept for long.
    pub(super) fn presses(&self) -> bool {
        self.pinned.load(Ordering::Relaxed) >= self.enough
    }

    #[cfg(test)]
    pub(super) fn pinned(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }
}

/// The kernel's limits for the queue of a connection whose size nobody set: least, at first, most.
const AUTOMATIC: &str = "/proc/sys/net/ipv4/tcp_rmem";

/// Keeps what waits on a connection within so many bytes of pages. Pages count as a whole, so that
/// small packets fill the queue as they fill the pool.
///
/// Packets behind a lost one wait in the kernel, each on a page of the pool. If they took all of
/// it, the lost one would find no page whenever it is sent again, and the connection would stall
/// for ever.
pub(super) fn limit_queue(payload: &TcpStream, pages: u64) -> io::Result<()> {
    let automatic = fs::read_to_string(AUTOMATIC).ok();
    if automatic
        .and_then(|text| most(&text))
        .is_some_and(|most| most <= pages)
    {
        // The kernel keeps to less by itself, and finds the best size.
        return Ok(());
    }
    // The kernel takes twice what it is given.
    let bytes = libc::c_int::try_from(pages / 2).unwrap_or(libc::c_int::MAX);
    // Beyond the limit for everybody where we may, else up to that.
    let set = |option| set_option(payload, libc::SOL_SOCKET, option, bytes);
    set(libc::SO_RCVBUFFORCE).or_else(|_| set(libc::SO_RCVBUF))
}

fn most(limits: &str) -> Option<u64> {
    limits.split_whitespace().nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fragment_keeps_the_pages_that_it_touches() {
        for (page, offset, length, pages) in [
            (4096, 0, 1, 1),
            (4096, 4095, 1, 1),
            (4096, 4095, 2, 2),
            (4096, 4096, 4096, 1),
            (4096, 100, 4096, 2),
            (4096, u64::MAX - 5, u32::MAX, 1),
            (65536, 4095, 2, 1),
            (65536, 65535, 2, 2),
        ] {
            let bytes = PoolUse::in_pages(1 << 20, page).pages(offset, length);
            assert_eq!(
                bytes,
                pages * page,
                "{length} bytes at {offset} of pages of {page}"
            );
        }
    }

    #[test]
    fn channels_that_share_a_pool_share_its_half() {
        let usage = PoolUse::of(1 << 20);
        assert_eq!(usage.part_for(1 << 20, 2), 1 << 18);
        let _others = [usage.clone(), usage.clone()];
        assert_eq!(usage.part_for(1 << 20, 2), 1 << 17);
    }

    #[test]
    fn few_fragments_press_where_pages_are_large() {
        // 1 MiB in pages of 64 KiB, a packet in each: 4 of 16 are a quarter.
        let usage = PoolUse::in_pages(1 << 20, 65536);
        for page in 0..4 {
            assert!(!usage.presses(), "after {page} packets");
            usage.pin(usage.pages(page * 65536, 1448));
        }
        assert!(usage.presses());
    }

    #[test]
    fn a_queue_takes_no_more_than_its_part() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let size = || socket2::SockRef::from(&stream).recv_buffer_size().unwrap();
        let automatic = size();
        limit_queue(&stream, u64::MAX).unwrap();
        assert_eq!(size(), automatic);
        limit_queue(&stream, 64 << 10).unwrap();
        assert_eq!(size(), 64 << 10);
    }

    #[test]
    fn the_kernels_limits_are_read_by_their_place() {
        assert_eq!(most("4096\t131072\t6291456\n"), Some(6_291_456));
        assert_eq!((most("1 2"), most("1 2 x")), (None, None));
    }
}

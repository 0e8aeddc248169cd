//! How much of a pool the packets that wait in a connection's queue may take.
//!
//! Packets behind a lost one wait in the kernel, each on a page of the pool. If they took all of it, the lost one
//! would find no page whenever it is sent again, and the connection would stand still for ever.

use std::fs;
use std::io;
use std::net::TcpStream;

use tcpx_lanes::socket::set_option;

/// The kernel's limits for the queue of a connection whose size nobody set: least, at first, most.
const AUTOMATIC: &str = "/proc/sys/net/ipv4/tcp_rmem";

/// Keeps what waits on a connection within so many bytes of pages. Pages count as a whole, so that
/// small packets fill the queue as they fill the pool.
pub(super) fn limit(payload: &TcpStream, pages: u64) -> io::Result<()> {
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
    fn a_queue_takes_no_more_than_its_part_and_a_large_part_is_left_to_the_kernel() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let size = || socket2::SockRef::from(&stream).recv_buffer_size().unwrap();
        let automatic = size();
        limit(&stream, u64::MAX).unwrap();
        assert_eq!(size(), automatic);
        limit(&stream, 64 << 10).unwrap();
        assert_eq!(size(), 64 << 10);
    }

    #[test]
    fn the_kernels_limits_are_read_by_their_place() {
        assert_eq!(most("4096\t131072\t6291456\n"), Some(6_291_456));
        assert_eq!((most("1 2"), most("1 2 x")), (None, None));
    }
}

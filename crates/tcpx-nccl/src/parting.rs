//! Connections whose comm has closed before the peer had its last bytes.
//!
//! What a send comm reported as done may still lie in its socket. A socket that is closed then drops
//! those bytes as soon as the peer says anything more, and receivers do: they grant. So it stays open
//! until the peer's kernel has acknowledged everything, looked at whenever a comm comes or goes.

use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::socket::Stream;

/// Connections that are kept; the oldest makes room.
const MOST: usize = 1024;
/// A peer that took nothing for so long takes nothing any more.
const LONGEST: Duration = Duration::from_secs(60);

/// The connections.
#[derive(Debug, Default)]
pub(crate) struct Parting(Mutex<VecDeque<(Arc<Stream>, Instant)>>);

impl Parting {
    /// Ends the sending direction; the connection goes when its bytes have arrived.
    pub(crate) fn part(&self, stream: Arc<Stream>) {
        // The end must be told here: a fork's copy of the socket would keep it back.
        let _ = stream.shutdown(Shutdown::Write);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back((stream, Instant::now()));
        if kept.len() > MOST {
            kept.pop_front();
        }
        drop(kept);
        self.look();
    }

    /// Lets go of those whose bytes have arrived.
    pub(crate) fn look(&self) {
        let now = Instant::now();
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|(stream, since)| {
                unacknowledged(stream) && now.duration_since(*since) < LONGEST
            });
    }
}

/// Whether bytes, or the end after them, are on their way.
fn unacknowledged(stream: &Stream) -> bool {
    let mut bytes: libc::c_int = 0;
    // SAFETY: an open socket, an out pointer of this frame.
    let answered = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    // A connection that was reset has nothing on its way.
    answered == 0 && bytes > 0
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    fn kept(parting: &Parting) -> usize {
        parting.0.lock().unwrap().len()
    }

    #[test]
    fn bytes_that_the_peer_does_not_have_yet_survive_what_the_peer_still_says() {
        let (mut near, mut far) = connected();
        near.set_nonblocking(true).unwrap();
        let mut sent = 0;
        while let Ok(bytes) = near.write(&[7; 4096]) {
            sent += bytes;
        }
        let parting = Parting::default();
        parting.part(Arc::new(Stream::new(near)));
        assert_eq!(kept(&parting), 1);
        for _ in 0..3 {
            far.write_all(b"a grant").unwrap();
        }
        let mut arrived = Vec::new();
        far.read_to_end(&mut arrived).unwrap();
        assert_eq!(arrived.len(), sent);
        // The end, which counts as a byte, may be acknowledged a moment later.
        let deadline = Instant::now() + Duration::from_secs(30);
        while kept(&parting) > 0 {
            assert!(Instant::now() < deadline);
            parting.look();
        }
    }

    #[test]
    fn a_peer_that_is_gone_keeps_nothing() {
        let (near, far) = connected();
        far.set_nonblocking(true).unwrap();
        drop(far);
        let parting = Parting::default();
        parting.part(Arc::new(Stream::new(near)));
        let deadline = Instant::now() + Duration::from_secs(30);
        while kept(&parting) > 0 {
            assert!(Instant::now() < deadline);
            parting.look();
        }
    }
}

//! Connections that close before the peer has their last bytes.
//!
//! What was reported as sent may still lie in a socket. A socket that is closed then drops those bytes as
//! soon as the peer sends anything more, and receivers do: they grant. So it stays open until the peer's
//! kernel has acknowledged everything.

use crate::lock;
use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Connections that are kept; the oldest makes room.
const MOST: usize = 1024;
/// A peer that took nothing for so long takes nothing any more.
const LONGEST: Duration = Duration::from_secs(60);

/// The connections, each as its owner holds it.
#[derive(Debug)]
pub struct DrainingSockets<S>(Mutex<VecDeque<(Arc<S>, Instant)>>);

impl<S> Default for DrainingSockets<S> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<S: Deref<Target = TcpStream>> DrainingSockets<S> {
    /// Ends the sending direction, and keeps the connection until its bytes have arrived.
    pub fn close(&self, stream: Arc<S>) {
        // A fork's copy of the socket would hold back the end that closing means.
        let _ = stream.shutdown(Shutdown::Write);
        let mut kept = lock(&self.0);
        kept.push_back((stream, Instant::now()));
        if kept.len() > MOST {
            kept.pop_front();
        }
        drop(kept);
        self.reap();
    }

    /// Closes those whose bytes have arrived; call it when connections come and go.
    pub fn reap(&self) {
        let now = Instant::now();
        lock(&self.0).retain(|(stream, since)| {
            unacknowledged(stream) && now.duration_since(*since) < LONGEST
        });
    }
}

/// Whether bytes, or the end after them, are on their way.
fn unacknowledged(stream: &TcpStream) -> bool {
    let mut bytes: libc::c_int = 0;
    // SAFETY: an open socket, an out pointer of this frame.
    let answered = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    // A connection that was reset has nothing on its way.
    answered == 0 && bytes > 0
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    fn kept(draining: &DrainingSockets<Box<TcpStream>>) -> usize {
        draining.0.lock().unwrap().len()
    }

    #[test]
    fn bytes_that_the_peer_does_not_have_yet_survive_what_the_peer_still_says() {
        let (mut near, mut far) = connected();
        near.set_nonblocking(true).unwrap();
        let mut sent = 0;
        while let Ok(bytes) = near.write(&[7; 4096]) {
            sent += bytes;
        }
        let draining = DrainingSockets::default();
        draining.close(Arc::new(Box::new(near)));
        assert_eq!(kept(&draining), 1);
        for _ in 0..3 {
            far.write_all(b"a grant").unwrap();
        }
        let mut arrived = Vec::new();
        far.read_to_end(&mut arrived).unwrap();
        assert_eq!(arrived.len(), sent);
        // The end, which counts as a byte, may be acknowledged a moment later.
        let deadline = Instant::now() + Duration::from_secs(60);
        while kept(&draining) > 0 {
            assert!(Instant::now() < deadline);
            draining.reap();
        }
    }

    #[test]
    fn a_peer_that_is_gone_keeps_nothing() {
        let (near, far) = connected();
        far.set_nonblocking(true).unwrap();
        drop(far);
        let draining = DrainingSockets::default();
        draining.close(Arc::new(Box::new(near)));
        let deadline = Instant::now() + Duration::from_secs(60);
        while kept(&draining) > 0 {
            assert!(Instant::now() < deadline);
            draining.reap();
        }
    }
}

//! A relay between the two ends: a path with a delay, on which connections are reset.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::connect_unspec;

/// Pieces of a stream that are under way.
const PIECES: usize = 4096;
const PIECE_BYTES: usize = 64 << 10;

/// Both sides of connections.
type Streams = Arc<Mutex<VecDeque<[TcpStream; 2]>>>;

/// Passes on what comes to its address, each byte after the delay.
#[derive(Debug)]
pub(crate) struct Relay {
    address: SocketAddr,
    /// Those of connections that came later than the first, oldest first.
    lanes: Streams,
}

impl Relay {
    /// Between whoever connects and this address.
    pub(crate) fn start(to: SocketAddr, delay: Duration) -> std::io::Result<Self> {
        let listener = TcpListener::bind((to.ip(), 0))?;
        let address = listener.local_addr()?;
        let lanes = Streams::default();
        let kept = Arc::clone(&lanes);
        std::thread::spawn(move || {
            for (at, near) in listener.incoming().enumerate() {
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(to)) else {
                    return;
                };
                // The first one is the control connection: lanes are what this is about.
                if at > 0
                    && let (Ok(near), Ok(far)) = (near.try_clone(), far.try_clone())
                {
                    kept.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push_back([near, far]);
                }
                for (from, to) in [(&near, &far), (&far, &near)] {
                    if let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) {
                        pass(from, to, delay);
                    }
                }
            }
        });
        Ok(Self { address, lanes })
    }

    /// Where to connect instead.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Resets the oldest lane that is left, again and again until the answer is dropped.
    pub(crate) fn reset_every(&self, every: Duration) -> Resets {
        let (stop, stopped) = sync_channel::<()>(0);
        let lanes = Arc::clone(&self.lanes);
        std::thread::spawn(move || {
            while let Err(std::sync::mpsc::RecvTimeoutError::Timeout) = stopped.recv_timeout(every)
            {
                let lane = lanes
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .pop_front();
                for side in lane.into_iter().flatten() {
                    // Linux resets a connection that is connected to nothing: what is under way is lost.
                    let _ = connect_unspec(&side);
                }
            }
        });
        Resets(stop)
    }
}

/// Resets go on while it lives.
#[derive(Debug)]
pub(crate) struct Resets(
    #[expect(dead_code, reason = "its end is the sign to stop")] std::sync::mpsc::SyncSender<()>,
);

fn pass(mut from: TcpStream, to: TcpStream, delay: Duration) {
    let _ = to.set_nodelay(true);
    let (pieces, due) = sync_channel::<(Instant, Vec<u8>)>(PIECES);
    std::thread::spawn(move || deliver(to, &due));
    std::thread::spawn(move || {
        loop {
            let mut piece = vec![0; PIECE_BYTES];
            match from.read(&mut piece) {
                Ok(0) | Err(_) => return,
                Ok(bytes) => piece.truncate(bytes),
            }
            if pieces.send((Instant::now() + delay, piece)).is_err() {
                return;
            }
        }
    });
}

fn deliver(mut to: TcpStream, due: &Receiver<(Instant, Vec<u8>)>) {
    for (at, piece) in due {
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        if to.write_all(&piece).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_reset_loses_what_the_relay_holds() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Relay::start(listener.local_addr().unwrap(), Duration::from_secs(2)).unwrap();
        let dial = || {
            let near = TcpStream::connect(relay.address()).unwrap();
            let (far, _) = listener.accept().unwrap();
            for end in [&near, &far] {
                end.set_read_timeout(Some(LIMIT)).unwrap();
            }
            (near, far)
        };
        let _control = dial();
        let (mut near, mut far) = dial();
        near.write_all(b"bytes").unwrap();
        let _resets = relay.reset_every(Duration::from_millis(1));
        for end in [&mut near, &mut far] {
            let error = end.read_to_end(&mut Vec::new()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        }
    }
}

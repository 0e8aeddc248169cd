//! A relay in front of a listener that flips single bits.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use tcpx_lanes::socket::abort;

use crate::faults::random;

/// Bytes moved at a time.
const PIECE: usize = 16 << 10;

/// Bits that relays have flipped.
#[derive(Debug, Default)]
pub struct Flips {
    /// In control connections, and in lanes.
    by_line: [AtomicU64; 2],
}

impl Flips {
    /// In control connections.
    pub fn control(&self) -> u64 {
        self.by_line[0].load(Ordering::Relaxed)
    }

    /// In lanes.
    pub fn lanes(&self) -> u64 {
        self.by_line[1].load(Ordering::Relaxed)
    }

    /// In both.
    pub fn sum(&self) -> u64 {
        self.control() + self.lanes()
    }
}

/// The relay. What ends without an order at one of its ends ends so at the other, too.
#[derive(Debug)]
pub struct Flipper {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    target: SocketAddr,
    flips: Arc<Flips>,
    gaps: [AtomicU64; 2],
    goes_on: bool,
}

impl Flipper {
    /// In front of `target`. `goes_on`: in a lane it goes on flipping behind a flip. What is sealed ends with the first
    /// one, and others behind it would change what nobody reads.
    ///
    /// # Panics
    /// When the system has no port left.
    pub fn start(target: SocketAddr, flips: &Arc<Flips>, goes_on: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let shared = Arc::new(Shared {
            target,
            flips: Arc::clone(flips),
            gaps: Default::default(),
            goes_on,
        });
        let relays = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&relays);
                thread::spawn(move || shared.relay(client));
            }
        });
        Self { address, shared }
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// In streams that come from now on: bytes from one flip to the next in a control connection and in a lane, at most;
    /// 0: none there.
    pub fn flip(&self, gaps: [u64; 2]) {
        for (held, gap) in self.shared.gaps.iter().zip(gaps) {
            held.store(gap, Ordering::Relaxed);
        }
    }
}

impl Shared {
    fn relay(&self, mut client: TcpStream) {
        let mut head = [0; 16];
        let Ok(server) = TcpStream::connect(self.target) else {
            return;
        };
        if client.read_exact(&mut head).is_err() {
            return;
        }
        for stream in [&client, &server] {
            // Without it the relay is slower, nothing else.
            let _ = stream.set_nodelay(true);
        }
        let line = usize::from(head[12] == 1);
        thread::scope(|scope| {
            scope.spawn(|| self.pump(&head, &client, &server, line));
            self.pump(&[], &server, &client, line);
        });
    }

    /// `first` came before the rest.
    fn pump(&self, first: &[u8], from: &TcpStream, mut to: &TcpStream, line: usize) {
        let gap = self.gaps[line].load(Ordering::Relaxed);
        let mut piece = [0; PIECE];
        let mut from_first = first.chain(from);
        let mut left = random().checked_rem(gap).unwrap_or(u64::MAX);
        let ended = loop {
            let count = match from_first.read(&mut piece) {
                Ok(0) => break Ok(()),
                Ok(count) => count,
                Err(error) => break Err(error),
            };
            let mut passed = 0;
            while left < (count - passed) as u64 {
                passed += left as usize;
                piece[passed] ^= 1 << (random() % 8);
                self.flips.by_line[line].fetch_add(1, Ordering::Relaxed);
                passed += 1;
                left = match self.goes_on && line == 1 {
                    true => random() % gap,
                    false => u64::MAX,
                };
            }
            left -= (count - passed) as u64;
            if let Err(error) = to.write_all(&piece[..count]) {
                break Err(error);
            }
        };
        for stream in [from, to] {
            match ended {
                // It may be down already.
                Ok(()) => drop(stream.shutdown(Shutdown::Both)),
                Err(_) => abort(stream.as_fd()),
            }
        }
    }
}

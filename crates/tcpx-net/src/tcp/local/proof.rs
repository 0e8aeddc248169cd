//! How a side learns which process of its host the peer is: the peer connects to a socket without a place in the file
//! system, whose name only the two ends of the session know, and the kernel says who did.

use std::io::{self, Read as _, Write as _};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::geteuid;
use tcpx_lanes::socket::{peer_process, timespec};

use super::exposed::{PROOF_BYTES, Table};
use super::peer_memory::PeerMemory;
use super::{Local, LocalPath};
use crate::error::NetworkError;
use crate::network::{Exchange, Setup, Side};

/// The peer connects as soon as it knows that this side listens, which it does.
const PATIENCE: Duration = Duration::from_secs(1);

/// A peer that seems to be on this host may come through it.
#[derive(Debug)]
pub(in crate::tcp) struct Door {
    listener: UnixListener,
    table: Arc<Table>,
}

/// What a side's table begins with, and the name of its socket.
fn proof(setup: &Setup<'_>, side: Side) -> ([u8; PROOF_BYTES], [u8; 32]) {
    let name: [&[u8]; 2] = match side {
        Side::Client => [b"client's table", b"client's door"],
        Side::Server => [b"server's table", b"server's door"],
    };
    let [table, door] = name.map(|name| setup.session.key.shared_value(name));
    (table, door)
}

fn address(door: [u8; 32]) -> io::Result<SocketAddr> {
    let (name, _) = door.split_at(16);
    let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddr::from_abstract_name(format!("tcpx-{name}"))
}

fn other(side: Side) -> Side {
    match side {
        Side::Client => Side::Server,
        Side::Server => Side::Client,
    }
}

impl Door {
    /// A door for a peer whose address is one of this host's; `sends` may be on their way to it.
    pub(in crate::tcp) fn open(local: Local, sends: u16, setup: &Setup<'_>) -> Option<Self> {
        let (own, peer) = (
            setup.local.ip().to_canonical(),
            setup.peer.ip().to_canonical(),
        );
        let is_near = own == peer || own.is_loopback() && peer.is_loopback();
        if !is_near || !local.is_wanted(setup.encrypt) {
            return None;
        }
        let (proof, door) = proof(setup, setup.side);
        let listener = address(door).and_then(|address| UnixListener::bind_addr(&address));
        let listener = listener.and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        match listener {
            Ok(listener) => Some(Self {
                listener,
                table: Table::new(&proof, sends),
            }),
            Err(error) => {
                tracing::debug!(%error, "no door for a peer on this host");
                None
            }
        }
    }

    /// One round with a peer that has a door too.
    pub(in crate::tcp) fn prove(
        self,
        setup: &Setup<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<LocalPath, NetworkError> {
        // Kept until the peer has come, which reads who this is.
        let said = self.say(setup);
        let peer = said.as_ref().map_err(ToString::to_string).and_then(|_| {
            let peer = self.hear(setup);
            peer.map_err(|error| error.to_string())
        });
        if let Err(error) = &peer {
            tracing::info!(peer = %setup.peer, %error, "memory of the peer, which is on this host, cannot be read where it lies");
        }
        let theirs = exchange.exchange(&[u8::from(peer.is_ok())], &mut ())?;
        Ok(LocalPath {
            table: (theirs == [1]).then_some(self.table),
            peer: peer.ok(),
            ..LocalPath::default()
        })
    }

    /// Goes through the peer's door and says where this side's table is.
    fn say(&self, setup: &Setup<'_>) -> io::Result<UnixStream> {
        let (_, door) = proof(setup, other(setup.side));
        let mut stream = UnixStream::connect_addr(&address(door)?)?;
        stream.write_all(&self.table.address().to_ne_bytes())?;
        Ok(stream)
    }

    /// Sees who comes through this side's door.
    fn hear(&self, setup: &Setup<'_>) -> io::Result<PeerMemory> {
        let until = setup.deadline.min(Instant::now() + PATIENCE);
        wait(&self.listener, until)?;
        let (mut stream, _) = self.listener.accept()?;
        let (process, user) = peer_process(&stream)?;
        let process = process.filter(|_| user == geteuid());
        let process = process.ok_or_else(|| {
            io::Error::other("it is another user's, or in another process namespace")
        })?;
        wait(&stream, until)?;
        let mut table = [0; 8];
        stream.read_exact(&mut table)?;
        let (proof, _) = proof(setup, other(setup.side));
        PeerMemory::proven(process, u64::from_ne_bytes(table), &proof)
    }
}

fn wait(socket: &impl std::os::fd::AsFd, until: Instant) -> io::Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut one = [PollFd::new(socket, PollFlags::IN)];
        match poll(&mut one, Some(&timespec(left))) {
            Ok(0) if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

//! How a side learns which process of its host the peer is: the peer connects to a socket without a
//! place in the file system, whose name only the two ends of the session know, and the kernel says
//! who did. Descriptors travel there.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};
use rustix::process::{geteuid, getpid};
use tcpx_lanes::shared_words::SharedWords;
use tcpx_lanes::socket::{peer_process, timespec};
use tcpx_memory::Gpu;

use super::super::TcpOptions;
use super::exposed::{MOST_PARTS, PROOF_BYTES, Table};
use super::gpu_memory::{GpuMemory, Message};
use super::peer_memory::{PeerMemory, Process};
use super::{Local, LocalPath, LocalSizes};
use crate::error::NetworkError;
use crate::network::{Exchange, Setup, Side};

/// The peer connects as soon as it knows that this side listens, which it does.
const PROOF_LIMIT: Duration = Duration::from_secs(1);

/// A peer that seems to be on this host may come through it.
#[derive(Debug)]
pub(in crate::tcp) struct Door {
    listener: OwnedFd,
    table: Arc<Table>,
    sizes: LocalSizes,
}

/// Who came through a door.
struct Came {
    socket: OwnedFd,
    memory: PeerMemory,
    /// Why its process's memory cannot be read.
    refused: Option<io::Error>,
    has_gpus: bool,
    is_own: bool,
}

/// What a side reads of the other: bits of one byte.
const READS_HOST: u8 = 1;
const READS_GPUS: u8 = 2;

/// What a side's table begins with, and the name of its socket.
fn proof(setup: &Setup<'_>, side: Side) -> ([u8; PROOF_BYTES], [u8; 32]) {
    let name: [&[u8]; 2] = match side {
        Side::Client => [b"client's table", b"client's door"],
        Side::Server => [b"server's table", b"server's door"],
    };
    let [table, door] = name.map(|name| setup.session.key.shared_value(name));
    (table, door)
}

fn address(door: [u8; 32]) -> io::Result<SocketAddrUnix> {
    let (name, _) = door.split_at(16);
    let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!("tcpx-{name}");
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

fn socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

fn other(side: Side) -> Side {
    match side {
        Side::Client => Side::Server,
        Side::Server => Side::Client,
    }
}

fn gpus(setup: &Setup<'_>) -> Vec<Gpu> {
    let gpus = setup.workers.iter().filter_map(|worker| worker.gpu());
    gpus.cloned().collect()
}

impl Door {
    /// A door for a peer whose address is one of this host's.
    ///
    /// # Errors
    /// Why there is none, where somebody may wonder.
    pub(in crate::tcp) fn open(
        options: &TcpOptions,
        setup: &Setup<'_>,
    ) -> Result<Self, Option<String>> {
        let (own, peer) = (
            setup.local.ip().to_canonical(),
            setup.peer.ip().to_canonical(),
        );
        let is_near = own == peer || own.is_loopback() && peer.is_loopback();
        match options.local {
            _ if !is_near => return Err(None),
            Local::Off => return Err(None),
            Local::Auto if setup.encrypt => return Err(Some("payload is encrypted".to_owned())),
            Local::Auto | Local::On => {}
        }
        let (proof, door) = proof(setup, setup.side);
        let open = || {
            let listener = socket()?;
            bind(&listener, &address(door)?)?;
            listen(&listener, 1)?;
            let mut sizes = options.local_sizes;
            sizes.parts = sizes.parts.clamp(1, MOST_PARTS);
            let table = Table::new(&proof, options.window.max(1), &sizes)?;
            io::Result::Ok(Self {
                listener,
                table,
                sizes,
            })
        };
        open().map_err(|error| Some(error.to_string()))
    }

    /// One round with a peer that has a door too.
    pub(in crate::tcp) fn prove(
        self,
        setup: &Setup<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<LocalPath, NetworkError> {
        // Kept until the peer has come, which reads who this is.
        let said = self.send_proof(setup);
        let came = said.and_then(|said| Ok((said, self.accept_proof(setup)?)));
        let reads = match &came {
            Ok((_, came)) => {
                let both = came.has_gpus && !setup.workers.is_empty();
                let bits = [(came.refused.is_none(), READS_HOST), (both, READS_GPUS)];
                let reads = bits.into_iter().filter(|(reads, _)| *reads);
                reads.fold(0, |all, (_, bit)| all | bit)
            }
            Err(_) => 0,
        };
        let [theirs] = exchange.exchange(&[reads], &mut ())?[..] else {
            return Ok(LocalPath::default());
        };
        let mut path = LocalPath::default();
        path.sizes = self.sizes;
        match came {
            Err(error) => path.refused(setup, &error),
            Ok((said, came)) => {
                if let Some(error) = &came.refused {
                    path.refused(setup, error);
                }
                path.exposes_host = theirs & READS_HOST != 0;
                path.reads_host = reads & READS_HOST != 0;
                // Each side has what the other says that it has.
                if reads & theirs & READS_GPUS != 0 {
                    let sockets = [said, came.socket];
                    match GpuMemory::start(sockets, gpus(setup), came.is_own, self.sizes) {
                        Ok(memory) => path.gpus = Some(memory),
                        Err(error) => tracing::warn!(%error, "GPU memory goes over TCP"),
                    }
                }
                path.table = Some(self.table);
                path.peer = Some(came.memory);
            }
        }
        Ok(path)
    }

    /// Goes through the peer's door and says where this side's table is.
    fn send_proof(&self, setup: &Setup<'_>) -> io::Result<OwnedFd> {
        let (_, door) = proof(setup, other(setup.side));
        let stream = socket()?;
        connect(&stream, &address(door)?)?;
        let message = Message::Table {
            address: self.table.address(),
            has_gpus: !setup.workers.is_empty(),
            windows: self.table.windows,
        };
        match message.send(&stream, Some(self.table.as_fd()))? {
            true => Ok(stream),
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Sees who comes through this side's door.
    fn accept_proof(&self, setup: &Setup<'_>) -> io::Result<Came> {
        let until = setup.deadline.min(Instant::now() + PROOF_LIMIT);
        wait(&self.listener, until)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = accept_with(&self.listener, flags)?;
        let (process, user) = peer_process(&socket)?;
        if user != geteuid() {
            return Err(io::Error::other("it is another user's"));
        }
        wait(&socket, until)?;
        let Some((said, Some(table))) = Message::receive(&socket)? else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let Message::Table {
            address,
            has_gpus,
            windows,
        } = said
        else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let (proof, _) = proof(setup, other(setup.side));
        let is_own = process == Some(getpid());
        let proven = match process {
            Some(process) => Process::prove(process, address, proof),
            None => Err(io::Error::other("it is in another process namespace")),
        };
        let (process, refused) = match proven {
            Ok(process) => (Some(process), None),
            Err(error) => (None, Some(error)),
        };
        let memory = PeerMemory {
            table: Table::of_peer(SharedWords::open(table)?, windows),
            process,
            slice: self.sizes.slice,
        };
        Ok(Came {
            socket,
            memory,
            refused,
            has_gpus,
            is_own,
        })
    }
}

fn wait(socket: &impl AsFd, until: Instant) -> io::Result<()> {
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

//! Options that every TCP socket of ours gets, and how it begins to connect.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::process::{Pid, Uid};
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};

use crate::congestion::{self, Congestion};
use crate::dial::Way;
use crate::error::SocketError;
use crate::interfaces::{InterfaceKind, interfaces};

/// How to dial, whatever the way.
#[derive(Debug, Clone)]
pub struct DialOptions {
    /// When connecting and authenticating must have ended.
    pub deadline: Instant,
    /// Congestion control of the socket.
    pub congestion: Congestion,
}

impl DialOptions {
    /// With automatic congestion control.
    pub const fn until(deadline: Instant) -> Self {
        Self {
            deadline,
            congestion: Congestion::Automatic,
        }
    }
}

/// Unacknowledged data makes the kernel give a control connection up after this long.
const USER_TIMEOUT: Duration = Duration::from_secs(10);

/// A lane, or a comm's connection, that has been silent for this long is asked whether its other
/// end is there, so often.
const IDLE: Duration = Duration::from_secs(10);
const PROBE: Duration = Duration::from_secs(5);
const PROBES: u32 = 4;

/// Connections that may wait for the acceptor: as many as the system allows (`net.core.somaxconn`).
/// Where they are too many the kernel drops one's first packet, which its client sends again after
/// a second.
const BACKLOG: i32 = i32::MAX;

fn is_every_v6(ip: IpAddr) -> bool {
    ip == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
}

/// What to listen on for every address of this host: `::`, which takes IPv4 too, or `0.0.0.0` on a
/// host without IPv6.
pub fn every_address() -> IpAddr {
    let v6 = Ipv6Addr::UNSPECIFIED;
    let bound = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP)).and_then(|socket| {
        socket.set_only_v6(false)?;
        socket.bind(&SocketAddr::from((v6, 0)).into())
    });
    match bound {
        Ok(()) => v6.into(),
        Err(error) => {
            tracing::debug!(%error, "no IPv6 here");
            Ipv4Addr::UNSPECIFIED.into()
        }
    }
}

/// An IPv4 address that a socket of both kinds wraps, as itself.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, address.port()),
        // With the link that an address of one link belongs to.
        IpAddr::V6(_) => address,
    }
}

/// A listening socket, non-blocking.
pub fn listen(address: SocketAddr, congestion: &Congestion) -> Result<TcpListener, SocketError> {
    let fail = |operation, cause: io::Error| io_error(operation, address, cause);
    let socket = new_socket(address, "making the listening socket")?;
    congestion.apply_to_listen(&socket, address)?;
    log_congestion(&socket, address);
    socket
        .set_reuse_address(true)
        .map_err(|cause| fail("SO_REUSEADDR", cause))?;
    if is_every_v6(address.ip()) {
        // Whatever the system's default is (net.ipv6.bindv6only).
        socket
            .set_only_v6(false)
            .map_err(|cause| fail("IPV6_V6ONLY", cause))?;
    }
    socket
        .bind(&address.into())
        .map_err(|cause| fail("binding", cause))?;
    socket
        .listen(BACKLOG)
        .map_err(|cause| fail("listening", cause))?;
    Ok(socket.into())
}

/// Begins to connect; [`is_connected`] says what came of it, once the stream, which is
/// non-blocking, is writable.
pub fn begin_connect(way: &Way, congestion: &Congestion) -> Result<TcpStream, SocketError> {
    let peer = way.peer;
    let started = Instant::now();
    let fail = |operation, cause: io::Error| io_error(operation, peer, cause);
    let socket = new_socket(peer, "making a socket")?;
    congestion.apply_to_dial(&socket, peer)?;
    log_congestion(&socket, peer);
    if let Some(interface) = &way.interface {
        match socket.bind_device(Some(interface.as_bytes())) {
            // The source address names the interface too, as far as the routes go.
            Err(cause)
                if way.local.is_some() && cause.kind() == io::ErrorKind::PermissionDenied =>
            {
                tracing::debug!(%peer, %interface, %cause, "bound by address alone");
            }
            bound => bound.map_err(|cause| fail("binding the socket to its interface", cause))?,
        }
    }
    if let Some(source) = way.local {
        socket
            .bind(&SocketAddr::new(source, 0).into())
            .map_err(|cause| connect_error(peer, started.elapsed(), cause))?;
    }
    match socket.connect(&peer.into()) {
        Err(cause) if cause.raw_os_error() != Some(libc::EINPROGRESS) => {
            Err(connect_error(peer, started.elapsed(), cause))
        }
        _ => Ok(socket.into()),
    }
}

/// Whether a stream that was to connect is connected by now.
pub fn is_connected(
    stream: &TcpStream,
    peer: SocketAddr,
    started: Instant,
) -> Result<bool, SocketError> {
    let error = stream.take_error();
    match error.map_err(|cause| io_error("SO_ERROR", peer, cause))? {
        Some(cause) => Err(connect_error(peer, started.elapsed(), cause)),
        None => Ok(stream.peer_addr().is_ok()),
    }
}

/// Options for a stream that was accepted.
pub fn prepare_accepted(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)
}

/// Options for a lane, or a comm's connection. Its timeout is off: that also counts while a living
/// peer has no room, and how long a receiver may rest is for the operation's deadline to say, or a
/// program at work. Of the engine's peers the control connection says whether they live.
///
/// # Errors
/// The connection was reset.
pub fn prepare_lane(stream: &TcpStream) -> io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_user_timeout(None)?;
    // The other end's kernel answers for a living peer, so this only finds what is really gone: a
    // host that vanished without a word.
    socket.set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(IDLE)
            .with_interval(PROBE)
            .with_retries(PROBES),
    )
}

/// Bytes that a lane's socket buffers hold where both ends are on one host.
const NEAR_BUFFER: u32 = 512 << 10;

/// Bounds what the kernel buffers for a lane, in bytes each way; with 0 only inside one host.
pub fn limit_buffers(stream: &TcpStream, bytes: u32) {
    let bytes = match bytes {
        0 if is_near(stream) => NEAR_BUFFER,
        0 => return,
        bytes => bytes,
    };
    let socket = socket2::SockRef::from(stream);
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    // Where the system allows less, its own choice is no worse than ours.
    drop(socket.set_send_buffer_size(bytes));
    drop(socket.set_recv_buffer_size(bytes));
}

/// Whether both ends are on this host, as far as their addresses tell.
pub fn is_near(socket: &impl AsFd) -> bool {
    let socket = socket2::SockRef::from(socket);
    let ip = |address: io::Result<socket2::SockAddr>| address.ok()?.as_socket().map(|one| one.ip());
    let (local, peer) = (ip(socket.local_addr()), ip(socket.peer_addr()));
    peer.is_some_and(|peer| local == Some(peer) || peer.to_canonical().is_loopback())
}

/// Whether the other end may be a process of this host: what lies in pages that the kernel passes
/// on by reference is then read when that process likes. Only where packets leave by a physical
/// card is it another host for sure: a virtual one may lead to a container.
pub fn may_be_near(socket: &impl AsFd) -> bool {
    if is_near(socket) {
        return true;
    }
    let socket = socket2::SockRef::from(socket);
    let local = socket.local_addr().ok().and_then(|one| one.as_socket());
    let Some(local) = local.map(|local| local.ip().to_canonical()) else {
        return true;
    };
    let all = interfaces().unwrap_or_default();
    let its = all.iter().find(|one| one.addresses.contains(&local));
    its.is_none_or(|one| one.kind != InterfaceKind::Physical)
}

/// Resets a stream: the kernel drops at once what it still has of it, and nobody sends or receives
/// on it any more.
pub fn abort(socket: std::os::fd::BorrowedFd<'_>) {
    // connect(2): an address of no family dissolves the association. Not by closing: others may
    // hold the socket for a while, and the kernel would go on sending meanwhile.
    let aborted = rustix::net::connect_unspec(socket);
    if let Err(error) = aborted {
        tracing::debug!(%error, "a lane that ends is reset when it is closed");
        let reset = socket2::SockRef::from(&socket).set_linger(Some(Duration::ZERO));
        if let Err(error) = reset {
            tracing::debug!(%error, "a lane that ends is not reset");
        }
    }
}

/// A duration as system calls take it.
pub fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

fn new_socket(address: SocketAddr, operation: &'static str) -> Result<Socket, SocketError> {
    let make = || {
        let socket = Socket::new(
            Domain::for_address(address),
            Type::STREAM.nonblocking(),
            Some(Protocol::TCP),
        )?;
        socket.set_tcp_nodelay(true)?;
        socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
        Ok(socket)
    };
    make().map_err(|cause| io_error(operation, address, cause))
}

fn log_congestion(socket: &Socket, address: SocketAddr) {
    if let Ok(name) = congestion::read(socket) {
        tracing::debug!(%address, congestion_control = name, "socket made");
    }
}

/// Sets an option whose value is an int.
pub fn set_option(
    socket: &impl AsFd,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the option's value is an int, and `value` is one that lives for the call.
    let answer = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if answer == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The process at the other end of a Unix socket as it is called here, `None` for one outside of
/// this process's namespace, and the user that it had: unix(7), `SO_PEERCRED`.
///
/// # Errors
/// The socket is of another kind.
pub fn peer_process(socket: &impl AsFd) -> io::Result<(Option<Pid>, Uid)> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = size_of_val(&peer) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `peer`, which has that many and is all
    // integers. The binding of `rustix` takes the process for a number above zero, which it is not
    // always.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    match answer {
        0 => Ok((Pid::from_raw(peer.pid), Uid::from_raw(peer.uid))),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The congestion control that a stream uses, as the kernel names it.
pub fn congestion_control(stream: &impl AsFd) -> Option<String> {
    congestion::read(&socket2::SockRef::from(stream)).ok()
}

fn connect_error(peer: SocketAddr, waited: Duration, cause: io::Error) -> SocketError {
    match cause.kind() {
        io::ErrorKind::ConnectionRefused => SocketError::Refused { peer },
        io::ErrorKind::TimedOut => SocketError::ConnectTimedOut { peer, waited },
        io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::NetworkDown
        | io::ErrorKind::AddrNotAvailable => SocketError::Unreachable {
            peer,
            cause: cause.into(),
        },
        _ => io_error("connecting", peer, cause),
    }
}

fn io_error(operation: &'static str, address: SocketAddr, cause: io::Error) -> SocketError {
    let hint = match (cause.kind(), cause.raw_os_error()) {
        (io::ErrorKind::AddrInUse, _) => {
            "; another program listens there: stop it or choose another port"
        }
        (io::ErrorKind::AddrNotAvailable, _) => {
            "; this host has no such address: use one of its own, or 0.0.0.0"
        }
        (io::ErrorKind::PermissionDenied, _) => {
            "; the system forbids it: use a port above 1023, or give the program the right"
        }
        (_, Some(libc::EMFILE | libc::ENFILE)) => {
            "; no file descriptor is left: raise the limit (ulimit -n)"
        }
        _ => "",
    };
    SocketError::Io {
        operation,
        address: address.to_string(),
        cause: cause.into(),
        hint,
    }
}

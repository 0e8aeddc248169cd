//! Bare streams that are set up as the embedded network's lanes are, for measuring beside it.
//!
//! Nothing here authenticates anybody: such a stream carries bytes of no meaning.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::PollFlags;

use tcpx_lanes::congestion::Congestion;
use tcpx_lanes::socket;

use crate::error::{NetworkError, SocketError};

/// Listens at `address`; the socket is non-blocking.
///
/// # Errors
/// [`NetworkError::Socket`]: the system's refusal.
pub fn listen(address: SocketAddr, congestion: &Congestion) -> Result<TcpListener, NetworkError> {
    Ok(socket::listen(address, congestion)?)
}

/// Takes the next stream, non-blocking.
///
/// # Errors
/// [`NetworkError::TimedOut`] when nobody came, [`NetworkError::Socket`].
pub fn accept(
    listener: &TcpListener,
    deadline: Instant,
) -> Result<(TcpStream, SocketAddr), NetworkError> {
    let fail = |operation| {
        move |cause: std::io::Error| SocketError::Io {
            operation,
            address: listener
                .local_addr()
                .map_or_else(|error| error.to_string(), |address| address.to_string()),
            cause: cause.into(),
            hint: "",
        }
    };
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                socket::prepare_accepted(&stream).map_err(fail("preparing a stream"))?;
                return Ok((stream, peer));
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(fail("accepting")(error).into()),
        }
        if !socket::wait(listener, PollFlags::IN, deadline).map_err(fail("poll"))? {
            let peer = listener.local_addr().map_err(fail("getsockname"))?;
            return Err(NetworkError::TimedOut {
                peer,
                operation: "waiting for a bare stream",
            });
        }
    }
}

/// Connects before the deadline; the stream is non-blocking.
///
/// # Errors
/// As for a lane: refused, unreachable, timed out.
pub fn connect(
    peer: SocketAddr,
    congestion: &Congestion,
    deadline: Instant,
) -> Result<TcpStream, NetworkError> {
    Ok(socket::connect(peer, congestion, deadline)?)
}

/// The congestion control of a stream or a listener, read back from the kernel.
pub fn congestion_control(socket: &impl AsFd) -> Option<String> {
    socket::congestion_control(socket)
}

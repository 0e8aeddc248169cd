//! Messages of a handshake on a socket: each is sent whole, and nothing is read that lies behind
//! the handshake.

use std::io;
use std::net::TcpStream;

use rustix::net::{RecvFlags, SendFlags, recv, send};

/// Most bytes of a handshake that are looked at in one call.
pub const PEEK_BYTES: usize = 512;

/// Fresh random bytes for a handshake.
///
/// # Errors
/// The system's random source does not work.
pub fn entropy<const BYTES: usize>() -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// Sends a whole handshake message; a fresh socket has room for it.
///
/// # Errors
/// The connection is broken, or has no room.
pub fn send_message(stream: &TcpStream, message: &[u8]) -> io::Result<()> {
    let sent = send(stream, message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    if sent == message.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

/// Shows what has arrived to `read`, and takes from the socket what `read` used. What follows the
/// handshake stays in the socket. `None`: the peer has closed.
///
/// # Errors
/// The connection is broken; [`io::ErrorKind::WouldBlock`]: nothing has arrived.
pub fn receive_message<T>(
    stream: &TcpStream,
    read: impl FnOnce(&mut &[u8]) -> T,
) -> io::Result<Option<T>> {
    let mut bytes = [0; PEEK_BYTES];
    let (_, arrived) = recv(stream, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
    if arrived == 0 {
        return Ok(None);
    }
    let mut input = bytes.get(..arrived).unwrap_or_default();
    let outcome = read(&mut input);
    let used = arrived - input.len();
    if used > 0 {
        let mut used_bytes = [0; PEEK_BYTES];
        // These bytes were seen a moment ago and nobody else reads this socket.
        let (_, taken) = recv(stream, &mut used_bytes[..used], RecvFlags::DONTWAIT)?;
        if taken != used {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(Some(outcome))
}

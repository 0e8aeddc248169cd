//! Through which interface an accepted connection came in, which its addresses do not tell: cards
//! of one network answer for each other unless the host was told otherwise (`arp_ignore`).

use std::io;
use std::net::{IpAddr, TcpStream};
use std::os::fd::AsRawFd;

use crate::control_messages::ControlMessages;
use crate::socket::set_option;

/// `IPV6_2292PKTOPTIONS` of linux/in6.h; libc has no name for it.
const PACKET_OPTIONS_V6: libc::c_int = 6;
/// `IP_PKTOPTIONS` of linux/in.h.
const PACKET_OPTIONS_V4: libc::c_int = 9;

/// The options of a family: level, the one that asks for packet information, the one that reads it,
/// and the kind of the answer.
type Options = (libc::c_int, libc::c_int, libc::c_int, libc::c_int);

const V4: Options = (
    libc::IPPROTO_IP,
    libc::IP_PKTINFO,
    PACKET_OPTIONS_V4,
    libc::IP_PKTINFO,
);
const V6: Options = (
    libc::IPPROTO_IPV6,
    libc::IPV6_RECVPKTINFO,
    PACKET_OPTIONS_V6,
    libc::IPV6_PKTINFO,
);

/// The name of the interface that an accepted connection's handshake came in through; `None` where
/// the system does not say.
pub fn interface(stream: &TcpStream) -> Option<String> {
    let index = index(stream).inspect_err(|error| {
        tracing::debug!(%error, "the system does not say where a lane came in");
    });
    let index = index.ok().flatten()?;
    rustix::net::netdevice::index_to_name(stream, index).ok()
}

fn index(stream: &TcpStream) -> io::Result<Option<u32>> {
    let is_v4 = matches!(stream.local_addr()?.ip().to_canonical(), IpAddr::V4(_));
    let (level, ask, answers, kind) = if is_v4 { V4 } else { V6 };
    set_option(stream, level, ask, 1)?;
    let read = read(stream, level, answers);
    set_option(stream, level, ask, 0)?;
    let (bytes, filled) = read?;
    for found in ControlMessages::new(&bytes.0[..filled]) {
        let bad = |error| io::Error::new(io::ErrorKind::InvalidData, format!("{error}"));
        let found = found.map_err(bad)?;
        if (found.level, found.kind) != (level, kind) {
            continue;
        }
        // in_pktinfo begins with the index, in6_pktinfo ends with it.
        let field = if is_v4 {
            found.payload.first_chunk()
        } else {
            found.payload.get(16..).and_then(<[u8]>::first_chunk)
        };
        let index = field.map(|field| u32::from_ne_bytes(*field));
        return Ok(index.filter(|index| *index > 0));
    }
    Ok(None)
}

/// Room for some control messages.
#[repr(C, align(8))]
struct Room([u8; 256]);

fn read(stream: &TcpStream, level: libc::c_int, option: libc::c_int) -> io::Result<(Room, usize)> {
    let mut room = Room([0; 256]);
    let mut filled = room.0.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `filled` bytes to the live buffer, and how many to
    // `filled`.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            level,
            option,
            room.0.as_mut_ptr().cast(),
            &raw mut filled,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let filled = (filled as usize).min(room.0.len());
    Ok((room, filled))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn what_comes_in_through_the_loopback_interface_says_so() {
        let mut seen = 0;
        for (bound, dialled) in [
            ("127.0.0.1:0", "127.0.0.1"),
            ("[::1]:0", "::1"),
            ("[::]:0", "127.0.0.1"),
        ] {
            let Ok(listener) = TcpListener::bind(bound) else {
                // A host without IPv6.
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            let dialled: IpAddr = dialled.parse().unwrap();
            let _client = TcpStream::connect((dialled, port)).unwrap();
            let accepted = listener.accept().unwrap().0;
            assert_eq!(interface(&accepted).as_deref(), Some("lo"), "{bound}");
            seen += 1;
        }
        if seen < 3 {
            let why = "no IPv6 here";
            let _ = writeln!(
                io::stderr(),
                "skipped: what_comes_in_through_the_loopback_interface_says_so: {why}"
            );
        }
    }
}

//! Which congestion control TCP sockets get: set before they connect or listen, and read back.

use std::fmt;
use std::io;
use std::net::{SocketAddr, SocketAddrV6, TcpStream, UdpSocket};
use std::sync::Once;

use socket2::{SockRef, Socket};

use crate::error::SocketError;
use crate::socket::is_near;

/// Instead of a default that paces, best first.
const INSTEAD: [&str; 2] = ["cubic", "reno"];

/// Where the system lists what it has.
const AVAILABLE: &str = "/proc/sys/net/ipv4/tcp_available_congestion_control";

/// Where the system lists what a program without `CAP_NET_ADMIN` may choose.
const ALLOWED: &str = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";

/// Where the system names what a socket gets that asks for nothing.
const USUAL: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// The congestion control of every TCP socket of a connection or a listener.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Congestion {
    /// The system's default, which its administrator chose for its links. Only where both ends are
    /// on this host, `bbr`, which paces such links to a quarter to a half of their speed, gives way
    /// to `cubic`, else, with a warning, to `reno`, whichever the system permits.
    #[default]
    Automatic,
    /// This one, as the system names it, or an error.
    Named(String),
}

impl fmt::Display for Congestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Automatic => "automatic",
            Self::Named(name) => name,
        })
    }
}

impl Congestion {
    /// Gives it to a socket that connects to `peer` next: set later, a default that paces stays in
    /// effect.
    pub fn apply_to_dial(&self, socket: &Socket, peer: SocketAddr) -> Result<(), SocketError> {
        self.apply(socket, || is_own(peer))
    }

    /// Gives it to a socket that listens on `address` next, and to those that it accepts.
    pub fn apply_to_listen(&self, socket: &Socket, address: SocketAddr) -> Result<(), SocketError> {
        self.apply(socket, || address.ip().to_canonical().is_loopback())
    }

    /// Gives it to a stream that was accepted where nobody knew who would come. It may go on being
    /// paced.
    ///
    /// # Errors
    /// What the system says.
    pub fn apply_to_accepted(&self, stream: &TcpStream) -> Result<(), SocketError> {
        self.apply(&SockRef::from(stream), || is_near(stream))
    }

    fn apply(&self, socket: &Socket, is_near: impl FnOnce() -> bool) -> Result<(), SocketError> {
        match self {
            Self::Automatic => {
                let usual = read(socket).unwrap_or_default();
                if paces(&usual) && is_near() {
                    let set = |name: &&str| socket.set_tcp_congestion(name.as_bytes()).is_ok();
                    let got = INSTEAD.into_iter().find(set);
                    warn_once(&usual, got.unwrap_or(&usual));
                }
                Ok(())
            }
            Self::Named(name) => set(socket, name),
        }
    }
}

/// Whether an address is one of this host: the system lets sockets have no others.
fn is_own(address: SocketAddr) -> bool {
    let any_port = match address {
        SocketAddr::V4(address) => SocketAddr::from((*address.ip(), 0)),
        SocketAddr::V6(address) => {
            SocketAddrV6::new(*address.ip(), 0, 0, address.scope_id()).into()
        }
    };
    address.ip().to_canonical().is_loopback() || UdpSocket::bind(any_port).is_ok()
}

/// Whether it goes on pacing what was sent under it.
fn paces(name: &str) -> bool {
    name.starts_with("bbr")
}

/// Says which one sockets get where `cubic` is not permitted.
fn warn_once(usual: &str, got: &str) {
    static SAID: Once = Once::new();
    if got != INSTEAD[0] {
        SAID.call_once(|| tracing::warn!(
            "sockets within this host get {got} in place of its {usual}, as cubic is not permitted: allow it in {ALLOWED}, or \
             name one (TCPX_CONGESTION={usual} keeps the host's)"
        ));
    }
}

fn set(socket: &Socket, name: &str) -> Result<(), SocketError> {
    let refused = |cause: io::Error| SocketError::Congestion {
        name: name.to_owned(),
        remedy: remedy(&cause),
        cause: cause.into(),
    };
    socket
        .set_tcp_congestion(name.as_bytes())
        .map_err(refused)?;
    let got = read(socket).map_err(refused)?;
    if got == name {
        return Ok(());
    }
    let text = format!("the system took it and answers with `{got}`");
    Err(refused(io::Error::other(text)))
}

/// The congestion control that a socket uses, as the kernel names it.
pub fn read(socket: &Socket) -> io::Result<String> {
    let name = socket.tcp_congestion()?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(name.escape_ascii().to_string())
}

/// What a socket gets that asks for nothing; `None` where the system does not say.
pub fn usual() -> Option<String> {
    let text = std::fs::read_to_string(USUAL).ok()?;
    Some(text.trim().to_owned()).filter(|name| !name.is_empty())
}

fn remedy(cause: &io::Error) -> String {
    let (file, advice) = if cause.kind() == io::ErrorKind::PermissionDenied {
        (
            ALLOWED,
            "choose one of these, or give the program CAP_NET_ADMIN",
        )
    } else {
        (AVAILABLE, "choose one of these, or load its kernel module")
    };
    let found = std::fs::read_to_string(file);
    match found {
        Ok(names) => format!("{file} has `{}`: {advice}", names.trim().escape_default()),
        Err(error) => format!("look into {file} ({error})"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::socket;

    fn listen(name: &str) -> Result<String, SocketError> {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = socket::listen(any, &Congestion::Named(name.to_owned()))?;
        Ok(read(&Socket::from(listener)).unwrap())
    }

    #[test]
    fn a_named_control_is_set_and_read_back() {
        let allowed = std::fs::read_to_string(ALLOWED).unwrap();
        for name in allowed.split_whitespace() {
            assert_eq!(listen(name).as_deref(), Ok(name));
        }
    }

    /// The host's choice is for the ways to others. Which it is here does not matter: a socket that
    /// has it is tried.
    #[test]
    fn a_control_that_paces_gives_way_within_the_host_alone() {
        let available = std::fs::read_to_string(AVAILABLE).unwrap();
        let with = |name: &str| {
            let socket = Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket
                .set_tcp_congestion(name.as_bytes())
                .is_ok()
                .then_some(socket)
        };
        let mut pacing = available.split_whitespace().filter(|name| paces(name));
        let Some(pacing) = pacing.find(|name| with(name).is_some()) else {
            // Not eprintln: the harness hides that.
            let _ = writeln!(
                io::stderr(),
                "skipped: a_control_that_paces_gives_way_within_the_host_alone: needs bbr"
            );
            return;
        };
        let control = |act: &dyn Fn(&Socket) -> Result<(), SocketError>| {
            let socket = with(pacing).unwrap();
            act(&socket).unwrap();
            read(&socket).unwrap()
        };
        let automatic = Congestion::Automatic;
        let [elsewhere, loopback, every] = ["192.0.2.1:1", "127.0.0.1:1", "0.0.0.0:0"]
            .map(|text| text.parse::<SocketAddr>().unwrap());
        assert_eq!(
            control(&|socket| automatic.apply_to_dial(socket, elsewhere)),
            pacing
        );
        assert_ne!(
            control(&|socket| automatic.apply_to_dial(socket, loopback)),
            pacing
        );
        assert_eq!(
            control(&|socket| automatic.apply_to_listen(socket, every)),
            pacing
        );
        assert_ne!(
            control(&|socket| automatic.apply_to_listen(socket, loopback)),
            pacing
        );
        let named = Congestion::Named(pacing.to_owned());
        assert_eq!(
            control(&|socket| named.apply_to_dial(socket, loopback)),
            pacing
        );
        let listener = with(pacing).unwrap();
        listener.bind(&every.into()).unwrap();
        listener.listen(1).unwrap();
        let address = listener.local_addr().unwrap().as_socket().unwrap();
        let _client = TcpStream::connect((loopback.ip(), address.port())).unwrap();
        let accepted: TcpStream = listener.accept().unwrap().0.into();
        automatic.apply_to_accepted(&accepted).unwrap();
        assert_ne!(read(&SockRef::from(&accepted)).unwrap(), pacing);
    }

    #[test]
    fn an_unknown_control_is_an_error_that_names_those_there_are() {
        for name in ["no_such", "a_name_longer_than_the_kernel_takes", ""] {
            let error = listen(name).unwrap_err();
            assert!(matches!(error, SocketError::Congestion { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(&format!("`{name}`")), "{text}");
            assert!(text.contains("congestion_control has `"), "{text}");
        }
    }

    #[test]
    fn what_is_not_permitted_points_to_what_is() {
        let text = remedy(&io::ErrorKind::PermissionDenied.into());
        assert!(text.starts_with(ALLOWED), "{text}");
        let text = remedy(&io::ErrorKind::NotFound.into());
        assert!(text.starts_with(AVAILABLE), "{text}");
    }
}

//! Which way a lane takes.

use std::net::{IpAddr, SocketAddr};

/// From where to where a lane is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Route {
    /// The address it leaves from; `None`: as the routes say.
    pub(super) local: Option<IpAddr>,
    /// The interface it leaves through; `None`: as the routes say.
    pub(super) interface: Option<String>,
    /// The peer's listening address.
    pub(super) peer: SocketAddr,
}

//! A generic netlink socket of this host.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

use tcpx_lanes::socket::set_option;

use super::NetlinkSocket;

/// Restarting a queue of a busy card takes a while; an answer that takes longer than this never comes.
const PATIENCE: Duration = Duration::from_secs(20);
const SOL_NETLINK: i32 = 270;
/// `NETLINK_EXT_ACK`: errors come with words.
const EXTENDED: i32 = 11;
/// `NETLINK_CAP_ACK`: errors do not repeat the request.
const CAPPED: i32 = 10;
/// `NETLINK_ADD_MEMBERSHIP`.
const JOIN: i32 = 1;

#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    pub(super) fn open() -> io::Result<Self> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::GENERIC),
        )?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        for option in [EXTENDED, CAPPED] {
            set_option(&socket, SOL_NETLINK, option, 1)?;
        }
        Ok(Self(socket))
    }
}

impl NetlinkSocket for Socket {
    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let sent = send(&self.0, message, SendFlags::empty())?;
        if sent == message.len() {
            return Ok(());
        }
        Err(io::Error::other("the kernel took a part of the request"))
    }

    fn join(&mut self, group: u32) -> io::Result<()> {
        set_option(&self.0, SOL_NETLINK, JOIN, group.cast_signed())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            // With this flag the answer is the message's length, also when it did not fit.
            match recv(&self.0, &mut *buffer, RecvFlags::TRUNC) {
                Ok((_, length)) if length <= buffer.len() => return Ok(length),
                Ok(_) => return Err(io::ErrorKind::InvalidData.into()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

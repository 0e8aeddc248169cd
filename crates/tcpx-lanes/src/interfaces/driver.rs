//! The driver that an interface names, where sysfs does not: ethtool's oldest question.

use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// `ETHTOOL_GDRVINFO` of linux/ethtool.h.
const GET_DRIVER_INFO: u32 = 3;
/// `SIOCETHTOOL` of linux/sockios.h.
const ETHTOOL: libc::Ioctl = 0x8946;
/// `struct ethtool_drvinfo`: the command, then the driver's name in 32 bytes, and more.
const INFO_BYTES: usize = 196;

/// The name of the interface's driver, such as `veth`; `None` when the system does not say.
pub(super) fn driver_of(interface: &str) -> Option<String> {
    let socket = socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .ok()?;
    let mut info = [0u8; INFO_BYTES];
    info[..4].copy_from_slice(&GET_DRIVER_INFO.to_ne_bytes());
    // SAFETY: ifreq is plain data for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero: it ends the name.
    let most = request.ifr_name.len() - 1;
    if interface.len() > most {
        return None;
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        // Signed on some processors, and not on others.
        *place = libc::c_char::from_ne_bytes([byte]);
    }
    request.ifr_ifru.ifru_data = info.as_mut_ptr().cast();
    // SAFETY: the request names an interface and points at a driver information block that lives
    // for the call; the kernel writes no more than that block. There is no safe binding.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), ETHTOOL, &raw mut request) };
    if done != 0 {
        return None;
    }
    let name = info[4..36].split(|byte| *byte == 0).next()?;
    (!name.is_empty()).then(|| name.escape_ascii().to_string())
}

#[cfg(test)]
mod tests {
    use super::driver_of;

    #[test]
    fn what_is_no_interface_has_no_driver() {
        assert_eq!(driver_of("none-such"), None);
        assert_eq!(driver_of(&"x".repeat(40)), None);
    }
}

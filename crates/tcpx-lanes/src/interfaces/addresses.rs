//! The addresses of the interfaces, through getifaddrs(3).

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// One address of one interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The interface's name.
    pub interface: String,
    /// The address.
    pub address: IpAddr,
    /// Leading bits that all addresses of its network share.
    pub prefix: u8,
}

/// A list from getifaddrs, freed on drop.
struct List(*mut libc::ifaddrs);

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the pointer came from getifaddrs and is freed once.
        unsafe { libc::freeifaddrs(self.0) };
    }
}

/// The IPv4 and IPv6 addresses of this host.
///
/// # Errors
/// What getifaddrs(3) says.
pub fn addresses() -> io::Result<Vec<InterfaceAddress>> {
    let mut head = std::ptr::null_mut();
    // SAFETY: `head` is a valid place for the result.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let list = List(head);
    let mut found = Vec::new();
    let mut next = list.0;
    // SAFETY: `next` is null or an element of the list, which lives until `list` is dropped.
    while let Some(element) = unsafe { next.as_ref() } {
        next = element.ifa_next;
        // SAFETY: the name is a C string of the list; the address is null or valid for its family.
        let entry = unsafe {
            (!element.ifa_name.is_null())
                .then(|| CStr::from_ptr(element.ifa_name))
                .zip(address(element.ifa_addr))
                .map(|entry| (entry, address(element.ifa_netmask)))
        };
        if let Some(((name, address), mask)) = entry
            && let Ok(name) = name.to_str()
        {
            found.push(InterfaceAddress {
                interface: device(name).to_owned(),
                address,
                prefix: prefix(address, mask),
            });
        }
    }
    Ok(found)
}

/// The interface behind a name that may be the label of an address, such as `eth0:1`: no interface
/// has a colon in its name.
fn device(name: &str) -> &str {
    name.split_once(':').map_or(name, |(device, _)| device)
}

/// The bits of a mask; without one of the same family the address is a network of its own.
fn prefix(address: IpAddr, mask: Option<IpAddr>) -> u8 {
    let bits = match (address, mask) {
        (IpAddr::V4(_), Some(IpAddr::V4(mask))) => mask.to_bits().leading_ones(),
        (IpAddr::V6(_), Some(IpAddr::V6(mask))) => mask.to_bits().leading_ones(),
        (IpAddr::V4(_), _) => 32,
        (IpAddr::V6(_), _) => 128,
    };
    u8::try_from(bits).unwrap_or(128)
}

/// The IP address in a socket address.
///
/// # Safety
/// `pointer` is null or points at a socket address as long as its family demands.
unsafe fn address(pointer: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: as the caller promises.
    let family = unsafe { pointer.as_ref() }?.sa_family;
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: the family says that it is a sockaddr_in; it may be unaligned for one.
            let address = unsafe { pointer.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(address.sin_addr.s_addr.to_ne_bytes()).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is a sockaddr_in6; it may be unaligned for one.
            let address = unsafe { pointer.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::device;

    #[test]
    fn a_labelled_address_belongs_to_its_interface() {
        assert_eq!(["eth0:1", "eth0:", "eth0"].map(device), ["eth0"; 3]);
    }
}

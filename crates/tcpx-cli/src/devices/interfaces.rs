//! Network interfaces: names and properties from sysfs, addresses from the C library.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::ptr;

/// An interface as the kernel describes it; what it does not say is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) addresses: Vec<IpAddr>,
    /// `up`, `down`, or `unknown` for interfaces without a carrier of their own.
    pub(crate) state: Option<String>,
    /// Speed in 10^6 bits a second.
    pub(crate) megabits: Option<u64>,
    pub(crate) mtu: Option<u32>,
    pub(crate) numa: Option<u32>,
}

/// Every interface of this network namespace, by name.
pub(crate) fn list() -> io::Result<Vec<Interface>> {
    let addresses = addresses()?;
    let mut found: BTreeMap<String, Interface> = BTreeMap::new();
    for (name, address) in addresses {
        let interface = found.entry(name.clone()).or_insert_with(|| Interface {
            name,
            ..Interface::default()
        });
        interface.addresses.extend(address);
    }
    for interface in found.values_mut() {
        describe(
            interface,
            &Path::new("/sys/class/net").join(&interface.name),
        );
    }
    Ok(found.into_values().collect())
}

/// Fills in what the interface's sysfs directory says.
fn describe(interface: &mut Interface, directory: &Path) {
    let read = |file: &str| {
        let text = std::fs::read_to_string(directory.join(file)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    interface.state = read("operstate");
    // A link without a speed says -1, or fails to answer; virtual ones may say 2^32-1.
    interface.megabits = read("speed")
        .and_then(|text| text.parse().ok())
        .filter(|&speed| speed > 0 && speed < u64::from(u32::MAX));
    interface.mtu = read("mtu").and_then(|text| text.parse().ok());
    interface.numa = read("device/numa_node").and_then(|text| text.parse().ok());
}

/// Name and address of every entry; entries of other families come without an address.
fn addresses() -> io::Result<Vec<(String, Option<IpAddr>)>> {
    let mut head = ptr::null_mut();
    // SAFETY: the C library writes the list's head through the pointer, which is ours.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut at = head;
    while !at.is_null() {
        // SAFETY: `at` is an element of the list, which lives until it is freed below.
        let entry = unsafe { &*at };
        // SAFETY: a name in the list is a C string that lives as long as the list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }
            .to_string_lossy()
            .into_owned();
        // SAFETY: an address in the list is null or points to a socket address of its family.
        found.push((name, unsafe { address(entry.ifa_addr) }));
        at = entry.ifa_next;
    }
    // SAFETY: the list came from getifaddrs, is freed once, and nothing points into it any more.
    unsafe { libc::freeifaddrs(head) };
    Ok(found)
}

/// The IP address in a socket address.
///
/// # Safety
/// `address` is null or points to a socket address that is as long as its family says.
unsafe fn address(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, and every socket address begins with its family.
    let family = unsafe { (*address).sa_family };
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: the family says that it is an IPv4 socket address.
            let address = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is an IPv6 socket address.
            let address = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_listed_once_with_its_address() {
        let found = list().expect("a list");
        let loopback: Vec<_> = found
            .iter()
            .filter(|interface| interface.name == "lo")
            .collect();
        assert_eq!(loopback.len(), 1, "{found:?}");
        assert!(
            loopback[0]
                .addresses
                .contains(&IpAddr::V4(Ipv4Addr::LOCALHOST)),
            "{found:?}"
        );
        assert_eq!(loopback[0].megabits, None);
    }

    #[test]
    fn what_sysfs_does_not_say_stays_unknown() {
        let directory = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| {
            std::fs::write(directory.path().join(name), text).expect("written")
        };
        write("speed", "-1\n");
        write("mtu", "garbage\n");
        write("operstate", "up\n");
        let mut interface = Interface::default();
        describe(&mut interface, directory.path());
        let expected = Interface {
            state: Some("up".into()),
            ..Interface::default()
        };
        assert_eq!(interface, expected);
    }

    #[test]
    fn speed_mtu_and_node_are_read() {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(directory.path().join("device")).expect("created");
        for (name, text) in [
            ("speed", "200000\n"),
            ("mtu", "8896\n"),
            ("device/numa_node", "1\n"),
        ] {
            std::fs::write(directory.path().join(name), text).expect("written");
        }
        let mut interface = Interface::default();
        describe(&mut interface, directory.path());
        assert_eq!(
            (interface.megabits, interface.mtu, interface.numa),
            (Some(200_000), Some(8896), Some(1))
        );
    }
}

//! The kernel of this host.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use super::netlink_socket::Socket;
use super::{Kernel, NetlinkSocket, Place, RuleTable, ethtool};
use crate::rule::Rule;

/// The kernel of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct Linux;

impl Kernel for Linux {
    fn netlink(&self) -> io::Result<Box<dyn NetlinkSocket>> {
        Ok(Box::new(Socket::open()?))
    }

    fn interface_index(&self, interface: &str) -> io::Result<u32> {
        let name = CString::new(interface)?;
        // SAFETY: the name is a C string that lives through the call.
        match unsafe { libc::if_nametoindex(name.as_ptr()) } {
            0 => Err(io::Error::last_os_error()),
            index => Ok(index),
        }
    }

    fn interface_name(&self, ifindex: u32) -> io::Result<Option<String>> {
        let mut buffer = [0_u8; libc::IF_NAMESIZE];
        // SAFETY: the buffer is as long as a name may be.
        let name = unsafe { libc::if_indextoname(ifindex, buffer.as_mut_ptr().cast()) };
        if !name.is_null() {
            let name = CStr::from_bytes_until_nul(&buffer).map_err(io::Error::other)?;
            return Ok(Some(name.to_string_lossy().into_owned()));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENXIO | libc::ENODEV) => Ok(None),
            _ => Err(error),
        }
    }

    fn driver(&self, interface: &str) -> io::Result<String> {
        ethtool::driver(interface)
    }

    fn receive_queues(&self, interface: &str) -> io::Result<u32> {
        ethtool::receive_queues(interface)
    }

    fn flow_rules_on(&self, interface: &str) -> io::Result<bool> {
        ethtool::flow_rules_on(interface)
    }

    fn turn_flow_rules(&self, interface: &str, on: bool) -> io::Result<()> {
        ethtool::turn_flow_rules(interface, on)
    }

    fn indirection(&self, interface: &str) -> io::Result<Vec<u32>> {
        ethtool::indirection(interface)
    }

    fn set_indirection(&self, interface: &str, table: &[u32]) -> io::Result<()> {
        ethtool::set_indirection(interface, table)
    }

    fn rules(&self, interface: &str) -> io::Result<RuleTable> {
        ethtool::rules(interface)
    }

    fn insert_rule(&self, interface: &str, rule: &Rule, at: Option<u32>) -> io::Result<u32> {
        ethtool::insert_rule(interface, rule, at)
    }

    fn delete_rule(&self, interface: &str, at: u32) -> io::Result<()> {
        ethtool::delete_rule(interface, at)
    }

    fn process_start(&self, pid: u32) -> io::Result<Option<u64>> {
        match fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(text) => match state_and_start(&text) {
                // Ended, and not waited for yet: nothing of it is held any more.
                Some(('Z' | 'X', _)) => Ok(None),
                Some((_, start)) => Ok(Some(start)),
                None => Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "/proc/PID/stat has no start time",
                )),
            },
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    || error.raw_os_error() == Some(libc::ESRCH) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn place(&self) -> io::Result<Place> {
        Ok(Place {
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id")?
                .trim()
                .to_owned(),
            // A thread may have gone to another network namespace than its process.
            network: fs::metadata("/proc/thread-self/ns/net")?.ino(),
            processes: fs::metadata("/proc/self/ns/pid")?.ino(),
            pid: std::process::id(),
        })
    }
}

/// The 3rd and the 22nd field of `/proc/PID/stat`; the second is in parentheses and may have any
/// characters.
fn state_and_start(stat: &str) -> Option<(char, u64)> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_with_spaces_and_parentheses_does_not_move_its_start_time() {
        let fields: Vec<_> = (4..=30).map(|number| number.to_string()).collect();
        let text = format!("12 (a ) b) S {}", fields.join(" "));
        assert_eq!(state_and_start(&text), Some(('S', 22)));
        assert_eq!(state_and_start("12 (a) S 1 2"), None);
        assert_eq!(state_and_start(""), None);
    }

    #[test]
    fn this_process_has_a_start_time_and_one_that_is_gone_has_none() {
        let own = Linux.process_start(std::process::id()).unwrap();
        assert!(own.is_some());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        // Not waited for yet, it may be a zombie; afterwards it is nothing at all.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while Linux.process_start(child.id()).unwrap().is_some() {
            assert!(
                std::time::Instant::now() < deadline,
                "the child does not end"
            );
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert_eq!(Linux.process_start(child.id()).unwrap(), None);
    }

    #[test]
    fn interfaces_have_names_by_their_numbers() {
        let Ok(index) = Linux.interface_index("lo") else {
            eprintln!("skipped: interfaces_have_names_by_their_numbers: no loopback here");
            return;
        };
        assert_eq!(Linux.interface_name(index).unwrap().as_deref(), Some("lo"));
        assert_eq!(Linux.interface_name(u32::MAX - 1).unwrap(), None);
    }

    #[test]
    fn an_interface_that_is_not_there_has_no_number() {
        let error = Linux.interface_index("no-such-if").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    }
}

//! The network interfaces that become devices.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use crate::config::Family;
use crate::error::PluginError;

/// Speed of an adapter that does not tell, in Mb/s: virtual ones in clouds do not.
const UNKNOWN_SPEED_MBPS: i32 = 100_000;
/// Speed of an interface without an adapter, such as loopback: as fast as the cores copy.
const MEMORY_SPEED_MBPS: i32 = 400_000;

/// Most interfaces that become devices: NCCL's search for rings takes longer with each.
const MAX_INTERFACES: usize = 16;
/// How the names of interfaces begin that container software and hypervisors keep for themselves.
const CONTAINER_NAMES: [&str; 12] = [
    "docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "cilium", "lxc", "lxd", "podman",
    "kube",
];

/// One interface with an address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) address: IpAddr,
    pub(crate) reach: Reach,
    /// Link speed in Mb/s, where it tells.
    pub(crate) speed: Option<i32>,
}

/// Who can be reached over an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// This host alone.
    Loopback,
    /// Containers and virtual machines of this host, or one network segment.
    Neighbours,
    /// Others, over an interface without an adapter of its own: as in a container.
    Virtual,
    /// Others, over an adapter.
    Adapter,
}

impl Interface {
    /// Path of the PCI device in sysfs; virtual interfaces have none.
    pub(crate) fn pci_path(&self) -> Option<String> {
        let link = Path::new("/sys/class/net").join(&self.name).join("device");
        let path = std::fs::canonicalize(link).ok()?;
        Some(path.to_str()?.to_owned())
    }

    /// Link speed in Mb/s, assumed where it does not tell.
    pub(crate) fn speed_mbps(&self) -> i32 {
        self.speed.unwrap_or_else(|| match self.pci_path() {
            Some(_) => UNKNOWN_SPEED_MBPS,
            None => MEMORY_SPEED_MBPS,
        })
    }

    fn is_loopback(&self) -> bool {
        self.reach == Reach::Loopback
    }
}

/// What sysfs tells of an interface: who can be reached over it, and its speed.
fn describe(name: &str, address: IpAddr, loopback: bool) -> (Reach, Option<i32>) {
    let folder = Path::new("/sys/class/net").join(name);
    let speed = std::fs::read_to_string(folder.join("speed"));
    let speed = speed.ok().and_then(|text| text.trim().parse().ok());
    let is_reserved = CONTAINER_NAMES.iter().any(|start| name.starts_with(start))
        || folder.join("bridge").is_dir()
        || is_link_local(address);
    let reach = if loopback {
        Reach::Loopback
    } else if is_reserved {
        Reach::Neighbours
    } else if folder.join("device").exists() {
        Reach::Adapter
    } else {
        Reach::Virtual
    };
    (reach, speed.filter(|speed| *speed > 0))
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V4(address) if address.is_link_local())
}

/// `NCCL_SOCKET_IFNAME`: names or prefixes between commas; `=` in front asks for whole names, `^`
/// turns the list around, and both may stand together as `^=`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    names: Vec<String>,
    exclude: bool,
    exact: bool,
}

impl Filter {
    /// Reads a filter; `None` when it names nothing.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (exclude, text) = strip(text.trim(), '^');
        let (exact, text) = strip(text, '=');
        let names: Vec<String> = text
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .collect();
        (!names.is_empty()).then_some(Self {
            names,
            exclude,
            exact,
        })
    }

    fn admits(&self, interface: &str) -> bool {
        let named = self.names.iter().any(|name| {
            if self.exact {
                interface == name
            } else {
                interface.starts_with(name.as_str())
            }
        });
        named != self.exclude
    }
}

fn strip(text: &str, mark: char) -> (bool, &str) {
    text.strip_prefix(mark)
        .map_or((false, text), |rest| (true, rest))
}

/// Chooses the devices, and says why: what the filter admits, or without one what is best.
pub(crate) fn choose(
    filter: &str,
    all: Vec<Interface>,
) -> Result<(Vec<Interface>, &'static str), PluginError> {
    let (chosen, why): (Vec<Interface>, _) = match Filter::parse(filter) {
        Some(parsed) => {
            let admitted = all
                .iter()
                .filter(|interface| parsed.admits(&interface.name))
                // Leaving out names is no wish for loopback.
                .filter(|interface| {
                    !(parsed.exclude && interface.is_loopback() && has_other(&all, &parsed))
                })
                .cloned();
            (admitted.collect(), "NCCL_SOCKET_IFNAME admits them")
        }
        None => unasked(&all),
    };
    if chosen.is_empty() {
        let found: Vec<&str> = all.iter().map(|i| i.name.as_str()).collect();
        return Err(PluginError::NoInterface {
            filter: filter.to_owned(),
            found: found.join(", "),
        });
    }
    Ok((chosen, why))
}

/// The fastest adapters; without one, the first interface that reaches others, else whatever there is.
fn unasked(all: &[Interface]) -> (Vec<Interface>, &'static str) {
    let adapters = || all.iter().filter(|one| one.reach == Reach::Adapter);
    // One that does not tell its speed is taken among its like.
    let fastest = adapters().map(|one| one.speed).max();
    if let Some(fastest) = fastest {
        let fastest = adapters().filter(|one| one.speed == fastest);
        let why = "the fastest network cards that are up";
        return (fastest.take(MAX_INTERFACES).cloned().collect(), why);
    }
    let rest = [
        (
            Reach::Virtual,
            "the first that is up, there is no network card",
        ),
        (Reach::Neighbours, "there is none that reaches other hosts"),
        (
            Reach::Loopback,
            "there is no other: this host alone can be reached",
        ),
    ];
    let found = rest
        .into_iter()
        .find_map(|(reach, why)| Some((all.iter().find(|one| one.reach == reach)?, why)));
    found.map_or_else(Default::default, |(one, why)| (vec![one.clone()], why))
}

fn has_other(all: &[Interface], filter: &Filter) -> bool {
    all.iter()
        .any(|interface| !interface.is_loopback() && filter.admits(&interface.name))
}

/// Interfaces that are up and have an address, of that family if one is given: IPv4 if there is one,
/// else a routable IPv6.
pub(crate) fn list(family: Option<Family>) -> Result<Vec<Interface>, PluginError> {
    let mut head: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the out pointer is valid; the list is freed below.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return Err(PluginError::system(
            "listing network interfaces",
            &std::io::Error::last_os_error(),
            "check the limits of this process",
        ));
    }
    let mut found: Vec<(String, IpAddr, bool)> = Vec::new();
    let mut at = head;
    // SAFETY: `at` walks the list that getifaddrs made, until its NULL.
    while let Some(entry) = unsafe { at.as_ref() } {
        at = entry.ifa_next;
        // SAFETY: the name of an entry is a C string.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }
            .to_string_lossy()
            .into_owned();
        // The flags are small positive bits in both types.
        let flag = |bit: libc::c_int| entry.ifa_flags & bit as libc::c_uint != 0;
        // SAFETY: the address belongs to the entry.
        let Some(address) = (unsafe { address(entry.ifa_addr) }) else {
            continue;
        };
        if !flag(libc::IFF_UP) || family.is_some_and(|family| !is_of(family, address)) {
            continue;
        }
        match found.iter_mut().find(|(known, ..)| *known == name) {
            Some((_, known, _)) if rank(address) > rank(*known) => *known = address,
            Some(_) => {}
            None => found.push((name, address, flag(libc::IFF_LOOPBACK))),
        }
    }
    // SAFETY: the list came from getifaddrs and is not used again.
    unsafe { libc::freeifaddrs(head) };
    let described = found.into_iter().map(|(name, address, loopback)| {
        let (reach, speed) = describe(&name, address, loopback);
        Interface {
            name,
            address,
            reach,
            speed,
        }
    });
    Ok(described.collect())
}

fn is_of(family: Family, address: IpAddr) -> bool {
    match family {
        Family::V4 => address.is_ipv4(),
        Family::V6 => address.is_ipv6(),
    }
}

/// Which of an interface's addresses is used: the highest.
fn rank(address: IpAddr) -> u8 {
    match address {
        _ if is_link_local(address) => 0,
        IpAddr::V6(_) => 1,
        IpAddr::V4(_) => 2,
    }
}

/// An IP address that can be used without naming an interface.
///
/// # Safety
/// `address` is NULL or points to a socket address as long as its family says.
unsafe fn address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: by the caller's promise.
    let family = i32::from(unsafe { address.as_ref() }?.sa_family);
    match family {
        libc::AF_INET => {
            // SAFETY: the family says that it is this structure.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr))))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            (!ip.is_unicast_link_local()).then_some(IpAddr::V6(ip))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str) -> Interface {
        Interface {
            name: name.to_owned(),
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            reach: match name {
                "lo" => Reach::Loopback,
                "docker0" => Reach::Neighbours,
                _ => Reach::Adapter,
            },
            speed: None,
        }
    }

    #[track_caller]
    fn check(filter: &str, expected: &[&str]) {
        let all = ["lo", "eth0", "eth1", "eth10", "docker0"].map(interface);
        let names: Vec<String> = match choose(filter, all.to_vec()) {
            Ok((chosen, _)) => chosen.into_iter().map(|i| i.name).collect(),
            Err(error) => {
                assert!(error.to_string().contains("docker0"), "{error}");
                Vec::new()
            }
        };
        assert_eq!(names, expected, "{filter:?}");
    }

    #[test]
    fn filters_work_as_nccl_documents_them() {
        check("", &["eth0", "eth1", "eth10"]);
        check("eth", &["eth0", "eth1", "eth10"]);
        check("eth1,docker", &["eth1", "eth10", "docker0"]);
        check("=eth1", &["eth1"]);
        check("=eth1,lo", &["lo", "eth1"]);
        check("^docker", &["eth0", "eth1", "eth10"]);
        check("^=eth1,docker0", &["eth0", "eth10"]);
        check("^eth,docker", &["lo"]);
        check("lo", &["lo"]);
        check("ib", &[]);
        check("^", &["eth0", "eth1", "eth10"]);
    }

    #[test]
    fn unasked_it_takes_the_fastest_adapters_and_never_what_containers_use_if_there_is_another() {
        let of = |name: &str, reach, speed| Interface {
            reach,
            speed,
            ..interface(name)
        };
        let lo = || of("lo", Reach::Loopback, None);
        let docker = || of("docker0", Reach::Neighbours, Some(1_000_000));
        let pod = || of("eth0", Reach::Virtual, Some(10_000));
        let card = |name: &str, speed| of(name, Reach::Adapter, speed);
        let many: Vec<Interface> = (0..40)
            .map(|n| card(&format!("eth{n}"), Some(100)))
            .collect();
        let names = |all: Vec<Interface>| -> Vec<String> {
            let (chosen, why) = choose("", all).unwrap();
            assert!(!why.is_empty());
            chosen.into_iter().map(|one| one.name).collect()
        };
        let managed = [
            docker(),
            card("eno1", Some(1000)),
            lo(),
            card("ens1", Some(200_000)),
            pod(),
            card("ens2", Some(200_000)),
            card("usb0", None),
        ];
        assert_eq!(names(managed.to_vec()), ["ens1", "ens2"]);
        assert_eq!(names(vec![lo(), docker(), pod()]), ["eth0"]);
        assert_eq!(names(vec![lo(), docker()]), ["docker0"]);
        let untold = [card("eth0", None), card("eth1", None)];
        assert_eq!(names(untold.to_vec()), ["eth0", "eth1"]);
        assert_eq!(names(many).len(), MAX_INTERFACES);
    }

    #[test]
    fn an_address_for_others_goes_before_one_for_the_segment() {
        let by_rank = ["169.254.3.1", "fd00::1", "10.0.0.1"].map(|text| text.parse().unwrap());
        assert!(by_rank.is_sorted_by_key(|address: &IpAddr| rank(*address)));
        let segment = describe("eth77", by_rank[0], false);
        assert_eq!(segment, (Reach::Neighbours, None));
        assert_eq!(describe("virbr9", by_rank[2], false).0, Reach::Neighbours);
        assert_eq!(describe("eth77", by_rank[2], false).0, Reach::Virtual);
    }

    #[test]
    fn loopback_serves_when_there_is_nothing_else() {
        let (chosen, why) = choose("", vec![interface("lo")]).unwrap();
        assert!(why.contains("this host alone"), "{why}");
        assert_eq!(chosen, [interface("lo")]);
        let error = choose("", Vec::new()).unwrap_err().to_string();
        assert!(error.contains("ip link set"), "{error}");
        assert!(!error.contains("NCCL_SOCKET_IFNAME"), "{error}");
    }

    #[test]
    fn this_machine_has_a_loopback_interface_with_an_address() {
        let all = list(None).unwrap();
        let lo = all.iter().find(|i| i.is_loopback()).unwrap();
        assert!(lo.address.is_loopback(), "{lo:?}");
        assert_eq!(lo.pci_path(), None);
        assert_eq!(lo.speed_mbps(), MEMORY_SPEED_MBPS);
        for family in [Family::V4, Family::V6] {
            let all = list(Some(family)).unwrap();
            assert!(all.iter().all(|one| is_of(family, one.address)), "{all:?}");
        }
    }
}

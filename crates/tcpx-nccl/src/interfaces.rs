//! The network interfaces that become devices.

use std::net::IpAddr;
use std::path::Path;

use nccl_net::ResultCode;
use nccl_net::export::NetError;
use tcpx_lanes::interfaces::{self as system, InterfaceFilter, InterfaceKind, is_link_local};

use crate::config::Family;
use crate::error;

/// Speed of an adapter that does not tell, in Mb/s: virtual ones in clouds do not.
const UNKNOWN_SPEED_MBPS: i32 = 100_000;
/// Speed of an interface without an adapter, such as loopback: as fast as the cores copy.
const MEMORY_SPEED_MBPS: i32 = 400_000;

/// Most interfaces that become devices: NCCL's search for rings takes longer with each.
const MAX_INTERFACES: usize = 16;
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
    /// Others, that routes lead to: the address is the host's own, and stands on loopback.
    Routed,
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
        self.speed
            .unwrap_or_else(|| match (self.reach, self.pci_path()) {
                (Reach::Routed, _) | (_, Some(_)) => UNKNOWN_SPEED_MBPS,
                (_, None) => MEMORY_SPEED_MBPS,
            })
    }

    /// It stands on `lo`.
    fn is_loopback(&self) -> bool {
        matches!(self.reach, Reach::Loopback | Reach::Routed)
    }
}

/// Chooses the devices, and says why: what the filter admits, or without one what is best.
pub(crate) fn choose(
    filter: &str,
    family: Option<Family>,
    all: Vec<Interface>,
) -> Result<(Vec<Interface>, &'static str), NetError> {
    let (chosen, why): (Vec<Interface>, _) = match InterfaceFilter::parse(filter) {
        Some(parsed) => {
            let admitted = all
                .iter()
                .filter(|interface| parsed.admits(&interface.name))
                // Leaving out names is no wish for loopback.
                .filter(|interface| {
                    !(parsed.is_exclusion() && interface.is_loopback() && has_other(&all, &parsed))
                })
                .cloned();
            (admitted.collect(), "NCCL_SOCKET_IFNAME admits them")
        }
        None => unasked(&all),
    };
    if chosen.is_empty() {
        let found: Vec<&str> = all.iter().map(|i| i.name.as_str()).collect();
        let why = no_interface(filter, family, &found.join(", "));
        return Err(NetError::new(ResultCode::SystemError, why));
    }
    Ok((chosen, why))
}

/// Which interfaces were asked for and which there are, and what to do.
fn no_interface(filter: &str, family: Option<Family>, found: &str) -> String {
    let family = match family {
        None => "",
        Some(Family::V4) => " of IPv4, as NCCL_SOCKET_FAMILY asks,",
        Some(Family::V6) => " of IPv6 for other links, as NCCL_SOCKET_FAMILY asks,",
    };
    let asked = match filter {
        "" => String::new(),
        filter => format!(" and a name that NCCL_SOCKET_IFNAME={filter:?} admits"),
    };
    let rest = match (found, family) {
        ("", "") => {
            "bring one up and give it an address (`ip link set IF up`, `ip address add ...`)".into()
        }
        ("", _) => "give one such an address, or unset the variable".to_owned(),
        (found, _) => format!("there are {found}; correct the variable or unset it"),
    };
    format!("no network interface is up with an address{family}{asked}; {rest}")
}

/// The names of a list of interfaces that none of these has: as a rule they are mistyped.
pub(crate) fn unmet(filter: &str, all: &[Interface]) -> Option<String> {
    let parsed = InterfaceFilter::parse(filter).filter(|parsed| !parsed.is_exclusion())?;
    let names: Vec<&str> = all.iter().map(|one| one.name.as_str()).collect();
    let unmet: Vec<&str> = parsed.unmet(&names).collect();
    (!unmet.is_empty()).then(|| {
        format!(
            "NCCL_SOCKET_IFNAME={filter:?} names {}, which no interface with an address has; there are {}",
            unmet.join(", "),
            names.join(", ")
        )
    })
}

/// The fastest adapters; without one, the first interface that reaches others, else whatever there
/// is.
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
        (
            Reach::Routed,
            "routes lead from there to other hosts, no other interface has an address",
        ),
        (Reach::Neighbours, "there is none that reaches other hosts"),
        (
            Reach::Loopback,
            "no other interface has an address (fe80:: ones count on one link alone): this host alone can be reached",
        ),
    ];
    let found = rest
        .into_iter()
        .find_map(|(reach, why)| Some((all.iter().find(|one| one.reach == reach)?, why)));
    found.map_or_else(Default::default, |(one, why)| (vec![one.clone()], why))
}

fn has_other(all: &[Interface], filter: &InterfaceFilter) -> bool {
    all.iter()
        .any(|interface| !interface.is_loopback() && filter.admits(&interface.name))
}

/// Interfaces that are up and have an address, of that family if one is given: IPv4 if there is
/// one, else a routable IPv6. They come in the kernel's order, which both ends of a rail share.
pub(crate) fn list(family: Option<Family>) -> Result<Vec<Interface>, NetError> {
    let system = |error: &dyn std::error::Error| {
        let hint = "see what keeps this process from it";
        error::system("listing network interfaces", error, hint)
    };
    let known = system::interfaces().map_err(|error| system(&error))?;
    let mut found: Vec<(String, IpAddr)> = Vec::new();
    for one in system::addresses().map_err(|error| system(&error))? {
        if !is_of(family, one.address) || is_of_a_link_v6(one.address) {
            continue;
        }
        match found.iter_mut().find(|(name, _)| *name == one.interface) {
            Some((_, address)) if rank(one.address) > rank(*address) => *address = one.address,
            Some(_) => {}
            None => found.push((one.interface, one.address)),
        }
    }
    let described = found.into_iter().filter_map(|(name, address)| {
        // Another network namespace than the one that sysfs was mounted in has others.
        let described = known.iter().find(|one| one.name == name);
        if described.is_some_and(|one| !one.up) {
            return None;
        }
        let speed = described.and_then(|one| one.speed);
        Some(Interface {
            reach: reach(&name, described.map(|one| one.kind), address),
            speed: speed.and_then(|bits| i32::try_from(bits / 1_000_000).ok()),
            name,
            address,
        })
    });
    Ok(described.collect())
}

fn reach(name: &str, kind: Option<InterfaceKind>, address: IpAddr) -> Reach {
    match kind {
        _ if address.is_loopback() => Reach::Loopback,
        Some(InterfaceKind::Loopback) => Reach::Routed,
        Some(InterfaceKind::Bridge) => Reach::Neighbours,
        _ if system::is_container_name(name) || is_link_local(address) => Reach::Neighbours,
        Some(InterfaceKind::Physical) => Reach::Adapter,
        _ => Reach::Virtual,
    }
}

/// Such an address says nothing without the name of an interface.
fn is_of_a_link_v6(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

fn is_of(family: Option<Family>, address: IpAddr) -> bool {
    match family {
        None => true,
        Some(Family::V4) => address.is_ipv4(),
        Some(Family::V6) => address.is_ipv6(),
    }
}

/// Which of an interface's addresses is used: the highest.
fn rank(address: IpAddr) -> u8 {
    match address {
        IpAddr::V6(_) if address.is_loopback() => 0,
        _ if address.is_loopback() => 1,
        _ if is_link_local(address) => 2,
        IpAddr::V6(_) => 3,
        IpAddr::V4(_) => 4,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

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
        let names: Vec<String> = match choose(filter, None, all.to_vec()) {
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
    fn a_name_of_a_list_that_no_interface_has_is_told() {
        let all = ["lo", "eth0"].map(interface);
        let told = unmet("eth0,eht1", &all).unwrap();
        assert!(
            told.contains("names eht1,") && told.contains("lo, eth0"),
            "{told}"
        );
        assert_eq!(unmet("eth,lo", &all), None);
        assert_eq!(unmet("^eht1", &all), None);
        assert_eq!(unmet("", &all), None);
    }

    #[test]
    fn unasked_it_takes_the_fastest_real_adapters() {
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
            let (chosen, why) = choose("", None, all).unwrap();
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
        // As on a host whose cards have addresses of their own link alone.
        let (_, why) = choose("", None, vec![lo()]).unwrap();
        assert!(
            why.contains("fe80::") && why.contains("this host alone"),
            "{why}"
        );
        assert_eq!(names(vec![lo(), docker(), pod()]), ["eth0"]);
        assert_eq!(names(vec![lo(), docker()]), ["docker0"]);
        let routed = || of("lo", Reach::Routed, None);
        assert_eq!(names(vec![routed(), docker()]), ["lo"]);
        assert_eq!(names(vec![routed(), docker(), pod()]), ["eth0"]);
        let untold = [card("eth0", None), card("eth1", None)];
        assert_eq!(names(untold.to_vec()), ["eth0", "eth1"]);
        assert_eq!(names(many).len(), MAX_INTERFACES);
    }

    #[test]
    fn an_address_for_others_goes_before_one_for_the_segment() {
        let by_rank = ["169.254.3.1", "fd00::1", "10.0.0.1"].map(|text| text.parse().unwrap());
        let on_loopback = ["::1", "127.0.0.1", "fd00::1", "10.255.0.1"];
        let on_loopback = on_loopback.map(|text| text.parse().unwrap());
        assert!(on_loopback.is_sorted_by_key(|address: &IpAddr| rank(*address)));
        let lo = Some(InterfaceKind::Loopback);
        let reached = on_loopback.map(|address| reach("lo", lo, address));
        let routed = [
            Reach::Loopback,
            Reach::Loopback,
            Reach::Routed,
            Reach::Routed,
        ];
        assert_eq!(reached, routed);
        assert!(by_rank.is_sorted_by_key(|address: &IpAddr| rank(*address)));
        let card = Some(InterfaceKind::Physical);
        assert_eq!(reach("eth77", card, by_rank[0]), Reach::Neighbours);
        assert_eq!(reach("virbr9", card, by_rank[2]), Reach::Neighbours);
        assert_eq!(reach("eth77", card, by_rank[2]), Reach::Adapter);
        assert_eq!(reach("eth77", None, by_rank[2]), Reach::Virtual);
    }

    #[test]
    fn loopback_serves_when_there_is_nothing_else() {
        let (chosen, why) = choose("", None, vec![interface("lo")]).unwrap();
        assert!(why.contains("this host alone"), "{why}");
        assert_eq!(chosen, [interface("lo")]);
        let error = |family| choose("", family, Vec::new()).unwrap_err().to_string();
        let [any, v6] = [None, Some(Family::V6)].map(error);
        assert!(any.contains("ip link set"), "{any}");
        assert!(!any.contains("SOCKET_"), "{any}");
        assert!(v6.contains("NCCL_SOCKET_FAMILY"), "{v6}");
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
            assert!(
                all.iter().all(|one| is_of(Some(family), one.address)),
                "{all:?}"
            );
        }
    }
}

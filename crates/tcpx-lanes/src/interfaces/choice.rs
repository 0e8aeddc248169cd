//! Which interfaces carry lanes.

use std::fmt;
use std::net::IpAddr;

use super::{Distance, Interface, InterfaceFilter, InterfaceKind, PciPlace};
use crate::error::SocketError;

/// Whether container or virtual-machine software names its interfaces so. Peers on other hosts
/// cannot reach them.
pub fn is_container_name(interface: &str) -> bool {
    const BEGINNINGS: [&str; 12] = [
        "docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "cilium", "lxc", "lxd",
        "podman", "kube",
    ];
    BEGINNINGS.iter().any(|start| interface.starts_with(start))
}

/// A card that is known to be slower than the fastest by more than this is for something else.
const SLOWEST_PART: u64 = 4;

/// What the choice depends on.
#[derive(Clone, Debug)]
pub struct Wish<'a> {
    /// What the user allows; `None`: automatic.
    pub filter: Option<&'a InterfaceFilter>,
    /// Where the GPU is whose memory moves.
    pub gpu: Option<&'a PciPlace>,
    /// Our address on the control connection, which works.
    pub local: IpAddr,
    /// The peer's.
    pub peer: IpAddr,
}

/// An interface that carries lanes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Its name.
    pub name: String,
    /// Its usable addresses with the leading bits of their networks; at least one.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Link speed in bits per second, where known.
    pub speed: Option<u64>,
    /// How far it is from the GPU, where there is one.
    pub distance: Option<Distance>,
    /// Packets of these addresses leave through it, so that sockets can be bound to it: not so on
    /// interfaces that only hold an address which other ones route.
    pub carries: bool,
}

/// The interfaces that were chosen, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// In the order of their names; may be empty: then only the control connection's way is known.
    pub nics: Vec<Nic>,
    /// The rule that decided.
    pub why: String,
    /// The peer is on this host: the loopback interface carries everything, whatever addresses say.
    pub within_host: bool,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, nic) in self.nics.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{}", nic.name)?;
            if let Some(distance) = nic.distance {
                write!(f, " ({distance})")?;
            }
        }
        write!(f, ": {}", self.why)
    }
}

/// Chooses among the interfaces of this host.
///
/// Between two processes of one host: the way of the control connection. Otherwise what the filter
/// admits; without a filter the cards that are up, are not much slower than the fastest, and, for a
/// GPU, as near to it as the nearest. The control connection's own interface is always a candidate.
///
/// # Errors
/// [`SocketError::NoInterface`] when the filter leaves nothing that is up and has an address.
pub fn choose(all: &[Interface], wish: &Wish<'_>) -> Result<Choice, SocketError> {
    let has = |one: &Interface, address: IpAddr| one.addresses.contains(&address);
    let is_ours = |address: IpAddr| all.iter().any(|one| has(one, address));
    if wish.local.is_loopback() || is_ours(wish.peer) {
        let same: Vec<_> = all.iter().filter(|one| has(one, wish.local)).collect();
        return Ok(Choice {
            nics: same.into_iter().map(|one| only(one, wish.local)).collect(),
            why: "the peer is on this host".to_owned(),
            within_host: true,
        });
    }
    if let Some(filter) = wish.filter {
        let nics: Vec<Nic> = all
            .iter()
            .filter(|one| one.up && filter.admits(&one.name))
            // Leaving out names is no wish for what others cannot reach.
            .filter(|one| !filter.is_exclusion() || !is_local_only(one))
            .filter_map(|one| {
                // Who names a card means it, whatever addresses it has.
                nic(one, wish.gpu, |address| {
                    is_usable(address) || !filter.is_exclusion() && is_link_local(address)
                })
            })
            .collect();
        if nics.is_empty() {
            return Err(SocketError::NoInterface {
                filter: filter.to_string(),
                found: listing(all),
            });
        }
        return Ok(Choice {
            nics,
            why: format!("`{filter}` allows them"),
            within_host: false,
        });
    }
    Ok(automatic(all, wish, &has))
}

fn automatic(
    all: &[Interface],
    wish: &Wish<'_>,
    has: &dyn Fn(&Interface, IpAddr) -> bool,
) -> Choice {
    let mut nics: Vec<Nic> = all
        .iter()
        .filter(|one| {
            // In a container a card is one end of a virtual cable; its name tells it from those
            // that the container software keeps for itself.
            let card = matches!(one.kind, InterfaceKind::Physical | InterfaceKind::Veth);
            one.up && card && !is_local_only(one) || has(one, wish.local)
        })
        .filter_map(|one| {
            // The control connection shows that its own address works.
            nic(one, wish.gpu, |address| {
                is_usable(address) || is_link_local(address) && address == wish.local
            })
        })
        .collect();
    let fastest = nics.iter().filter_map(|nic| nic.speed).max();
    if let Some(fastest) = fastest {
        nics.retain(|nic| {
            nic.speed
                .is_none_or(|speed| speed >= fastest / SLOWEST_PART)
        });
    }
    let nearest = nics.iter().filter_map(|nic| nic.distance).min();
    if let Some(nearest) = nearest {
        nics.retain(|nic| nic.distance.is_none_or(|distance| distance <= nearest));
    }
    let why = match (nics.len(), nearest) {
        (0 | 1, None) => "the way of the control connection".to_owned(),
        (_, None) => "the cards that are up".to_owned(),
        (_, Some(_)) => "nearest to the GPU".to_owned(),
    };
    Choice {
        nics,
        why,
        within_host: false,
    }
}

/// Peers on other hosts cannot reach it.
fn is_local_only(interface: &Interface) -> bool {
    matches!(
        interface.kind,
        InterfaceKind::Loopback | InterfaceKind::Bridge
    ) || is_container_name(&interface.name)
}

fn nic(
    interface: &Interface,
    gpu: Option<&PciPlace>,
    usable: impl Fn(IpAddr) -> bool,
) -> Option<Nic> {
    let addresses: Vec<_> = interface
        .networks()
        .filter(|(address, _)| usable(*address))
        .collect();
    (!addresses.is_empty()).then(|| Nic {
        name: interface.name.clone(),
        addresses,
        speed: interface.speed,
        distance: gpu.map(|gpu| gpu.distance(interface)),
        carries: carries(interface),
    })
}

fn only(interface: &Interface, address: IpAddr) -> Nic {
    Nic {
        name: interface.name.clone(),
        addresses: interface
            .networks()
            .filter(|(own, _)| *own == address)
            .collect(),
        speed: interface.speed,
        distance: None,
        carries: carries(interface),
    }
}

fn carries(interface: &Interface) -> bool {
    interface.kind != InterfaceKind::Loopback && interface.driver.as_deref() != Some("dummy")
}

/// An address that means the same to every host.
fn is_usable(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !v4.is_link_local() && !v4.is_unspecified() && !v4.is_loopback(),
        IpAddr::V6(v6) => !v6.is_unicast_link_local() && !v6.is_unspecified() && !v6.is_loopback(),
    }
}

/// Of a network that ends at the cable. Those of IPv6 mean nothing without the name of a card,
/// which differs from host to host.
pub fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V4(v4) if v4.is_link_local())
}

fn listing(all: &[Interface]) -> String {
    let each = all.iter().map(|one| {
        let usable = one.addresses.iter().any(|address| is_usable(*address));
        let state = match (one.up, one.addresses.is_empty()) {
            (false, _) => " (down)",
            (true, true) => " (no address)",
            (true, false) if !usable => " (no address that other hosts know)",
            (true, false) => "",
        };
        format!("{}{state}", one.name)
    });
    each.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, kind: InterfaceKind, address: &str) -> Interface {
        Interface {
            name: name.to_owned(),
            kind,
            up: true,
            addresses: vec![address.parse().unwrap()],
            prefixes: vec![24],
            speed: None,
            mtu: None,
            pci_path: Vec::new(),
            numa_node: None,
            driver: None,
        }
    }

    fn host() -> Vec<Interface> {
        use InterfaceKind::{Bridge, Loopback, Physical, Veth, Virtual};
        let mut all = vec![
            interface("docker0", Bridge, "172.17.0.1"),
            interface("eth0", Physical, "10.0.0.1"),
            interface("eth1", Physical, "10.0.1.1"),
            interface("eth2", Physical, "10.0.2.1"),
            interface("eth3", Physical, "169.254.7.7"),
            interface("lo", Loopback, "127.0.0.1"),
            interface("veth12", Veth, "10.9.0.1"),
            interface("wg0", Virtual, "10.8.0.1"),
        ];
        all[1].speed = Some(10_000_000_000);
        all[2].speed = Some(200_000_000_000);
        all[3].speed = Some(100_000_000_000);
        all
    }

    fn chosen(filter: Option<&str>, local: &str, peer: &str) -> Vec<String> {
        let filter = filter.and_then(InterfaceFilter::parse);
        let wish = Wish {
            filter: filter.as_ref(),
            gpu: None,
            local: local.parse().unwrap(),
            peer: peer.parse().unwrap(),
        };
        let choice = choose(&host(), &wish).unwrap();
        choice.nics.into_iter().map(|nic| nic.name).collect()
    }

    #[test]
    fn only_fast_reachable_cards_are_taken() {
        assert_eq!(chosen(None, "10.0.1.1", "10.0.1.2"), ["eth1", "eth2"]);
    }

    #[test]
    fn the_control_connections_way_is_a_candidate() {
        assert_eq!(
            chosen(None, "10.8.0.1", "10.8.0.2"),
            ["eth1", "eth2", "wg0"]
        );
        assert_eq!(
            chosen(None, "10.9.0.1", "10.9.0.2"),
            ["eth1", "eth2", "veth12"]
        );
    }

    #[test]
    fn between_processes_of_one_host_only_their_own_way_counts() {
        assert_eq!(chosen(Some("eth"), "127.0.0.1", "127.0.0.1"), ["lo"]);
        assert_eq!(chosen(None, "10.0.1.1", "10.0.1.1"), ["eth1"]);
        assert_eq!(chosen(None, "10.0.1.1", "10.0.2.1"), ["eth1"]);
    }

    #[test]
    fn a_filter_decides_alone() {
        assert_eq!(chosen(Some("=eth0"), "10.0.1.1", "10.0.1.2"), ["eth0"]);
        assert_eq!(
            chosen(Some("veth,docker"), "10.0.1.1", "10.0.1.2"),
            ["docker0", "veth12"]
        );
        assert_eq!(
            chosen(Some("^eth1"), "10.0.1.1", "10.0.1.2"),
            ["eth0", "eth2", "wg0"]
        );
    }

    #[test]
    fn a_filter_that_leaves_nothing_names_what_there_is() {
        let filter = InterfaceFilter::parse("ib,lo").unwrap();
        let wish = Wish {
            filter: Some(&filter),
            gpu: None,
            local: IpAddr::from([10, 0, 1, 1]),
            peer: IpAddr::from([10, 0, 1, 2]),
        };
        let error = choose(&host(), &wish).unwrap_err().to_string();
        assert!(
            error.contains("`ib,lo`")
                && error.contains("eth0, eth1")
                && error.contains("lo (no address that"),
            "{error}"
        );
    }

    #[test]
    fn a_link_local_address_counts_on_a_named_card() {
        let taken = |filter, local| chosen(filter, local, "169.254.7.8");
        assert_eq!(taken(Some("=eth3"), "169.254.7.7"), ["eth3"]);
        assert_eq!(taken(Some("eth1,eth3"), "10.0.1.1"), ["eth1", "eth3"]);
        assert_eq!(taken(None, "169.254.7.7"), ["eth1", "eth2", "eth3"]);
        assert_eq!(taken(None, "10.0.1.1"), ["eth1", "eth2"]);
        assert!(!taken(Some("^eth1"), "10.0.1.1").contains(&"eth3".to_owned()));
    }

    #[test]
    fn what_only_holds_an_address_is_not_bound_to() {
        let mut dummy = interface("dummy0", InterfaceKind::Virtual, "10.255.0.1");
        dummy.driver = Some("dummy".to_owned());
        let bond = interface("bond0", InterfaceKind::Virtual, "10.3.0.1");
        let looped = interface("lo", InterfaceKind::Loopback, "10.255.0.2");
        assert_eq!([&dummy, &bond, &looped].map(carries), [false, true, false]);
    }

    #[test]
    fn for_a_gpu_the_nearest_cards_are_taken() {
        let mut all = host();
        all[2].pci_path = vec!["0000:00:01.0".to_owned(), "0000:02:00.0".to_owned()];
        all[3].pci_path = vec!["0000:80:01.0".to_owned()];
        all[3].numa_node = Some(1);
        let gpu = PciPlace {
            path: vec!["0000:00:01.0".to_owned(), "0000:03:00.0".to_owned()],
            numa: Some(0),
        };
        let wish = Wish {
            filter: None,
            gpu: Some(&gpu),
            local: IpAddr::from([10, 0, 0, 1]),
            peer: IpAddr::from([10, 0, 0, 2]),
        };
        let choice = choose(&all, &wish).unwrap();
        assert_eq!(choice.nics.len(), 1);
        assert_eq!(choice.to_string(), "eth1 (same switch): nearest to the GPU");
    }
}

//! The address of this host that others most likely reach it at.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use super::{Interface, InterfaceKind, interfaces};

/// The address that another host most likely reaches this one at, which listens on `bound`.
pub fn reachable(bound: IpAddr) -> IpAddr {
    if !bound.is_unspecified() {
        return bound;
    }
    // What listens on every address takes IPv4 too.
    let takes = |ip: &IpAddr| bound.is_ipv6() || ip.is_ipv4();
    outward()
        .filter(takes)
        .or_else(|| best(&interfaces().unwrap_or_default(), takes))
        .unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// Our address on the default route. Connecting a UDP socket chooses a route and sends nothing; the
/// addresses are such as are reserved for documentation.
fn outward() -> Option<IpAddr> {
    let on_route = |from: IpAddr, to: IpAddr| {
        let socket = UdpSocket::bind((from, 0)).ok()?;
        socket.connect((to, 9)).ok()?;
        let ip = socket.local_addr().ok()?.ip();
        (!ip.is_unspecified()).then_some(ip)
    };
    let v4 = || {
        let to = Ipv4Addr::new(192, 0, 2, 1);
        on_route(Ipv4Addr::UNSPECIFIED.into(), to.into())
    };
    let v6 = || {
        let to = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
        on_route(Ipv6Addr::UNSPECIFIED.into(), to.into())
    };
    v4().or_else(v6)
}

/// Without a default route: an address of an interface that leads somewhere, cards before software.
fn best(interfaces: &[Interface], takes: impl Fn(&IpAddr) -> bool) -> Option<IpAddr> {
    interfaces
        .iter()
        .filter(|interface| interface.up)
        .flat_map(|interface| {
            interface
                .addresses
                .iter()
                .map(move |ip| (interface.kind, *ip))
        })
        .filter(|(_, ip)| takes(ip))
        .filter(|(_, ip)| match ip {
            IpAddr::V4(ip) => !ip.is_loopback(),
            // One of a link means nothing without the name that the other side has for it.
            IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
        })
        .min_by_key(|(kind, ip)| {
            let is_card = *kind == InterfaceKind::Physical;
            (*kind == InterfaceKind::Loopback, ip.is_ipv6(), !is_card)
        })
        .map(|(_, ip)| ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_address_is_reachable_as_it_is() {
        let bound = IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert_eq!(reachable(bound), bound);
        for every in [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()] {
            assert!(!reachable(every).is_unspecified());
        }
        assert!(reachable(Ipv4Addr::UNSPECIFIED.into()).is_ipv4());
    }

    #[test]
    fn without_a_route_a_card_with_an_address_is_named_first() {
        let interface = |kind, up, addresses: &[&str]| Interface {
            name: "some".into(),
            kind,
            up,
            addresses: addresses
                .iter()
                .map(|ip| ip.parse().expect("an address"))
                .collect(),
            prefixes: Vec::new(),
            speed: None,
            mtu: None,
            pci_path: Vec::new(),
            numa_node: None,
            driver: None,
        };
        let named = |all: &[Interface]| best(all, |_| true).map(|ip| ip.to_string());
        let all = [
            interface(InterfaceKind::Loopback, true, &["127.0.0.1"]),
            interface(InterfaceKind::Physical, true, &["fe80::1"]),
            interface(InterfaceKind::Physical, true, &["fd00::1"]),
            interface(InterfaceKind::Bridge, true, &["172.17.0.1"]),
            interface(InterfaceKind::Physical, false, &["10.0.0.1"]),
            interface(InterfaceKind::Physical, true, &["10.0.1.1"]),
        ];
        assert_eq!(named(&all).as_deref(), Some("10.0.1.1"));
        assert_eq!(named(&all[..5]).as_deref(), Some("172.17.0.1"));
        assert_eq!(named(&all[..3]).as_deref(), Some("fd00::1"));
        assert_eq!(best(&all[..3], IpAddr::is_ipv4), None);
        assert_eq!(named(&all[..2]), None);
        // Routes lead to it, wherever it stands.
        let routed = interface(
            InterfaceKind::Loopback,
            true,
            &["127.0.0.1", "10.255.0.1", "::1"],
        );
        let [lo, link, ..] = &all;
        let alone = [lo.clone(), link.clone(), routed.clone()];
        assert_eq!(named(&alone).as_deref(), Some("10.255.0.1"));
        assert_eq!(named(&[routed, all[2].clone()]).as_deref(), Some("fd00::1"));
    }
}

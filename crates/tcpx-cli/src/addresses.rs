//! Addresses that a person types, and the one to print for the other side.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use tcpx_net::interfaces::{Interface, InterfaceKind, interfaces};

use crate::error::Error;

/// Every address that `text` means: an IP address or a host name, with `:port` or without.
pub(crate) fn resolve(text: &str, port: u16) -> Result<Vec<SocketAddr>, Error> {
    let bare = text
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(text);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return zoned(text, SocketAddr::new(ip, port));
    }
    if let Ok(address) = text.parse::<SocketAddr>() {
        return zoned(text, address);
    }
    // An address of one link, with the name of the interface to it: `[fe80::1%eth0]:7`.
    if let Some((zoned, last)) = text
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("]:"))
    {
        let Ok(port) = last.parse::<u16>() else {
            return Err(wrong(text, format!("`{last}` is no port")));
        };
        let found: Vec<_> = (zoned, port)
            .to_socket_addrs()
            .map_err(|error| wrong(text, error.to_string()))?
            .collect();
        return Ok(found);
    }
    let found = match text.rsplit_once(':') {
        // A bare IPv6 address with a zone also has colons, and no host name has them.
        Some((name, last)) if !name.contains(':') => match last.parse::<u16>() {
            Ok(port) => (name, port).to_socket_addrs(),
            Err(_) => return Err(wrong(text, format!("`{last}` is no port"))),
        },
        _ => (bare, port).to_socket_addrs(),
    };
    let found: Vec<_> = found
        .map_err(|error| wrong(text, error.to_string()))?
        .collect();
    if found.is_empty() {
        Err(wrong(text, "the name has no address".into()))
    } else {
        Ok(found)
    }
}

/// An address, unless it is one of a link and does not say of which.
fn zoned(text: &str, address: SocketAddr) -> Result<Vec<SocketAddr>, Error> {
    match address {
        SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0 => Err(wrong(
            text,
            format!(
                "it counts on one link only: say on which, as in `{}%eth0`",
                v6.ip()
            ),
        )),
        address => Ok(vec![address]),
    }
}

/// The address that another host most likely reaches `bound` at.
pub(crate) fn reachable(bound: SocketAddr) -> SocketAddr {
    if !bound.ip().is_unspecified() {
        return bound;
    }
    SocketAddr::new(
        outward()
            .or_else(|| best(&interfaces().unwrap_or_default()))
            .unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        bound.port(),
    )
}

/// Our address on the default route. Connecting a UDP socket chooses a route and sends nothing; the addresses
/// are such as are reserved for documentation.
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
fn best(interfaces: &[Interface]) -> Option<IpAddr> {
    interfaces
        .iter()
        .filter(|interface| interface.up)
        .flat_map(|interface| {
            interface
                .addresses
                .iter()
                .map(move |ip| (interface.kind, *ip))
        })
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

fn wrong(text: &str, why: String) -> Error {
    Error::Address {
        address: text.escape_debug().to_string(),
        why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> String {
        let found = resolve(text, 12345).expect(text);
        assert_eq!(found.len(), 1, "{text}");
        found[0].to_string()
    }

    #[test]
    fn addresses_are_read_with_and_without_a_port() {
        assert_eq!(one("10.0.0.2"), "10.0.0.2:12345");
        assert_eq!(one("10.0.0.2:7"), "10.0.0.2:7");
        assert_eq!(one("::1"), "[::1]:12345");
        assert_eq!(one("[::1]"), "[::1]:12345");
        assert_eq!(one("[::1]:7"), "[::1]:7");
        assert_eq!(one("fe80::1%lo"), "[fe80::1%1]:12345");
        assert_eq!(one("[fe80::1%lo]"), "[fe80::1%1]:12345");
        assert_eq!(one("[fe80::1%lo]:7"), "[fe80::1%1]:7");
        assert_eq!(one("[fe80::1%1]:7"), "[fe80::1%1]:7");
        assert!(
            resolve("localhost:7", 1)
                .expect("localhost")
                .iter()
                .all(|address| address.port() == 7)
        );
    }

    #[test]
    fn what_is_no_address_is_named() {
        for text in [
            "",
            "10.0.0.2:99999",
            "no such host",
            "a:b",
            "fe80::1",
            "[fe80::1]:7",
            "[fe80::1%none-such]:7",
            "[fe80::1%lo]:x",
        ] {
            let error = resolve(text, 12345).expect_err(text);
            assert!(error.to_string().contains(&format!("`{text}`")), "{error}");
        }
    }

    #[test]
    fn a_bound_address_is_reachable_as_it_is() {
        let bound = SocketAddr::from(([127, 0, 0, 1], 5));
        assert_eq!(reachable(bound), bound);
        for every in [
            IpAddr::from(Ipv4Addr::UNSPECIFIED),
            Ipv6Addr::UNSPECIFIED.into(),
        ] {
            let open = reachable(SocketAddr::new(every, 5));
            assert!(!open.ip().is_unspecified());
            assert_eq!(open.port(), 5);
        }
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
        let all = [
            interface(InterfaceKind::Loopback, true, &["127.0.0.1"]),
            interface(InterfaceKind::Physical, true, &["fe80::1"]),
            interface(InterfaceKind::Physical, true, &["fd00::1"]),
            interface(InterfaceKind::Bridge, true, &["172.17.0.1"]),
            interface(InterfaceKind::Physical, false, &["10.0.0.1"]),
            interface(InterfaceKind::Physical, true, &["10.0.1.1"]),
        ];
        let best = |count| best(&all[..count]).map(|ip| ip.to_string());
        assert_eq!(best(6).as_deref(), Some("10.0.1.1"));
        assert_eq!(best(5).as_deref(), Some("172.17.0.1"));
        assert_eq!(best(3).as_deref(), Some("fd00::1"));
        assert_eq!(best(2), None);
        // Routes lead to it, wherever it stands.
        let routed = interface(
            InterfaceKind::Loopback,
            true,
            &["127.0.0.1", "10.255.0.1", "::1"],
        );
        let [lo, link, ..] = &all;
        let alone = [lo.clone(), link.clone(), routed.clone()];
        let found = super::best(&alone).map(|ip| ip.to_string());
        assert_eq!(found.as_deref(), Some("10.255.0.1"));
        let found = super::best(&[routed, all[2].clone()]).map(|ip| ip.to_string());
        assert_eq!(found.as_deref(), Some("fd00::1"));
    }
}

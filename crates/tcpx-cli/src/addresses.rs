//! Addresses that a person types.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

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
}

//! Flow rules as the card keeps them.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::bound::Flow;
use super::error::{DevmemError, Why};

/// TCP packets that go to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Rule {
    /// Destination of the packets. An unspecified address stands for all.
    pub local: SocketAddr,
    /// Their source; `None` for all.
    pub remote: Option<SocketAddr>,
    /// The queue they go to.
    pub queue: u32,
}

impl Rule {
    /// The rule for a flow. IPv4 addresses in IPv6 clothes, as sockets for both families report
    /// them, become what the packets have.
    pub(super) fn new(flow: Flow, queue: u32) -> Result<Self, DevmemError> {
        let bad = |why| {
            let text = format!(
                "{flow} is no flow for a rule: {why}; use both addresses of one established connection"
            );
            Err(DevmemError::new(Why::BadFlow, text))
        };
        let plain =
            |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
        let rule = Self {
            local: plain(flow.local),
            remote: flow.remote.map(plain),
            queue,
        };
        if rule.local.port() == 0 {
            return bad("the local port is 0");
        }
        match rule.remote {
            Some(remote) if remote.is_ipv4() != rule.local.is_ipv4() => {
                bad("its ends are of different families")
            }
            Some(remote) if remote.port() == 0 || remote.ip().is_unspecified() => {
                bad("the remote address is not one of a connection")
            }
            _ => Ok(rule),
        }
    }

    /// Whether both match the same packets, to whatever queue.
    pub(super) fn same_packets(&self, other: &Self) -> bool {
        (self.local, self.remote) == (other.local, other.remote)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flow = Flow {
            local: self.local,
            remote: self.remote,
        };
        write!(f, "{flow} to queue {}", self.queue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(local: &str, remote: Option<&str>) -> Flow {
        Flow {
            local: local.parse().unwrap(),
            remote: remote.map(|remote| remote.parse().unwrap()),
        }
    }

    #[test]
    fn dual_stack_addresses_become_those_of_packets() {
        let rule = Rule::new(flow("[::ffff:10.0.0.2]:5", Some("[::ffff:10.0.0.1]:6")), 1).unwrap();
        assert_eq!(
            rule,
            Rule::new(flow("10.0.0.2:5", Some("10.0.0.1:6")), 1).unwrap()
        );
    }

    #[test]
    fn what_is_no_flow_is_refused() {
        for (local, remote) in [
            ("10.0.0.2:0", None),
            ("10.0.0.2:5", Some("[fd00::1]:6")),
            ("10.0.0.2:5", Some("10.0.0.1:0")),
            ("10.0.0.2:5", Some("0.0.0.0:6")),
        ] {
            let refused = Rule::new(flow(local, remote), 1).unwrap_err();
            assert_eq!(refused.why(), Why::BadFlow, "{refused}");
        }
    }
}

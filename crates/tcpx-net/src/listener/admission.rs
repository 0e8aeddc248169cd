//! Which connection gives way when strangers crowd the listener.
//!
//! A client speaks first and at once, so among those that have said nothing it is one for an instant
//! only. The victim is drawn at random, because whoever evicts the oldest can be made to evict
//! exactly those that have a long way; and from the source that has the most, so that many
//! connections from one place push each other out and nobody else.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

/// Most connections that have not proved themselves yet.
pub(super) const MOST: usize = 1024;
/// Most of them from one source.
pub(super) const MOST_PER_SOURCE: usize = 64;

/// Whose connection it is: an IPv4 address, or an IPv6 network of 64 bits, which one host has all of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Source(IpAddr);

impl Source {
    pub(super) fn of(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) & (u128::MAX << 64);
                IpAddr::V6(Ipv6Addr::from(network))
            }
            address => address,
        })
    }
}

/// Numbers that a stranger cannot foresee (xorshift from the system's randomness).
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new() -> Self {
        let mut seed = [0; 8];
        // Without randomness nobody can be authenticated either, which says so.
        let _ = getrandom::fill(&mut seed);
        Self(u64::from_ne_bytes(seed) | 1)
    }

    /// A number below `limit`, which is not 0.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }
}

/// A connection that has not proved itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) source: Source,
    /// It has said something that a client says.
    pub(super) has_spoken: bool,
}

/// The one that gives way to a newcomer from `source`, if one must. `draw(n)` gives a number below `n`.
pub(super) fn victim(
    candidates: &[Candidate],
    source: Source,
    draw: impl FnOnce(usize) -> usize,
) -> Option<usize> {
    let of = |wanted: Source| {
        candidates
            .iter()
            .filter(move |one| one.source == wanted)
            .count()
    };
    let crowded = if of(source) >= MOST_PER_SOURCE {
        source
    } else if candidates.len() >= MOST {
        largest(candidates)?
    } else {
        return None;
    };
    any(candidates, crowded, draw)
}

/// The one that gives way where the system has no descriptor left.
pub(super) fn any_victim(
    candidates: &[Candidate],
    draw: impl FnOnce(usize) -> usize,
) -> Option<usize> {
    any(candidates, largest(candidates)?, draw)
}

/// The source with the most connections; of several such, all are as good.
fn largest(candidates: &[Candidate]) -> Option<Source> {
    let mut counts: HashMap<Source, usize> = HashMap::new();
    for one in candidates {
        // Who has spoken may be a client: a source is crowded by those that have not.
        *counts.entry(one.source).or_default() += usize::from(!one.has_spoken);
    }
    counts
        .into_iter()
        .max_by_key(|(_, count)| *count)
        .map(|(source, _)| source)
}

/// One of a source, drawn; of those that have said nothing if there are any.
///
/// Where every source has one connection, all that are silent count as one source.
fn any(
    candidates: &[Candidate],
    source: Source,
    draw: impl FnOnce(usize) -> usize,
) -> Option<usize> {
    let silent_of_source = |one: &Candidate| one.source == source && !one.has_spoken;
    let count = candidates
        .iter()
        .filter(|one| silent_of_source(one))
        .count();
    let choose: Box<dyn Fn(&Candidate) -> bool> = match count {
        0 if candidates
            .iter()
            .any(|one| one.source == source && one.has_spoken) =>
        {
            Box::new(|one| one.source == source)
        }
        0 => return None,
        1 => Box::new(|one| !one.has_spoken),
        _ => Box::new(silent_of_source),
    };
    let chosen: Vec<usize> = (0..candidates.len())
        .filter(|at| choose(&candidates[*at]))
        .collect();
    chosen.get(draw(chosen.len())).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(last: u16) -> Source {
        let [high, low] = last.to_be_bytes();
        Source::of(IpAddr::from([10, 0, high, low]))
    }

    fn silent(source: Source) -> Candidate {
        Candidate {
            source,
            has_spoken: false,
        }
    }

    fn spoken(source: Source) -> Candidate {
        Candidate {
            source,
            has_spoken: true,
        }
    }

    /// Numbers that a test can repeat.
    fn draws(seed: u64) -> impl FnMut(usize) -> usize {
        let mut state = seed;
        move |below| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as usize % below
        }
    }

    #[test]
    fn a_network_of_ipv6_is_one_source() {
        let source = |text: &str| Source::of(text.parse().unwrap());
        assert_eq!(source("2001:db8:1:2::1"), source("2001:db8:1:2:ffff::9"));
        assert_ne!(source("2001:db8:1:2::1"), source("2001:db8:1:3::1"));
        assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
        assert_ne!(source("10.0.0.1"), source("10.0.0.2"));
    }

    #[test]
    fn nobody_gives_way_while_there_is_room() {
        let few = vec![silent(v4(1)); MOST_PER_SOURCE - 1];
        assert_eq!(victim(&few, v4(1), |_| 0), None);
        assert_eq!(any_victim(&[], |_| 0), None);
    }

    #[test]
    fn a_client_outlives_strangers_from_its_own_address() {
        let mut random = draws(7);
        let mut crowd = vec![spoken(v4(1))];
        for _ in 0..100_000 {
            if let Some(gone) = victim(&crowd, v4(1), &mut random) {
                assert!(!crowd[gone].has_spoken);
                crowd.remove(gone);
            }
            crowd.push(silent(v4(1)));
            assert!(crowd.len() <= MOST_PER_SOURCE);
        }
        assert!(crowd.iter().any(|one| one.has_spoken));
    }

    #[test]
    fn a_client_outlives_strangers_from_everywhere() {
        let mut random = draws(9);
        let mut crowd = vec![spoken(v4(1))];
        for stranger in 0..50_000u16 {
            let source = v4(2 + stranger % 2000);
            if let Some(gone) = victim(&crowd, source, &mut random) {
                assert!(!crowd[gone].has_spoken);
                crowd.remove(gone);
            }
            crowd.push(silent(source));
            assert!(crowd.len() <= MOST);
        }
        assert!(crowd.iter().any(|one| one.has_spoken));
    }

    #[test]
    fn a_crowded_source_pushes_out_its_own() {
        let mut crowd: Vec<_> = (0..MOST - 40)
            .map(|at| silent(v4(at as u16 + 100)))
            .collect();
        crowd.extend(vec![silent(v4(1)); 40]);
        let gone = victim(&crowd, v4(7), draws(3)).unwrap();
        assert_eq!(crowd[gone].source, v4(1));
    }

    #[test]
    fn where_all_have_spoken_one_of_the_source_gives_way() {
        let crowd = vec![spoken(v4(1)); MOST_PER_SOURCE];
        assert!(victim(&crowd, v4(1), draws(1)).is_some());
    }
}

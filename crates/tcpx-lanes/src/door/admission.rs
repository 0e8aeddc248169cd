//! Which connection gives way when strangers crowd the listener.
//!
//! A client speaks first and at once, so among those that have said nothing it is one for an
//! instant only. The victim is drawn at random, because whoever evicts the oldest can be made to
//! evict exactly those that have a long way; and of two that are drawn it is the one whose source
//! has more, so that many connections from one place push each other out, and hardly ever one that
//! is alone.

use std::collections::{HashSet, VecDeque};
use std::net::{IpAddr, Ipv6Addr};

use crate::hello::entropy;

/// Most connections that have not proved themselves yet.
pub(super) const MOST: usize = 1024;
/// Most of them from one source.
pub(super) const MOST_PER_SOURCE: usize = 64;

/// Whose connection it is: an IPv4 address, or an IPv6 network of 64 bits, which one host has all
/// of.
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

/// A number below `limit` that a stranger cannot foresee.
pub(super) fn draw(limit: usize) -> usize {
    // Without randomness nobody can be authenticated either, which says so.
    let drawn = u64::from_ne_bytes(entropy().unwrap_or_default());
    (drawn % limit.max(1) as u64) as usize
}

/// Hellos that are remembered: of clients, for others cannot make one that counts.
const MOST_SEEN: usize = 16 << 10;

/// The hellos that came last. One that comes again was recorded on the way, and spares nobody.
#[derive(Debug, Default)]
pub(super) struct Seen {
    marks: HashSet<[u8; 16]>,
    order: VecDeque<[u8; 16]>,
}

impl Seen {
    /// Whether it comes for the first time.
    pub(super) fn is_fresh(&mut self, mark: &[u8; 16]) -> bool {
        let is_fresh = self.marks.insert(*mark);
        if is_fresh {
            self.order.push_back(*mark);
            if self.order.len() > MOST_SEEN
                && let Some(oldest) = self.order.pop_front()
            {
                self.marks.remove(&oldest);
            }
        }
        is_fresh
    }
}

/// A connection that has not proved itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) source: Source,
    /// It said what a client says within a round trip.
    pub(super) has_spoken: bool,
}

/// The one that gives way to a newcomer from `source`, if one must. `draw(n)` gives a number below
/// `n`.
pub(super) fn victim(
    candidates: impl Iterator<Item = Candidate> + Clone,
    source: Source,
    draw: impl FnMut(usize) -> usize,
) -> Option<usize> {
    let is_its = |one: &Candidate| one.source == source;
    if candidates.clone().filter(is_its).count() >= MOST_PER_SOURCE {
        any(candidates, is_its, draw)
    } else if candidates.clone().count() >= MOST {
        any_victim(candidates, draw)
    } else {
        None
    }
}

/// The one that gives way where the system has no descriptor left.
pub(super) fn any_victim(
    candidates: impl Iterator<Item = Candidate> + Clone,
    draw: impl FnMut(usize) -> usize,
) -> Option<usize> {
    any(candidates, |_| true, draw)
}

/// One of those that are `eligible`; of those that have said nothing if there are any.
fn any(
    candidates: impl Iterator<Item = Candidate> + Clone,
    eligible: impl Fn(&Candidate) -> bool,
    mut draw: impl FnMut(usize) -> usize,
) -> Option<usize> {
    let silent = |one: &Candidate| eligible(one) && !one.has_spoken;
    let all_spoke = !candidates.clone().any(|one| silent(&one));
    let chosen = candidates
        .clone()
        .enumerate()
        .filter(|(_, one)| eligible(one) && (all_spoke || !one.has_spoken));
    let count = chosen.clone().count();
    if count == 0 {
        return None;
    }
    let two = [draw(count), draw(count)].map(|at| chosen.clone().nth(at));
    let crowd = |(_, drawn): &(usize, Candidate)| {
        let same = candidates.clone().filter(|one| one.source == drawn.source);
        same.count()
    };
    let (index, _) = two.into_iter().flatten().max_by_key(crowd)?;
    Some(index)
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
        assert_eq!(victim(few.iter().copied(), v4(1), |_| 0), None);
        assert_eq!(any_victim([].into_iter(), |_| 0), None);
    }

    #[test]
    fn a_client_outlives_strangers_from_its_own_address() {
        let mut random = draws(7);
        let mut crowd = vec![spoken(v4(1))];
        for _ in 0..100_000 {
            if let Some(gone) = victim(crowd.iter().copied(), v4(1), &mut random) {
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
            if let Some(gone) = victim(crowd.iter().copied(), source, &mut random) {
                assert!(!crowd[gone].has_spoken);
                crowd.remove(gone);
            }
            crowd.push(silent(source));
            assert!(crowd.len() <= MOST);
        }
        assert!(crowd.iter().any(|one| one.has_spoken));
    }

    /// Its hello is late, as where the network lost it: meanwhile others come for a second, at
    /// 15,000 a second.
    #[test]
    fn a_silent_client_outlives_sources_with_many_connections() {
        let mut random = draws(3);
        let client = silent(v4(1));
        let stranger = |number: usize| silent(v4(2 + (number % 17) as u16));
        let mut crowd: Vec<_> = (1..MOST).map(stranger).chain([client]).collect();
        for number in 0..15_000 {
            let newcomer = stranger(number);
            let gone = victim(crowd.iter().copied(), newcomer.source, &mut random);
            crowd.swap_remove(gone.expect("there are too many"));
            crowd.push(newcomer);
        }
        assert!(crowd.iter().any(|one| one.source == client.source));
    }

    #[test]
    fn a_hello_is_fresh_once_while_it_is_remembered() {
        let mark = |number: usize| (number as u128).to_le_bytes();
        let mut seen = Seen::default();
        assert!((0..MOST_SEEN).all(|number| seen.is_fresh(&mark(number))));
        assert!(!(0..MOST_SEEN).any(|number| seen.is_fresh(&mark(number))));
        assert!(seen.is_fresh(&mark(MOST_SEEN)) && seen.is_fresh(&mark(0)));
        assert_eq!(seen.marks.len(), MOST_SEEN);
    }

    #[test]
    fn where_all_have_spoken_one_of_the_source_gives_way() {
        let crowd = vec![spoken(v4(1)); MOST_PER_SOURCE];
        assert!(victim(crowd.into_iter(), v4(1), draws(1)).is_some());
    }
}

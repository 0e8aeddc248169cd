//! Which of our cards talks to which of the peer's.

use std::net::SocketAddr;

use super::advert::NicAddress;
use tcpx_lanes::interfaces::same_network;

use crate::channel::Way;

/// Most pairs that are tried.
const MAX_PAIRS: usize = 32;

/// The pairs of cards that lanes are spread over, each from one of our addresses to one of the
/// peer's: every card of the side that has more of them once. Cards of one network come together
/// first; else their order decides, which hosts of one kind number alike. `port` is the peer's.
///
/// Whether a pair works is for the first connection over it to show.
pub(super) fn pair_up(ours: &[NicAddress], theirs: &[NicAddress], port: u16) -> Vec<Way> {
    let (our_cards, their_cards) = (cards(ours), cards(theirs));
    let most = our_cards.len().max(their_cards.len()).min(MAX_PAIRS);
    let mut found: Vec<(Candidate<'_>, bool)> = Vec::new();
    let mut our_uses = vec![0u32; our_cards.len()];
    let mut their_uses = vec![0u32; their_cards.len()];
    for _ in 0..most {
        let candidates = our_cards.iter().enumerate().flat_map(|(left, our)| {
            let their_cards = their_cards.iter().enumerate();
            their_cards.filter_map(move |(right, their)| {
                let best = best(ours, *our, theirs, *their)?;
                Some((left, right, best))
            })
        });
        let chosen = candidates
            .filter(|(.., candidate)| !found.iter().any(|(known, _)| known == candidate))
            .min_by_key(|(left, right, candidate)| {
                let uses = our_uses[*left].max(their_uses[*right]);
                let apart = left.abs_diff(*right);
                let sum = our_uses[*left] + their_uses[*right];
                (!candidate.same_network(), uses, sum, apart, *left, *right)
            });
        let Some((left, right, candidate)) = chosen else {
            break;
        };
        our_uses[left] += 1;
        their_uses[right] += 1;
        found.push((candidate, candidate.same_network()));
    }
    // Through a gateway only where no two cards share a network: gateways join what is apart.
    let direct = found.iter().any(|(_, same)| *same);
    found
        .into_iter()
        .filter(|(_, same)| *same || !direct)
        .map(|(candidate, _)| Way {
            local: Some(candidate.our.address),
            interface: Some(candidate.our.name.clone()),
            peer: SocketAddr::new(candidate.their.address, port),
        })
        .collect()
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate<'a> {
    our: &'a NicAddress,
    their: &'a NicAddress,
}

impl Candidate<'_> {
    /// One family, and not from a card into this host itself.
    fn is_possible(self) -> bool {
        let (our, their) = (self.our.address, self.their.address);
        our.is_ipv4() == their.is_ipv4() && our.is_loopback() == their.is_loopback()
    }

    fn same_network(self) -> bool {
        let prefix = self.our.prefix.min(self.their.prefix);
        same_network(self.our.address, self.their.address, prefix)
    }
}

fn cards(addresses: &[NicAddress]) -> Vec<u8> {
    let mut cards: Vec<u8> = Vec::new();
    for one in addresses {
        if !cards.contains(&one.card) {
            cards.push(one.card);
        }
    }
    cards
}

/// The addresses over which two cards talk: of one network if they can, else of one family.
fn best<'a>(
    ours: &'a [NicAddress],
    our_card: u8,
    theirs: &'a [NicAddress],
    their_card: u8,
) -> Option<Candidate<'a>> {
    let of_card = |all: &'a [NicAddress], card| all.iter().filter(move |one| one.card == card);
    of_card(ours, our_card)
        .flat_map(|our| of_card(theirs, their_card).map(move |their| Candidate { our, their }))
        .filter(|candidate| candidate.is_possible())
        .min_by_key(|candidate| (!candidate.same_network(), candidate.our.address.is_ipv6()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(addresses: &[(u8, &str)]) -> Vec<NicAddress> {
        addresses
            .iter()
            .map(|(card, text)| {
                let (address, prefix) = text.split_once('/').unwrap_or((text, "24"));
                NicAddress {
                    card: *card,
                    name: format!("eth{card}"),
                    address: address.parse().unwrap(),
                    prefix: prefix.parse().unwrap(),
                }
            })
            .collect()
    }

    fn pairs(ours: &[(u8, &str)], theirs: &[(u8, &str)]) -> Vec<String> {
        pair_up(&side(ours), &side(theirs), 7)
            .into_iter()
            .map(|route| format!("{}>{}", route.local.unwrap(), route.peer.ip()))
            .collect()
    }

    #[test]
    fn cards_of_one_network_come_together_whatever_their_order() {
        assert_eq!(
            pairs(
                &[(0, "10.0.0.1"), (1, "10.0.1.1"), (2, "10.0.2.1")],
                &[(0, "10.0.2.2"), (1, "10.0.0.2"), (2, "10.0.1.2")],
            ),
            [
                "10.0.0.1>10.0.0.2",
                "10.0.1.1>10.0.1.2",
                "10.0.2.1>10.0.2.2"
            ]
        );
    }

    #[test]
    fn in_one_flat_network_each_card_is_used_once() {
        assert_eq!(
            pairs(
                &[(0, "10.0.0.1"), (1, "10.0.0.2"), (2, "10.0.0.3")],
                &[(0, "10.0.0.11"), (1, "10.0.0.12"), (2, "10.0.0.13")],
            ),
            [
                "10.0.0.1>10.0.0.11",
                "10.0.0.2>10.0.0.12",
                "10.0.0.3>10.0.0.13"
            ]
        );
    }

    #[test]
    fn the_side_with_more_cards_uses_all_of_them() {
        assert_eq!(
            pairs(
                &[(0, "10.0.0.1")],
                &[(0, "10.0.0.11"), (1, "10.0.0.12"), (2, "10.0.0.13")],
            ),
            [
                "10.0.0.1>10.0.0.11",
                "10.0.0.1>10.0.0.12",
                "10.0.0.1>10.0.0.13"
            ]
        );
    }

    #[test]
    fn networks_of_one_side_alone_are_left_alone() {
        assert_eq!(
            pairs(
                &[(0, "10.0.0.1"), (1, "10.0.1.1")],
                &[(0, "10.0.0.2"), (1, "192.168.3.2")],
            ),
            ["10.0.0.1>10.0.0.2"]
        );
    }

    #[test]
    fn without_a_shared_network_their_order_decides() {
        assert_eq!(
            pairs(
                &[(0, "10.0.0.1"), (1, "10.0.1.1")],
                &[(0, "10.1.0.2"), (1, "10.1.1.2")],
            ),
            ["10.0.0.1>10.1.0.2", "10.0.1.1>10.1.1.2"]
        );
    }

    #[test]
    fn families_do_not_mix_and_nobody_is_sent_to_his_own_host() {
        assert_eq!(pairs(&[(0, "10.0.0.1")], &[(0, "127.0.0.1/8")]), [""; 0]);
        assert_eq!(
            pairs(&[(0, "10.0.0.1"), (0, "fd00::1/64")], &[(0, "fd00::2/64")],),
            ["fd00::1>fd00::2"]
        );
        assert_eq!(pairs(&[(0, "10.0.0.1")], &[(0, "fd00::2/64")]), [""; 0]);
    }
}

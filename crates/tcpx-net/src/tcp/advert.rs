//! What each side tells the other before lanes are opened: how many it wants, and where it can be
//! reached.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::shared::MAX_LANES;

/// First bytes of the message, then its version.
const MAGIC: [u8; 4] = *b"TCPL";
const VERSION: u16 = 3;
/// Bytes before the addresses: magic, version u16, lanes u16, flags u8, number of addresses u8, two
/// zero bytes.
const HEAD_BYTES: usize = 12;
/// Of an address: card u8, family u8 (4 or 6), prefix u8, zero u8, 16 bytes (an IPv4 address fills
/// the first four), name of the card in 16 bytes.
const ENTRY_BYTES: usize = 36;
/// Bytes of a card's name; Linux allows 15.
const NAME_BYTES: usize = 16;
/// Flag: the number of lanes was asked for by a person.
const ASKED: u8 = 1;
/// Flag: payload is to be encrypted.
const ENCRYPT: u8 = 2;
/// Flag: a peer on the same host may prove itself.
const DOOR: u8 = 4;

/// Most addresses that are told.
pub(super) const MAX_ADDRESSES: usize = 64;

/// One address of a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NicAddress {
    /// Addresses with the same number belong to the same card.
    pub(super) card: u8,
    pub(super) name: String,
    pub(super) address: IpAddr,
    /// Leading bits that its network shares.
    pub(super) prefix: u8,
}

/// A side's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Advert {
    /// Lanes wanted, 1 to [`MAX_LANES`].
    pub(super) lanes: u16,
    /// They were asked for; otherwise cards may add to them.
    pub(super) asked: bool,
    /// Payload is to be encrypted: both sides say so, or none.
    pub(super) encrypt: bool,
    /// A peer on the same host may prove itself: another round follows where both sides say so.
    pub(super) has_door: bool,
    pub(super) addresses: Vec<NicAddress>,
}

impl Advert {
    pub(super) fn encode(&self) -> Vec<u8> {
        let told = self.addresses.len().min(MAX_ADDRESSES);
        let mut bytes = Vec::with_capacity(HEAD_BYTES + told * ENTRY_BYTES);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.lanes.to_le_bytes());
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        let flags =
            flag(self.asked, ASKED) | flag(self.encrypt, ENCRYPT) | flag(self.has_door, DOOR);
        // At most MAX_ADDRESSES.
        bytes.extend_from_slice(&[flags, told as u8, 0, 0]);
        for entry in self.addresses.iter().take(told) {
            let mut address = [0; 16];
            let family = match entry.address {
                IpAddr::V4(v4) => {
                    address[..4].copy_from_slice(&v4.octets());
                    4
                }
                IpAddr::V6(v6) => {
                    address = v6.octets();
                    6
                }
            };
            let mut name = [0; NAME_BYTES];
            let length = entry.name.len().min(NAME_BYTES);
            name[..length].copy_from_slice(&entry.name.as_bytes()[..length]);
            bytes.extend_from_slice(&[entry.card, family, entry.prefix, 0]);
            bytes.extend_from_slice(&address);
            bytes.extend_from_slice(&name);
        }
        bytes
    }

    /// Reads a message.
    ///
    /// # Errors
    /// What was expected and what arrived.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, (String, String)> {
        let head = |bytes: &[u8]| {
            let start = bytes.get(..16).unwrap_or(bytes);
            format!(
                "{} bytes that begin \"{}\"",
                bytes.len(),
                start.escape_ascii()
            )
        };
        let Some((&[m0, m1, m2, m3, v0, v1, l0, l1, flags, count, z0, z1], rest)) =
            bytes.split_first_chunk::<HEAD_BYTES>()
        else {
            return Err((
                format!("a set-up message of version {VERSION}"),
                head(bytes),
            ));
        };
        if [m0, m1, m2, m3] != MAGIC || u16::from_le_bytes([v0, v1]) != VERSION {
            return Err((
                format!("a set-up message of version {VERSION}"),
                head(bytes),
            ));
        }
        let lanes = u16::from_le_bytes([l0, l1]);
        if !(1..=MAX_LANES).contains(&lanes) {
            return Err((format!("1 to {MAX_LANES} lanes"), format!("{lanes}")));
        }
        let (entries, odd) = rest.as_chunks::<ENTRY_BYTES>();
        let counted = entries.len() == usize::from(count) && entries.len() <= MAX_ADDRESSES;
        if !counted
            || !odd.is_empty()
            || flags & !(ASKED | ENCRYPT | DOOR) != 0
            || [z0, z1] != [0, 0]
        {
            return Err((
                format!(
                    "at most {MAX_ADDRESSES} addresses of {ENTRY_BYTES} bytes, as many as said"
                ),
                format!("{} bytes for {count} of them, flags {flags}", rest.len()),
            ));
        }
        let addresses = entries.iter().map(decode_entry).collect::<Result<_, _>>()?;
        Ok(Self {
            lanes,
            asked: flags & ASKED != 0,
            encrypt: flags & ENCRYPT != 0,
            has_door: flags & DOOR != 0,
            addresses,
        })
    }

    /// How many cards it names.
    pub(super) fn cards(&self) -> u16 {
        let mut cards: Vec<u8> = self.addresses.iter().map(|one| one.card).collect();
        cards.sort_unstable();
        cards.dedup();
        u16::try_from(cards.len()).unwrap_or(MAX_LANES)
    }

    /// The number of lanes that both sides come to: the lesser wish. Where nobody asked for a
    /// number it is enough for every pair of cards to have as many as the others.
    pub(super) fn agree(&self, theirs: &Self) -> u16 {
        let lanes = match (self.asked, theirs.asked) {
            (true, false) => self.lanes,
            (false, true) => theirs.lanes,
            _ => self.lanes.min(theirs.lanes),
        };
        if self.asked || theirs.asked {
            return lanes;
        }
        let pairs = self.pairs(theirs);
        lanes.div_ceil(pairs).saturating_mul(pairs).min(MAX_LANES)
    }

    /// How many of the lanes are open from the start: all, but where a side with few cores wishes
    /// no more than two for each pair of cards, one for each. The others are opened once there is
    /// work for them.
    pub(super) fn at_first(&self, theirs: &Self) -> u16 {
        let (lanes, pairs) = (self.agree(theirs), self.pairs(theirs));
        let is_few = !self.asked && !theirs.asked && lanes <= 2 * pairs;
        if is_few { pairs.min(lanes) } else { lanes }
    }

    fn pairs(&self, theirs: &Self) -> u16 {
        self.cards().max(theirs.cards()).max(1)
    }
}

fn decode_entry(entry: &[u8; ENTRY_BYTES]) -> Result<NicAddress, (String, String)> {
    let &[card, family, prefix, zero, ..] = entry;
    let mut octets = [0; 16];
    octets.copy_from_slice(&entry[4..20]);
    let (address, most) = match family {
        4 => {
            let [a, b, c, d, rest @ ..] = octets;
            let v4: IpAddr = Ipv4Addr::from([a, b, c, d]).into();
            (v4, if rest == [0; 12] { 32 } else { 0 })
        }
        6 => (Ipv6Addr::from(octets).into(), 128),
        _ => (IpAddr::from([0, 0, 0, 0]), 0),
    };
    let name = entry[20..].split(|byte| *byte == 0).next().unwrap_or(&[]);
    let name = name.escape_ascii().to_string();
    // Nothing that would have this side talk to itself or to everybody.
    let strange = address.is_unspecified() || address.is_multicast() || prefix > most || zero != 0;
    if strange {
        return Err((
            "the address of a card".to_owned(),
            format!("family {family}, {address}/{prefix} of {name:?}"),
        ));
    }
    Ok(NicAddress {
        card,
        name,
        address,
        prefix,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn advert(lanes: u16, asked: bool, cards: &[(u8, &str)]) -> Advert {
        let addresses = cards
            .iter()
            .map(|(card, address)| NicAddress {
                card: *card,
                name: format!("eth{card}"),
                address: address.parse().unwrap(),
                prefix: 24,
            })
            .collect();
        Advert {
            lanes,
            asked,
            encrypt: lanes.is_multiple_of(2),
            has_door: lanes == 1,
            addresses,
        }
    }

    #[test]
    fn a_message_reads_back() {
        for advert in [
            advert(1, false, &[]),
            advert(
                64,
                true,
                &[(0, "10.0.0.1"), (0, "fd00::1"), (1, "10.0.1.1")],
            ),
        ] {
            assert_eq!(Advert::decode(&advert.encode()), Ok(advert));
        }
    }

    #[test]
    fn lanes_suit_both_sides_cards_unless_asked_for() {
        let one = advert(6, false, &[(0, "10.0.0.1")]);
        let four = [
            (0, "10.0.0.2"),
            (1, "10.0.1.2"),
            (2, "10.0.2.2"),
            (3, "10.0.3.2"),
        ];
        assert_eq!(one.agree(&advert(8, false, &[])), 6);
        assert_eq!(one.agree(&advert(8, false, &four)), 8);
        assert_eq!(advert(1, false, &four).agree(&advert(1, false, &four)), 4);
        assert_eq!(advert(3, true, &four).agree(&advert(12, false, &four)), 3);
        assert_eq!(advert(12, false, &four).agree(&advert(3, true, &four)), 3);
        assert_eq!(advert(5, true, &four).agree(&advert(2, true, &[])), 2);
    }

    #[test]
    fn two_lanes_that_nobody_asked_for_are_opened_one_by_one() {
        let cards = [(0, "10.0.0.2"), (1, "10.0.1.2")];
        let at_first = |lanes, asked, other| {
            let (one, other) = (advert(lanes, asked, &[]), advert(other, false, &cards));
            let (first, same) = (one.at_first(&other), other.at_first(&one));
            assert_eq!(first, same);
            (one.agree(&other), first)
        };
        assert_eq!(at_first(2, false, 12), (2, 2));
        assert_eq!(at_first(4, false, 12), (4, 2));
        assert_eq!(at_first(6, false, 12), (6, 6));
        assert_eq!(at_first(4, true, 12), (4, 4));
        let alone = advert(2, false, &[]);
        assert_eq!((alone.agree(&alone), alone.at_first(&alone)), (2, 1));
    }

    #[test]
    fn what_is_no_message_is_named() {
        let good = advert(2, false, &[(0, "10.0.0.1")]).encode();
        let changed = |at: usize, to: u8| {
            let mut bytes = good.clone();
            bytes[at] = to;
            Advert::decode(&bytes).unwrap_err()
        };
        assert!(changed(0, b'X').1.contains("begin \"XCPL"));
        assert!(changed(4, 1).0.contains("version 3"));
        assert_eq!(changed(6, 65).1, "65");
        assert_eq!(changed(6, 0).1, "0");
        assert!(changed(9, 2).1.contains("for 2 of them"));
        assert!(changed(8, 8).1.contains("flags 8"));
        assert!(changed(13, 5).1.contains("family 5"));
        assert!(changed(14, 33).1.contains("/33"));
        assert!(changed(16, 0xE0).1.contains("224."));
        assert!(Advert::decode(&good[..good.len() - 1]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            crate::tcp::fuzzing::run(&bytes);
        }
    }
}

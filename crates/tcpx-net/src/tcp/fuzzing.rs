//! What the fuzz target `advert` asserts, for any bytes.

use super::advert::Advert;
use super::shared::MAX_LANES;

/// Input: what a peer tells before lanes are opened.
pub fn run(data: &[u8]) {
    let Ok(advert) = Advert::decode(data) else {
        return;
    };
    let names = advert.addresses.iter().map(|one| &one.name);
    assert!(
        names
            .clone()
            .all(|name| name.bytes().all(|byte| (b' '..=b'~').contains(&byte)))
    );
    // An escaped name is longer than the field for it.
    if names.clone().all(|name| !name.contains('\\')) {
        assert_eq!(Advert::decode(&advert.encode()).as_ref(), Ok(&advert));
    }
    let own = Advert {
        lanes: 2,
        asked: false,
        encrypt: false,
        has_door: false,
        addresses: Vec::new(),
    };
    let (lanes, first) = (own.agree(&advert), own.at_first(&advert));
    assert_eq!((lanes, first), (advert.agree(&own), advert.at_first(&own)));
    assert!((1..=lanes).contains(&first) && lanes <= MAX_LANES);
}

#[cfg(test)]
#[path = "../../../../fuzz/src/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn the_corpus_breaks_nothing() {
        replay("advert", super::run);
    }
}

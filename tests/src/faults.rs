//! How often, or for how many seconds, some tests do what they do: a little, or as the variable
//! `FAULTS` says.
//!
//! | name | of what | test |
//! |---|---|---|
//! | `kills`, `resets` | a peer killed, all connections reset at a random moment | `faults` |
//! | `seconds` | random transfers, in which nothing grows | `faults` |
//! | `clients` | clients that connect while strangers come from a thousand addresses | `faults` |
//! | `flips`, `relays`, `flips_for` | flipped bits, relays at once, seconds at most, plain and as many sealed | `engine flips::`, `processes flips::` of the program |
//! | `rest` | seconds for which a process is stopped | `engine rests::` |
//! | `connects` | connects and closes, after which nothing is left | `engine resources::` |

/// The variable: `NAME=COUNT` between commas, such as `kills=200,flips=1000000`.
pub const VARIABLE: &str = "FAULTS";

/// The count of `name` in [`VARIABLE`], else `usual`.
///
/// # Panics
/// When the variable cannot be read.
pub fn count(name: &str, usual: u64) -> u64 {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    let pairs = text.split(',').filter(|pair| !pair.is_empty());
    let mut pairs = pairs.map(|pair| pair.split_once('=').expect("NAME=COUNT between commas"));
    let found = pairs.find(|(other, _)| *other == name);
    found.map_or(usual, |(_, count)| {
        count.parse().expect("a count is a number")
    })
}

/// A random number.
///
/// # Panics
/// When the system has none.
pub fn random() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("there is randomness");
    u64::from_ne_bytes(bytes)
}

//! What the fuzz target `nixl` asserts, for any bytes.

use crate::info::{ConnectionInfo, RegionInfo};
use crate::message::Message;

/// Input: what a peer says, or a part of an agent's metadata.
pub fn run(data: &[u8]) {
    if let Some(message) = Message::from_bytes(data) {
        let again = message.to_bytes();
        assert_eq!(Message::from_bytes(&again).as_ref(), Some(&message));
    }
    if let Ok(info) = ConnectionInfo::from_bytes(data) {
        let again = info.to_bytes();
        assert_eq!(ConnectionInfo::from_bytes(&again).as_ref(), Ok(&info));
    }
    if let Some(info) = RegionInfo::from_bytes(data) {
        assert_eq!(info.to_bytes(), data, "an accepted region is canonical");
    }
}

#[cfg(test)]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn the_corpus_breaks_nothing() {
        replay("nixl", super::run);
    }
}

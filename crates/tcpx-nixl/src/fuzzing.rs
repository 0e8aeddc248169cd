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
mod tests {
    #[test]
    fn the_corpus_breaks_nothing() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/nixl");
        let mut inputs = 0;
        // A published package comes without the corpus.
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            super::run(&std::fs::read(entry.unwrap().path()).unwrap());
            inputs += 1;
        }
        let in_the_repository = std::path::Path::new(folder).parent().unwrap().exists();
        assert_eq!(inputs > 0, in_the_repository);
    }
}

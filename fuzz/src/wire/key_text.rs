//! The text of a key.

use tcpx_wire::key::AnyKey;

/// Input: a text that may be a key's.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match AnyKey::parse(&text) {
        Ok(key) => {
            let again = match &key {
                AnyKey::Server(key) => key.to_text(),
                AnyKey::Client(key) => key.to_text(),
            };
            assert_eq!(
                text.trim().to_ascii_uppercase(),
                again,
                "an accepted text is canonical but for its case"
            );
            assert!(!format!("{key:?}").contains(&again), "shown by accident");
        }
        // Errors go to logs.
        Err(error) => {
            // No word of ours is that long.
            let (text, shown) = (text.trim(), error.to_string());
            let is_long = text.len() >= 16 && !text.contains(char::is_whitespace);
            assert!(!is_long || !shown.contains(text), "{shown}");
        }
    }
}

//! The text of a key.

use tcpx_wire::key::{AnyKey, KeyName};

/// Input: a text that may be a key's, or a client's name.
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
    if let Ok(name) = text.parse::<KeyName>() {
        assert_eq!(name.as_str(), text, "a name is as it was written");
        let mut bytes = name.as_str().bytes();
        assert!(bytes.all(|byte| byte != b'/' && !byte.is_ascii_control()));
    }
}

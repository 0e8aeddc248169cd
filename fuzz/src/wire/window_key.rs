//! The key of a window.

use tcpx_wire::WindowKey;

/// Input: a key's bytes.
pub fn run(data: &[u8]) {
    if let Ok(key) = WindowKey::from_bytes(data) {
        assert_eq!(key.to_bytes(), data, "an accepted key is canonical");
    }
}

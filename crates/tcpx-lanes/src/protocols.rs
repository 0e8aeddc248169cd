//! What this process says of itself in its handshakes.

use std::sync::OnceLock;

pub use tcpx_wire::handshake::Build;
use tcpx_wire::handshake::Version;

/// `LOWEST-HIGHEST`, in place of what the release speaks.
const VARIABLE: &str = "TCPX_PROTOCOLS";

/// The release that this process is, with the protocols that it names; the variable is read once.
pub fn own_build() -> &'static Build {
    static OWN: OnceLock<Build> = OnceLock::new();
    OWN.get_or_init(|| match std::env::var(VARIABLE) {
        Ok(text) if !text.is_empty() => with_range(&text).unwrap_or_else(|| {
            let ours = Build::OURS;
            tracing::warn!("{VARIABLE} is {text:?}, not LOWEST-HIGHEST; this side is {ours}");
            ours
        }),
        _ => Build::OURS,
    })
}

/// The same release with other protocols.
fn with_range(text: &str) -> Option<Build> {
    let (lowest, highest) = text.split_once('-')?;
    let (lowest, highest) = (
        Version(lowest.parse().ok()?),
        Version(highest.parse().ok()?),
    );
    let ours = Build::OURS;
    (lowest <= highest).then_some(Build {
        lowest,
        highest,
        ..ours
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_range_is_taken() {
        let range = with_range("3-4").unwrap();
        assert_eq!([range.lowest, range.highest], [Version(3), Version(4)]);
        assert_eq!(range.release, Build::OURS.release);
        for wrong in ["", "3", "4-3", "-", "3-x", "3-4-5", "3-70000"] {
            assert!(with_range(wrong).is_none(), "{wrong}");
        }
    }
}

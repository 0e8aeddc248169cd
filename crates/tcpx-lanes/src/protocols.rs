//! Which protocols this process speaks.

use std::sync::OnceLock;

pub use tcpx_wire::handshake::Speaks;
use tcpx_wire::handshake::Version;

/// `LOWEST-HIGHEST`, in place of what the release speaks.
const VARIABLE: &str = "TCPX_PROTOCOLS";

/// What this process says in its handshakes; the variable is read once.
pub fn spoken() -> &'static Speaks {
    static SPOKEN: OnceLock<Speaks> = OnceLock::new();
    SPOKEN.get_or_init(|| match std::env::var(VARIABLE) {
        Ok(text) => told(&text).unwrap_or_else(|| {
            let ours = Speaks::OURS;
            tracing::warn!("{VARIABLE} is {text:?}, not LOWEST-HIGHEST; this side is {ours}");
            ours
        }),
        Err(_) => Speaks::OURS,
    })
}

fn told(text: &str) -> Option<Speaks> {
    let (lowest, highest) = text.split_once('-')?;
    let (lowest, highest) = (
        Version(lowest.parse().ok()?),
        Version(highest.parse().ok()?),
    );
    let ours = Speaks::OURS;
    (lowest <= highest).then_some(Speaks {
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
        let range = told("3-4").unwrap();
        assert_eq!([range.lowest, range.highest], [Version(3), Version(4)]);
        assert_eq!(range.release, Speaks::OURS.release);
        for wrong in ["", "3", "4-3", "-", "3-x", "3-4-5", "3-70000"] {
            assert!(told(wrong).is_none(), "{wrong}");
        }
    }
}

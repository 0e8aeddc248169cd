//! Sources with recognisable contents; poisoned destinations with guards on both sides.

use tcpx::{Region, RegionSlice};

use crate::content::Content;

/// Bytes of a guard; more than any fragment is long.
const GUARD: usize = 8192;
/// What destinations and guards hold before a transfer.
const POISON: u8 = 0xA5;

/// Memory to send from. It starts anywhere in a page.
#[derive(Debug)]
pub struct Source {
    region: Region,
    start: usize,
}

impl Source {
    /// `bytes` of `content`.
    pub fn new(content: Content, bytes: u64, start: usize) -> Self {
        let len = usize::try_from(bytes).expect("it fits this machine");
        let region = Region::host(start + len).expect("there is memory");
        let source = Self { region, start };
        assert!(source.try_fill(content), "nobody else holds it");
        source
    }

    /// Holds other contents from now on; `false` when a transfer still holds the memory.
    pub fn try_fill(&self, content: Content) -> bool {
        self.region
            .with_bytes_mut(self.start.., |memory| content.fill(0, memory))
            .is_ok()
    }

    /// What to send.
    pub fn slice(&self) -> RegionSlice {
        self.region.slice(self.start..).expect("in range")
    }
}

/// Memory to receive into. It starts anywhere in a page.
#[derive(Debug)]
pub struct Destination {
    region: Region,
    start: usize,
    len: usize,
}

impl Destination {
    /// Poison, `bytes` long, between guards.
    pub fn new(bytes: u64, start: usize) -> Self {
        let len = usize::try_from(bytes).expect("it fits this machine");
        let start = GUARD + start;
        let region = Region::host(start + len + GUARD).expect("there is memory");
        let destination = Self { region, start, len };
        destination.poison();
        destination
    }

    /// Where to receive.
    pub fn slice(&self) -> RegionSlice {
        self.shorter(0)
    }

    /// All but the last bytes of it.
    pub fn shorter(&self, by: usize) -> RegionSlice {
        let end = self.start + self.len - by;
        self.region.slice(self.start..end).expect("in range")
    }

    /// Poisons everything anew.
    ///
    /// # Panics
    /// When a transfer still holds the memory.
    pub fn poison(&self) {
        assert!(self.try_poison(), "a transfer still holds the memory");
    }

    /// Poisons everything anew; `false` when a transfer still holds the memory.
    pub fn try_poison(&self) -> bool {
        self.region
            .with_bytes_mut(.., |memory| memory.fill(POISON))
            .is_ok()
    }

    /// What is wrong after `content` was received.
    pub fn defect(&self, content: Content) -> Option<String> {
        let end = self.start + self.len;
        let look = |memory: &[u8]| {
            content
                .difference(0, &memory[self.start..end])
                .or_else(|| written("before the destination", 0, &memory[..self.start]))
                .or_else(|| written("behind the destination", end, &memory[end..]))
        };
        self.region
            .with_bytes(.., look)
            .unwrap_or_else(|error| Some(error.to_string()))
    }

    /// Which byte was written although none may be.
    pub fn touched(&self) -> Option<String> {
        let look = |memory: &[u8]| written("untouched memory", 0, memory);
        self.region
            .with_bytes(.., look)
            .unwrap_or_else(|error| Some(error.to_string()))
    }
}

fn written(what: &str, from: usize, memory: &[u8]) -> Option<String> {
    let at = memory.iter().position(|byte| *byte != POISON)?;
    let at_most = memory.len().min(at + 8);
    Some(format!(
        "{what}: byte {} was written: {:02x?}",
        from + at,
        &memory[at..at_most]
    ))
}

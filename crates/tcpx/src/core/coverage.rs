//! Which bytes of a chunk its parts have brought.

use tcpx_wire::descriptor::Descriptors;

/// The destinations of several lists of one chunk. Each list was checked by itself; together they
/// must bring every byte exactly once.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    /// Start and length, in the order of arrival.
    spans: Vec<(u64, u64)>,
    bytes: u64,
}

impl Coverage {
    pub(super) fn add(&mut self, descriptors: &Descriptors) {
        let spans = descriptors.as_slice().iter();
        self.spans
            .extend(spans.map(|one| (one.destination_offset, u64::from(one.length))));
        self.bytes += descriptors.bytes();
    }

    /// Bytes of all parts, whether or not some came twice.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Checks that the parts are the bytes `0..length`, each once.
    ///
    /// # Errors
    /// In words: the first byte that is missing or came twice.
    pub(super) fn check(mut self, length: u64) -> Result<(), String> {
        self.spans.sort_unstable();
        let mut next = 0;
        for (start, bytes) in self.spans {
            if start != next {
                let what = if start > next {
                    "is missing"
                } else {
                    "came twice"
                };
                let at = start.min(next);
                return Err(format!(
                    "expected each of {length} bytes once in the parts of a chunk, the one at {at} {what}"
                ));
            }
            next += bytes;
        }
        if next != length {
            return Err(format!(
                "expected parts of {length} bytes together, {next} bytes arrived"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tcpx_wire::descriptor::Limits;
    use tcpx_wire::{Fragment, ScatterList};

    fn part(spans: &[(u64, u32)]) -> Descriptors {
        let list: ScatterList = spans
            .iter()
            .map(|&(destination_offset, length)| Fragment {
                source_offset: destination_offset * 7 % 1000,
                length,
                destination_offset,
            })
            .collect();
        let mut descriptors = Descriptors::new();
        let limits = Limits {
            pool_bytes: 1 << 20,
            destination_bytes: 1 << 20,
            received_bytes: spans.iter().map(|(_, length)| u64::from(*length)).sum(),
        };
        descriptors.build(&list, limits).unwrap();
        descriptors
    }

    fn covered(parts: &[&[(u64, u32)]], length: u64) -> Result<(), String> {
        let mut coverage = Coverage::default();
        for spans in parts {
            coverage.add(&part(spans));
        }
        coverage.check(length)
    }

    #[test]
    fn interleaved_parts_make_a_chunk() {
        assert_eq!(
            covered(&[&[(0, 5), (9, 3)], &[(5, 4)], &[(12, 1)]], 13),
            Ok(())
        );
    }

    #[test]
    fn a_hole_and_a_byte_that_came_twice_are_named() {
        let hole = covered(&[&[(0, 5)], &[(6, 4)]], 10).unwrap_err();
        assert!(hole.contains("at 5 is missing"), "{hole}");
        let twice = covered(&[&[(0, 5)], &[(4, 6)]], 10).unwrap_err();
        assert!(twice.contains("at 4 came twice"), "{twice}");
        let short = covered(&[&[(0, 5)]], 10).unwrap_err();
        assert!(short.contains("10 bytes together, 5 bytes"), "{short}");
    }
}

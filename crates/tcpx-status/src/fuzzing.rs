//! What the fuzz target `status_request` asserts, for any bytes.

use crate::http::{Route, route};

/// Input: what a client of the local socket or of the metrics port sends.
pub fn run(data: &[u8]) {
    // What is decided early stays so: more bytes behind a complete head change nothing.
    let whole = route(data, 0);
    let first = (0..=data.len()).find_map(|end| route(&data[..end], end.saturating_sub(1)));
    assert_eq!(whole, first, "the same answer in any slicing");
    if let Some(Route::Status | Route::Metrics) = whole {
        assert!(data.starts_with(b"GET /"), "answered without being asked");
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_breaks_nothing() {
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../fuzz/corpus/status_request"
        );
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

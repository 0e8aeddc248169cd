//! What the fuzz targets `status_request` and `status_answer` assert, for any bytes.

use crate::http::{Route, route};
use crate::reader::report_in;
use crate::report::{SCHEMA, VERSION};

/// Input: what a process answers that is asked for its report.
pub fn answer(data: &[u8]) {
    let Ok(report) = report_in(data) else {
        return;
    };
    assert_eq!((report.schema.as_str(), report.version), (SCHEMA, VERSION));
    // Whoever shows it may write it again.
    let mut again = b"HTTP/1.0 200 OK\r\n\r\n".to_vec();
    serde_json::to_writer(&mut again, &report).expect("a report is JSON");
    let again = report_in(&again).expect("it is read as it was written");
    assert_eq!(again.connections.len(), report.connections.len());
    assert_eq!(again.totals, report.totals);
    assert_eq!(again.listeners, report.listeners);
}

/// Input: what a client of the local socket or of the metrics port sends.
pub fn request(data: &[u8]) {
    // What is decided early stays so: more bytes behind a complete head change nothing.
    let whole = route(data, 0);
    let first = (0..=data.len()).find_map(|end| route(&data[..end], end.saturating_sub(1)));
    assert_eq!(whole, first, "the same answer in any slicing");
    if let Some(Route::Status | Route::Metrics) = whole {
        assert!(data.starts_with(b"GET /"), "answered without being asked");
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
        replay("status_request", super::request);
        replay("status_answer", super::answer);
    }
}

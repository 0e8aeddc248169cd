//! A request to a process's status.

use tcpx_status::{Route, route};

/// Input: what a client of the local socket or of the metrics port sends.
pub fn run(data: &[u8]) {
    // What is decided early stays so: more bytes behind a complete head change nothing.
    let whole = route(data);
    let first = (0..=data.len()).find_map(|end| route(&data[..end]));
    assert_eq!(whole, first, "the same answer in any slicing");
    if let Some(Route::Status | Route::Metrics) = whole {
        assert!(data.starts_with(b"GET /"), "answered without being asked");
    }
}

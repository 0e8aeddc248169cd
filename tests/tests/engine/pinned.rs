//! What a connection holds of the pinned slots that GPU memory goes through: nothing at rest, and a
//! window of 64 MiB at most while bytes move one way. Host memory takes the same way here.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tcpx_memory::CopyWorker;
use tcpx_tests::child;
use tcpx_tests::pair::{LONG, Listening, close, moves};
use tcpx_tests::support::wait;

const BYTES: usize = 96 << 20;
/// A window of chunks, at one end.
const MOST: usize = 64 << 20;

#[test]
fn a_connection_at_rest_holds_no_pinned_memory() {
    let test = "a_connection_at_rest_holds_no_pinned_memory";
    // The slots are those of the whole process.
    child::run_as(test, &[], holds_its_window);
}

fn holds_its_window() {
    let worker = CopyWorker::host().expect("a worker");
    let held = || worker.pinned_in_use();
    let listening = Listening::staged();
    let (server, client) = listening.connect();
    assert_eq!(held(), 0, "before anything was sent");
    let over = AtomicBool::new(false);
    let most = thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut most = 0;
            while !over.load(Ordering::Acquire) {
                most = most.max(held());
                thread::yield_now();
            }
            most
        });
        for _ in 0..4 {
            moves(&client, &server, BYTES);
            moves(&server, &client, BYTES);
        }
        over.store(true, Ordering::Release);
        watching.join().expect("it only looks")
    });
    let _ = writeln!(
        std::io::stderr(),
        "measured: {} MiB in use by both ends",
        most >> 20
    );
    // Both ends are in this process; each has slots of its own.
    assert!(most > 0, "nothing was staged");
    assert!(most <= 2 * MOST, "{most} bytes at a time");
    // The last acknowledgement may be under way.
    wait(LONG, "a connection at rest to hold nothing", || {
        (held() == 0).then_some(())
    });
    close(server, client);
    assert_eq!(held(), 0);
}

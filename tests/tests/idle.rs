//! What an open connection costs that nobody uses.

use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tcpx::{Region, TcpNetwork};
use tcpx_net::TcpOptions;
use tcpx_tests::pair::{Listening, close};

const IDLE: Duration = Duration::from_secs(2);

/// Processor time of this process.
fn spent() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    let nanos = u32::try_from(now.tv_nsec).expect("less than a second");
    Duration::new(now.tv_sec.unsigned_abs(), nanos)
}

#[test]
fn an_open_idle_connection_costs_less_than_a_thousandth_of_a_core() {
    let network = TcpNetwork::new(TcpOptions {
        lanes: 4,
        ..TcpOptions::default()
    });
    let listening = Listening::new(std::sync::Arc::new(network), |_| {}, |_| {});
    let (server, client) = listening.connect();
    // Used before, small and large, so that everything that looks for more work has a reason to.
    for bytes in [8, 8 << 20] {
        let (from, to) = (
            Region::host(bytes).expect("memory"),
            Region::host(bytes).expect("memory"),
        );
        let received = server.receive(to.all(), 1).start().expect("room");
        let sent = client.send(from.all(), 1).start().expect("room");
        sent.wait().expect("it arrives");
        received.wait().expect("it arrives");
    }
    // Whatever looks for more work gives up within half a second.
    thread::sleep(Duration::from_millis(500));
    let before = spent();
    thread::sleep(IDLE);
    let cost = spent() - before;
    // Both ends are in this process.
    assert!(cost < 2 * IDLE / 1000, "{cost:?} in {IDLE:?}");
    close(server, client);
}

//! What an open connection costs that nobody uses.

use std::io::Write;
use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tcpx::{Connection, Region, TcpNetwork};
use tcpx_net::TcpOptions;
use tcpx_tests::pair::{Listening, close};

const IDLE: Duration = Duration::from_secs(2);

/// Processor time of this process.
fn spent() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    let nanos = u32::try_from(now.tv_nsec).expect("less than a second");
    Duration::new(now.tv_sec.unsigned_abs(), nanos)
}

/// Small and large, so that everything that looks for more work has a reason to.
fn use_it(server: &Connection, client: &Connection) {
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
}

#[test]
fn open_idle_connections_cost_less_than_a_thousandth_of_a_core_each() {
    let network = TcpNetwork::new(TcpOptions {
        lanes: 4,
        ..TcpOptions::default()
    });
    let network = std::sync::Arc::new(network);
    // Never used, then used before; one, and several.
    for count in [1, 12] {
        let listening = Listening::new(network.clone(), |_| {}, |_| {});
        let connections: Vec<_> = (0..count).map(|_| listening.connect()).collect();
        for used in [false, true] {
            if used {
                for (server, client) in &connections {
                    use_it(server, client);
                }
            }
            // Whatever looks for more work gives up within half a second.
            thread::sleep(Duration::from_millis(500));
            let before = spent();
            thread::sleep(IDLE);
            let cost = spent() - before;
            let _ = writeln!(
                std::io::stderr(),
                "measured: {count} idle connections, used: {used}: {:.4} % of a core for each end",
                cost.as_secs_f64() / IDLE.as_secs_f64() * 50.0 / f64::from(count)
            );
            // Both ends are in this process.
            let most = 2 * count * IDLE / 1000;
            assert!(cost < most, "{count}, {used}: {cost:?} in {IDLE:?}");
        }
        for (server, client) in connections {
            close(server, client);
        }
    }
}

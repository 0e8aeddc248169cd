//! What an open connection costs that nobody uses: processor time of a process of its own.

use std::io::Write;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tcpx::{Connection, Network, Region, TcpNetwork};
use tcpx_net::TcpOptions;
use tcpx_tests::child;
use tcpx_tests::pair::{LONG, Listening, close, double_network};
use tcpx_tests::support::wait;

const IDLE: Duration = Duration::from_secs(2);

/// Processor time of this process.
fn spent() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    let nanos = u32::try_from(now.tv_nsec).expect("less than a second");
    Duration::new(now.tv_sec.unsigned_abs(), nanos)
}

/// Small and large, so that everything that looks for more work has a reason to; and so that a
/// receive that waits is granted ahead.
fn use_it(server: &Connection, client: &Connection) {
    for bytes in [8, 8 << 20, 8 << 20, 8 << 20] {
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

/// What nobody uses for a while must cost each end less than a thousandth of a core, once whatever
/// looks for more work has given up: within half a second, or later on a busy machine.
fn idle(what: &str, connections: &[(Connection, Connection)]) {
    // Both ends are in this process.
    let ends = u32::try_from(2 * connections.len()).expect("a few");
    wait(LONG, what, || {
        thread::sleep(Duration::from_millis(500));
        let before = spent();
        thread::sleep(IDLE);
        let cost = spent() - before;
        let _ = writeln!(
            std::io::stderr(),
            "measured: {what}, {ends} ends: {:.4} % of a core for each end",
            cost.as_secs_f64() / IDLE.as_secs_f64() * 100.0 / f64::from(ends)
        );
        (cost < ends * IDLE / 1000).then_some(())
    });
}

/// One connection and several over a network: never used, then used before, then with receives for
/// which nothing comes.
fn idle_over(name: &str, network: &Arc<dyn Network>) {
    for count in [1, 12] {
        let listening = Listening::new(network.clone(), |_| {}, |_| {});
        let connections: Vec<_> = (0..count).map(|_| listening.connect()).collect();
        idle(&format!("{name}, never used"), &connections);
        for (server, client) in &connections {
            use_it(server, client);
        }
        idle(&format!("{name}, used before"), &connections);
        let waiting: Vec<_> = connections
            .iter()
            .map(|(server, _)| {
                let memory = Region::host(1 << 20).expect("memory");
                server.receive(memory.all(), 2).start().expect("room")
            })
            .collect();
        idle(&format!("{name}, a receive waits"), &connections);
        drop(waiting);
        for (server, client) in connections {
            close(server, client);
        }
    }
}

#[test]
fn idle_connections_cost_under_a_thousandth_of_a_core() {
    child::run(&[], || {
        let network = TcpNetwork::new(TcpOptions {
            lanes: 4,
            ..TcpOptions::default()
        });
        idle_over("tcp", &(Arc::new(network) as Arc<dyn Network>));
    });
}

#[test]
fn so_do_those_of_a_plugin_which_can_only_be_polled() {
    child::run(&[], || {
        idle_over("plugin", &double_network());
    });
}

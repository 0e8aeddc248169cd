//! The engine over plugins with habits that the double has not.

use std::path::Path;
use std::sync::Arc;

use tcpx::{Error, Network, Region};
use tcpx_net::{PluginMemory, PluginNetwork, PluginOptions};
use tcpx_tests::pair::{self, LONG, Listening, moves};
use tcpx_tests::support::until;
use tcpx_tests::withholding::Withholding;
use tcpx_tests::{child, double, habits};

const BYTES: usize = 5 << 20;

/// More than its bounce pool holds.
const LARGE: usize = 16 << 20;

/// The double behind a plugin with habits.
fn network(memory: PluginMemory) -> Arc<dyn Network> {
    load(habits::path(), memory)
}

fn load(path: &Path, memory: PluginMemory) -> Arc<dyn Network> {
    let options = PluginOptions {
        path: path.to_owned(),
        abi: None,
        device: 0,
        memory,
    };
    Arc::new(PluginNetwork::load(options).unwrap())
}

/// Three channels a connection.
fn listening(network: Arc<dyn Network>) -> Listening {
    let three_channels = |options: &mut tcpx::Options| options.channels = 3;
    Listening::new(network, three_channels, three_channels)
}

fn environment(habits: &str) -> [(&str, &str); 2] {
    let inner = double::path().to_str().unwrap();
    [(habits::OF, inner), (habits::HABITS, habits)]
}

#[test]
fn a_close_that_waits_for_the_peers_holds_no_goodbye() {
    child::run(&environment("closes-together"), || {
        let listening = listening(network(PluginMemory::Host));
        for _ in 0..3 {
            let (server, client) = listening.connect();
            moves(&server, &client, BYTES);
            moves(&client, &server, BYTES);
            pair::close(server, client);
        }
    });
}

#[test]
fn a_close_holds_nobody_after_a_cancellation() {
    child::run(&environment("closes-together"), || {
        // Its pool runs dry amid the transfer.
        let network = Withholding::after_consumes(network(PluginMemory::StandIn), 2);
        let one_channel = |options: &mut tcpx::Options| options.channels = 1;
        let (server, client) = Listening::new(network, one_channel, one_channel).connect();
        let (source, target) = (Region::host(LARGE).unwrap(), Region::host(LARGE).unwrap());
        let receive = server.receive(target.all(), 1).start().unwrap();
        let send = client.send(source.all(), 1).start().unwrap();
        until("chunks have arrived", || {
            (send.progress().bytes_done > 0).then_some(())
        });
        receive.cancel();
        for (transfer, region) in [(receive, &target), (send, &source)] {
            let error = transfer.wait_timeout(LONG).unwrap().unwrap_err();
            assert!(!matches!(error, Error::MemoryHeld { .. }), "{error}");
            region.with_bytes(.., |_| ()).unwrap();
        }
        for end in [server, client] {
            let error = end.close(LONG).unwrap_err().to_string();
            assert!(error.contains("network that cannot cancel"), "{error}");
        }
    });
}

#[test]
fn host_memory_needs_no_bounce_pool() {
    child::run(&environment("no-pool"), || {
        let (server, client) = listening(network(PluginMemory::Host)).connect();
        moves(&server, &client, BYTES);
        moves(&client, &server, BYTES);
        pair::close(server, client);
    });
}

#[test]
fn a_receive_that_waits_for_its_send_completes() {
    child::run(&environment("receive-after-send"), || {
        let (server, client) = listening(network(PluginMemory::Host)).connect();
        moves(&server, &client, BYTES);
        moves(&client, &server, BYTES);
        pair::close(server, client);
    });
}

#[test]
fn a_liberal_plugin_moves_both_ways_and_ends_in_order() {
    let listening = listening(load(habits::liberal(), PluginMemory::Host));
    for _ in 0..3 {
        let (server, client) = listening.connect();
        moves(&server, &client, BYTES);
        moves(&client, &server, BYTES);
        pair::close(server, client);
    }
}

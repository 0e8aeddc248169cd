//! The engine over plugins with habits that the double has not.

use std::sync::Arc;

use tcpx::Region;
use tcpx_net::{PluginMemory, PluginNetwork, PluginOptions};
use tcpx_tests::pair::{LONG, Listening};
use tcpx_tests::{child, double, habits};

#[test]
fn a_close_that_waits_for_the_peer_holds_no_goodbye() {
    let inner = double::path().to_str().unwrap();
    let environment = [
        (habits::OF, inner),
        (habits::HABITS, "closes-together,receive-after-send"),
    ];
    let name = "a_close_that_waits_for_the_peer_holds_no_goodbye";
    child::run(name, &environment, || {
        let network = PluginNetwork::load(PluginOptions {
            path: habits::path().to_owned(),
            abi: None,
            device: 0,
            memory: PluginMemory::StandIn,
        })
        .unwrap();
        let one_channel = |options: &mut tcpx::Options| options.channels = 1;
        let listening = Listening::new(Arc::new(network), one_channel, one_channel);
        let (server, client) = listening.connect();
        let source = Region::host(1 << 20).unwrap();
        let target = Region::host(1 << 20).unwrap();
        let receive = server.receive(target.all(), 1).start().unwrap();
        let send = client.send(source.all(), 1).start().unwrap();
        send.wait_timeout(LONG).unwrap().unwrap();
        receive.wait_timeout(LONG).unwrap().unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| client.close(LONG));
            server.close(LONG).unwrap();
            other.join().unwrap().unwrap();
        });
    });
}

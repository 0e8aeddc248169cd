//! Two connected ends in this process.

use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use tcpx::{Auth, Connection, Endpoint, Error, Key, Network, Options, TcpNetwork};
use tcpx_net::{PluginMemory, PluginNetwork, PluginOptions, TcpOptions};

use crate::double;

/// Far beyond what anything in this process takes.
pub const LONG: Duration = Duration::from_secs(60);

/// The double of Google's plugin as a network of this process, with host memory in the place of a GPU's.
pub fn double_network() -> Arc<dyn Network> {
    double_network_of(PluginMemory::StandIn)
}

/// The double for one kind of memory: a process starts it once, and what the first caller wants holds.
pub fn double_network_of(memory: PluginMemory) -> Arc<dyn Network> {
    static NETWORK: OnceLock<Arc<PluginNetwork>> = OnceLock::new();
    NETWORK
        .get_or_init(|| {
            let options = PluginOptions {
                path: double::path().to_owned(),
                abi: None,
                device: 0,
                memory,
            };
            Arc::new(PluginNetwork::load(options).expect("the double starts"))
        })
        .clone()
}

/// A listening end that any number of clients can connect to.
#[derive(Debug)]
pub struct Listening {
    endpoint: Endpoint,
    client: Options,
}

impl Listening {
    /// The two ends differ in what `server` and `client` change of the defaults for `network`.
    pub fn new(
        network: Arc<dyn Network>,
        server: impl FnOnce(&mut Options),
        client: impl FnOnce(&mut Options),
    ) -> Self {
        let key = Key::generate(&mut |bytes| getrandom::fill(bytes).expect("there is randomness"));
        let mut theirs = Options::new(network, Auth::Key(key));
        // Nothing stands still for so long, nor is either end silent, on a busy machine.
        theirs.deadlines.stall = 10 * LONG;
        theirs.dead_after = LONG;
        let mut ours = theirs.clone();
        server(&mut ours);
        client(&mut theirs);
        let endpoint = Endpoint::listen(([127, 0, 0, 1], 0).into(), ours).expect("a free port");
        Self {
            endpoint,
            client: theirs,
        }
    }

    /// On the embedded network, host memory taking the way of GPU memory: through pinned slots.
    pub fn staged() -> Self {
        let network = TcpNetwork::new(TcpOptions {
            lanes: 3,
            stage_host: true,
            ..TcpOptions::default()
        });
        Self::new(Arc::new(network), |_| {}, |_| {})
    }

    /// As [`Self::connect`], when either end may fail.
    pub fn try_connect(&self) -> (Result<Connection, Error>, Result<Connection, Error>) {
        let address = self.endpoint.local_addr();
        thread::scope(|scope| {
            let client = scope.spawn(|| Endpoint::connect(address, &self.client));
            let server = self.endpoint.accept(LONG);
            (server, client.join().expect("no panic"))
        })
    }

    /// One more connection: the server's end and the client's.
    pub fn connect(&self) -> (Connection, Connection) {
        let address = self.endpoint.local_addr();
        thread::scope(|scope| {
            let client = scope.spawn(|| Endpoint::connect(address, &self.client));
            let server = self.endpoint.accept(LONG).expect("the client connects");
            let client = client.join().expect("no panic").expect("it listens");
            (server, client)
        })
    }
}

/// Closes both ends in order.
pub fn close(server: Connection, client: Connection) {
    thread::scope(|scope| {
        let other = scope.spawn(|| client.close(LONG));
        server.close(LONG).expect("an orderly goodbye");
        let other = other.join().expect("no panic");
        other.expect("an orderly goodbye");
    });
}

//! Two connected ends in this process.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use tcpx::{
    Auth, Connection, Endpoint, Error, Key, Level, Network, Options, Report, TcpNetwork, Transfer,
    Window, WindowKey,
};
use tcpx_net::{PluginMemory, PluginNetwork, PluginOptions, TcpOptions};

use crate::buffers::{Destination, Source};
use crate::content::Content;
use crate::process::Running;
use crate::{child, double};

/// Far beyond what anything in this process takes.
pub const LONG: Duration = Duration::from_secs(60);

/// The double of Google's plugin as a network of this process, with host memory in the place of a
/// GPU's.
pub fn double_network() -> Arc<dyn Network> {
    double_network_of(PluginMemory::StandIn)
}

/// The double for one kind of memory: a process starts it once, and what the first caller wants
/// holds.
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

/// A key that nobody else has.
pub fn new_key() -> Key {
    Key::generate(&mut |bytes| getrandom::fill(bytes).expect("there is randomness"))
}

/// Starts this test program again for the part `role`, which does [`connect_back`], and accepts its
/// connection.
#[track_caller]
pub fn process(
    test: &str,
    role: &str,
    environment: &[(&str, &str)],
    options: impl FnOnce(Key) -> Options,
) -> (Running, Connection, Endpoint) {
    let key = new_key();
    let text = key.to_text().to_string();
    let endpoint = Endpoint::listen(([127, 0, 0, 1], 0).into(), options(key));
    let endpoint = endpoint.expect("a free port");
    let address = endpoint.local_addr().to_string();
    let ours = [("TEST_ADDRESS", &*address), ("TEST_KEY", &*text)];
    let process = child::start(test, role, &[&ours, environment].concat());
    let connection = endpoint.accept(LONG).expect("the process connects");
    (process, connection, endpoint)
}

/// What the process was started with.
pub fn variable(name: &str) -> String {
    std::env::var(name).expect("it was started with it")
}

/// In such a process: the other end.
pub fn connect_back(options: impl FnOnce(Key) -> Options) -> Connection {
    let address: SocketAddr = variable("TEST_ADDRESS").parse().expect("an address");
    let key = Key::parse(&variable("TEST_KEY")).expect("a key");
    Endpoint::connect(address, &options(key)).expect("it listens")
}

/// Says the key of a window to the peer, which calls [`told_window`].
pub fn tell_window(connection: &Connection, window: &Window) {
    let told = connection.notify(&window.key().to_bytes());
    told.and_then(Transfer::wait).expect("the peer lives");
}

/// The key of the peer's window.
pub fn told_window(connection: &Connection) -> WindowKey {
    let told = connection.notification(LONG).expect("the peer lives");
    WindowKey::from_bytes(&told.expect("it says its window")).expect("a key")
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
        let mut theirs = Options::new(network, Auth::Key(new_key()));
        // Nothing stalls for so long, nor is either end silent, on a busy machine.
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

/// Moves so many fresh bytes from one end to the other; how that ended where they arrive and where
/// they come from, and what is wrong with them.
pub fn try_move(
    from: &Connection,
    to: &Connection,
    bytes: usize,
    level: Level,
) -> (Result<Report, Error>, Result<Report, Error>, Option<String>) {
    let content = Content::new(getrandom::u64().expect("there is randomness"), 0);
    let source = Source::new(content, bytes as u64, 0);
    let destination = Destination::new(bytes as u64, 17);
    let receive = to.receive(destination.slice(), 1).level(level).start();
    let send = from.send(source.slice(), 1).level(level).start();
    let ended = |transfer: Result<Transfer, Error>| {
        transfer.and_then(|transfer| transfer.wait_timeout(LONG).expect("it ends"))
    };
    let ends = (ended(receive), ended(send));
    // Whatever the end was, nothing holds the memory.
    (ends.0, ends.1, destination.defect(content))
}

/// As [`try_move`], when all is well.
#[track_caller]
pub fn moves(from: &Connection, to: &Connection, bytes: usize) {
    let (received, sent, defect) = try_move(from, to, bytes, Level::Placed);
    received.expect("it arrives");
    sent.expect("it arrives");
    assert_eq!(defect, None);
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

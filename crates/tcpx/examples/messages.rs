//! A message between two endpoints: `cargo run -p tcpx --example messages`.
//!
//! Both run in this process, on loopback; on two hosts the server gives `address` and
//! `key.to_text()` to the client by a way that strangers cannot read.

use std::error::Error;
use std::thread;
use std::time::Duration;

use tcpx::{Auth, Endpoint, Level, Options, Region};

const TIMEOUT: Duration = Duration::from_secs(10);
const TAG: u64 = 42;

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let key = tcpx::generate_key()?;
    let options = Options::tcp(Auth::Key(key));
    let endpoint = Endpoint::listen("127.0.0.1:0".parse()?, options.clone())?;
    let address = endpoint.local_addr();
    let client = thread::spawn(move || send(&format!("localhost:{}", address.port()), &options));

    let connection = endpoint.accept(TIMEOUT)?;
    println!(
        "{} connected: {}",
        connection.peer().address,
        connection.path()
    );
    let destination = Region::host(1 << 20)?;
    let receive = connection.receive(destination.all(), TAG);
    let report = receive.level(Level::Verified).start()?.wait()?;
    let bytes = usize::try_from(report.bytes)?;
    // Without a copy, while no transfer uses the memory.
    let text =
        destination.with_bytes(..bytes, |bytes| String::from_utf8_lossy(bytes).into_owned())?;
    println!("received {text:?} in {:.1?}", report.elapsed);
    connection.close(TIMEOUT)?;
    client.join().map_err(|_| "the client panicked")??;
    Ok(())
}

fn send(address: &str, options: &Options) -> Result<(), tcpx::Error> {
    let connection = Endpoint::connect(address, options)?;
    let message = b"hello from the other side";
    let source = Region::host(message.len())?;
    source.write_from(0, message)?;
    let send = connection.send(source.all(), TAG).level(Level::Verified);
    send.start()?.wait()?;
    connection.close(TIMEOUT)
}

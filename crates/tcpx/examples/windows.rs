//! Writing into a peer's memory and reading it back: `cargo run -p tcpx --example windows`.

use std::error::Error;
use std::thread;
use std::time::Duration;

use tcpx::{Auth, Connection, Endpoint, Options, Region, Rights, WindowKey};

const TIMEOUT: Duration = Duration::from_secs(10);
const PAGE: usize = 64 << 10;
const PAGES: usize = 16;

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::tcp(Auth::Key(tcpx::generate_key()?));
    let endpoint = Endpoint::listen("127.0.0.1:0".parse()?, options.clone())?;
    let address = endpoint.local_addr();
    let user = thread::spawn(move || -> Result<(), tcpx::Error> {
        use_memory(Endpoint::connect(address, &options)?)
    });

    // The memory's owner gives the window's key to the peer, here by a notification.
    let connection = endpoint.accept(TIMEOUT)?;
    let memory = Region::host(PAGES * PAGE)?;
    let window = connection.expose(memory.all(), Rights::GetAndPut)?;
    connection.notify(&window.key().to_bytes())?.wait()?;
    // It takes no part in what happens there, but to wait for the peer's notification.
    let done = connection
        .notification(TIMEOUT)?
        .ok_or("the peer is slow")?;
    println!("the peer says {:?}", String::from_utf8_lossy(&done));
    memory.with_bytes(.., |bytes| {
        assert!(
            bytes
                .chunks(PAGE)
                .enumerate()
                .all(|(n, page)| page[0] == n as u8)
        );
    })?;
    window.revoke(TIMEOUT)?;
    connection.close(TIMEOUT)?;
    user.join().map_err(|_| "the user panicked")??;
    Ok(())
}

fn use_memory(connection: Connection) -> Result<(), tcpx::Error> {
    let key = connection.notification(TIMEOUT)?.unwrap_or_default();
    let key = WindowKey::from_bytes(&key).expect("the owner sent its window's key");
    let pages = Region::host(PAGES * PAGE)?;
    let mut batch = connection.batch();
    for page in (0..PAGES).rev() {
        let at = page * PAGE;
        pages.write_from(at, &[page as u8; PAGE])?;
        batch = batch.put(pages.slice(at..at + PAGE)?, &key, at as u64);
    }
    batch.start()?.wait()?;
    let back = Region::host(PAGES * PAGE)?;
    connection.get(back.all(), &key, 0).start()?.wait()?;
    println!(
        "all pages came back: {}",
        back.checksum(..)? == pages.checksum(..)?
    );
    connection.notify(b"all pages are written")?.wait()?;
    connection.close(TIMEOUT)
}

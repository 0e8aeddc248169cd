//! What lists of pieces cost: `cargo run --release -p tcpx --example lists`.
//!
//! How long it takes to post a prepared batch, and how long a message of 8 bytes is under way
//! behind a list that the peer is being told, beside one that is alone.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use tcpx::request::PreparedBatch;
use tcpx::{Auth, Connection, Endpoint, Options, Region, Rights, WindowKey};

const TIMEOUT: Duration = Duration::from_secs(60);
const ROUNDS: usize = if cfg!(debug_assertions) { 3 } else { 41 };

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::tcp(Auth::Key(tcpx::generate_key()?));
    let endpoint = Endpoint::listen("127.0.0.1:0".parse()?, options.clone())?;
    let address = endpoint.local_addr();
    let owner = thread::spawn(move || -> Result<(), tcpx::Error> {
        let connection = Endpoint::connect(address, &options)?;
        let memory = Region::host(512 << 20)?;
        let window = connection.expose(memory.all(), Rights::GetAndPut)?;
        connection.notify(&window.key().to_bytes())?.wait()?;
        // Sends back what it hears until it hears nothing.
        while let Ok(Some(bytes)) = connection.notification(TIMEOUT)
            && !bytes.is_empty()
        {
            connection.notify(&bytes)?.wait()?;
        }
        connection.close(TIMEOUT)
    });
    let connection = endpoint.accept(TIMEOUT)?;
    let key = connection.notification(TIMEOUT)?.unwrap_or_default();
    let key = WindowKey::from_bytes(&key)?;
    posting(&connection, &key, 32_768, 4096)?;
    behind_a_list(&connection, &key, 112_000)?;
    connection.notify(&[])?.wait()?;
    connection.close(TIMEOUT)?;
    owner.join().map_err(|_| "the owner panicked")??;
    Ok(())
}

/// A batch of so many pieces, none of which lies beside the one before.
fn prepare(
    connection: &Connection,
    key: &WindowKey,
    pieces: usize,
    bytes: usize,
) -> Result<PreparedBatch, Box<dyn Error>> {
    let source = Region::host(pieces * bytes)?;
    let mut batch = connection.batch();
    for at in 0..pieces {
        let start = at * 40_503 % pieces * bytes;
        batch = batch.put(source.slice(start..start + bytes)?, key, start as u64);
    }
    Ok(batch.prepare()?)
}

fn posting(
    connection: &Connection,
    key: &WindowKey,
    pieces: usize,
    bytes: usize,
) -> Result<(), Box<dyn Error>> {
    let began = Instant::now();
    let prepared = prepare(connection, key, pieces, bytes)?;
    let preparing = began.elapsed();
    let mut posting = Vec::new();
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let transfer = prepared.start()?;
        posting.push(began.elapsed());
        transfer.wait()?;
    }
    println!(
        "a batch of {pieces} pieces of {bytes} bytes: prepared in {:.2} ms, posted in {:.3} ms",
        milliseconds(preparing),
        milliseconds(median(posting)),
    );
    Ok(())
}

fn behind_a_list(
    connection: &Connection,
    key: &WindowKey,
    pieces: usize,
) -> Result<(), Box<dyn Error>> {
    let (mut alone, mut behind, mut telling) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        alone.push(round_trip(connection)?);
        let began = Instant::now();
        let prepared = prepare(connection, key, pieces, 4096)?;
        telling.push(began.elapsed());
        behind.push(round_trip(connection)?);
        drop(prepared);
    }
    println!(
        "a round trip of 8 bytes: {:.3} ms alone, {:.3} ms behind a list of {pieces} pieces, which took {:.2} ms to prepare",
        milliseconds(median(alone)),
        milliseconds(median(behind)),
        milliseconds(median(telling)),
    );
    Ok(())
}

fn round_trip(connection: &Connection) -> Result<Duration, Box<dyn Error>> {
    let began = Instant::now();
    let told = connection.notify(&[1; 8])?;
    connection
        .notification(TIMEOUT)?
        .ok_or("the owner is slow")?;
    let took = began.elapsed();
    told.wait()?;
    Ok(took)
}

fn median(mut of: Vec<Duration>) -> Duration {
    of.sort_unstable();
    of[of.len() / 2]
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

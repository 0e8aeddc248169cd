//! The historic check: `Hello from TCPX client!` with tag 42, into page-aligned buffers, each byte
//! compared.

use std::time::Duration;

use tcpx::{Connection, Level, Report};

use crate::error::Error;
use crate::memory_choice::{self, MemoryChoice};
use crate::messages::{self, ANSWER, PAYLOAD, REQUEST, Reason, Request, VERDICT};
use crate::output::hexdump::hex_dump;
use crate::output::progress::Progress;
use crate::output::say::say;
use crate::pattern::{Difference, Pattern};
use crate::sizes::{Size, rate, time};

/// The 23 bytes.
pub(crate) const GREETING: &[u8; 23] = b"Hello from TCPX client!";

/// The server's last word: CRC32C of what arrived, if every byte is right.
type Verdict = Result<u32, Reason>;

/// How much of the payload a person is shown, in bytes.
const SHOWN: usize = 64;

/// What a payload of any size holds: the greeting (cut short if need be), then the pattern.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payload {
    pub(crate) bytes: u64,
    pub(crate) seed: u64,
}

impl Payload {
    fn greeting(self) -> &'static [u8] {
        let length = usize::try_from(self.bytes)
            .unwrap_or(usize::MAX)
            .min(GREETING.len());
        &GREETING[..length]
    }

    /// Fills the source.
    pub(crate) fn write(self, region: &tcpx::Region) -> Result<(), Error> {
        tcpx_bench::fill(region, self.bytes, Pattern::new(self.seed))?;
        region
            .write_from(0, self.greeting())
            .map_err(Error::memory("fill the source"))
    }

    /// Compares every byte of the destination.
    pub(crate) fn check(self, region: &tcpx::Region) -> Result<(), Error> {
        let mut arrived = vec![0; self.greeting().len()];
        region
            .read_to(0, &mut arrived)
            .map_err(Error::memory("read the destination back"))?;
        let wrong = self
            .greeting()
            .iter()
            .zip(&arrived)
            .enumerate()
            .find(|(_, (a, b))| a != b);
        if let Some((place, (&expected, &arrived))) = wrong {
            return Err(Difference {
                offset: place as u64,
                expected,
                arrived,
            }
            .into());
        }
        let pattern = Pattern::new(self.seed);
        Ok(tcpx_bench::compare(
            region,
            arrived.len() as u64,
            self.bytes,
            pattern,
        )?)
    }
}

/// The server's side.
pub(crate) fn receive(
    connection: &Connection,
    memory: &MemoryChoice,
    bytes: u64,
    seed: u64,
) -> Result<(), Error> {
    let payload = Payload { bytes, seed };
    let result = place(connection, memory, payload);
    let verdict: Verdict = result
        .as_ref()
        .map_or_else(|error| Err(error.into()), |crc32c| Ok(*crc32c));
    let told = messages::send_message(connection, VERDICT, &verdict);
    result.and(told)
}

fn place(connection: &Connection, memory: &MemoryChoice, payload: Payload) -> Result<u32, Error> {
    let destination = match memory.allocate_pages(payload.bytes) {
        Ok(destination) => destination,
        Err(error) => {
            let reason = Reason {
                why: messages::brief(&error.what()),
                hint: "send fewer bytes".into(),
            };
            return Err(messages::refused(connection, ANSWER, reason, error));
        }
    };
    tcpx_bench::poison(&destination)?;
    let length = usize::try_from(payload.bytes).unwrap_or(usize::MAX);
    let slice = destination
        .slice(..length)
        .map_err(Error::memory("post the receive"))?;
    let transfer = connection
        .receive(slice, PAYLOAD)
        .level(Level::Verified)
        .start()?;
    messages::tell_ready(connection)?;
    let report = Progress::new("receiving", payload.bytes).follow(transfer, 0)?;
    say!(
        "received {} with tag {PAYLOAD}, {}:",
        Size(report.bytes),
        placing(&report)
    );
    say!(
        "{}",
        hex_dump(
            &memory_choice::head(&destination, payload.bytes, SHOWN)?,
            0,
            SHOWN,
            "  "
        )
        .trim_end()
    );
    rest(payload.bytes);
    payload.check(&destination)?;
    let crc32c = destination
        .checksum(..length)
        .map_err(Error::memory("checksum the destination"))?;
    say!("every byte is right (CRC32C {crc32c:08x})");
    Ok(crc32c)
}

/// The client's side.
pub(crate) fn send(
    connection: &Connection,
    memory: &MemoryChoice,
    bytes: u64,
    limit: Duration,
) -> Result<(), Error> {
    let seed = crate::key::seed()?;
    let payload = Payload { bytes, seed };
    let source = memory.allocate_pages(bytes)?;
    payload.write(&source)?;
    let length = usize::try_from(bytes).unwrap_or(usize::MAX);
    let slice = source
        .slice(..length)
        .map_err(Error::memory("start the send"))?;
    let answer = messages::expect(connection, ANSWER, limit)?;
    messages::send_message(connection, REQUEST, &Request::Greeting { bytes, seed })?;
    messages::ready(answer)?;
    say!("sending {} with tag {PAYLOAD}:", Size(bytes));
    say!(
        "{}",
        hex_dump(&memory_choice::head(&source, bytes, SHOWN)?, 0, SHOWN, "  ").trim_end()
    );
    rest(bytes);
    let transfer = connection
        .send(slice, PAYLOAD)
        .level(Level::Verified)
        .start()?;
    let report = Progress::new("sending", bytes).follow(transfer, 0)?;
    // The server checks every byte before it answers, which may take longer than one step of the
    // network.
    let verdict = messages::expect(connection, VERDICT, limit + checking(bytes))?;
    let theirs = verdict.wait::<Verdict>("a verdict")??;
    let ours = source
        .checksum(..length)
        .map_err(Error::memory("checksum the source"))?;
    if ours != theirs {
        return Err(Error::Digest {
            what: "the CRC32C checksums",
            ours: format!("{ours:08x}"),
            theirs: format!("{theirs:08x}"),
        });
    }
    let speed =
        rate(bytes, report.elapsed).map_or_else(String::new, |rate| format!(", {rate:.2} GB/s"));
    let speed = if bytes < 1 << 20 {
        String::new()
    } else {
        speed
    };
    say!("placed and verified in {}{speed}", time(report.elapsed));
    Ok(())
}

/// Time to check `bytes` on a slow host, on top of the usual limit: 100 MB/s.
fn checking(bytes: u64) -> Duration {
    Duration::from_secs(bytes / 100_000_000)
}

/// How the bytes reached their place.
fn placing(report: &Report) -> String {
    let plural = if report.fragments == 1 { "" } else { "s" };
    match report.unpack_method {
        Some(method) => format!(
            "unpacked from {} fragment{plural} with `{method}`",
            report.fragments
        ),
        None => "placed by the network itself".to_owned(),
    }
}

fn rest(bytes: u64) {
    if bytes > SHOWN as u64 {
        say!("  ... {} more", Size(bytes - SHOWN as u64));
    }
}

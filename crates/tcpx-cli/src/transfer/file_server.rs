//! Receiving a file: placed in pieces, digested, written under a temporary name, named only when everything is right.

use std::collections::VecDeque;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use tcpx::{Connection, Region, Transfer};

use super::file_name::FileName;
use super::partial_file::PartialFile;
use crate::error::Error;
use crate::memory_choice::MemoryChoice;
use crate::messages::{self, ANSWER, Answer, END, End, PAYLOAD, VERDICT, Verdict};
use crate::output::progress::Progress;
use crate::output::say::say;
use crate::sizes::{Size, rate, time};

/// Pieces on their way at once, at either side.
pub(crate) const PIECES_IN_FLIGHT: usize = 4;

/// Piece sizes that a peer may ask for, in bytes: memory is taken for them before anything arrived.
const PIECE_SIZES: std::ops::RangeInclusive<u64> = 4096..=64 << 20;

/// How long to wait for the peer's reason after a receive failed.
const REASON: Duration = Duration::from_secs(2);

/// What the client wants to send, as it said it.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) piece_bytes: u64,
}

/// Where files go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Out<'a> {
    pub(crate) directory: Option<&'a Path>,
    pub(crate) overwrite: bool,
}

/// Receives the file; under its final name it is whole, or not there.
pub(crate) fn receive(
    connection: &Connection,
    memory: &MemoryChoice,
    offer: &Offer,
    out: Out<'_>,
    limit: Duration,
) -> Result<(), Error> {
    let mut file = match accept(offer, out) {
        Ok(file) => file,
        Err(error) => {
            let refusal = Answer::Refused {
                why: messages::brief(&error.what()),
                hint: messages::brief(&error.hint()),
            };
            return Err(messages::refused(connection, &refusal, error));
        }
    };
    say!("receiving \"{}\" ({})", offer.name, Size(offer.bytes));
    let started = Instant::now();
    // Posted before the payload: the client may give up at any piece, and this is where it says why.
    let end = messages::expect(connection, END, messages::LONGEST_TRANSFER)?;
    let mut posted = VecDeque::with_capacity(PIECES_IN_FLIGHT);
    let result = match pieces(connection, memory, offer, &mut file, &mut posted, limit) {
        Ok(sha256) => finish(end, file, &sha256, limit).map(|target| (sha256, target)),
        Err(error @ Error::Engine(_)) => Err(match end.within(REASON, "the end of the file") {
            Some(End::GaveUp { why }) => gave_up(why),
            _ => error,
        }),
        Err(error) => Err(error),
    };
    let verdict = match &result {
        Ok((sha256, _)) => Verdict::Passed {
            crc32c: None,
            sha256: Some(sha256.clone()),
            spent: None,
        },
        Err(error) => Verdict::Failed {
            why: messages::brief(&error.what()),
            hint: messages::brief(&error.hint()),
        },
    };
    let told = messages::tell(connection, VERDICT, &verdict);
    // Only now: taking a posted receive back can end the whole connection, and the verdict with it.
    drop(posted);
    let (sha256, target) = result?;
    let took = started.elapsed();
    let speed = rate(offer.bytes, took).filter(|_| offer.bytes >= 1 << 20);
    let speed = speed.map_or_else(String::new, |speed| {
        format!(", {speed:.2} GB/s with digest and writing")
    });
    say!("wrote {} in {}{speed}", target.display(), time(took));
    say!("SHA-256 {sha256}, the same at both ends");
    told
}

/// Checks the offer and opens the temporary file.
fn accept(offer: &Offer, out: Out<'_>) -> Result<PartialFile, Error> {
    let Some(directory) = out.directory else {
        return Err(Error::Failed {
            what: format!(
                "the client wants to send a file ({}), and there is no place for it",
                Size(offer.bytes)
            ),
            hint: "start the server with --out DIR",
        });
    };
    if !PIECE_SIZES.contains(&offer.piece_bytes) {
        return Err(Error::Unexpected {
            expected: "pieces of 4096 bytes to 64 MiB",
            arrived: format!("pieces of {} bytes", offer.piece_bytes),
        });
    }
    let name = FileName::from_peer(&offer.name)?;
    Ok(PartialFile::create(
        directory,
        &name,
        offer.bytes,
        out.overwrite,
    )?)
}

/// Receives every piece and writes it; returns the digest of what was written.
fn pieces(
    connection: &Connection,
    memory: &MemoryChoice,
    offer: &Offer,
    file: &mut PartialFile,
    posted: &mut VecDeque<(Region, Transfer)>,
    limit: Duration,
) -> Result<String, Error> {
    let size = |index: u64| {
        offer
            .piece_bytes
            .min(offer.bytes - index * offer.piece_bytes)
    };
    let count = offer.bytes.div_ceil(offer.piece_bytes);
    let post = |region: &Region, index: u64| {
        let length = usize::try_from(size(index)).unwrap_or(usize::MAX);
        let slice = region
            .slice(..length)
            .map_err(Error::memory("post a piece"))?;
        let deadlines = messages::in_line(limit, PIECES_IN_FLIGHT);
        Ok::<_, Error>(
            connection
                .receive(slice, PAYLOAD)
                .deadlines(deadlines)
                .start()?,
        )
    };
    let mut next = 0;
    while next < count && posted.len() < PIECES_IN_FLIGHT {
        let region = memory.allocate_pages(size(next))?;
        let transfer = post(&region, next)?;
        posted.push_back((region, transfer));
        next += 1;
    }
    messages::tell(connection, ANSWER, &Answer::Ready)?;
    let mut digest = Sha256::new();
    let mut progress = Progress::new("receiving", offer.bytes);
    let mut piece = Vec::new();
    for index in 0..count {
        let Some((region, transfer)) = posted.pop_front() else {
            break;
        };
        let report = progress.follow(transfer, index * offer.piece_bytes)?;
        if report.bytes != size(index) {
            return Err(Error::Unexpected {
                expected: "a piece of the agreed size",
                arrived: format!("{} bytes instead of {}", report.bytes, size(index)),
            });
        }
        piece.resize(usize::try_from(report.bytes).unwrap_or(usize::MAX), 0);
        region
            .read_to(0, &mut piece)
            .map_err(Error::memory("read a piece"))?;
        if next < count {
            let transfer = post(&region, next)?;
            posted.push_back((region, transfer));
            next += 1;
        }
        digest.update(&piece);
        file.write(&piece)?;
    }
    Ok(hexadecimal(&digest.finalize()))
}

/// Waits for the client's digest, compares, and gives the file its name.
fn finish(
    end: messages::Expected,
    file: PartialFile,
    sha256: &str,
    limit: Duration,
) -> Result<std::path::PathBuf, Error> {
    match end.wait_at_most(limit, "the end of the file")? {
        End::File { sha256: theirs } if theirs == sha256 => Ok(file.publish()?),
        End::File { sha256: theirs } => Err(Error::Digest {
            what: "the SHA-256 digests",
            ours: sha256.into(),
            theirs: messages::brief(&theirs),
        }),
        End::GaveUp { why } => Err(gave_up(why)),
    }
}

fn gave_up(why: String) -> Error {
    Error::Peer {
        what: why,
        hint: "look at the file at the client, then send it again".into(),
    }
}

/// Bytes as lower-case hexadecimal digits, as `sha256sum` prints them.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

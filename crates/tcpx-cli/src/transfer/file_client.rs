//! Sending a file: read, digested and sent in pieces, a few of them in flight.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use tcpx::{Connection, Region, Transfer};

use super::file_server::{PIECES_IN_FLIGHT, hexadecimal};
use crate::error::Error;
use crate::memory_choice::MemoryChoice;
use crate::messages::{self, ANSWER, END, End, PAYLOAD, REQUEST, Request, VERDICT, Verdict};
use crate::output::progress::Progress;
use crate::output::say::say;
use crate::sizes::{Size, rate, time};

/// Bytes that are read and sent at a time.
const PIECE: u64 = 8 << 20;

/// How long to wait for the peer's reason after a send failed.
const REASON: Duration = Duration::from_secs(2);

/// Time that the server may take to flush and name the file, on top of the usual limit: 50 MB/s.
fn flushing(bytes: u64) -> Duration {
    Duration::from_secs(bytes / 50_000_000)
}

/// The file to send, opened.
#[derive(Debug)]
pub(crate) struct Source {
    file: File,
    path: PathBuf,
    name: String,
    bytes: u64,
}

impl Source {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Io {
            doing: "open",
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        let wrong = |what: String, hint: &str| Error::Usage {
            what,
            hint: hint.into(),
        };
        if !metadata.is_file() {
            return Err(wrong(
                format!("{} is not a file", path.display()),
                "name a regular file",
            ));
        }
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            return Err(wrong(
                format!("the name of {} is not text", path.display()),
                "rename it",
            ));
        };
        Ok(Self {
            file,
            path: path.to_owned(),
            name: name.to_owned(),
            bytes: metadata.len(),
        })
    }

    /// Fills `piece`, or says that the file is shorter than it was.
    fn read(&mut self, piece: &mut [u8]) -> Result<(), Error> {
        self.file.read_exact(piece).map_err(|source| Error::Io {
            doing: "read",
            path: self.path.clone(),
            source,
        })
    }

    /// A file that grew while it was sent would arrive cut short.
    fn check_end(&mut self) -> Result<(), Error> {
        match self.file.read(&mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(Error::Failed {
                what: format!("{} grew while it was sent", self.path.display()),
                hint: "send it when nobody writes to it",
            }),
            Err(source) => Err(Error::Io {
                doing: "read",
                path: self.path.clone(),
                source,
            }),
        }
    }
}

/// Sends the file and waits until it stands under its name at the server.
pub(crate) fn send(
    connection: &Connection,
    memory: &MemoryChoice,
    mut source: Source,
    limit: Duration,
) -> Result<(), Error> {
    let bytes = source.bytes;
    let answer = messages::expect(connection, ANSWER, limit)?;
    let request = Request::File {
        name: source.name.clone(),
        bytes,
        piece_bytes: PIECE,
    };
    messages::tell(connection, REQUEST, &request)?;
    messages::ready(answer)?;
    say!("sending {} ({})", source.path.display(), Size(bytes));
    let started = Instant::now();
    // Posted before the payload: the server may give up at any piece, and this is where it says why.
    let verdict = messages::expect(connection, VERDICT, messages::LONGEST_TRANSFER)?;
    let sha256 = match pieces(connection, memory, &mut source, limit) {
        Ok(sha256) => sha256,
        Err(error @ Error::Engine(_)) => {
            let said = verdict.within(REASON, "a verdict");
            return Err(match said {
                Some(Verdict::Failed { why, hint }) => Error::Peer { what: why, hint },
                _ => error,
            });
        }
        Err(error) => {
            let _ = messages::tell(
                connection,
                END,
                &End::GaveUp {
                    why: messages::brief(&error.what()),
                },
            );
            return Err(error);
        }
    };
    messages::tell(
        connection,
        END,
        &End::File {
            sha256: sha256.clone(),
        },
    )?;
    let took = started.elapsed();
    match verdict.wait_at_most(limit + flushing(bytes), "a verdict")? {
        Verdict::Passed {
            sha256: Some(theirs),
            ..
        } if theirs == sha256 => {}
        Verdict::Passed { sha256: theirs, .. } => {
            return Err(Error::Digest {
                what: "the SHA-256 digests",
                ours: sha256,
                theirs: messages::brief(theirs.as_deref().unwrap_or("none")),
            });
        }
        Verdict::Failed { why, hint } => return Err(Error::Peer { what: why, hint }),
    }
    let speed = rate(bytes, took).filter(|_| bytes >= 1 << 20);
    let speed = speed.map_or_else(String::new, |speed| {
        format!(", {speed:.2} GB/s with reading, digest and writing")
    });
    say!("sent in {}{speed}", time(took));
    say!("SHA-256 {sha256}, the same at both ends");
    Ok(())
}

/// Sends every piece; returns the digest of what was sent.
fn pieces(
    connection: &Connection,
    memory: &MemoryChoice,
    source: &mut Source,
    limit: Duration,
) -> Result<String, Error> {
    let mut digest = Sha256::new();
    let mut progress = Progress::new("sending", source.bytes);
    let mut flying: VecDeque<(Region, Transfer)> = VecDeque::with_capacity(PIECES_IN_FLIGHT);
    let mut piece = vec![0; usize::try_from(PIECE.min(source.bytes)).unwrap_or(0)];
    let (mut read, mut arrived) = (0, 0);
    while arrived < source.bytes {
        let region = if flying.len() == PIECES_IN_FLIGHT || read == source.bytes {
            let Some((region, transfer)) = flying.pop_front() else {
                break;
            };
            arrived += progress.follow(transfer, arrived)?.bytes;
            region
        } else {
            memory.allocate_pages(PIECE.min(source.bytes))?
        };
        if read == source.bytes {
            continue;
        }
        let count = PIECE.min(source.bytes - read);
        let bytes = &mut piece[..usize::try_from(count).unwrap_or(0)];
        source.read(bytes)?;
        digest.update(&*bytes);
        region
            .write_from(0, bytes)
            .map_err(Error::memory("fill a piece"))?;
        let slice = region
            .slice(..bytes.len())
            .map_err(Error::memory("send a piece"))?;
        let deadlines = messages::in_line(limit, PIECES_IN_FLIGHT);
        flying.push_back((
            region,
            connection
                .send(slice, PAYLOAD)
                .deadlines(deadlines)
                .start()?,
        ));
        read += count;
    }
    source.check_end()?;
    Ok(hexadecimal(&digest.finalize()))
}

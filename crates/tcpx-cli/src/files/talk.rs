//! How a side of a file transfer waits: it notices signals, the peer's last word, and a peer that
//! stalls.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tcpx::{Connection, Deadlines, Level, Region, Report, Transfer};

use super::Terms;
use super::manifest::{self, Entry};
use crate::error::Error;
use crate::interrupt::{self, LOOK};
use crate::memory_choice::MemoryChoice;
use crate::messages::{self, Expected, LONGEST_TRANSFER, LastWord};
use crate::output::progress::Progress;
use crate::sizes::Amount;

/// Bytes of a piece. A shorter one ends the stream of contents.
pub(super) const PIECE: usize = 1 << 20;

/// Pieces that the receiver has posted; after the end of the stream the sender fills the rest with
/// empty ones.
pub(super) const POSTED: usize = 8;

/// Longest wait for the peer's reason after an operation failed.
const REASON: Duration = Duration::from_secs(2);

/// Time for reading or flushing `bytes` on a slow disk, on top of `limit`: 50 MB/s.
pub(super) fn with_disk_time(limit: Duration, bytes: u64) -> Duration {
    limit.saturating_add(Duration::from_secs(bytes / 50_000_000))
}

/// One side's view of the other.
#[derive(Debug)]
pub(super) struct Talk<'a> {
    pub(super) connection: &'a Connection,
    /// Longest time without progress.
    pub(super) limit: Duration,
    /// Tag of this side's own last word.
    own_tag: u64,
    expected: RefCell<Option<Expected>>,
    heard: RefCell<Option<LastWord>>,
    pub(super) progress: RefCell<Option<Progress>>,
    pub(super) done: Cell<u64>,
    total: Cell<Option<u64>>,
}

impl<'a> Talk<'a> {
    /// Listens for the peer's last word from the start: it may give up at any step.
    pub(super) fn new(
        connection: &'a Connection,
        own_tag: u64,
        peers_tag: u64,
        limit: Duration,
    ) -> Result<Self, Error> {
        let expected = messages::expect(connection, peers_tag, LONGEST_TRANSFER)?;
        Ok(Self {
            connection,
            limit,
            own_tag,
            expected: RefCell::new(Some(expected)),
            heard: RefCell::new(None),
            progress: RefCell::new(None),
            done: Cell::new(0),
            total: Cell::new(None),
        })
    }

    /// How many bytes there will be.
    pub(super) fn expect_bytes(&self, entries: &[Entry]) {
        self.total.set(Some(manifest::total(entries)));
    }

    /// Shows the progress from here on; `there` bytes of it need not travel.
    pub(super) fn show(&self, terms: Terms<'_>, entries: &[Entry], there: u64) {
        if !terms.is_one_of_many {
            let label = match entries {
                [only] => manifest::shown(&only.path),
                _ => manifest::describe(entries),
            };
            *self.progress.borrow_mut() = Some(Progress::from(&label, self.total.get(), there));
        }
        self.advance(there);
    }

    /// More bytes are done.
    pub(super) fn advance(&self, bytes: u64) {
        // What frames the contents on the wire is not theirs.
        let most = self.total.get().unwrap_or(u64::MAX);
        self.done.set((self.done.get() + bytes).min(most));
        if let Some(progress) = &mut *self.progress.borrow_mut() {
            progress.at(self.done.get());
        }
    }

    /// An error if a signal came or the peer gave up.
    pub(super) fn check_peer(&self) -> Result<(), Error> {
        interrupt::check()?;
        self.check_last_word()
    }

    fn check_last_word(&self) -> Result<(), Error> {
        let word = match &*self.expected.borrow() {
            Some(expected) => expected.peek("a last word"),
            None => None,
        };
        if let Some(word) = word {
            self.expected.borrow_mut().take();
            *self.heard.borrow_mut() = Some(word?);
        }
        match &*self.heard.borrow() {
            Some(Err(reason)) => Err(reason.clone().into()),
            _ => Ok(()),
        }
    }

    /// How `transfer` ended; `None` if it goes on after `limit`.
    pub(super) fn poll(
        &self,
        transfer: &Transfer,
        limit: Duration,
    ) -> Result<Option<Report>, Error> {
        match transfer.wait_timeout(limit) {
            None => self.check_peer().map(|()| None),
            Some(Ok(report)) => Ok(Some(report)),
            Some(Err(error)) => Err(error.into()),
        }
    }

    /// The peer's reason, which is better than what came of it; else `error` itself.
    pub(super) fn reason(&self, error: Error) -> Error {
        if !matches!(error, Error::Engine(_)) {
            return error;
        }
        if let Some(expected) = &*self.expected.borrow() {
            let _ = expected.transfer().wait_timeout(REASON);
        }
        self.check_last_word().err().unwrap_or(error)
    }

    /// Waits for `transfer`, at most `limit` without progress.
    pub(super) fn wait(&self, transfer: &Transfer, limit: Duration) -> Result<Report, Error> {
        let mut watch = Watch::new(limit);
        loop {
            if let Some(report) = self.poll(transfer, LOOK)? {
                return Ok(report);
            }
            watch.check_progress(transfer)?;
        }
    }

    /// Waits for a message.
    pub(super) fn message<T: DeserializeOwned>(
        &self,
        expected: Expected,
        limit: Duration,
        what: &'static str,
    ) -> Result<T, Error> {
        self.wait(expected.transfer(), limit)?;
        expected.wait(what)
    }

    /// Sends a list that may be longer than a message; the peer takes it within `limit`.
    pub(super) fn send_list(&self, tag: u64, text: &[u8], limit: Duration) -> Result<(), Error> {
        let region = Region::host(text.len()).map_err(Error::memory("make room for a list"))?;
        region
            .write_from(0, text)
            .map_err(Error::memory("write a list"))?;
        let send = self.connection.send(region.all(), tag);
        let transfer = send.level(Level::Verified).deadlines(NONE).start()?;
        self.wait(&transfer, limit).map(drop)
    }

    /// Receives a list of at most `most` bytes.
    pub(super) fn receive_list(
        &self,
        tag: u64,
        most: u64,
        limit: Duration,
    ) -> Result<Vec<u8>, Error> {
        let region = MemoryChoice::host("for a list").allocate(most)?;
        let receive = self.connection.receive(region.all(), tag);
        let transfer = receive.level(Level::Verified).deadlines(NONE).start()?;
        let report = self.wait(&transfer, limit)?;
        let mut text = vec![0; usize::try_from(report.bytes).unwrap_or(usize::MAX)];
        region
            .read_to(0, &mut text)
            .map_err(Error::memory("read a list"))?;
        Ok(text)
    }

    /// Starts to send a piece of the contents.
    pub(super) fn send(&self, piece: &Piece, bytes: usize) -> Result<Transfer, Error> {
        let slice = piece.slice(bytes)?;
        let send = self.connection.send(slice, messages::PAYLOAD);
        Ok(send.deadlines(NONE).start()?)
    }

    /// Posts a receive of a piece of the contents.
    pub(super) fn post(&self, piece: &Piece) -> Result<Transfer, Error> {
        let receive = self
            .connection
            .receive(piece.slice(PIECE)?, messages::PAYLOAD);
        Ok(receive.deadlines(NONE).start()?)
    }

    /// Says how this side ended; the work's own error is the news, whatever becomes of this word.
    pub(super) fn last_word(&self, digest: Result<&str, &Error>) -> Result<(), Error> {
        let word = match digest {
            Ok(digest) => LastWord::Ok(digest.to_owned()),
            Err(Error::Peer(_)) => return Ok(()),
            Err(error) => LastWord::Err(error.into()),
        };
        messages::send_message(self.connection, self.own_tag, &word)
    }

    /// Waits for the peer's digest over everything.
    fn peers_digest(&self, limit: Duration) -> Result<String, Error> {
        let expected = self.expected.borrow_mut().take();
        if let Some(expected) = expected {
            let word = self.message(expected, limit, "a last word")?;
            *self.heard.borrow_mut() = Some(word);
        }
        self.check_last_word()?;
        match &*self.heard.borrow() {
            Some(Ok(digest)) => Ok(messages::brief(digest)),
            _ => Err(Error::unexpected("a last word", "none")),
        }
    }

    /// The peer must say that digest of the whole transfer which is right for its side; its word
    /// may take `limit`.
    pub(super) fn agree(&self, right: &str, limit: Duration) -> Result<(), Error> {
        match self.peers_digest(limit)? {
            theirs if theirs == right => Ok(()),
            theirs => Err(Error::Digest {
                what: "the keyed BLAKE3 digests of the transfer",
                ours: right.to_owned(),
                theirs,
            }),
        }
    }

    /// Says of an error at which peer it happened, and after how many bytes.
    pub(super) fn place(&self, error: Error) -> Error {
        let done = Amount(self.done.get());
        let peer = self.connection.peer().address;
        let place = match self.total.get() {
            _ if matches!(error, Error::Peer(_)) && self.done.get() == 0 => {
                format!("peer {peer}, before the first byte")
            }
            Some(total) => format!("peer {peer}, after {done} of {}", Amount(total)),
            None => format!("peer {peer}, after {done}"),
        };
        Error::At {
            place,
            source: Box::new(error),
        }
    }
}

/// Keeps contents below a rate.
#[derive(Debug)]
pub(super) struct Pace {
    rate: Option<u64>,
    started: Instant,
    bytes: u64,
}

impl Pace {
    /// At most `rate` bytes a second.
    pub(super) fn new(rate: Option<u64>) -> Self {
        Self {
            rate,
            started: Instant::now(),
            bytes: 0,
        }
    }

    /// Waits until `bytes` more may travel.
    pub(super) fn wait(&mut self, talk: &Talk<'_>, bytes: usize) -> Result<(), Error> {
        let Some(rate) = self.rate else {
            return Ok(());
        };
        #[expect(clippy::cast_precision_loss, reason = "a time to wait needs no more")]
        let due = Duration::from_secs_f64(self.bytes as f64 / rate as f64);
        self.bytes += bytes as u64;
        loop {
            let left = due.saturating_sub(self.started.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(LOOK));
            talk.check_peer()?;
        }
    }
}

/// [`Watch`] has the deadline: pieces wait for those before them, and the engine would count that,
/// too.
const NONE: Deadlines = Deadlines {
    stall: LONGEST_TRANSFER,
    total: None,
};

/// Notices that nothing moves.
#[derive(Debug)]
pub(super) struct Watch {
    limit: Duration,
    moved: Instant,
    done: u64,
}

impl Watch {
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            moved: Instant::now(),
            done: 0,
        }
    }

    /// Something moved.
    pub(super) fn reset(&mut self) {
        (self.moved, self.done) = (Instant::now(), 0);
    }

    /// An error when `transfer` has stalled for too long.
    pub(super) fn check_progress(&mut self, transfer: &Transfer) -> Result<(), Error> {
        let done = transfer.progress().bytes_done;
        if done != self.done {
            (self.moved, self.done) = (Instant::now(), done);
        }
        if self.moved.elapsed() < self.limit {
            return Ok(());
        }
        Err(Error::NothingMoved { limit: self.limit })
    }
}

/// Memory of one piece: read where it lies, or beside GPU memory.
#[derive(Debug)]
pub(super) struct Piece {
    region: Region,
    staging: Option<Vec<u8>>,
}

impl Piece {
    pub(super) fn new(memory: &MemoryChoice) -> Result<Self, Error> {
        Ok(Self {
            region: memory.allocate(PIECE as u64)?,
            staging: memory.gpu.is_some().then(|| vec![0; PIECE]),
        })
    }

    fn slice(&self, bytes: usize) -> Result<tcpx::RegionSlice, Error> {
        self.region
            .slice(..bytes)
            .map_err(Error::memory("use a piece"))
    }

    /// Writes as many of the bytes as there is room for from `at` on; how many.
    pub(super) fn put(&self, at: usize, bytes: &[u8]) -> Result<usize, Error> {
        let count = bytes.len().min(PIECE - at);
        let written = self.region.write_from(at, &bytes[..count]);
        written.map_err(Error::memory("fill a piece"))?;
        Ok(count)
    }

    /// Has `read` look at the first `bytes`.
    pub(super) fn read<T>(
        &mut self,
        bytes: usize,
        read: impl FnOnce(&[u8]) -> Result<T, Error>,
    ) -> Result<T, Error> {
        match &mut self.staging {
            Some(staging) => {
                let copied = self.region.read_to(0, &mut staging[..bytes]);
                copied.map_err(Error::memory("read a piece"))?;
                read(&staging[..bytes])
            }
            None => self
                .region
                .with_bytes(..bytes, read)
                .map_err(Error::memory("read a piece"))?,
        }
    }
}

/// What the server has of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Present {
    /// Place in the manifest.
    pub(super) index: usize,
    pub(super) bytes: u64,
    /// Whether they have the final name.
    pub(super) is_final: bool,
}

/// BLAKE3 of the beginning of each file that the server has something of; none where the client has
/// less. The client says them first, so that a server tells nobody what its files hold.
pub(super) type Digests = Vec<Option<String>>;

/// Which of these the server keeps.
pub(super) type KeptFiles = Vec<bool>;

/// What both ends say when nothing was to be moved.
pub(super) const DRY_RUN: &str = "dry run";

/// A list as text.
pub(super) fn encode<T: Serialize>(list: &T) -> Result<Vec<u8>, Error> {
    let written = serde_json::to_vec(list).map_err(std::io::Error::from);
    written.map_err(Error::process("write a list for the peer"))
}

/// A list from the peer.
pub(super) fn decode<T: DeserializeOwned>(text: &[u8], what: &'static str) -> Result<T, Error> {
    serde_json::from_slice(text)
        .map_err(|error| Error::unexpected(what, format!("something else ({error})")))
}

//! Sending files: a thread reads and digests them into pieces, while earlier pieces are on their
//! way.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use tcpx::{Connection, Transfer};

use super::digest::{DigestKey, Side};
use super::manifest::{self, Entry, Found, Kind, Manifest, Selection};
use super::receiver::LEFT_OUT;
use super::talk::{
    self, DRY_RUN, Digests, PIECE, POSTED, Pace, Piece, Present, Talk, Watch, with_disk_time,
};
use super::{Summary, Terms, say_plan, store};
use crate::error::Error;
use crate::interrupt::{self, LOOK};
use crate::messages::{
    self, ANSWER, Answer, DIGESTS, END, KEPT, MANIFEST, OFFER, Offer, Offered, PRESENT, REQUEST,
    Request, VERDICT,
};

/// Pieces on their way at once; two more are being filled.
const IN_FLIGHT: usize = 4;

/// Bytes that are read and digested at a time, so that they are still in the cache.
const BLOCK: usize = 256 << 10;

/// Who began: it decides how the receiver hears of the offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opening {
    /// The sender, with this request.
    Push,
    /// The receiver, and this answers it.
    Pull,
}

/// Sends everything and waits until it is in its place at the receiver.
pub(super) fn send(
    connection: &Connection,
    terms: Terms<'_>,
    selection: Selection,
    opening: Opening,
    dry_run: bool,
) -> Result<Summary, Error> {
    let talk = Talk::new(connection, END, VERDICT, terms.limit)?;
    let result = attempt(&talk, terms, selection, opening, dry_run);
    let result = result.map_err(|error| talk.reason(error));
    talk.progress.borrow_mut().take();
    result.map_err(|error| {
        if let Err(untold) = talk.last_word(Err(&error)) {
            tracing::debug!(%untold, "the peer did not hear why");
        }
        talk.place(error)
    })
}

fn attempt(
    talk: &Talk<'_>,
    terms: Terms<'_>,
    selection: Selection,
    opening: Opening,
    dry_run: bool,
) -> Result<Summary, Error> {
    let Selection {
        found,
        left_out,
        within,
    } = selection;
    let within = within.as_deref();
    let entries: Vec<Entry> = found.iter().map(|found| found.entry.clone()).collect();
    let total = manifest::total(&entries);
    talk.expect_bytes(&entries);
    let manifest = Manifest { entries, left_out };
    let text = talk::encode(&manifest)?;
    let Manifest {
        mut entries,
        mut left_out,
    } = manifest;
    let manifest_digest = blake3::hash(&text);
    let key = DigestKey::new()?;
    let offer = Offer {
        bytes: text.len() as u64,
        digest: manifest_digest.to_string(),
        key: key.clone(),
        dry_run,
    };
    let answer = messages::expect(talk.connection, ANSWER, messages::LONGEST_TRANSFER)?;
    match opening {
        Opening::Push => messages::send_message(talk.connection, REQUEST, &Request::Push(offer))?,
        Opening::Pull => messages::send_message(talk.connection, OFFER, &Offered::Ok(offer))?,
    }
    let listed = talk.send_list(MANIFEST, &text, talk.limit);
    if let (Err(_), Some(refused)) = (&listed, answer.peek::<Answer>("what the receiver has")) {
        refused??;
    }
    listed?;
    let disk = with_disk_time(talk.limit, total);
    let present = match talk.message::<Answer>(answer, disk, "what the receiver has")?? {
        0 => Vec::new(),
        bytes if bytes <= manifest::MOST_BYTES => {
            let list = talk.receive_list(PRESENT, bytes, talk.limit)?;
            talk::decode(&list, "what the receiver has")?
        }
        _ => return Err(Error::unexpected("what the receiver has", "a longer list")),
    };
    let kept = compare(talk, &found, within, &present, disk)?;
    let there = kept.values().map(|kept| kept.bytes).sum();
    let started = Instant::now();
    if dry_run {
        talk.last_word(Ok(DRY_RUN))?;
        talk.agree(DRY_RUN, disk)?;
        if terms.is_client {
            say_plan(&entries, |index| kept.get(&index).map(|kept| kept.bytes));
        }
        let took = started.elapsed();
        return Ok(Summary::new(&entries, left_out, there, took, None));
    }
    talk.show(terms, &entries, there);
    let Moved { digests, changed } = stream(talk, terms, (found, within), kept, key.clone())?;
    left_out.take(&mut entries, &changed);
    let digest = overall(&manifest_digest, &digests);
    let [ours, theirs] = [Side::Sender, Side::Receiver].map(|side| key.end(side, &digest));
    talk.last_word(Ok(&ours.to_string()))?;
    let limit = with_disk_time(talk.limit, talk.done.get());
    talk.agree(&theirs.to_string(), limit)?;
    let ended = Some((&digests[..], digest));
    let took = started.elapsed();
    Ok(Summary::new(&entries, left_out, there, took, ended))
}

/// BLAKE3 over the manifest's digest and those of all contents in their order.
pub(super) fn overall(manifest: &blake3::Hash, digests: &[Content]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(manifest.as_bytes());
    for (digest, _) in digests {
        hasher.update(digest.as_bytes());
    }
    hasher.finalize()
}

/// The beginning of a file that the receiver has and keeps.
#[derive(Debug)]
struct KeptBeginning {
    bytes: u64,
    /// Nothing of the file is sent.
    is_whole: bool,
    hasher: blake3::Hasher,
}

/// Has the receiver compare what it has with what is here; what differs is sent from its beginning.
fn compare(
    talk: &Talk<'_>,
    found: &[Found],
    within: Option<&Path>,
    present: &[Present],
    disk: Duration,
) -> Result<BTreeMap<usize, KeptBeginning>, Error> {
    if present.is_empty() {
        return Ok(BTreeMap::new());
    }
    let ascends = present.is_sorted_by(|one, next| one.index < next.index);
    if !ascends || present.iter().any(|there| there.index >= found.len()) {
        let expected = "each file that the receiver has once, of those that were offered";
        return Err(Error::unexpected(expected, "others"));
    }
    let hashers = present
        .iter()
        .map(|there| beginning(talk, found, within, there));
    let hashers = hashers.collect::<Result<Vec<_>, _>>()?;
    let digest = |hasher: &blake3::Hasher| hasher.finalize().to_string();
    let digests: Digests = hashers.iter().map(|one| one.as_ref().map(digest)).collect();
    talk.send_list(DIGESTS, &talk::encode(&digests)?, disk)?;
    // `false` and a comma for each.
    let text = talk.receive_list(KEPT, present.len() as u64 * 6 + 2, disk)?;
    let kept: talk::KeptFiles = talk::decode(&text, "what the receiver keeps")?;
    let all = present.iter().zip(hashers).zip(kept);
    let kept = all.filter_map(|((there, hasher), is_kept)| {
        let kept = KeptBeginning {
            bytes: there.bytes,
            is_whole: there.is_final && there.bytes == found[there.index].entry.bytes(),
            hasher: hasher.filter(|_| is_kept)?,
        };
        Some((there.index, kept))
    });
    Ok(kept.collect())
}

/// BLAKE3 of as many bytes as the receiver has of a file; none if that cannot be its beginning.
fn beginning(
    talk: &Talk<'_>,
    found: &[Found],
    within: Option<&Path>,
    there: &Present,
) -> Result<Option<blake3::Hasher>, Error> {
    let Some(Found { entry, source }) = found.get(there.index) else {
        return Ok(None);
    };
    if there.bytes > entry.bytes() {
        return Ok(None);
    }
    talk.check_peer()?;
    let mut source = Source::open(source, entry, within)??;
    let hashed = store::hash(&mut source.file, there.bytes);
    interrupt::check()?;
    hashed.map(Some).map_err(|error| source.failed(error))
}

/// BLAKE3 of a file's bytes, and how many there are.
pub(super) type Content = (blake3::Hash, u64);

/// What came of all contents.
#[derive(Debug, Default)]
pub(super) struct Moved {
    pub(super) digests: Vec<Content>,
    /// Places of files that were left out after all.
    pub(super) changed: Vec<usize>,
}

/// What the reading thread hands over.
enum Filled {
    Piece(Piece, usize),
    End(Result<Moved, Error>),
}

/// Sends the contents of everything.
fn stream(
    talk: &Talk<'_>,
    terms: Terms<'_>,
    (found, within): (Vec<Found>, Option<&Path>),
    kept: BTreeMap<usize, KeptBeginning>,
    key: DigestKey,
) -> Result<Moved, Error> {
    let within = within.map(Path::to_owned);
    let memory = terms.memory;
    let mut pace = Pace::new(terms.most);
    let (free, free_pieces) = mpsc::channel();
    let (full, full_pieces) = mpsc::sync_channel(IN_FLIGHT);
    for _ in 0..IN_FLIGHT + 2 {
        let _ = free.send(Piece::new(memory)?);
    }
    let reader = std::thread::Builder::new().name("tcpx-read".into());
    let reader = reader.spawn(move || {
        let mut packer = Packer {
            free: free_pieces,
            full,
            current: None,
        };
        let read = read_all(&mut packer, found, within.as_deref(), kept, &key);
        let _ = packer.full.send(Filled::End(read));
    });
    reader.map_err(Error::process("start a thread"))?;
    let mut flying = VecDeque::with_capacity(IN_FLIGHT);
    let moved = loop {
        // Two pieces at least are with the reader then.
        while flying.len() == IN_FLIGHT {
            reap(talk, &mut flying, &free)?;
        }
        match full_pieces.recv_timeout(LOOK) {
            Ok(Filled::Piece(piece, bytes)) => {
                pace.wait(talk, bytes)?;
                let transfer = talk.send(&piece, bytes)?;
                flying.push_back((transfer, piece, bytes));
            }
            Ok(Filled::End(moved)) => break moved?,
            Err(mpsc::RecvTimeoutError::Timeout) => talk.check_peer()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(gone()),
        }
    };
    while !flying.is_empty() {
        reap(talk, &mut flying, &free)?;
    }
    // The receiver has posted more than there was: it could not know.
    let empty = Piece::new(memory)?;
    let fills: Result<Vec<Transfer>, Error> = (1..POSTED).map(|_| talk.send(&empty, 0)).collect();
    for fill in fills? {
        talk.wait(&fill, talk.limit)?;
    }
    Ok(moved)
}

/// A thread that ended without its result.
pub(super) fn gone() -> Error {
    Error::failed(
        "a thread of the transfer ended without a result",
        "report this as a defect of tcpx",
    )
}

/// Waits for the oldest piece.
fn reap(
    talk: &Talk<'_>,
    flying: &mut VecDeque<(Transfer, Piece, usize)>,
    free: &Sender<Piece>,
) -> Result<(), Error> {
    if let Some((transfer, piece, bytes)) = flying.pop_front() {
        let mut watch = Watch::new(talk.limit);
        while talk.poll(&transfer, LOOK)?.is_none() {
            watch.check_progress(&transfer)?;
        }
        talk.advance(bytes as u64);
        // The reader may have read everything.
        let _ = free.send(piece);
    }
    Ok(())
}

/// Packs contents into pieces.
struct Packer {
    free: Receiver<Piece>,
    full: mpsc::SyncSender<Filled>,
    current: Option<(Piece, usize)>,
}

impl Packer {
    fn hand_over(&self, piece: Piece, bytes: usize) -> Result<(), Error> {
        let sent = self.full.send(Filled::Piece(piece, bytes));
        sent.map_err(|_| gone())
    }

    fn put(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let (piece, at) = match self.current.take() {
                Some(current) => current,
                None => (self.free.recv().map_err(|_| gone())?, 0),
            };
            let count = piece.put(at, bytes)?;
            bytes = &bytes[count..];
            if at + count == PIECE {
                self.hand_over(piece, PIECE)?;
            } else {
                self.current = Some((piece, at + count));
            }
        }
        Ok(())
    }

    /// Hands over the last piece, which is shorter than the others.
    fn finish(&mut self) -> Result<(), Error> {
        let (piece, bytes) = match self.current.take() {
            Some(current) => current,
            None => (self.free.recv().map_err(|_| gone())?, 0),
        };
        self.hand_over(piece, bytes)
    }
}

/// The stream: for each file blocks with their lengths in front, an empty one, and the keyed digest
/// of their bytes. In the place of the empty one [`LEFT_OUT`] ends a file that is not sent after
/// all.
fn read_all(
    packer: &mut Packer,
    found: Vec<Found>,
    within: Option<&Path>,
    mut kept: BTreeMap<usize, KeptBeginning>,
    key: &DigestKey,
) -> Result<Moved, Error> {
    let mut moved = Moved::default();
    for (index, Found { entry, source }) in found.into_iter().enumerate() {
        let mut hasher = blake3::Hasher::new();
        let Kind::File { bytes, .. } = entry.kind else {
            continue;
        };
        let mut from = 0;
        match kept.remove(&index) {
            Some(kept) if kept.is_whole => {
                moved.digests.push((kept.hasher.finalize(), bytes));
                continue;
            }
            Some(kept) => (hasher, from) = (kept.hasher, kept.bytes),
            None => {}
        }
        let is_whole = match Source::open(&source, &entry, within)? {
            Ok(mut source) => source.send(packer, &mut hasher, from)?,
            Err(_) => false,
        };
        let end = if is_whole { 0 } else { LEFT_OUT };
        packer.put(&end.to_le_bytes())?;
        if !is_whole {
            moved.changed.push(index);
            continue;
        }
        let digest = hasher.finalize();
        moved.digests.push((digest, hasher.count()));
        packer.put(key.file(index, &digest).as_bytes())?;
    }
    packer.finish()?;
    Ok(moved)
}

/// Packs blocks with their lengths in front until there is no more; within, an error of the input.
fn read_blocks(
    packer: &mut Packer,
    mut input: impl Read,
    hasher: &mut blake3::Hasher,
) -> Result<std::io::Result<()>, Error> {
    let mut block = vec![0; BLOCK];
    loop {
        let count = match input.read(&mut block) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Ok(Err(error)),
            Ok(0) => return Ok(Ok(())),
            Ok(count) => count,
        };
        packer.put(&u32::try_from(count).unwrap_or(0).to_le_bytes())?;
        hasher.update(&block[..count]);
        packer.put(&block[..count])?;
    }
}

/// A file whose size and time are what the manifest says.
struct Source {
    file: File,
    path: PathBuf,
    bytes: u64,
    time: (i64, u32),
}

impl Source {
    /// Opens it; within, an error of the file's own. A path that lay within a folder may have got a
    /// link in it since it was looked at; what was opened has not.
    fn open(
        path: &Path,
        entry: &Entry,
        within: Option<&Path>,
    ) -> Result<Result<Self, Error>, Error> {
        let failed = Error::io("open", path);
        // A pipe that took its place keeps nobody waiting.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut options = File::options();
        let file = match options.read(true).custom_flags(flags).open(path) {
            Ok(file) => file,
            Err(error) => return Ok(Err(failed(error))),
        };
        let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
        if let Some(within) = within
            && !std::fs::read_link(opened)
                .map_err(failed)?
                .starts_with(within)
        {
            return Err(Error::failed(
                format!(
                    "{} leads outside of the folder that is shared",
                    path.display()
                ),
                "let nobody else write into that folder",
            ));
        }
        let source = Self {
            file,
            path: path.to_owned(),
            bytes: entry.bytes(),
            time: (entry.seconds, entry.nanoseconds),
        };
        Ok(source.check().map(|()| source))
    }

    fn failed(&self, source: std::io::Error) -> Error {
        if source.kind() == std::io::ErrorKind::UnexpectedEof {
            return self.changed();
        }
        Error::io("read", &self.path)(source)
    }

    fn changed(&self) -> Error {
        Error::failed(
            format!("{} changed while it was sent", self.path.display()),
            "send it when nobody writes to it",
        )
    }

    /// Whoever writes to the file while it is sent makes the copy one that never existed.
    fn check(&self) -> Result<(), Error> {
        let now = self.file.metadata().map_err(|error| self.failed(error))?;
        let time = (
            now.mtime(),
            u32::try_from(now.mtime_nsec()).unwrap_or_default(),
        );
        if now.len() == self.bytes && time == self.time && now.is_file() {
            Ok(())
        } else {
            Err(self.changed())
        }
    }

    /// Packs what is behind `from`; `false` if it could not be read, or has changed.
    fn send(
        &mut self,
        packer: &mut Packer,
        hasher: &mut blake3::Hasher,
        from: u64,
    ) -> Result<bool, Error> {
        use std::io::Seek;
        let mut is_whole = self.file.seek(std::io::SeekFrom::Start(from)).is_ok();
        if is_whole {
            // One that grows ends nowhere.
            let rest = (&self.file).take(self.bytes.saturating_sub(from));
            is_whole = read_blocks(packer, rest, hasher)?.is_ok();
        }
        Ok(is_whole && hasher.count() == self.bytes && self.check().is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_takes_a_file_s_place_leads_nobody_outside() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path().canonicalize().expect("there");
        let shared = root.join("shared");
        std::fs::create_dir_all(shared.join("a")).expect("created");
        for path in ["shared/a/x", "x"] {
            std::fs::write(root.join(path), b"12345").expect("written");
        }
        let rules = manifest::Rules::new(false, &[], &[], Some(shared.clone())).expect("none");
        let paths = manifest::shared(&shared, &["a".to_owned()]).expect("there");
        let selection = manifest::collect(&paths, &rules).expect("found");
        let open = |within| {
            let file = selection.found.last().expect("a file");
            let entry = Entry {
                seconds: root.join("x").metadata().expect("there").mtime(),
                nanoseconds: root.join("x").metadata().expect("there").mtime_nsec() as u32,
                ..file.entry.clone()
            };
            Source::open(&file.source, &entry, within).map(|opened| opened.is_ok())
        };
        std::fs::remove_dir_all(shared.join("a")).expect("removed");
        std::os::unix::fs::symlink("..", shared.join("a")).expect("linked");
        assert!(
            open(None).expect("nobody asks where it leads"),
            "it is a file of the right size and time"
        );
        let error = open(selection.within.as_deref()).expect_err("outside");
        assert!(error.to_string().contains("leads outside"), "{error}");
    }
}

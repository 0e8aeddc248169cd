//! Receiving files: pieces arrive while one thread checks the digests of earlier ones and another
//! one writes.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::time::{Duration, Instant};

use tcpx::{Connection, Transfer};

use super::digest::{DigestKey, Side};
use super::manifest::{self, Entry, Kind, Manifest};
use super::sender::{Content, Moved, gone, overall};
use super::store::{self, Claim, Identity, PartialFile, Present, Store, StoreError};
use super::talk::{
    self, DRY_RUN, Digests, PIECE, POSTED, Pace, Piece, Talk, Watch, with_disk_time,
};
use super::{Summary, Terms, say_plan};
use crate::error::Error;
use crate::interrupt::{self, LOOK};
use crate::messages::{
    self, ANSWER, Answer, DIGESTS, END, KEPT, MANIFEST, Offer, PRESENT, VERDICT,
};
use crate::output::say::aside;
use crate::sizes::{Amount, Size};

/// Bytes of the length in front of each block of a file.
const BLOCK_HEADER: usize = 4;
/// In the place of a length: the file is left out after all.
pub(super) const LEFT_OUT: u32 = u32::MAX;

/// Pieces that are being checked and written while others arrive.
const BEHIND: usize = 8;

/// Bytes and files that wait for one flush before they get their names.
const FLUSH_BYTES: u64 = 256 << 20;
const FLUSH_FILES: usize = 256;

/// Partial files of earlier transfers that are held open until their turn; others are sent anew.
const MOST_HELD: usize = 64;

/// Longest wait for the writing thread to put away what it has, after something else failed.
const PUT_AWAY: Duration = Duration::from_secs(10);

/// Where files go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Out<'a> {
    pub(super) directory: &'a Path,
    pub(super) overwrite: bool,
    /// What this side asked for, if it did: nothing else is taken.
    pub(super) asked: Option<&'a [String]>,
    /// This side asked for nothing to be moved.
    pub(super) dry_run: bool,
}

/// Receives everything; under its final name a file is whole, or not there.
pub(super) fn receive(
    connection: &Connection,
    terms: Terms<'_>,
    offer: &Offer,
    out: Out<'_>,
) -> Result<Summary, Error> {
    let talk = Talk::new(connection, VERDICT, END, terms.limit)?;
    let mut posted = VecDeque::with_capacity(POSTED);
    let result = attempt(&talk, terms, offer, out, &mut posted).map_err(|error| talk.reason(error));
    talk.progress.borrow_mut().take();
    let told = match &result {
        Ok((_, word)) => talk.last_word(Ok(word)),
        Err(error) => talk.last_word(Err(error)),
    };
    // Only now: taking a posted receive back can end the whole connection, and the last word with
    // it.
    drop(posted);
    let (summary, _) = result.map_err(|error| talk.place(error))?;
    told.map(|()| summary)
}

type PostedPieces = VecDeque<(Transfer, Piece)>;

/// Returns this side's last word as well.
fn attempt(
    talk: &Talk<'_>,
    terms: Terms<'_>,
    offer: &Offer,
    out: Out<'_>,
    posted: &mut PostedPieces,
) -> Result<(Summary, String), Error> {
    if !(1..=manifest::MOST_BYTES).contains(&offer.bytes) {
        return Err(Error::unexpected(
            "a list of files of at most 256 MiB",
            format!("one of {}", Size(offer.bytes)),
        ));
    }
    let text = talk.receive_list(MANIFEST, offer.bytes, talk.limit)?;
    let manifest_digest = blake3::hash(&text);
    if manifest_digest.to_string() != offer.digest {
        return Err(Error::Digest {
            what: "the BLAKE3 digests of the list of files",
            ours: manifest_digest.to_string(),
            theirs: messages::brief(&offer.digest),
        });
    }
    let Manifest {
        mut entries,
        mut left_out,
    } = talk::decode(&text, "a list of files")?;
    drop(text);
    manifest::check(&entries)?;
    if let Some(asked) = out.asked {
        manifest::check_asked(&entries, asked)?;
    }
    talk.expect_bytes(&entries);
    let (mut store, plan) = prepare(talk, &entries, out)?;
    let started = Instant::now();
    let there = plan.skipped;
    if offer.dry_run || out.dry_run {
        talk.agree(DRY_RUN, talk.limit)?;
        if terms.is_client {
            say_plan(&entries, |index| plan.there(index));
        }
        let summary = Summary::new(&entries, left_out, there, started.elapsed(), None);
        return Ok((summary, DRY_RUN.to_owned()));
    }
    talk.show(terms, &entries, there);
    let mut new = BTreeSet::new();
    for (index, entry) in entries.iter().enumerate() {
        if entry.kind == Kind::Directory && store.make_directory(entry)? {
            new.insert(index);
        }
    }
    let into = Destination { store, new };
    let moved = contents(talk, terms, &entries, &offer.key, plan, into, posted)?;
    let Moved { digests, changed } = moved;
    left_out.take(&mut entries, &changed);
    let digest = overall(&manifest_digest, &digests);
    let [theirs, ours] = [Side::Sender, Side::Receiver].map(|side| offer.key.end(side, &digest));
    talk.agree(&theirs.to_string(), talk.limit)?;
    let ended = Some((&digests[..], digest));
    let summary = Summary::new(&entries, left_out, there, started.elapsed(), ended);
    Ok((summary, ours.to_string()))
}

/// Where the contents go, and the places of the directories there that are new.
#[derive(Debug)]
struct Destination {
    store: Store,
    new: BTreeSet<usize>,
}

/// What comes for one file.
#[derive(Debug)]
struct Job {
    index: usize,
    /// Bytes that are there already, and what they hash to.
    from: u64,
    hasher: blake3::Hasher,
    /// The partial file that they are in.
    claim: Option<Claim>,
}

/// What comes, in its order.
#[derive(Debug, Default)]
struct Plan {
    jobs: VecDeque<Job>,
    /// Files that are there, by their place.
    whole: Vec<(usize, Content, Identity)>,
    skipped: u64,
}

impl Plan {
    /// Bytes of a file that need not come.
    fn there(&self, index: usize) -> Option<u64> {
        let whole = self.whole.iter().find(|(at, ..)| *at == index);
        let part = self
            .jobs
            .iter()
            .find(|job| job.index == index && job.from > 0);
        whole
            .map(|&(_, (_, bytes), _)| bytes)
            .or_else(|| part.map(|job| job.from))
    }
}

/// Checks the destination and agrees with the sender on what is there already.
fn prepare(talk: &Talk<'_>, entries: &[Entry], out: Out<'_>) -> Result<(Store, Plan), Error> {
    let store = Store::open(out.directory, out.overwrite)?;
    for entry in entries {
        store.check(entry)?;
    }
    let mut there = Vec::new();
    let (mut bytes, mut held) = (0, 0);
    for (index, entry) in entries.iter().enumerate() {
        talk.check_peer()?;
        let present = match once_free(talk, || store.present(entry))? {
            Some(Present::Partial { .. }) if held == MOST_HELD => None,
            present => present,
        };
        if let Some(present) = present {
            held += usize::from(!present.is_final());
            bytes += present.bytes();
            there.push((index, present));
        }
    }
    store.check_space(manifest::on_disk(entries).saturating_sub(bytes))?;
    let plan = if there.is_empty() {
        messages::tell_ready(talk.connection)?;
        plan(entries, Vec::new())
    } else {
        keep(talk, entries, &store, there, out.overwrite)?
    };
    Ok((store, plan))
}

/// What `look` finds, once no other transfer has the file: one that has just lost its peer puts it
/// away first.
fn once_free<T>(
    talk: &Talk<'_>,
    mut look: impl FnMut() -> Result<T, StoreError>,
) -> Result<T, Error> {
    let until = Instant::now() + PUT_AWAY / 2;
    loop {
        match look() {
            Err(StoreError::Busy(_)) if Instant::now() < until => {
                talk.check_peer()?;
                std::thread::sleep(LOOK);
            }
            found => return Ok(found?),
        }
    }
}

/// Agrees with the sender on what of the files that are there is kept. The sender says what it has,
/// and this side compares.
fn keep(
    talk: &Talk<'_>,
    entries: &[Entry],
    store: &Store,
    mut there: Vec<(usize, Present)>,
    overwrite: bool,
) -> Result<Plan, Error> {
    let list: Vec<_> = there
        .iter()
        .map(|(index, present)| talk::Present {
            index: *index,
            bytes: present.bytes(),
            is_final: present.is_final(),
        })
        .collect();
    let text = talk::encode(&list)?;
    let bytes = text.len() as u64;
    messages::send_message(talk.connection, ANSWER, &Answer::Ok(bytes))?;
    talk.send_list(PRESENT, &text, talk.limit)?;
    let mut hashed = Vec::with_capacity(there.len());
    for (index, present) in &mut there {
        talk.check_peer()?;
        hashed.push(store.hash(&entries[*index], present));
        interrupt::check()?;
    }
    // Quotation marks and a comma around each.
    let most = list.len() as u64 * (2 * blake3::OUT_LEN as u64 + 3) + 2;
    let total = list.iter().map(|there| there.bytes).sum();
    let text = talk.receive_list(DIGESTS, most, with_disk_time(talk.limit, total))?;
    let theirs: Digests = talk::decode(&text, "digests of what is there")?;
    if theirs.len() != list.len() {
        return Err(Error::unexpected(
            "a digest for each file that is there",
            "another number of them",
        ));
    }
    let there = there.into_iter().zip(hashed).zip(theirs);
    let there = there.map(|(((index, present), hashed), theirs)| {
        let is_equal = |hashed: &store::Hashed| {
            theirs.is_some_and(|theirs| theirs == hashed.hasher.finalize().to_string())
        };
        (index, present, hashed.filter(is_equal))
    });
    let there: Vec<_> = there.collect();
    for (index, present, kept) in &there {
        if present.is_final() && kept.is_none() && !overwrite {
            return Err(store.exists(&entries[*index]).into());
        }
    }
    let kept: talk::KeptFiles = there.iter().map(|(.., kept)| kept.is_some()).collect();
    talk.send_list(KEPT, &talk::encode(&kept)?, talk.limit)?;
    Ok(plan(entries, there))
}

/// What comes, given what is there and, where it is kept, its contents.
fn plan(entries: &[Entry], there: Vec<(usize, Present, Option<store::Hashed>)>) -> Plan {
    let mut plan = Plan::default();
    let mut there = there.into_iter().peekable();
    for (index, entry) in entries.iter().enumerate() {
        if !manifest::is_content(entry) {
            continue;
        }
        let mut job = Job {
            index,
            from: 0,
            hasher: blake3::Hasher::new(),
            claim: None,
        };
        if let Some((_, present, kept)) = there.next_if(|(at, ..)| *at == index) {
            let bytes = present.bytes();
            if kept.is_some() {
                plan.skipped += bytes;
            }
            match (present, kept) {
                (Present::Final { .. }, Some(kept)) => {
                    let content = (kept.hasher.finalize(), bytes);
                    plan.whole.push((index, content, kept.identity));
                    continue;
                }
                (Present::Final { .. }, None) => {}
                (Present::Partial { claim, .. }, kept) => {
                    job.claim = Some(claim);
                    if let Some(kept) = kept {
                        (job.from, job.hasher) = (bytes, kept.hasher);
                    }
                }
            }
        }
        plan.jobs.push_back(job);
    }
    plan
}

/// What the writing thread does with a piece.
#[derive(Debug)]
enum Step {
    Begin {
        index: usize,
        claim: Option<Claim>,
        from: u64,
    },
    Write(Range<usize>),
    End,
    /// The sender leaves the file out after all.
    LeaveOut,
    /// The file is not what was sent.
    Remove,
}

/// How the writing thread ended.
struct Written {
    result: Result<(), Error>,
    /// Where a part of a file is kept, and how many bytes of it.
    kept: Option<(PathBuf, u64)>,
}

/// Receives, checks and writes all contents.
fn contents(
    talk: &Talk<'_>,
    terms: Terms<'_>,
    entries: &[Entry],
    key: &DigestKey,
    plan: Plan,
    into: Destination,
    posted: &mut PostedPieces,
) -> Result<Moved, Error> {
    let (free, free_pieces) = mpsc::channel();
    let (arrived, to_check) = mpsc::sync_channel(POSTED + BEHIND);
    let (checked, to_write) = mpsc::sync_channel(BEHIND);
    let (digests, all_digests) = mpsc::channel();
    let (written, end) = mpsc::channel();
    for _ in 0..POSTED + BEHIND {
        let _ = free.send(Piece::new(terms.memory)?);
    }
    let failed = Error::process("start a thread");
    let expected = plan.jobs.len();
    let whole = plan
        .whole
        .iter()
        .map(|&(index, _, identity)| (index, identity));
    let whole = whole.collect();
    let digests_there = plan
        .whole
        .into_iter()
        .map(|(index, content, _)| (index, content));
    let checker = Checker {
        entries: entries.to_vec(),
        key: key.clone(),
        digests: digests_there.collect(),
        jobs: plan.jobs,
        at: At::Between,
        digest: Vec::with_capacity(blake3::OUT_LEN),
        changed: Vec::new(),
    };
    let thread = std::thread::Builder::new().name("tcpx-check".into());
    let checking = thread.spawn(move || {
        let _ = digests.send(checker.run(&to_check, &checked));
    });
    checking.map_err(failed)?;
    let writer = Writer {
        entries: entries.to_vec(),
        store: into.store,
        new: into.new,
        current: None,
        ready: Vec::new(),
        ready_bytes: 0,
        expected,
        whole,
    };
    let thread = std::thread::Builder::new().name("tcpx-write".into());
    let writing = thread.spawn(move || {
        let _ = written.send(writer.run(&to_write, &free));
    });
    writing.map_err(failed)?;
    let pace = Pace::new(terms.most);
    let all_arrived = arrive(talk, pace, &free_pieces, &arrived, posted);
    drop(arrived);
    let limit = match &all_arrived {
        Ok(()) => with_disk_time(talk.limit, talk.done.get()),
        Err(_) => PUT_AWAY,
    };
    let all_checked = match &all_arrived {
        Ok(()) => interrupt::receive(&all_digests, Some(limit)),
        Err(_) => Ok(all_digests.recv_timeout(limit).ok()),
    };
    // A defect of the contents is the reason for whatever the others met.
    let result = match (all_arrived, all_checked) {
        (_, Ok(Some(Err(error)))) | (Err(error), _) | (Ok(()), Err(error)) => Err(error),
        (Ok(()), Ok(Some(Ok(moved)))) => Ok(moved),
        (Ok(()), Ok(None)) => Err(gone()),
    };
    let mut written = match &result {
        Ok(_) => interrupt::receive(&end, Some(limit)),
        Err(_) => Ok(None),
    };
    if !matches!(written, Ok(Some(_))) {
        // Interrupted while it flushed, or something failed before.
        written = Ok(end.recv_timeout(PUT_AWAY).ok());
    }
    let Some(written) = written? else {
        return result.and_then(|_| Err(gone()));
    };
    if let Some((path, bytes)) = written.kept {
        aside!(
            "kept: {} has the first {} of a file; the next transfer of it goes on there",
            path.display(),
            Amount(bytes)
        );
    }
    match written.result {
        // The other threads only saw that it was gone.
        Err(error) => Err(error),
        Ok(()) => result,
    }
}

/// Receives pieces until the short one that ends the stream.
fn arrive(
    talk: &Talk<'_>,
    mut pace: Pace,
    free: &Receiver<Piece>,
    arrived: &SyncSender<(Piece, usize)>,
    posted: &mut PostedPieces,
) -> Result<(), Error> {
    let mut watch = Watch::new(talk.limit);
    let post_more = |posted: &mut PostedPieces, count: usize| {
        while posted.len() < count {
            let piece = match free.try_recv() {
                Ok(piece) => piece,
                Err(mpsc::TryRecvError::Empty) if !posted.is_empty() => break,
                Err(mpsc::TryRecvError::Empty) => match free.recv_timeout(LOOK) {
                    Ok(piece) => piece,
                    Err(mpsc::RecvTimeoutError::Timeout) => {
                        talk.check_peer()?;
                        continue;
                    }
                    Err(mpsc::RecvTimeoutError::Disconnected) => return Err(gone()),
                },
                Err(mpsc::TryRecvError::Disconnected) => return Err(gone()),
            };
            posted.push_back((talk.post(&piece)?, piece));
        }
        Ok::<(), Error>(())
    };
    loop {
        post_more(posted, POSTED)?;
        let Some((transfer, _)) = posted.front() else {
            continue;
        };
        let wait = if posted.len() < POSTED {
            Duration::from_millis(1)
        } else {
            LOOK
        };
        let Some(report) = talk.poll(transfer, wait)? else {
            watch.check_progress(transfer)?;
            continue;
        };
        watch.reset();
        let Some((_, piece)) = posted.pop_front() else {
            continue;
        };
        let bytes = usize::try_from(report.bytes).unwrap_or(PIECE);
        talk.advance(report.bytes);
        pace.wait(talk, bytes)?;
        arrived.send((piece, bytes)).map_err(|_| gone())?;
        if bytes < PIECE {
            break;
        }
    }
    // Each of these is met by an empty piece.
    let mut empty = 0;
    while empty < POSTED - 1 {
        post_more(posted, 1)?;
        if let Some((transfer, _)) = posted.front() {
            talk.wait(transfer, talk.limit)?;
            posted.pop_front();
            empty += 1;
        }
    }
    Ok(())
}

/// Where in the stream the next byte is.
#[derive(Debug)]
enum At {
    Between,
    /// Bytes of a block that are left.
    Contents(u32),
    /// A block's length, as far as it has come.
    Length(Vec<u8>),
    Digest,
}

/// Follows the stream and compares each keyed digest in it with that of the bytes before it.
#[derive(Debug)]
struct Checker {
    entries: Vec<Entry>,
    key: DigestKey,
    jobs: VecDeque<Job>,
    digests: Vec<(usize, Content)>,
    at: At,
    digest: Vec<u8>,
    /// Places of files that the sender has left out after all.
    changed: Vec<usize>,
}

impl Checker {
    fn run(
        mut self,
        from: &Receiver<(Piece, usize)>,
        to: &SyncSender<(Piece, Vec<Step>)>,
    ) -> Result<Moved, Error> {
        while let Ok((mut piece, bytes)) = from.recv() {
            let steps = match piece.read(bytes, |bytes| self.steps(bytes)) {
                Ok(steps) => steps,
                Err(error) => {
                    let _ = to.send((piece, vec![Step::Remove]));
                    return Err(error);
                }
            };
            if to.send((piece, steps)).is_err() {
                return Ok(Moved::default());
            }
        }
        self.digests.sort_by_key(|&(index, _)| index);
        let digests = self.digests.into_iter().map(|(_, digest)| digest);
        Ok(Moved {
            digests: digests.collect(),
            changed: self.changed,
        })
    }

    fn steps(&mut self, bytes: &[u8]) -> Result<Vec<Step>, Error> {
        let mut steps = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let Some(job) = self.jobs.front_mut() else {
                return Err(Error::unexpected("the end of the stream", "more bytes"));
            };
            let entry = &self.entries[job.index];
            let rest = &bytes[at..];
            match &mut self.at {
                At::Between => {
                    steps.push(Step::Begin {
                        index: job.index,
                        claim: job.claim.take(),
                        from: job.from,
                    });
                    self.at = At::Length(Vec::new());
                }
                At::Length(length) => {
                    let count = rest.len().min(BLOCK_HEADER - length.len());
                    length.extend_from_slice(&rest[..count]);
                    at += count;
                    if let Ok(length) = <[u8; BLOCK_HEADER]>::try_from(length.as_slice()) {
                        let length = u32::from_le_bytes(length);
                        let end = job.hasher.count() + u64::from(length);
                        let fits = match length {
                            0 => end == entry.bytes(),
                            _ => end <= entry.bytes(),
                        };
                        if length == LEFT_OUT {
                            steps.push(Step::LeaveOut);
                            self.changed.push(job.index);
                            self.jobs.pop_front();
                            self.at = At::Between;
                            continue;
                        }
                        if !fits {
                            return Err(Error::unexpected(
                                "as many bytes of each file as the list says",
                                format!("{end} of \"{}\"", manifest::shown(&entry.path)),
                            ));
                        }
                        self.at = match length {
                            0 => At::Digest,
                            length => At::Contents(length),
                        };
                    }
                }
                At::Contents(left) => {
                    let count = rest.len().min(*left as usize);
                    job.hasher.update(&rest[..count]);
                    steps.push(Step::Write(at..at + count));
                    at += count;
                    *left -= count as u32;
                    if *left == 0 {
                        self.at = At::Length(Vec::new());
                    }
                }
                At::Digest => {
                    let count = rest.len().min(blake3::OUT_LEN - self.digest.len());
                    self.digest.extend_from_slice(&rest[..count]);
                    at += count;
                    if let Ok(theirs) = blake3::Hash::from_slice(&self.digest) {
                        let contents = job.hasher.finalize();
                        let ours = self.key.file(job.index, &contents);
                        if theirs != ours {
                            return Err(Error::Digest {
                                what: "the keyed BLAKE3 digests of a file",
                                ours: ours.to_string(),
                                theirs: theirs.to_string(),
                            });
                        }
                        self.digest.clear();
                        let content = (contents, job.hasher.count());
                        self.digests.push((job.index, content));
                        steps.push(Step::End);
                        self.jobs.pop_front();
                        self.at = At::Between;
                    }
                }
            }
        }
        Ok(steps)
    }
}

/// What a stream of contents in these parts has for the files: those that ended, with their bytes;
/// and whether it may go on.
#[cfg(any(test, fuzzing))]
pub(crate) fn follow(entries: &[Entry], key: &DigestKey, parts: &[&[u8]]) -> (Vec<Vec<u8>>, bool) {
    let jobs = plan(entries, Vec::new()).jobs;
    let mut checker = Checker {
        entries: entries.to_vec(),
        key: key.clone(),
        digests: Vec::new(),
        jobs,
        at: At::Between,
        digest: Vec::new(),
        changed: Vec::new(),
    };
    let (mut ended, mut current) = (Vec::new(), Vec::new());
    for part in parts {
        let Ok(steps) = checker.steps(part) else {
            return (ended, false);
        };
        for step in steps {
            match step {
                Step::Begin { .. } | Step::LeaveOut | Step::Remove => current.clear(),
                Step::Write(range) => current.extend_from_slice(&part[range]),
                Step::End => ended.push(std::mem::take(&mut current)),
            }
        }
    }
    (ended, true)
}

/// Writes what was checked. A file gets its name only behind its digest.
#[derive(Debug)]
struct Writer {
    entries: Vec<Entry>,
    store: Store,
    /// Places of what was not there before.
    new: BTreeSet<usize>,
    current: Option<(PartialFile, usize)>,
    /// Files that are whole and wait for a flush.
    ready: Vec<(PartialFile, Entry)>,
    ready_bytes: u64,
    /// Files that come, and files that are there.
    expected: usize,
    whole: Vec<(usize, Identity)>,
}

impl Writer {
    fn run(mut self, from: &Receiver<(Piece, Vec<Step>)>, free: &Sender<Piece>) -> Written {
        let mut result = Ok(());
        let mut ended = 0;
        while let Ok((mut piece, steps)) = from.recv() {
            let bytes = steps.iter().map(|step| match step {
                Step::Write(range) => range.end,
                _ => 0,
            });
            let bytes = bytes.max().unwrap_or(0);
            result = piece.read(bytes, |bytes| {
                for step in steps {
                    ended += usize::from(matches!(step, Step::End | Step::LeaveOut));
                    self.step(bytes, step)?;
                }
                Ok(())
            });
            if result.is_err() {
                break;
            }
            let _ = free.send(piece);
        }
        // What is whole gets its name, whatever became of the rest.
        let published = self.publish();
        let is_complete = ended == self.expected;
        let result = result
            .and(published)
            .and_then(|()| if is_complete { self.finish() } else { Ok(()) });
        let mut kept = None;
        if let Some((partial, _)) = self.current.take() {
            // After a failed write, too: what a full disk has of it is sent only once.
            if partial.bytes > 0 {
                partial.keep();
                kept = Some((partial.kept_at(), partial.bytes));
            } else {
                partial.remove();
            }
        }
        Written { result, kept }
    }

    fn step(&mut self, bytes: &[u8], step: Step) -> Result<(), Error> {
        match step {
            Step::Begin { index, claim, from } => {
                let partial = self.store.begin(&self.entries[index], claim, from)?;
                self.new.insert(index);
                self.current = Some((partial, index));
            }
            Step::Write(range) => {
                if let Some((partial, _)) = &mut self.current {
                    partial.write(&bytes[range])?;
                }
            }
            Step::End => {
                if let Some((partial, index)) = self.current.take() {
                    self.ready_bytes += partial.bytes;
                    self.ready.push((partial, self.entries[index].clone()));
                }
                if self.ready.len() >= FLUSH_FILES || self.ready_bytes >= FLUSH_BYTES {
                    self.publish()?;
                }
            }
            Step::LeaveOut => {
                if let Some((partial, index)) = self.current.take() {
                    self.new.remove(&index);
                    partial.keep();
                }
            }
            Step::Remove => {
                if let Some((partial, _)) = self.current.take() {
                    partial.remove();
                }
            }
        }
        Ok(())
    }

    fn publish(&mut self) -> Result<(), Error> {
        self.store.flush(&mut self.ready)?;
        for (partial, entry) in self.ready.drain(..) {
            self.store.publish(partial, &entry)?;
        }
        self.ready_bytes = 0;
        Ok(())
    }

    /// After the last file: links, and the directories' modes and times.
    fn finish(&mut self) -> Result<(), Error> {
        for &(index, identity) in &self.whole {
            self.store.refresh(&self.entries[index], identity)?;
        }
        for (index, entry) in self.entries.iter().enumerate() {
            if self.store.link(entry)? {
                self.new.insert(index);
            }
        }
        self.store
            .finish(&self.entries, |index| self.new.contains(&index))?;
        Ok(())
    }
}

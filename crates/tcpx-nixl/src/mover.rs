//! Carries out the transfers of a connection that their posters cannot start at once: many runs, gathered
//! pieces, what waits for windows or staging memory, and what the peer pulls.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use tcpx::{After, Error, Region, Transfer, WindowKey};

use crate::abi::Status;
use crate::conn::{Conn, Event};
use crate::flight::Flight;
use crate::memory::{Hold, Staging, copy};
use crate::message::{MOST_BYTES, Message, PIECE_BYTES, Piece, TABLE_BYTES};

/// Flights that are under way at a time; more wait their turn.
const MOST_FLIGHTS: usize = 32;
/// Runs that go as one batch of the engine.
const BATCH_RUNS: usize = 16;
/// Runs that are under way at a time.
const MOST_RUNS: usize = 256;
/// Pieces that one message names at most.
const MOST_PIECES: usize = (MOST_BYTES - TABLE_BYTES) / PIECE_BYTES;
/// Bytes that a flight asks its peer for ahead of what has come.
const PULL_AHEAD: u64 = 16 << 20;
/// How often messages that found no room are tried again.
const RETRY: Duration = Duration::from_millis(1);

/// Pieces that the peer wants.
#[derive(Debug)]
pub(crate) struct Pull {
    pub(crate) transfer: u64,
    pub(crate) first: u64,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) holds: HashMap<u64, Arc<Hold>>,
    pub(crate) done: Cursor,
}

/// How far a list of pieces is: the next one, and the bytes of it that are done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cursor {
    next: usize,
    offset: u64,
}

/// A piece that is gathered: its bytes, and how the peer knows where they go.
struct Gathered<'a> {
    hold: &'a Hold,
    at: u64,
    len: u64,
    what: u64,
    to: u64,
}

/// A flight that is under way.
#[derive(Debug)]
struct Active {
    flight: Arc<Flight>,
    /// The engine's regions over its local memory.
    locals: HashMap<u32, Region>,
    /// Windows of the peer, for the runs that go alone.
    keys: Vec<(u64, WindowKey)>,
    next_alone: usize,
    gathered: Cursor,
    /// Transfers of the engine that are under way.
    running: usize,
    /// Bytes of gathered runs that the peer was asked for.
    pulled: u64,
}

/// A transfer of the engine.
#[derive(Debug)]
struct Running {
    transfer: Arc<Transfer>,
    /// The flight, and what it has of its bytes then: none where the peer says it.
    flight: Option<(u64, u64)>,
    runs: usize,
    slot: Option<u32>,
}

/// The peer's staging memory, and ours that is copied to it.
#[derive(Debug)]
struct Out {
    key: WindowKey,
    slot_bytes: usize,
    source: Arc<Staging>,
    region: Region,
    free: Vec<u32>,
    /// For each slot, whether the peer still reads it and whether the engine still sends it.
    busy: Vec<(bool, bool)>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Mover {
    conn: Arc<Conn>,
    waiting: VecDeque<Arc<Flight>>,
    active: VecDeque<Active>,
    pulls: VecDeque<Pull>,
    running: HashMap<u64, Running>,
    next: u64,
    runs: usize,
    asked_staging: bool,
    out: Option<Out>,
    /// The connection had no room for one more transfer.
    has_no_room: bool,
}

/// What an attempt to go on has brought.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// Something was started.
    Went,
    /// Something must happen first.
    Waits,
}

impl Mover {
    pub(crate) fn new(conn: Arc<Conn>) -> Self {
        Self {
            conn,
            waiting: VecDeque::new(),
            active: VecDeque::new(),
            pulls: VecDeque::new(),
            running: HashMap::new(),
            next: 0,
            runs: 0,
            asked_staging: false,
            out: None,
            has_no_room: false,
        }
    }

    /// Runs until the connection ends.
    pub(crate) fn run(mut self) {
        let mut has_backlog = false;
        loop {
            let limit = (has_backlog || self.has_no_room).then_some(RETRY);
            self.has_no_room = false;
            for event in self.conn.take_events(limit) {
                match event {
                    Event::Flight(flight) => self.waiting.push_back(flight),
                    Event::Ended(key) => self.ended(key),
                    Event::SlotFree(slot) => self.slot_free(slot),
                    Event::Staging {
                        key,
                        slots,
                        slot_bytes,
                    } => self.staging_came(key, slots, slot_bytes),
                    Event::Look => {}
                    Event::Pull(pull) => self.pulls.push_back(pull),
                    Event::Stop => {
                        self.stop();
                        return;
                    }
                }
            }
            has_backlog = self.conn.flush();
            self.go_on();
        }
    }

    fn stop(&mut self) {
        let waiting = self.waiting.drain(..);
        let active = self.active.drain(..).map(|active| active.flight);
        for flight in waiting.chain(active) {
            flight.end(Status::REMOTE_DISCONNECT);
        }
    }

    /// Starts what can be started, one piece of each in turn.
    fn go_on(&mut self) {
        loop {
            while self.active.len() < MOST_FLIGHTS
                && let Some(flight) = self.waiting.pop_front()
            {
                self.begin(flight);
            }
            let mut went = false;
            for _ in 0..self.active.len() {
                let Some(mut active) = self.active.pop_front() else {
                    break;
                };
                went |= self.turn(&mut active) == Turn::Went;
                if self.is_finished(&active) {
                    self.conn.moving.fetch_sub(1, Ordering::AcqRel);
                    self.finish(active);
                    went = true;
                } else {
                    self.active.push_back(active);
                }
            }
            if let Some(mut pull) = self.pulls.pop_front() {
                if pull.done.next == pull.pieces.len() {
                    self.conn.pull_ended(pull.pieces.len());
                    went = true;
                } else {
                    // An error has ended the connection.
                    went |= self.answer(&mut pull) == Ok(Turn::Went);
                    self.pulls.push_front(pull);
                }
            }
            if !went {
                return;
            }
        }
    }

    fn begin(&mut self, flight: Arc<Flight>) {
        if flight.is_over() {
            self.conn.moving.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        if flight.plan.bytes == 0 {
            self.conn.advance(&flight, 0);
            self.conn.moving.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        self.conn.add_flight(&flight);
        self.active.push_back(Active {
            flight,
            locals: HashMap::new(),
            keys: Vec::new(),
            next_alone: 0,
            gathered: Cursor::default(),
            running: 0,
            pulled: 0,
        });
    }

    /// Nothing is left to start, and nothing runs that this side must see the end of.
    fn is_finished(&self, active: &Active) -> bool {
        if active.running > 0 {
            return false;
        }
        active.flight.is_over()
            || (active.next_alone == active.flight.plan.alone.len()
                && active.gathered.next == active.flight.plan.gathered.len())
    }

    fn finish(&self, active: Active) {
        // What failed may still be under way at the peer: its windows are not used again.
        let is_fine = matches!(
            active.flight.status(),
            Status::SUCCESS | Status::IN_PROGRESS
        );
        if is_fine {
            self.conn.give_back(active.keys);
        } else {
            self.conn.close_windows(active.keys);
            self.conn.remove_flight(active.flight.id);
        }
    }

    fn turn(&mut self, active: &mut Active) -> Turn {
        if active.flight.is_over() {
            return Turn::Waits;
        }
        let mut turn = Turn::Waits;
        if active.next_alone < active.flight.plan.alone.len() {
            match self.start_alone(active) {
                Ok(one) => turn = one,
                Err(status) => {
                    active.flight.end(status);
                    return Turn::Waits;
                }
            }
        }
        if active.gathered.next < active.flight.plan.gathered.len() {
            let other = match active.flight.plan.is_write {
                true => self.push(active),
                false => self.pull(active),
            };
            match other {
                Ok(Turn::Went) => turn = Turn::Went,
                Ok(_) => {}
                Err(status) => active.flight.end(status),
            }
        }
        turn
    }

    /// Starts some of the runs that go alone.
    fn start_alone(&mut self, active: &mut Active) -> Result<Turn, Status> {
        let plan = Arc::clone(&active.flight.plan);
        if self.runs >= MOST_RUNS {
            return Ok(Turn::Waits);
        }
        if active.keys.is_empty() {
            let mut seen = HashSet::new();
            let mut regions = Vec::new();
            for run in &plan.alone {
                if seen.insert(run.remote) {
                    regions.push(plan.remotes[run.remote as usize].id);
                }
            }
            match self.conn.take_keys(&regions)? {
                Some(keys) => active.keys = keys,
                None => return Ok(Turn::Waits),
            }
        }
        let Some(holds) = active.flight.holds() else {
            return Ok(Turn::Waits);
        };
        let end = plan.alone.len().min(active.next_alone + BATCH_RUNS);
        let runs = &plan.alone[active.next_alone..end];
        let mut batch = self.conn.connection().batch().after(After::Nothing);
        for run in runs {
            let local = active
                .locals
                .entry(run.local)
                .or_insert_with(|| holds[run.local as usize].region(active.flight.token()));
            let (start, len) = (run.local_offset as usize, run.len as usize);
            let slice = local
                .slice(start..start + len)
                .map_err(|_| Status::INVALID_PARAM)?;
            let region = plan.remotes[run.remote as usize].id;
            let key = active.keys.iter().find(|(id, _)| *id == region);
            let (_, key) = key.ok_or(Status::BACKEND)?;
            batch = match plan.is_write {
                true => batch.put(slice, key, run.remote_offset),
                false => batch.get(slice, key, run.remote_offset),
            };
        }
        match batch.start() {
            Ok(transfer) => {
                let bytes = runs.iter().map(|run| run.len).sum();
                let count = runs.len();
                active.next_alone = end;
                active.running += 1;
                let transfer = Arc::new(transfer);
                active.flight.add_transfer(&transfer);
                self.watch(Running {
                    transfer,
                    flight: Some((active.flight.id, bytes)),
                    runs: count,
                    slot: None,
                });
                Ok(Turn::Went)
            }
            Err(Error::Request { .. }) => {
                self.has_no_room = true;
                Ok(Turn::Waits)
            }
            Err(error) => Err(self.conn.failed(&error)),
        }
    }

    /// Has the end of a transfer reported to this mover.
    fn watch(&mut self, running: Running) {
        let key = self.next;
        self.next += 1;
        self.runs += running.runs;
        let waker = self.conn.waker(key);
        let transfer = Arc::clone(&running.transfer);
        self.running.insert(key, running);
        if let Poll::Ready(_outcome) = transfer.poll_outcome(&mut Context::from_waker(&waker)) {
            self.conn.post(Event::Ended(key));
        }
    }

    fn ended(&mut self, key: u64) {
        let Some(running) = self.running.get(&key) else {
            return;
        };
        let Some(outcome) = running.transfer.test() else {
            return;
        };
        let Some(running) = self.running.remove(&key) else {
            return;
        };
        self.runs -= running.runs;
        if let Some(slot) = running.slot
            && let Some(out) = &mut self.out
        {
            out.busy[slot as usize].1 = false;
            out.free_if_idle(slot);
        }
        let status = match &outcome {
            Ok(_) => Status::SUCCESS,
            Err(error) => self.conn.failed(error),
        };
        let Some((id, bytes)) = running.flight else {
            return;
        };
        let active = self.active.iter_mut().find(|active| active.flight.id == id);
        let Some(active) = active else { return };
        active.running -= 1;
        let flight = Arc::clone(&active.flight);
        match status {
            Status::SUCCESS => {
                self.conn.advance(&flight, bytes);
            }
            status => flight.end(status),
        }
    }

    // Gathered pieces.

    fn staging_came(&mut self, key: WindowKey, slots: u32, slot_bytes: u32) {
        let bytes = u64::from(slots) * u64::from(slot_bytes);
        let is_sane = (1..=64).contains(&slots)
            && (4096..=4 << 20).contains(&slot_bytes)
            && bytes <= key.bytes;
        let source = Staging::new(bytes as usize).filter(|_| is_sane);
        let (Some(source), None) = (source, &self.out) else {
            tracing::error!("a peer's staging memory cannot be used");
            self.conn.say_goodbye();
            return;
        };
        self.out = Some(Out {
            key,
            slot_bytes: slot_bytes as usize,
            region: source.region(),
            source,
            free: (0..slots).rev().collect(),
            busy: vec![(false, false); slots as usize],
        });
    }

    fn slot_free(&mut self, slot: u32) {
        if let Some(out) = &mut self.out
            && let Some(busy) = out.busy.get_mut(slot as usize)
            && busy.0
        {
            busy.0 = false;
            out.free_if_idle(slot);
        }
    }

    /// A slot of the peer's staging memory, if one is free.
    fn take_slot(&mut self) -> Option<u32> {
        if self.out.is_none() && !self.asked_staging {
            self.asked_staging = true;
            self.conn.send(&Message::AskStaging);
        }
        self.out.as_mut()?.free.pop()
    }

    /// Fills a slot with the pieces that `piece` numbers, from `done` on, and sends it with the message that says
    /// where they go.
    fn gather<'a>(
        &mut self,
        transfer: u64,
        is_answer: bool,
        done: &mut Cursor,
        piece: impl Fn(usize) -> Option<Gathered<'a>>,
    ) -> Result<Turn, Status> {
        let Some(slot) = self.take_slot() else {
            return Ok(Turn::Waits);
        };
        let out = self.out.as_mut().ok_or(Status::BACKEND)?;
        let start = slot as usize * out.slot_bytes;
        let mut now = *done;
        let mut pieces = Vec::new();
        let mut filled = 0;
        while pieces.len() < MOST_PIECES
            && filled < out.slot_bytes
            && let Some(one) = piece(now.next)
        {
            let len = (one.len - now.offset).min((out.slot_bytes - filled) as u64) as usize;
            let from = one.hold.host_piece(one.at + now.offset, len);
            let to = out.source.part(start + filled, len);
            if let (Some(from), Some(to)) = (from, to) {
                // SAFETY: the source is held, and the slot is this thread's until it is sent.
                unsafe { copy(from, to, len) };
            }
            pieces.push(Piece {
                what: one.what,
                offset: one.to + now.offset,
                len: len as u32,
            });
            filled += len;
            now.offset += len as u64;
            if now.offset == one.len {
                now = Cursor {
                    next: now.next + 1,
                    offset: 0,
                };
            }
        }
        let message = Message::Push {
            transfer,
            is_answer,
            slot,
            pieces,
        };
        let slice = out.region.slice(start..start + filled);
        let slice = slice.map_err(|_| Status::BACKEND)?;
        let connection = self.conn.connection();
        let put = connection.put(slice, &out.key, start as u64);
        match put.notify(&message.to_bytes()).start() {
            Ok(transfer) => {
                out.busy[slot as usize] = (true, true);
                *done = now;
                self.watch(Running {
                    transfer: Arc::new(transfer),
                    flight: None,
                    runs: 0,
                    slot: Some(slot),
                });
                Ok(Turn::Went)
            }
            Err(error) => {
                out.free.push(slot);
                match error {
                    Error::Request { .. } => {
                        self.has_no_room = true;
                        Ok(Turn::Waits)
                    }
                    error => Err(self.conn.failed(&error)),
                }
            }
        }
    }

    /// Sends pieces of a write.
    fn push(&mut self, active: &mut Active) -> Result<Turn, Status> {
        let Some(holds) = active.flight.holds() else {
            return Ok(Turn::Waits);
        };
        let plan = Arc::clone(&active.flight.plan);
        self.gather(active.flight.id, false, &mut active.gathered, |number| {
            let run = plan.gathered.get(number)?;
            Some(Gathered {
                hold: &holds[run.local as usize],
                at: run.local_offset,
                len: run.len,
                what: plan.remotes[run.remote as usize].id,
                to: run.remote_offset,
            })
        })
    }

    /// Sends pieces that the peer wants.
    fn answer(&mut self, pull: &mut Pull) -> Result<Turn, Status> {
        let (pieces, holds, first) = (&pull.pieces, &pull.holds, pull.first);
        self.gather(pull.transfer, true, &mut pull.done, |number| {
            let piece = pieces.get(number)?;
            Some(Gathered {
                hold: holds.get(&piece.what)?,
                at: piece.offset,
                len: piece.len.into(),
                what: first + number as u64,
                to: 0,
            })
        })
    }

    /// Asks for pieces of a read.
    fn pull(&self, active: &mut Active) -> Result<Turn, Status> {
        let plan = &active.flight.plan;
        let come = plan.bytes - active.flight.left();
        if active.pulled >= come.saturating_add(PULL_AHEAD) {
            return Ok(Turn::Waits);
        }
        let first = active.gathered.next;
        let mut pieces = Vec::new();
        let mut bytes = 0;
        while pieces.len() < MOST_PIECES
            && bytes < PULL_AHEAD / 2
            && let Some(run) = plan.gathered.get(active.gathered.next)
        {
            // Longer ones go alone, but for those whose destinations overlap.
            let len = u32::try_from(run.len).map_err(|_| Status::INVALID_PARAM)?;
            pieces.push(Piece {
                what: plan.remotes[run.remote as usize].id,
                offset: run.remote_offset,
                len,
            });
            bytes += run.len;
            active.gathered.next += 1;
        }
        active.pulled += bytes;
        self.conn.send(&Message::Pull {
            transfer: active.flight.id,
            first: first as u64,
            pieces,
        });
        Ok(Turn::Went)
    }
}

impl Out {
    fn free_if_idle(&mut self, slot: u32) {
        if self.busy[slot as usize] == (false, false) && !self.free.contains(&slot) {
            self.free.push(slot);
        }
    }
}

//! Windows that are open to chunks of the peer, found by name.
//!
//! A chunk names its window, its index and the length of its transfer; with the window's plan that
//! says where it goes. The first chunk fixes the transfer's length. Each chunk is [claimed](Claims)
//! once.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crossbeam_queue::SegQueue;

use tcpx_lanes::claims::{Claimed, Claims};
use tcpx_lanes::idle::LaneSet;
use tcpx_lanes::receive_lane::Violation;
use tcpx_memory::{Fence, RegionSlice};
use tcpx_wire::ChunkPlan;
use tcpx_wire::chunk_header::ChunkHeader;

use super::shared::lock;
use crate::channel::{Completion, ReceiveWindow};
use crate::error::{ChannelError, ChunkPosition};

/// An open window.
#[derive(Debug)]
pub(super) struct OpenWindow {
    name: u64,
    token: u64,
    /// How a transfer that fills it is cut.
    cut: ChunkPlan,
    /// Number of its first chunk among those of all windows.
    first: u64,
    fence: Option<Fence>,
    state: Mutex<WindowState>,
}

#[derive(Debug)]
struct WindowState {
    /// `None` once nothing points at its memory any more. A lane may hold the window for longer.
    destination: Option<RegionSlice>,
    /// How its transfer is cut, once a chunk of that has come.
    plan: Option<ChunkPlan>,
    /// Chunks by number.
    claims: Claims<u16>,
    /// Chunks that the copy worker moves to the destination.
    copying: u32,
    /// Chunks that are not at their destination; known with the plan.
    left: u32,
    /// Chunks that are, and that the owner was not told of.
    news: Vec<u32>,
    failed: Option<(u32, ChannelError)>,
    /// It takes no chunk any more.
    closing: bool,
    /// A lane has had a chunk of it, so that some of its memory may be written.
    is_touched: bool,
    /// The owner was told that.
    is_begun: bool,
    /// The owner was told that nothing points at its memory any more, or need not be.
    is_told: bool,
    /// The owner will look at it.
    is_ready: bool,
}

/// A chunk's place, in a lane's hands.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) window: Arc<OpenWindow>,
    index: u32,
    pub(super) destination: RegionSlice,
}

/// What a chunk's header leads to.
#[derive(Debug)]
pub(super) enum Arrival {
    Claimed(Claim),
    /// Its window is closed, or it has come before; drop its bytes.
    Unwanted,
    /// It was sent again because this lane died, which this side did not know: end it. The lane
    /// that asks is on the list of those to wake.
    HeldBy(u16),
}

/// What became of [`ReceiveTable::close`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closing {
    /// No byte of it was written.
    Done,
    /// The end is reported later; these lanes have chunks of it, and others may be in copies.
    AskLanes(u64),
}

#[derive(Debug)]
pub(super) struct ReceiveTable {
    open: Mutex<BTreeMap<u64, Arc<OpenWindow>>>,
    /// One behind the highest name.
    named: AtomicU64,
    /// Chunks of all windows so far.
    chunks: AtomicU64,
    /// Windows that the owner is to look at, each once: those that are open, and those that were
    /// closed since it looked last.
    ready: SegQueue<Arc<OpenWindow>>,
    /// Lanes that wait for another one to let go of their chunk.
    pub(super) waiting: LaneSet,
}

impl Claim {
    /// Number of the chunk among those of all windows: neighbours follow each other.
    pub(super) fn number(&self) -> u64 {
        self.window.first + u64::from(self.index)
    }

    pub(super) fn index(&self) -> u32 {
        self.index
    }

    pub(super) fn fence(&self) -> Option<Fence> {
        self.window.fence.clone()
    }
}

impl OpenWindow {
    /// Whether the lane that has a chunk of it should let go.
    pub(super) fn is_closing(&self) -> bool {
        lock(&self.state).closing
    }
}

impl WindowState {
    /// Nobody has a chunk, and nobody will: lets go of the memory.
    fn ends(&mut self) -> bool {
        let all_placed = self.plan.is_some() && self.left == 0;
        let is_held = self.copying > 0 || self.claims.lanes().next().is_some();
        let is_over = !is_held && (self.closing || all_placed);
        self.closing |= is_over;
        is_over && self.destination.take().is_some()
    }
}

impl ReceiveTable {
    pub(super) fn new() -> Self {
        Self {
            open: Mutex::default(),
            named: AtomicU64::new(0),
            chunks: AtomicU64::new(0),
            ready: SegQueue::new(),
            waiting: LaneSet::new(),
        }
    }

    /// Opens a window; `Err` if its name is not above all before it. How many are open the
    /// session's limits say.
    pub(super) fn open(&self, window: ReceiveWindow) -> Result<(), ReceiveWindow> {
        let mut open = lock(&self.open);
        if window.window < self.named.load(Ordering::Acquire) {
            return Err(window);
        }
        let chunks = window.cut.count();
        let first = self.chunks.fetch_add(chunks.into(), Ordering::Relaxed);
        let name = window.window;
        let opened = Arc::new(OpenWindow {
            name,
            token: window.token,
            cut: window.cut,
            first,
            fence: window.fence,
            state: Mutex::new(WindowState {
                destination: Some(window.destination),
                plan: None,
                claims: Claims::default(),
                copying: 0,
                left: chunks,
                news: Vec::with_capacity(chunks as usize),
                failed: None,
                closing: false,
                is_touched: false,
                is_begun: false,
                is_told: false,
                is_ready: false,
            }),
        });
        open.insert(name, opened);
        self.named.store(name.saturating_add(1), Ordering::Release);
        Ok(())
    }

    /// Finds the place of a chunk whose header has arrived.
    pub(super) fn claim(&self, lane: u16, header: &ChunkHeader) -> Result<Arrival, Violation> {
        match self.try_claim(lane, header)? {
            Arrival::HeldBy(_) => {
                // Onto the list first and then a second look: whoever lets go in between either is
                // seen here or sees the list.
                self.waiting.insert(lane);
                let arrival = self.try_claim(lane, header)?;
                if !matches!(arrival, Arrival::HeldBy(_)) {
                    self.waiting.remove(lane);
                }
                Ok(arrival)
            }
            arrival => Ok(arrival),
        }
    }

    fn try_claim(&self, lane: u16, header: &ChunkHeader) -> Result<Arrival, Violation> {
        let found = lock(&self.open).get(&header.transfer.0).cloned();
        let Some(window) = found else {
            let named = self.named.load(Ordering::Acquire);
            if header.transfer.0 < named {
                return Ok(Arrival::Unwanted);
            }
            return Err(Violation {
                expected: format!("chunks of windows below {named}"),
                arrived: format!("one of window {}", header.transfer.0),
                chunk: Some(*header),
            });
        };
        self.claim_in(window, lane, header)
    }

    fn claim_in(
        &self,
        window: Arc<OpenWindow>,
        lane: u16,
        header: &ChunkHeader,
    ) -> Result<Arrival, Violation> {
        let mut state = lock(&window.state);
        // Since it was found.
        if state.closing {
            return Ok(Arrival::Unwanted);
        }
        let (index, range) = window.place(&mut state, header)?;
        let place = state.destination.as_ref();
        let Some(Ok(destination)) = place.map(|all| all.slice(range)) else {
            return Err(window.misfit(header));
        };
        let part = u64::from(index)..u64::from(index) + 1;
        match state.claims.claim(lane, part, header.attempt) {
            Claimed::Taken => {}
            Claimed::HeldBy(holder) => return Ok(Arrival::HeldBy(holder)),
            Claimed::Drain => return Ok(Arrival::Unwanted),
            bad @ (Claimed::Twice | Claimed::Scattered) => {
                let (expected, what) = match bad {
                    Claimed::Twice => ("each chunk once", "a second"),
                    _ => ("a transfer in few pieces", "one more piece,"),
                };
                return Err(Violation {
                    expected: expected.to_owned(),
                    arrived: format!("{what} chunk {index} of window {}", header.transfer.0),
                    chunk: Some(*header),
                });
            }
        }
        match std::mem::replace(&mut state.is_touched, true) {
            true => drop(state),
            // The owner hears of it before the end of what began earlier, and is not woken.
            false => self.look_at(&window, state),
        }
        Ok(Arrival::Claimed(Claim {
            window,
            index,
            destination,
        }))
    }

    /// A chunk is at its destination. Wake the owner afterwards, as behind all that follows.
    pub(super) fn arrived(&self, claim: Claim) {
        let Claim {
            window,
            index,
            destination,
        } = claim;
        drop(destination);
        let mut state = lock(&window.state);
        state.claims.complete(index.into());
        state.placed(index);
        self.look_at(&window, state);
    }

    /// The copy worker moves a chunk to its destination from now on.
    pub(super) fn copies(&self, window: &OpenWindow, index: u32) {
        let mut state = lock(&window.state);
        state.claims.complete(index.into());
        state.copying += 1;
    }

    /// The copy worker has let go of a chunk, which is placed if there is no error, and if it
    /// `is_whole`.
    pub(super) fn copied(
        &self,
        window: &Arc<OpenWindow>,
        index: u32,
        error: Option<ChannelError>,
        is_whole: bool,
    ) {
        let mut state = lock(&window.state);
        state.copying -= 1;
        match error {
            None if is_whole => state.placed(index),
            None => {}
            Some(error) => {
                state.failed.get_or_insert((index, error));
            }
        }
        self.look_at(window, state);
    }

    /// A lane cannot write a chunk that it has, of whose window nothing more is taken. Wake the
    /// owner afterwards.
    pub(super) fn fail(&self, claim: &Claim, error: ChannelError) {
        let mut state = lock(&claim.window.state);
        state.failed.get_or_insert((claim.index, error));
        state.closing = true;
        self.look_at(&claim.window, state);
    }

    /// A lane lets go of a chunk that it has not read to the end: another lane may take it, if its
    /// window is still open. Wake the waiting lanes afterwards.
    pub(super) fn put_back(&self, claim: Claim) {
        let Claim {
            window,
            index,
            destination,
        } = claim;
        drop(destination);
        let mut state = lock(&window.state);
        state.claims.put_back(index.into());
        self.look_at(&window, state);
    }

    /// Closes a window.
    pub(super) fn close(&self, name: u64) -> Closing {
        let Some(window) = lock(&self.open).remove(&name) else {
            // It has ended, and its end is reported.
            return Closing::AskLanes(0);
        };
        let mut state = lock(&window.state);
        state.closing = true;
        let ends = state.ends();
        if ends && !state.is_touched {
            state.is_told = true;
            return Closing::Done;
        }
        let lanes = state.claims.lanes();
        let lanes = lanes.fold(0, |lanes, lane| lanes | 1 << lane);
        // What came until now is reported with the end.
        if ends && !std::mem::replace(&mut state.is_ready, true) {
            drop(state);
            self.ready.push(window);
        }
        Closing::AskLanes(lanes)
    }

    /// Has the owner look at a window, if there is something to see.
    fn look_at(&self, window: &Arc<OpenWindow>, mut state: MutexGuard<'_, WindowState>) {
        let ends = state.ends();
        let begins = state.is_touched && !state.is_begun;
        let has_news = begins || !state.news.is_empty() || state.failed.is_some() || ends;
        let is_new = has_news && !std::mem::replace(&mut state.is_ready, true);
        drop(state);
        if ends {
            lock(&self.open).remove(&window.name);
        }
        if is_new {
            self.ready.push(Arc::clone(window));
        }
    }

    /// Tells the owner what has become of its windows.
    pub(super) fn drain(&self, out: &mut Vec<Completion>) {
        while let Some(window) = self.ready.pop() {
            let mut state = lock(&window.state);
            state.is_ready = false;
            let token = window.token;
            if let Some(plan) = state.plan {
                if !std::mem::replace(&mut state.is_begun, true) {
                    out.push(Completion::Begun { token, cut: plan });
                }
                for index in state.news.drain(..) {
                    let (offset, length) = plan.range(index);
                    out.push(Completion::Placed {
                        token,
                        index,
                        offset,
                        bytes: length,
                    });
                }
            }
            if let Some((index, error)) = state.failed.take() {
                out.push(Completion::NotPlaced {
                    token,
                    index,
                    error,
                });
            }
            if state.destination.is_none() && !std::mem::replace(&mut state.is_told, true) {
                let touched = state.is_touched;
                out.push(Completion::Closed { token, touched });
            }
        }
    }
}

impl WindowState {
    fn placed(&mut self, index: u32) {
        self.left -= 1;
        self.news.push(index);
    }
}

impl OpenWindow {
    /// Where a chunk goes. The first one says how long the transfer is.
    fn place(
        &self,
        state: &mut WindowState,
        header: &ChunkHeader,
    ) -> Result<(u32, Range<usize>), Violation> {
        let fits = (1..=self.cut.bytes()).contains(&header.total);
        let plan = match state.plan {
            Some(plan) => plan,
            None if fits => self.plan(header),
            None => return Err(self.misfit(header)),
        };
        let index = u32::try_from(header.sequence).ok();
        let Some(index) = index.filter(|index| *index < plan.count()) else {
            return Err(self.misfit(header));
        };
        let (offset, length) = plan.range(index);
        if (plan.bytes(), offset, length) != (header.total, header.offset, header.length) {
            return Err(self.misfit(header));
        }
        if state.plan.is_none() {
            state.plan = Some(plan);
            state.left = plan.count();
        }
        // Inside the destination, whose length is a usize.
        let start = offset as usize;
        Ok((index, start..start + length as usize))
    }

    /// How a transfer is cut, by one of its headers. Chunks that are read where they lie may be
    /// longer than others.
    fn plan(&self, header: &ChunkHeader) -> ChunkPlan {
        let usual = self.cut.for_total(header.total);
        let chunk_bytes = match header.sequence {
            0 => header.length.into(),
            before => header.offset / before,
        };
        let is_long = chunk_bytes > self.cut.chunk_bytes().into();
        let own = u32::try_from(chunk_bytes)
            .ok()
            .filter(|_| is_long && header.is_exposed());
        own.map_or(usual, |own| ChunkPlan::even(header.total, own))
    }

    fn misfit(&self, header: &ChunkHeader) -> Violation {
        Violation {
            expected: format!(
                "chunks of a transfer of at most {} bytes in window {}, {} bytes each",
                self.cut.bytes(),
                self.name,
                self.cut.chunk_bytes()
            ),
            arrived: format!(
                "chunk {} with {} bytes at offset {} of {}",
                header.sequence, header.length, header.offset, header.total
            ),
            chunk: Some(*header),
        }
    }
}

/// The chunk that a header names, nothing of it done.
pub(super) fn position(header: &ChunkHeader) -> ChunkPosition {
    ChunkPosition {
        sequence: header.sequence,
        transfer: header.transfer.0,
        offset: header.offset,
        length: header.length.into(),
        done: 0,
    }
}

#[cfg(test)]
mod tests {
    use tcpx_memory::{Access, Region};
    use tcpx_wire::TransferId;

    use tcpx_wire::chunk_header::ChunkPayload;

    use super::*;

    const CHUNK: u32 = 8;

    fn open(table: &ReceiveTable, name: u64, region: &Region) {
        open_slice(table, name, region.lease(.., Access::Write).unwrap().all());
    }

    fn open_slice(table: &ReceiveTable, name: u64, destination: RegionSlice) {
        let opened = table.open(ReceiveWindow {
            token: name,
            window: name,
            cut: ChunkPlan::even(destination.len() as u64, CHUNK),
            destination,
            fence: None,
        });
        assert!(opened.is_ok());
    }

    /// Of a chunk of a transfer that fills its window.
    fn header(name: u64, index: u32, region: &Region) -> ChunkHeader {
        ChunkHeader {
            sequence: index.into(),
            transfer: TransferId(name),
            offset: u64::from(index * CHUNK),
            total: region.len() as u64,
            length: CHUNK,
            attempt: 0,
            payload: ChunkPayload::Follows,
        }
    }

    /// A lane has that chunk.
    fn claim(table: &ReceiveTable, name: u64, index: u32, region: &Region) -> Claim {
        match table.claim(0, &header(name, index, region)) {
            Ok(Arrival::Claimed(claim)) => claim,
            other => panic!("{other:?}"),
        }
    }

    fn is_free(region: &Region) -> bool {
        region.lease(.., Access::Write).is_ok()
    }

    #[test]
    fn a_window_that_is_gone_holds_no_memory_though_its_news_wait() {
        let table = ReceiveTable::new();
        let region = Region::host(2 * CHUNK as usize).unwrap();
        open(&table, 0, &region);
        table.arrived(claim(&table, 0, 0, &region));
        assert!(!is_free(&region));
        assert_eq!(table.close(0), Closing::AskLanes(0));
        assert!(is_free(&region));
        let mut out = Vec::new();
        table.drain(&mut out);
        assert!(
            matches!(
                out[..],
                [
                    Completion::Begun { cut, .. },
                    Completion::Placed { .. },
                    Completion::Closed { touched: true, .. }
                ] if cut.bytes() == 16
            ),
            "{out:?}"
        );
    }

    /// A lane has read the beginning of a chunk, and died.
    #[test]
    fn a_window_of_which_a_part_of_a_chunk_came_says_so() {
        let table = ReceiveTable::new();
        let region = Region::host(2 * CHUNK as usize).unwrap();
        open(&table, 0, &region);
        table.put_back(claim(&table, 0, 0, &region));
        assert_eq!(table.close(0), Closing::AskLanes(0));
        let mut out = Vec::new();
        table.drain(&mut out);
        assert!(
            matches!(
                out[..],
                [
                    Completion::Begun { .. },
                    Completion::Closed { touched: true, .. }
                ]
            ),
            "{out:?}"
        );
    }

    #[test]
    fn a_window_closed_under_a_lane_takes_no_chunk() {
        let table = ReceiveTable::new();
        let region = Region::host(2 * CHUNK as usize).unwrap();
        for ends in [false, true] {
            let name = u64::from(ends);
            open(&table, name, &region);
            let window = lock(&table.open).get(&name).cloned().unwrap();
            if ends {
                (0..2).for_each(|index| table.arrived(claim(&table, name, index, &region)));
            } else {
                assert_eq!(table.close(name), Closing::Done);
            }
            let late = table.claim_in(window, 1, &header(name, 0, &region));
            assert!(matches!(late, Ok(Arrival::Unwanted)), "{late:?}");
        }
    }

    /// A side may take a million puts at a time, which have a window each.
    #[test]
    fn as_many_windows_are_open_as_a_session_opens() {
        let table = ReceiveTable::new();
        let region = Region::host(CHUNK as usize).unwrap();
        let destination = region.lease(.., Access::Write).unwrap().all();
        (0..40_000).for_each(|name| open_slice(&table, name, destination.clone()));
    }

    #[test]
    fn news_outlast_any_number_of_closed_windows() {
        let table = ReceiveTable::new();
        let region = Region::host(2 * CHUNK as usize).unwrap();
        let most = 1 << 14;
        for name in 0..=most {
            open(&table, name, &region);
            table.arrived(claim(&table, name, 0, &region));
            if name < most {
                assert_eq!(table.close(name), Closing::AskLanes(0));
            }
        }
        let mut out = Vec::new();
        table.drain(&mut out);
        let closed = |one: &&Completion| matches!(one, Completion::Closed { .. });
        assert_eq!(out.iter().filter(closed).count() as u64, most);
        assert!(
            matches!(out.last(), Some(Completion::Placed { token, index: 0, .. }) if *token == most),
            "{out:?}"
        );
    }

    /// Its owner opens the next window by what is under way.
    #[test]
    fn a_begun_transfer_is_reported_before_the_last_ends() {
        let table = ReceiveTable::new();
        let regions = [0, 1].map(|_| Region::host(2 * CHUNK as usize).unwrap());
        open(&table, 0, &regions[0]);
        open(&table, 1, &regions[1]);
        let mut out = Vec::new();
        let chunks = [0, 1].map(|index| claim(&table, 0, index, &regions[0]));
        table.drain(&mut out);
        let next = claim(&table, 1, 0, &regions[1]);
        chunks.into_iter().for_each(|chunk| table.arrived(chunk));
        table.drain(&mut out);
        assert!(
            matches!(
                out[..],
                [
                    Completion::Begun { token: 0, .. },
                    Completion::Begun { token: 1, .. },
                    Completion::Placed { token: 0, .. },
                    Completion::Placed { token: 0, .. },
                    Completion::Closed { token: 0, .. }
                ]
            ),
            "{out:?}"
        );
        table.arrived(next);
        table.drain(&mut out);
        assert!(
            matches!(out[5..], [Completion::Placed { token: 1, .. }]),
            "said once: {out:?}"
        );
    }

    #[test]
    fn a_window_that_is_closed_in_mid_copy_ends_with_the_copy() {
        let table = ReceiveTable::new();
        let region = Region::host(2 * CHUNK as usize).unwrap();
        open(&table, 0, &region);
        let chunk = claim(&table, 0, 0, &region);
        let (window, destination) = (chunk.window, chunk.destination);
        table.copies(&window, 0);
        assert_eq!(table.close(0), Closing::AskLanes(0), "no lane has a chunk");
        assert_eq!(table.close(0), Closing::AskLanes(0), "it is closed");
        let mut out = Vec::new();
        table.drain(&mut out);
        assert!(matches!(out[..], [Completion::Begun { .. }]), "{out:?}");
        assert!(!is_free(&region));
        drop(destination);
        table.copied(&window, 0, None, true);
        assert!(is_free(&region));
        table.drain(&mut out);
        assert!(
            matches!(
                out[1..],
                [Completion::Placed { .. }, Completion::Closed { .. }]
            ),
            "{out:?}"
        );
    }

    /// As one does that has let go of its chunk and not yet of the window.
    #[test]
    fn a_lane_that_holds_a_closed_window_holds_no_memory() {
        let table = ReceiveTable::new();
        let region = Region::host(CHUNK as usize).unwrap();
        open(&table, 0, &region);
        let claim = claim(&table, 0, 0, &region);
        let window = Arc::clone(&claim.window);
        table.arrived(claim);
        let mut out = Vec::new();
        table.drain(&mut out);
        assert!(
            matches!(
                out[1..],
                [Completion::Placed { .. }, Completion::Closed { .. }]
            ),
            "{out:?}"
        );
        assert!(is_free(&region));
        drop(window);
    }
}

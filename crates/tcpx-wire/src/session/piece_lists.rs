//! Lists of pieces that operations name: those that the peer was told, and those that it told.
//!
//! Both sides count the same: pieces of lists that are kept, and pieces of operations under way. The one that names
//! them holds back, and the one that keeps them takes no more for granted.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Session;
use super::error::{RequestError, SessionError};
use super::unexpected;
use crate::frame::{Destination, Extent, Frame};
use crate::pieces::{MAX_PIECES, PieceList};

/// Pieces of operations of the peer that may be under way: what it is told of their ends may be on its way.
const PEER_PIECES: u32 = 4 * MAX_PIECES;

/// A list that the peer was told.
#[derive(Debug)]
struct Told {
    pieces: u32,
    bytes: u64,
    /// Gets that will name it.
    queued: usize,
    /// After those no operation will.
    dropped: bool,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct PieceLists {
    told: BTreeMap<u64, Told>,
    next: u64,
    told_pieces: u32,
    /// Of this side's operations under way.
    running: u32,
    kept: BTreeMap<u64, Arc<PieceList>>,
    /// The list whose parts come.
    coming: PieceList,
    next_kept: u64,
    kept_pieces: u32,
    /// Of the peer's operations under way.
    peers_running: u32,
}

/// What a list costs where it is kept.
fn cost(list: &PieceList) -> u32 {
    list.pieces().max(1)
}

fn within(pieces: u32, more: u32, most: u32) -> Option<u32> {
    pieces.checked_add(more).filter(|sum| *sum <= most)
}

impl PieceLists {
    /// The next part of a list of the peer.
    pub(super) fn take_part(
        &mut self,
        list: u64,
        last: bool,
        part: &[u8],
    ) -> Result<(), SessionError> {
        if list != self.next_kept {
            let next = self.next_kept;
            return Err(unexpected(
                "pieces",
                "lists that count up by one",
                format!("a part of list {list} arrived, not of {next}"),
            ));
        }
        let read = self.coming.read_part(part);
        read.map_err(|error| {
            unexpected("pieces", "a list that can be", format!("{list}: {error}"))
        })?;
        let pieces = within(self.kept_pieces, cost(&self.coming), MAX_PIECES);
        let pieces = pieces.ok_or_else(|| SessionError::TooMany {
            what: "pieces of lists",
            limit: MAX_PIECES.into(),
        })?;
        if last {
            self.kept_pieces = pieces;
            self.next_kept += 1;
            let whole = std::mem::take(&mut self.coming);
            self.kept.insert(list, Arc::new(whole));
        }
        Ok(())
    }

    pub(super) fn take_drop(&mut self, list: u64) -> Result<(), SessionError> {
        let dropped = self.kept.remove(&list);
        let dropped = dropped.ok_or_else(|| not_kept("drop-pieces", list))?;
        self.kept_pieces -= cost(&dropped);
        Ok(())
    }

    /// Pieces of the list that a transfer of the peer goes to.
    pub(super) fn pieces_kept(&self, to: Destination) -> u32 {
        match to {
            Destination::Put {
                to: Extent::Pieces(list),
                ..
            } => self.kept.get(&list).map_or(0, |kept| kept.pieces()),
            _ => 0,
        }
    }

    /// The peer starts an operation on this list.
    pub(super) fn peers_begin(&mut self, list: u64) -> Result<Arc<PieceList>, SessionError> {
        let kept = self.kept.get(&list);
        let kept = kept.ok_or_else(|| not_kept("an operation", list))?;
        let running = within(self.peers_running, kept.pieces(), PEER_PIECES);
        self.peers_running = running.ok_or_else(|| SessionError::TooMany {
            what: "pieces of operations under way",
            limit: PEER_PIECES.into(),
        })?;
        Ok(Arc::clone(kept))
    }

    /// One on so many pieces is over.
    pub(super) fn peers_ended(&mut self, pieces: u32) {
        self.peers_running -= pieces;
    }

    /// Starts an operation of this side; how many pieces of a list it has.
    pub(super) fn begin(&mut self, extent: Extent, bytes: u64) -> Result<u32, RequestError> {
        let Extent::Pieces(list) = extent else {
            return Ok(0);
        };
        let told = self.told.get(&list).filter(|told| !told.dropped);
        let told = told.filter(|told| told.bytes == bytes);
        let pieces = told.ok_or(RequestError::NotListed { list, bytes })?.pieces;
        let running = within(self.running, pieces, MAX_PIECES);
        self.running = running.ok_or(RequestError::TooManyPieces { most: MAX_PIECES })?;
        Ok(pieces)
    }

    /// As [`Self::begin`], where the list will be named later.
    pub(super) fn begin_later(&mut self, extent: Extent, bytes: u64) -> Result<u32, RequestError> {
        let pieces = self.begin(extent, bytes)?;
        if let Extent::Pieces(list) = extent
            && let Some(told) = self.told.get_mut(&list)
        {
            told.queued += 1;
        }
        Ok(pieces)
    }

    /// An operation of this side on so many pieces is over.
    pub(super) fn ended(&mut self, pieces: u32) {
        self.running -= pieces;
    }

    #[cfg(test)]
    pub(super) fn assert_nothing_under_way(&self) {
        assert_eq!((self.running, self.peers_running), (0, 0));
        assert!(self.told.values().all(|told| told.queued == 0));
    }
}

fn not_kept(frame: &'static str, list: u64) -> SessionError {
    unexpected(
        frame,
        "a list of pieces that is kept",
        format!("list {list} was named"),
    )
}

impl Session {
    /// Whether lists of so many pieces in all may be added, and operations on so many started.
    ///
    /// # Errors
    /// Too many are kept, or under way.
    pub fn check_pieces(&self, added: u32, started: u32) -> Result<(), RequestError> {
        let lists = &self.piece_lists;
        for (counted, more) in [(lists.told_pieces, added), (lists.running, started)] {
            within(counted, more, MAX_PIECES)
                .ok_or(RequestError::TooManyPieces { most: MAX_PIECES })?;
        }
        Ok(())
    }

    /// Tells the peer a list, for puts to and gets from [`Extent::Pieces`]; its number. The peer checks it with each of them.
    ///
    /// # Errors
    /// Too many pieces are kept, or the session closes.
    pub fn add_pieces(&mut self, list: &PieceList) -> Result<u64, RequestError> {
        if self.closing() {
            return Err(RequestError::Closed);
        }
        let lists = &mut self.piece_lists;
        let pieces = within(lists.told_pieces, cost(list), MAX_PIECES);
        lists.told_pieces = pieces.ok_or(RequestError::TooManyPieces { most: MAX_PIECES })?;
        let number = lists.next;
        lists.next += 1;
        let told = Told {
            pieces: list.pieces(),
            bytes: list.bytes(),
            queued: 0,
            dropped: false,
        };
        lists.told.insert(number, told);
        let mut parts = list.parts().into_iter().peekable();
        while let Some(part) = parts.next() {
            let last = parts.peek().is_none();
            self.transmit.push_back(Frame::Pieces {
                list: number,
                last,
                part,
            });
        }
        Ok(number)
    }

    /// No operation will name this list any more but those that were started.
    pub fn drop_pieces(&mut self, list: u64) {
        if let Some(told) = self.piece_lists.told.get_mut(&list) {
            told.dropped = true;
            self.forget_dropped(list);
        }
    }

    /// A get has left, or has ended before.
    pub(super) fn list_asked_for(&mut self, from: Extent) {
        if let Extent::Pieces(list) = from
            && let Some(told) = self.piece_lists.told.get_mut(&list)
        {
            told.queued -= 1;
            self.forget_dropped(list);
        }
    }

    fn forget_dropped(&mut self, list: u64) {
        let lists = &mut self.piece_lists;
        let is_over = lists
            .told
            .get(&list)
            .is_some_and(|told| told.dropped && told.queued == 0);
        if is_over && let Some(told) = lists.told.remove(&list) {
            lists.told_pieces -= told.pieces.max(1);
            if !self.ended() {
                self.transmit.push_back(Frame::DropPieces { list });
            }
        }
    }
}

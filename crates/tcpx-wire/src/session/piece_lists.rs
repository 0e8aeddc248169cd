//! Lists of pieces that operations name: those that the peer was told, and those that it told.
//!
//! Both sides count the pieces of lists that are kept alike: from the first frame of a list to the
//! one that drops it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Session;
use super::error::{RequestError, SessionError};
use super::limits::within;
use super::stall::OperationKind;
use super::unexpected;
use crate::frame::{Destination, Extent, Frame, Limits, RefuseReason};
use crate::pieces::PieceList;

const KEPT: &str = "pieces of lists";

/// A list of this side.
#[derive(Debug)]
struct Added {
    /// Until the peer has it.
    list: Option<Arc<PieceList>>,
    /// What the peer calls it.
    told: Option<u64>,
    pieces: u32,
    bytes: u64,
    /// Operations that will name it.
    queued: usize,
    /// After those no operation will.
    dropped: bool,
}

impl Added {
    fn cost(&self) -> u32 {
        self.pieces.max(1)
    }
}

/// A list of the peer.
#[derive(Debug)]
pub(super) struct KeptList {
    pub(super) list: Arc<PieceList>,
    /// Whether the peer may put there, and get from there, while windows are as they were then.
    checked: [Option<(u64, Result<(), RefuseReason>)>; 2],
}

impl KeptList {
    /// What a check of the list says, which is made again only once windows have `changed`.
    pub(super) fn checked(
        &mut self,
        kind: OperationKind,
        changed: u64,
        check: impl FnOnce(&PieceList) -> Result<(), RefuseReason>,
    ) -> Result<(), RefuseReason> {
        let known = &mut self.checked[usize::from(kind == OperationKind::PeerGet)];
        match *known {
            Some((then, allowed)) if then == changed => allowed,
            _ => {
                let allowed = check(&self.list);
                *known = Some((changed, allowed));
                allowed
            }
        }
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct PieceLists {
    added: BTreeMap<u64, Added>,
    next: u64,
    /// Pieces of lists that the program may still name.
    held: u32,
    next_told: u64,
    /// Pieces of lists that the peer keeps.
    told_pieces: u32,
    kept: BTreeMap<u64, KeptList>,
    /// The list whose parts come.
    coming: PieceList,
    next_kept: u64,
    kept_pieces: u32,
}

/// What a list costs where it is kept.
fn cost(list: &PieceList) -> u32 {
    list.pieces().max(1)
}

impl PieceLists {
    /// The next part of a list of the peer.
    pub(super) fn take_part(
        &mut self,
        limits: &Limits,
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
        let windows = self.coming.windows().len();
        within("windows in a list", windows, 0, limits.list_windows)?;
        let cost = cost(&self.coming);
        within(KEPT, self.kept_pieces as usize, cost, limits.pieces)?;
        if last {
            self.kept_pieces += cost;
            self.next_kept += 1;
            let whole = std::mem::take(&mut self.coming);
            let kept = KeptList {
                list: Arc::new(whole),
                checked: [None; 2],
            };
            self.kept.insert(list, kept);
        }
        Ok(())
    }

    pub(super) fn take_drop(&mut self, list: u64) -> Result<(), SessionError> {
        let dropped = self.kept.remove(&list);
        let dropped = dropped.ok_or_else(|| not_kept("drop-pieces", list))?;
        self.kept_pieces -= cost(&dropped.list);
        Ok(())
    }

    /// Pieces of the list that a transfer of the peer goes to.
    pub(super) fn pieces_kept(&self, to: Destination) -> u32 {
        match to {
            Destination::Put {
                to: Extent::Pieces(list),
                ..
            } => self.kept.get(&list).map_or(0, |kept| kept.list.pieces()),
            _ => 0,
        }
    }

    /// The list that an operation of the peer names.
    pub(super) fn peers(&mut self, list: u64) -> Result<&mut KeptList, SessionError> {
        let kept = self.kept.get_mut(&list);
        kept.ok_or_else(|| not_kept("an operation", list))
    }

    /// An operation of this side will name a list; how many pieces that has.
    pub(super) fn queue(&mut self, extent: Extent, bytes: u64) -> Result<u32, RequestError> {
        let Extent::Pieces(list) = extent else {
            return Ok(0);
        };
        let added = self.added.get_mut(&list).filter(|added| !added.dropped);
        let added = added.filter(|added| added.bytes == bytes);
        let added = added.ok_or(RequestError::NotListed { list, bytes })?;
        added.queued += 1;
        Ok(added.pieces)
    }

    /// Whether the peer has the list, or can be told of it now.
    pub(super) fn may_name(&self, limits: &Limits, extent: Extent) -> bool {
        let Extent::Pieces(list) = extent else {
            return true;
        };
        let fits = |added: &Added| {
            let told = self.told_pieces as usize;
            added.told.is_some() || within(KEPT, told, added.cost(), limits.pieces).is_ok()
        };
        self.added.get(&list).is_some_and(fits)
    }

    #[cfg(test)]
    pub(super) fn assert_nothing_queued(&self) {
        assert!(self.added.values().all(|added| added.queued == 0));
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
    /// Whether a list of so many pieces may be added.
    ///
    /// # Errors
    /// The peer does not keep as many, beside those that the program has not dropped.
    pub fn check_pieces(&self, pieces: u32) -> Result<(), RequestError> {
        let most = self.agreed.map_or(0, |agreed| agreed.limits.pieces);
        let held = self.piece_lists.held as usize;
        within(KEPT, held, pieces.max(1), most).map_err(|_| RequestError::TooManyPieces { most })
    }

    /// Adds a list, for puts to and gets from [`Extent::Pieces`]; its number. The peer is told of
    /// it when an operation names it, and checks it with each of them.
    ///
    /// # Errors
    /// The peer does not keep as many pieces, beside those of lists that were not dropped, or no
    /// list of as many windows, or has not said how many it keeps; or the session closes.
    pub fn add_pieces(&mut self, list: Arc<PieceList>) -> Result<u64, RequestError> {
        if self.closing() {
            return Err(RequestError::Closed);
        }
        self.check_pieces(list.pieces())?;
        let most = self.agreed.map_or(0, |agreed| agreed.limits.list_windows);
        if list.windows().len() > most as usize {
            return Err(RequestError::TooManyWindows { most });
        }
        let lists = &mut self.piece_lists;
        let number = lists.next;
        lists.next += 1;
        let added = Added {
            told: None,
            pieces: list.pieces(),
            bytes: list.bytes(),
            queued: 0,
            dropped: false,
            list: Some(list),
        };
        lists.held += added.cost();
        lists.added.insert(number, added);
        Ok(number)
    }

    /// Tells the peer of a list before any operation names it, if it has room for that.
    pub fn tell_pieces(&mut self, list: u64) {
        let extent = Extent::Pieces(list);
        if let Some(agreed) = &self.agreed
            && !self.closing()
            && self.piece_lists.may_name(&agreed.limits, extent)
        {
            self.name_on_wire(extent);
        }
    }

    /// No operation will name this list any more but those that were started.
    pub fn drop_pieces(&mut self, list: u64) {
        let lists = &mut self.piece_lists;
        if let Some(added) = lists.added.get_mut(&list)
            && !std::mem::replace(&mut added.dropped, true)
        {
            lists.held -= added.cost();
            self.forget_dropped(list);
            self.ask_queued();
        }
    }

    /// What the peer calls this; it is told of a list that it does not have.
    pub(super) fn name_on_wire(&mut self, extent: Extent) -> Extent {
        let lists = &mut self.piece_lists;
        let Extent::Pieces(list) = extent else {
            return extent;
        };
        let Some(added) = lists.added.get_mut(&list) else {
            return extent;
        };
        let told = *added.told.get_or_insert(lists.next_told);
        if let Some(list) = added.list.take() {
            lists.next_told += 1;
            lists.told_pieces += added.cost();
            let mut parts = list.parts().into_iter().peekable();
            while let Some(part) = parts.next() {
                self.transmit.push_back(Frame::Pieces {
                    list: told,
                    last: parts.peek().is_none(),
                    part,
                });
            }
        }
        Extent::Pieces(told)
    }

    /// An operation has named its list, or will not.
    pub(super) fn named(&mut self, extent: Extent) {
        if let Extent::Pieces(list) = extent
            && let Some(added) = self.piece_lists.added.get_mut(&list)
        {
            added.queued -= 1;
            self.forget_dropped(list);
        }
    }

    fn forget_dropped(&mut self, list: u64) {
        let lists = &mut self.piece_lists;
        let over = |added: &Added| added.dropped && added.queued == 0;
        if lists.added.get(&list).is_some_and(over)
            && let Some(added) = lists.added.remove(&list)
            && let Some(list) = added.told
        {
            lists.told_pieces -= added.cost();
            if !self.ended() {
                self.transmit.push_back(Frame::DropPieces { list });
            }
        }
    }
}

//! One-sided transfers: puts into windows, gets from them, notifications.
//!
//! A put is a transfer whose first frame names a place in a window that it goes to. The
//! owner of the window checks that, asks its caller for the memory, and takes the transfer as if a
//! receive for it had been posted. A get asks the owner of a window for such a transfer. A
//! notification is one to the program itself: the owner takes it once every put that it names is
//! placed, and drops it where one failed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Session;
use super::action::{Action, Covered, GetRequest, OperationId};
use super::config::MAX_NOTIFICATION_BYTES;
use super::error::{Delivered, EndCause, RequestError, SessionError};
use super::matching::Arrival;
use super::outgoing::Outgoing;
use super::unexpected;
use crate::frame::{Extent, Frame, Level, RefuseReason, TransferId};
use crate::numbered::take_out;
use crate::pieces::{PieceList, PieceRun};
use crate::time::Time;
use crate::window::{Place, Rights, WindowSecret};

/// Gets that this side asks for at a time; the others wait here.
const GETS_UNDER_WAY: usize = 64;
/// Gets that the peer may ask for at a time: what it is told of their ends may be on its way.
const PEER_GETS: usize = 4 * GETS_UNDER_WAY;

/// Why an incoming operation exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The program posted a receive.
    Posted,
    /// The program asked for a piece of a window, or for as many of a list; the request's number once it left.
    Get {
        from: Extent,
        pieces: u32,
        request: Option<u64>,
    },
    /// The peer writes into a window.
    Put { covered: Covered, notified: bool },
    /// The peer notifies the program.
    Notification,
}

impl Origin {
    /// Pieces of a list that it covers.
    pub(super) fn pieces(&self) -> u32 {
        match self {
            Self::Get { pieces, .. } => *pieces,
            Self::Put { covered, .. } => covered.pieces(),
            Self::Posted | Self::Notification => 0,
        }
    }
}

#[derive(Debug)]
struct Window {
    secret: WindowSecret,
    bytes: u64,
    rights: Rights,
}

/// A notification that waits for puts before it.
#[derive(Debug)]
struct Held {
    notification: TransferId,
    end: u64,
    /// Puts that have not ended.
    running: usize,
    failed: bool,
}

/// An arrival of a peer that has got pieces whose memory this side's network still holds: the peer may
/// write there now, and the program that is notified may use it.
#[derive(Debug)]
struct Releasing {
    transfer: TransferId,
    /// What the caller is asked for then.
    action: Action,
    replies: BTreeSet<TransferId>,
}

/// Where an arrival goes.
#[derive(Clone, Debug)]
enum To {
    Memory { covered: Covered, notified: bool },
    Notification { first: TransferId },
}

/// A put that a notification follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Notified {
    Running,
    Failed,
}

/// Windows of this side, and what is under way in those of both.
#[derive(Debug, Default)]
pub(super) struct OneSided {
    windows: BTreeMap<u64, Window>,
    next_window: u64,
    /// Transfers of the peer that the caller has yet to accept, or that wait for puts.
    arrivals: BTreeMap<TransferId, (Arrival, To)>,
    /// Operations that the peer began.
    peers: usize,
    notified: BTreeMap<TransferId, Notified>,
    /// By the first put that each waits for.
    held: BTreeMap<TransferId, Held>,
    /// Arrivals that wait for this side's network to let go of what the peer has got.
    releasing: Vec<Releasing>,
    /// Gets that have not left, and the requests of those that have and are not answered.
    queued_gets: VecDeque<OperationId>,
    gets: BTreeMap<u64, OperationId>,
    /// Gets that have left and not ended.
    gets_under_way: usize,
    next_get: u64,
    /// Requests of the peer that the caller has yet to answer, and what they ask for.
    peer_gets: BTreeMap<u64, Covered>,
    next_peer_get: u64,
    /// Answers to the peer that are under way.
    replies: usize,
}

impl OneSided {
    /// Forgets what has not begun; how many pieces of lists that has.
    pub(super) fn clear(&mut self) -> u32 {
        let arrivals = std::mem::take(&mut self.arrivals).into_values();
        let puts = arrivals.filter_map(|(_, to)| match to {
            To::Memory { covered, .. } => Some(covered),
            To::Notification { .. } => None,
        });
        let gets = std::mem::take(&mut self.peer_gets).into_values();
        let pieces = puts.chain(gets).map(|covered| covered.pieces()).sum();
        self.notified.clear();
        self.held.clear();
        self.releasing.clear();
        self.queued_gets.clear();
        self.gets.clear();
        pieces
    }

    /// Whether a transfer of this name waits.
    pub(super) fn has_arrival(&self, transfer: TransferId) -> bool {
        self.arrivals.contains_key(&transfer)
    }

    /// Operations that the peer began.
    pub(super) fn peers(&self) -> usize {
        self.peers
    }

    fn check(
        &self,
        place: &Place,
        bytes: u64,
        allow: fn(Rights) -> bool,
    ) -> Result<(), RefuseReason> {
        let window = self.windows.get(&place.window);
        let Some(window) = window.filter(|window| window.secret == place.secret) else {
            return Err(RefuseReason::UnknownWindow);
        };
        if !allow(window.rights) {
            return Err(RefuseReason::NotPermitted);
        }
        match place.offset.checked_add(bytes) {
            Some(end) if end <= window.bytes => Ok(()),
            _ => Err(RefuseReason::OutOfRange),
        }
    }

    /// As [`Self::check`], for every piece of a list.
    fn check_list(&self, list: &PieceList, allow: fn(Rights) -> bool) -> Result<(), RefuseReason> {
        let mut bytes = Vec::with_capacity(list.windows().len());
        for (window, secret) in list.windows() {
            let (window, secret, offset) = (*window, *secret, 0);
            let place = Place {
                window,
                secret,
                offset,
            };
            self.check(&place, 0, allow)?;
            bytes.push(self.windows.get(&window).map_or(0, |window| window.bytes));
        }
        let fits = |run: &PieceRun| {
            let end = run.end();
            end.is_some_and(|end| end <= bytes[run.window as usize])
        };
        match list.runs().iter().all(fits) {
            true => Ok(()),
            false => Err(RefuseReason::OutOfRange),
        }
    }
}

/// The window's owner.
impl Session {
    /// Opens a window of so many bytes to the peer; its number.
    pub fn expose(&mut self, secret: WindowSecret, bytes: u64, rights: Rights) -> u64 {
        let window = self.one_sided.next_window;
        self.one_sided.next_window += 1;
        let opened = Window {
            secret,
            bytes,
            rights,
        };
        self.one_sided.windows.insert(window, opened);
        window
    }

    /// Closes a window: the peer starts nothing there any more. What is under way ends early where
    /// the network can cancel, else by itself; every operation ends as ever.
    pub fn revoke(&mut self, now: Time, window: u64) {
        if self.one_sided.windows.remove(&window).is_none() {
            return;
        }
        let is_for = |to: &To| matches!(to, To::Memory { covered, .. } if covered.names(window));
        let arrivals = self.one_sided.arrivals.iter();
        let unaccepted: Vec<_> = arrivals
            .filter(|(_, (_, to))| is_for(to))
            .map(|(transfer, _)| *transfer)
            .collect();
        for transfer in unaccepted {
            self.refuse_arrival(transfer, RefuseReason::UnknownWindow);
        }
        let gets = self.one_sided.peer_gets.iter();
        let unanswered: Vec<_> = gets
            .filter(|(_, of)| of.names(window))
            .map(|(request, _)| *request)
            .collect();
        for request in unanswered {
            self.refuse_get(request, RefuseReason::UnknownWindow);
        }
        if !self.config.cancellable {
            return;
        }
        let puts = self.receives.iter().filter(
            |(_, receive)| matches!(&receive.origin, Origin::Put { covered, .. } if covered.names(window)),
        );
        let mut running: Vec<_> = puts.map(|(operation, _)| *operation).collect();
        let replies = self.sends.iter();
        let replies = replies.filter(|(_, send)| {
            let covered = send.covered.as_ref();
            covered.is_some_and(|covered| covered.names(window))
        });
        running.extend(replies.map(|(transfer, _)| OperationId::send(*transfer)));
        for operation in running {
            self.cancel_operation(now, operation, EndCause::Revoked);
        }
    }

    /// Takes a put or a notification of the peer, whose memory is there now. `None` when it ended
    /// meanwhile.
    pub fn accept(&mut self, now: Time, transfer: TransferId) -> Option<OperationId> {
        let (arrival, to) = self.one_sided.arrivals.remove(&transfer)?;
        let origin = match to {
            To::Memory { covered, notified } => Origin::Put { covered, notified },
            To::Notification { .. } => Origin::Notification,
        };
        let operation = self.insert_receive(now, origin, arrival.bytes, Level::Placed, None);
        self.one_sided.peers += 1;
        self.match_up(now, operation, arrival);
        Some(operation)
    }

    /// Refuses a put or a notification of the peer that was not accepted.
    pub fn refuse_arrival(&mut self, transfer: TransferId, reason: RefuseReason) {
        if let Some(arrival) = self.take_arrival(transfer) {
            self.refuse(arrival, reason);
        }
    }

    /// Refuses a get of the peer that was not answered.
    pub fn refuse_get(&mut self, request: u64, reason: RefuseReason) {
        if let Some(covered) = self.one_sided.peer_gets.remove(&request) {
            self.piece_lists.peers_ended(covered.pieces());
            self.transmit
                .push_back(Frame::RefuseGet { request, reason });
        }
    }

    /// Refuses whatever was not accepted or answered: this side closes.
    pub(super) fn refuse_one_sided(&mut self) {
        while let Some((transfer, _)) = self.one_sided.arrivals.first_key_value() {
            let transfer = *transfer;
            self.refuse_arrival(transfer, RefuseReason::Shutdown);
        }
        while let Some((request, _)) = self.one_sided.peer_gets.first_key_value() {
            let request = *request;
            self.refuse_get(request, RefuseReason::Shutdown);
        }
    }

    /// An arrival that was not accepted, which it will not be any more.
    pub(super) fn take_arrival(&mut self, transfer: TransferId) -> Option<Arrival> {
        let (arrival, to) = self.one_sided.arrivals.remove(&transfer)?;
        match to {
            To::Memory { covered, notified } => {
                self.piece_lists.peers_ended(covered.pieces());
                if notified {
                    self.put_ended(transfer, false);
                }
            }
            To::Notification { first } => {
                let held = &mut self.one_sided.held;
                if held
                    .get(&first)
                    .is_some_and(|held| held.notification == transfer)
                {
                    held.remove(&first);
                }
            }
        }
        Some(arrival)
    }

    /// Bounds what the peer has begun.
    fn check_peers(&self) -> Result<(), SessionError> {
        let (limit, one_sided) = (self.config.max_operations, &self.one_sided);
        if one_sided.arrivals.len() + one_sided.peers >= limit || one_sided.notified.len() > limit {
            let (what, limit) = ("one-sided transfers under way", limit as u64);
            return Err(SessionError::TooMany { what, limit });
        }
        Ok(())
    }

    /// The peer writes into windows.
    pub(super) fn put_arrived(
        &mut self,
        arrival: Arrival,
        to: Extent,
        notified: bool,
    ) -> Result<(), SessionError> {
        self.check_peers()?;
        let (transfer, bytes) = (arrival.transfer, arrival.bytes);
        let (covered, allowed) = self.cover(to, bytes, Rights::allow_put)?;
        if notified {
            self.one_sided.notified.insert(transfer, Notified::Running);
        }
        let to = To::Memory {
            covered: covered.clone(),
            notified,
        };
        self.one_sided.arrivals.insert(transfer, (arrival, to));
        match allowed {
            Ok(()) => {
                let action = Action::PutArrives {
                    transfer,
                    covered,
                    bytes,
                };
                self.ask_for(transfer, action);
            }
            Err(reason) => self.refuse_arrival(transfer, reason),
        }
        Ok(())
    }

    /// What the peer means, and whether it may; it is under way from now on.
    fn cover(
        &mut self,
        extent: Extent,
        bytes: u64,
        allow: fn(Rights) -> bool,
    ) -> Result<(Covered, Result<(), RefuseReason>), SessionError> {
        Ok(match extent {
            Extent::Place(place) => {
                let Place { window, offset, .. } = place;
                let allowed = self.one_sided.check(&place, bytes, allow);
                (Covered::Range { window, offset }, allowed)
            }
            Extent::Pieces(list) => {
                let list = self.piece_lists.peers_begin(list)?;
                let allowed = match list.bytes() == bytes {
                    true => self.one_sided.check_list(&list, allow),
                    false => Err(RefuseReason::OutOfRange),
                };
                (Covered::Pieces(list), allowed)
            }
        })
    }

    /// The peer notifies the program of so many puts from `first` on.
    pub(super) fn notification_arrived(
        &mut self,
        frame: &'static str,
        arrival: Arrival,
        first: TransferId,
        count: u32,
    ) -> Result<(), SessionError> {
        self.check_peers()?;
        let transfer = arrival.transfer;
        if arrival.bytes > MAX_NOTIFICATION_BYTES {
            return Err(unexpected(
                frame,
                "a notification of at most 65536 bytes",
                format!("transfer {transfer} has {}", arrival.bytes),
            ));
        }
        let end = first.0.checked_add(count.into());
        let Some(end) = end.filter(|end| *end <= transfer.0) else {
            return Err(unexpected(
                frame,
                "a notification behind transfers before it",
                format!("transfer {transfer} names others"),
            ));
        };
        let notification = transfer;
        let named = first..TransferId(end);
        let one_sided = &mut self.one_sided;
        let (mut running, mut failures) = (0, Vec::new());
        for (put, state) in one_sided.notified.range(named) {
            match state {
                Notified::Running => running += 1,
                Notified::Failed => failures.push(*put),
            }
        }
        for put in &failures {
            one_sided.notified.remove(put);
        }
        let to = To::Notification { first };
        one_sided.arrivals.insert(notification, (arrival, to));
        let failed = !failures.is_empty();
        if running > 0 {
            let held = Held {
                notification,
                end,
                running,
                failed,
            };
            one_sided.held.insert(first, held);
        } else {
            self.notification_is_due(notification, failed);
        }
        Ok(())
    }

    /// Every put that a notification names has ended.
    fn notification_is_due(&mut self, transfer: TransferId, failed: bool) {
        if failed {
            return self.refuse_arrival(transfer, RefuseReason::PutFailed);
        }
        let Some((arrival, _)) = self.one_sided.arrivals.get(&transfer) else {
            return;
        };
        let action = Action::NotificationArrives {
            transfer,
            bytes: arrival.bytes,
            eager: arrival.eager.is_some(),
        };
        self.ask_for(transfer, action);
    }

    /// Asks the caller for the memory of an arrival, once what the peer has got is released.
    fn ask_for(&mut self, transfer: TransferId, action: Action) {
        let held =
            |send: &Outgoing| send.covered.is_some() && send.is_acked() && !send.course.completed;
        let running = match self.one_sided.replies {
            0 => None,
            _ => Some(self.sends.iter()),
        };
        let replies = running.into_iter().flatten();
        let replies = replies.filter(|(_, send)| held(send));
        let replies: BTreeSet<_> = replies.map(|(transfer, _)| *transfer).collect();
        if replies.is_empty() {
            self.actions.push_back(action);
        } else {
            self.one_sided.releasing.push(Releasing {
                transfer,
                action,
                replies,
            });
        }
    }

    /// The answer to a get of the peer has ended.
    pub(super) fn reply_ended(&mut self, reply: TransferId) {
        let OneSided {
            releasing,
            arrivals,
            ..
        } = &mut self.one_sided;
        let actions = &mut self.actions;
        releasing.retain_mut(|waiting| {
            waiting.replies.remove(&reply);
            if !waiting.replies.is_empty() {
                return true;
            }
            if arrivals.contains_key(&waiting.transfer) {
                actions.push_back(waiting.action.clone());
            }
            false
        });
    }

    /// A put of the peer that a notification follows has ended.
    pub(super) fn put_ended(&mut self, transfer: TransferId, placed: bool) {
        let one_sided = &mut self.one_sided;
        if one_sided.notified.remove(&transfer).is_none() {
            return;
        }
        let held = one_sided.held.range_mut(..=transfer).next_back();
        let Some((first, held)) = held.filter(|(_, held)| transfer.0 < held.end) else {
            if !placed {
                one_sided.notified.insert(transfer, Notified::Failed);
            }
            return;
        };
        held.running = held.running.saturating_sub(1);
        held.failed |= !placed;
        if held.running == 0 {
            let (first, notification, failed) = (*first, held.notification, held.failed);
            one_sided.held.remove(&first);
            self.notification_is_due(notification, failed);
        }
    }

    /// The peer asks for a piece of a window.
    pub(super) fn asked_for(
        &mut self,
        request: u64,
        from: Extent,
        bytes: u64,
        level: Level,
    ) -> Result<(), SessionError> {
        let closing = self.closing();
        let one_sided = &mut self.one_sided;
        if request != one_sided.next_peer_get {
            return Err(unexpected(
                "get",
                "requests that count up by one",
                format!("{request} arrived, not {}", one_sided.next_peer_get),
            ));
        }
        if one_sided.peer_gets.len() + one_sided.replies >= PEER_GETS {
            let (what, limit) = ("gets under way", PEER_GETS as u64);
            return Err(SessionError::TooMany { what, limit });
        }
        one_sided.next_peer_get += 1;
        let (covered, mut allowed) = self.cover(from, bytes, Rights::allow_get)?;
        self.one_sided.peer_gets.insert(request, covered.clone());
        if closing {
            allowed = Err(RefuseReason::Shutdown);
        }
        match allowed {
            Ok(()) => self.actions.push_back(Action::GetArrives {
                request,
                covered,
                bytes,
                level,
            }),
            Err(reason) => self.refuse_get(request, reason),
        }
        Ok(())
    }

    /// What the answer to this get of the peer is read from, unless it was refused.
    pub(super) fn begin_reply(&mut self, request: u64) -> Result<Covered, RequestError> {
        let covered = self.one_sided.peer_gets.remove(&request);
        let covered = covered.ok_or(RequestError::NotAsked { request })?;
        self.one_sided.replies += 1;
        Ok(covered)
    }

    /// A send is over.
    pub(super) fn remove_send(&mut self, transfer: TransferId) {
        self.forget_send_window(transfer);
        let Some(removed) = take_out(&mut self.sends, &transfer) else {
            return;
        };
        self.piece_lists.ended(removed.pieces);
        if let Some(covered) = removed.covered {
            self.piece_lists.peers_ended(covered.pieces());
            self.one_sided.replies -= 1;
        }
    }

    /// An operation that the peer began, or a get, is over.
    pub(super) fn one_sided_over(&mut self, origin: Origin) {
        match origin {
            Origin::Posted => {}
            Origin::Get {
                from,
                pieces,
                request,
            } => {
                self.piece_lists.ended(pieces);
                if let Some(request) = request {
                    self.one_sided.gets.remove(&request);
                    self.one_sided.gets_under_way -= 1;
                } else {
                    self.list_asked_for(from);
                }
                self.ask_queued();
            }
            Origin::Put { covered, .. } => {
                self.piece_lists.peers_ended(covered.pieces());
                self.one_sided.peers -= 1;
            }
            Origin::Notification => self.one_sided.peers -= 1,
        }
    }
}

/// The initiator of gets.
impl Session {
    /// Starts a get: asks for a piece of a window of the peer.
    ///
    /// # Errors
    /// When the bounds of the session do not allow it, or it closes. Nothing was started then.
    pub fn get(&mut self, now: Time, request: GetRequest) -> Result<OperationId, RequestError> {
        self.check_room(self.receives.len() - self.one_sided.peers)?;
        let GetRequest {
            from,
            bytes,
            level,
            deadlines,
        } = request;
        if bytes > super::MAX_TRANSFER_BYTES {
            return Err(RequestError::TooLong { bytes });
        }
        let pieces = self.piece_lists.begin_later(from, bytes)?;
        let origin = Origin::Get {
            from,
            pieces,
            request: None,
        };
        let operation = self.insert_receive(now, origin, bytes, level, deadlines);
        self.one_sided.queued_gets.push_back(operation);
        self.ask_queued();
        Ok(operation)
    }

    /// Sends requests for queued gets, as many as may be under way.
    fn ask_queued(&mut self) {
        while self.one_sided.gets_under_way < GETS_UNDER_WAY
            && let Some(operation) = self.one_sided.queued_gets.pop_front()
        {
            let Some(receive) = self.receives.get_mut(&operation) else {
                continue;
            };
            let Origin::Get { from, request, .. } = &mut receive.origin else {
                continue;
            };
            let number = self.one_sided.next_get;
            self.one_sided.next_get += 1;
            *request = Some(number);
            self.one_sided.gets.insert(number, operation);
            self.one_sided.gets_under_way += 1;
            let (from, bytes, level) = (*from, receive.capacity, receive.asked);
            self.transmit.push_back(Frame::Get {
                request: number,
                from,
                bytes,
                level,
            });
            self.list_asked_for(from);
        }
    }

    /// The peer answers a get with a transfer.
    pub(super) fn replied(
        &mut self,
        now: Time,
        frame: &'static str,
        request: u64,
        arrival: Arrival,
    ) -> Result<(), SessionError> {
        self.check_peers()?;
        let Some(operation) = self.answered(frame, request)? else {
            // It ended here meanwhile.
            self.refuse(arrival, RefuseReason::Cancelled);
            return Ok(());
        };
        let expected = self.receives.get(&operation).map_or(0, |get| get.capacity);
        if arrival.bytes != expected {
            return Err(unexpected(
                frame,
                "as many bytes as were asked for",
                format!(
                    "transfer {} has {} of {expected}",
                    arrival.transfer, arrival.bytes
                ),
            ));
        }
        self.match_up(now, operation, arrival);
        Ok(())
    }

    pub(super) fn get_refused(
        &mut self,
        request: u64,
        reason: RefuseReason,
    ) -> Result<(), SessionError> {
        if let Some(operation) = self.answered("refuse-get", request)? {
            let cause = EndCause::Refused { reason };
            self.end_receive(operation, Err((cause, Delivered::None)));
        }
        Ok(())
    }

    /// The get that is answered; `None` when it ended before.
    fn answered(
        &mut self,
        frame: &'static str,
        request: u64,
    ) -> Result<Option<OperationId>, SessionError> {
        if request >= self.one_sided.next_get {
            return Err(unexpected(
                frame,
                "a get that was asked for",
                format!("request {request} was not"),
            ));
        }
        Ok(self.one_sided.gets.remove(&request))
    }
}

#[cfg(test)]
impl Session {
    /// Nothing of one-sided transfers is left but windows.
    pub(super) fn assert_nothing_one_sided(&self) {
        let OneSided {
            arrivals,
            peers,
            notified,
            held,
            releasing,
            gets,
            gets_under_way,
            peer_gets,
            replies,
            ..
        } = &self.one_sided;
        assert!(arrivals.is_empty(), "{arrivals:?}");
        assert!(
            notified.is_empty() && held.is_empty(),
            "{notified:?} {held:?}"
        );
        assert!(gets.is_empty() && *gets_under_way == 0, "{gets:?}");
        assert!(peer_gets.is_empty(), "{peer_gets:?}");
        assert!(releasing.is_empty(), "{releasing:?}");
        assert_eq!((*peers, *replies), (0, 0));
        self.piece_lists.assert_nothing_under_way();
    }
}

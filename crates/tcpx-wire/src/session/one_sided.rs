//! One-sided transfers: puts into windows, gets from them, notifications.
//!
//! A put is a transfer whose first frame names a place in a window that it goes to. The
//! owner of the window checks that, asks its caller for the memory, and takes the transfer as if a
//! receive for it had been posted. A get asks the owner of a window for such a transfer. A
//! notification is one to the program itself: the owner takes it once every put that it follows is
//! placed, and drops it where one failed. Each side asks for no more of these than the other one takes at a
//! time: see [`credit`](super::credit).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::Session;
use super::action::{Action, Covered, GetRequest, OperationId};
use super::config::{Deadlines, MAX_NOTIFICATION_BYTES, eager_cost};
use super::credit::Kind;
#[cfg(test)]
use super::credit::UnderWay;
use super::error::{Delivered, EndCause, RequestError, SessionError};
use super::matching::Arrival;
use super::outgoing::{EagerSend, Outgoing, SendStage};
use super::unexpected;
use crate::frame::{
    Destination, Extent, Frame, Level, Limits, Notified, Payload, RefuseReason, TransferId,
};
use crate::numbered::take_out;
use crate::pieces::PieceList;
use crate::time::Time;
use crate::window::{Place, Rights, WindowSecret};

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
    /// The peer writes into a window; the puts before the notification that follows.
    Put {
        covered: Covered,
        group: Option<u64>,
    },
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

/// Puts of the peer that a notification follows.
#[derive(Debug)]
struct Group {
    /// The first of them.
    first: TransferId,
    came: u32,
    /// Those of them that have not ended.
    running: usize,
    failed: bool,
    notification: Option<TransferId>,
}

/// An arrival of a peer that has got pieces whose memory this side's network still holds: the peer may
/// write there now, and the program that is notified may use it.
#[derive(Debug)]
struct Releasing {
    transfer: TransferId,
    /// What the caller is asked for once the answers before this one are released.
    action: Action,
    before: u64,
}

/// Where an arrival goes.
#[derive(Clone, Debug)]
enum To {
    Memory {
        covered: Covered,
        group: Option<u64>,
    },
    Notification {
        group: Option<u64>,
    },
}

/// A put or a notification that the peer was not asked to take.
#[derive(Debug)]
pub(super) struct Queued {
    /// Its bytes, where they travel with the frame that asks.
    pub(super) payload: Option<Payload>,
    /// The first of the puts before a notification, of a put that one follows.
    group: Option<TransferId>,
}

/// A get that the owner was asked for, and has not answered.
#[derive(Clone, Copy, Debug)]
enum Unanswered {
    Running(OperationId),
    /// It has ended here; the owner counts it, and its pieces, until it has answered.
    Ended(u32),
}

/// Windows of this side, and what is under way in those of both.
#[derive(Debug, Default)]
pub(super) struct OneSided {
    windows: BTreeMap<u64, Window>,
    next_window: u64,
    /// How often windows were opened or closed.
    changed: u64,
    /// Transfers of the peer that the caller has yet to accept, or that wait for puts.
    arrivals: BTreeMap<TransferId, (Arrival, To)>,
    /// Operations that the peer began.
    peers: usize,
    groups: BTreeMap<u64, Group>,
    next_group: u64,
    /// The one whose notification is to come.
    open_group: Option<u64>,
    /// Puts that the peer does not take yet; and, apart, those before a notification, and notifications: these wait
    /// for its program too.
    queued: [BTreeMap<TransferId, Queued>; 2],
    /// The first put of those that the program starts now, and of those that were asked for last, before a notification.
    starting: Option<TransferId>,
    asked_group: Option<TransferId>,
    /// When something that was queued could leave.
    pub(super) credit_came: Time,
    /// Answers that the peer has got and this side's network has not let go of, counted in their order.
    unreleased: VecDeque<(u64, TransferId)>,
    next_unreleased: u64,
    /// Arrivals that wait for those, in their order.
    releasing: VecDeque<Releasing>,
    /// Gets that have not left, and the requests of those that have and are not answered.
    pub(super) queued_gets: BTreeSet<OperationId>,
    gets: BTreeMap<u64, Unanswered>,
    next_get: u64,
    /// Requests of the peer that the caller has yet to answer, and what they ask for.
    peer_gets: BTreeMap<u64, Covered>,
    next_peer_get: u64,
    /// Answers to the peer that are under way.
    replies: usize,
}

impl OneSided {
    /// Forgets what has not begun.
    pub(super) fn clear(&mut self) {
        self.arrivals.clear();
        self.peer_gets.clear();
        self.groups.clear();
        self.open_group = None;
        self.releasing.clear();
        self.unreleased.clear();
        self.gets.clear();
    }

    /// Answers to the peer that are under way.
    pub(super) fn replies(&self) -> usize {
        self.replies
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
        list.ends().try_for_each(|(window, secret, end)| {
            let offset = 0;
            let place = Place {
                window,
                secret,
                offset,
            };
            self.check(&place, end, allow)
        })
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
        self.one_sided.changed += 1;
        window
    }

    /// Closes a window: the peer starts nothing there any more. What is under way ends early where
    /// the network can cancel, else by itself; every operation ends as ever.
    pub fn revoke(&mut self, now: Time, window: u64) {
        if self.one_sided.windows.remove(&window).is_none() {
            return;
        }
        self.one_sided.changed += 1;
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
            To::Memory { covered, group } => Origin::Put { covered, group },
            To::Notification { .. } => Origin::Notification,
        };
        let deadlines = Some(Deadlines::PEERS);
        let operation = self.insert_receive(now, origin, arrival.bytes, Level::Placed, deadlines);
        self.one_sided.peers += 1;
        self.match_up(now, operation, arrival);
        Some(operation)
    }

    /// Whether a put or a notification of the peer is yet to be accepted.
    pub fn waits(&self, transfer: TransferId) -> bool {
        self.one_sided.has_arrival(transfer)
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
            self.taken.end(Kind::Get, covered.pieces());
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
            To::Memory { covered, group } => {
                self.taken.end(Kind::Put, covered.pieces());
                if let Some(group) = group {
                    self.put_ended(group, false);
                }
            }
            To::Notification { group } => {
                self.taken.end(Kind::Notification, 0);
                let group = group.and_then(|group| self.one_sided.groups.get_mut(&group));
                if let Some(group) = group {
                    group.notification = None;
                }
            }
        }
        Some(arrival)
    }

    /// The peer writes into windows.
    pub(super) fn put_arrived(
        &mut self,
        arrival: Arrival,
        to: Extent,
        notified: Notified,
    ) -> Result<(), SessionError> {
        let (transfer, bytes) = (arrival.transfer, arrival.bytes);
        let (covered, allowed) = self.cover(Kind::Put, to, bytes, Rights::allow_put)?;
        let group = self.one_sided.join_group(transfer, notified)?;
        let to = To::Memory {
            covered: covered.clone(),
            group,
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
        kind: Kind,
        extent: Extent,
        bytes: u64,
        allow: fn(Rights) -> bool,
    ) -> Result<(Covered, Result<(), RefuseReason>), SessionError> {
        let limits = &self.config.ours.limits;
        Ok(match extent {
            Extent::Place(place) => {
                self.taken.begin(limits, kind, 0)?;
                let Place { window, offset, .. } = place;
                let allowed = self.one_sided.check(&place, bytes, allow);
                (Covered::Range { window, offset }, allowed)
            }
            Extent::Pieces(list) => {
                let kept = self.piece_lists.peers(list)?;
                self.taken.begin(limits, kind, kept.list.pieces())?;
                let windows = self.one_sided.changed;
                let allowed = match kept.list.bytes() == bytes {
                    true => {
                        kept.checked(kind, windows, |list| self.one_sided.check_list(list, allow))
                    }
                    false => Err(RefuseReason::OutOfRange),
                };
                (Covered::Pieces(Arc::clone(&kept.list)), allowed)
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
        let transfer = arrival.transfer;
        if arrival.bytes > MAX_NOTIFICATION_BYTES {
            return Err(unexpected(
                frame,
                "a notification of at most 65536 bytes",
                format!("transfer {transfer} has {}", arrival.bytes),
            ));
        }
        let end = first.0.checked_add(count.into());
        if end.is_none_or(|end| end > transfer.0) {
            return Err(unexpected(
                frame,
                "a notification behind transfers before it",
                format!("transfer {transfer} names others"),
            ));
        }
        let limits = &self.config.ours.limits;
        self.taken.begin(limits, Kind::Notification, 0)?;
        let one_sided = &mut self.one_sided;
        let group = match count {
            0 => None,
            _ => one_sided.open_group.take(),
        };
        let to = To::Notification { group };
        one_sided.arrivals.insert(transfer, (arrival, to));
        let Some(number) = group else {
            // Where puts come before it, none of them came.
            self.notification_is_due(transfer, count > 0);
            return Ok(());
        };
        if let Some(group) = one_sided.groups.get_mut(&number) {
            // Puts that did not come have ended at the peer before.
            group.failed |= group.first != first || group.came != count;
            group.notification = Some(transfer);
            if group.running == 0 {
                self.group_ended(number);
            }
        }
        Ok(())
    }

    /// Every put of a group has ended.
    fn group_ended(&mut self, number: u64) {
        let one_sided = &mut self.one_sided;
        if one_sided.open_group != Some(number)
            && let Some(group) = one_sided.groups.remove(&number)
            && let Some(notification) = group.notification
        {
            self.notification_is_due(notification, group.failed);
        }
    }

    /// Every put that a notification follows has ended.
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
        if self.one_sided.unreleased.is_empty() {
            self.actions.push_back(action);
        } else {
            let before = self.one_sided.next_unreleased;
            self.one_sided.releasing.push_back(Releasing {
                transfer,
                action,
                before,
            });
        }
    }

    /// The peer has all of the answer to its get.
    pub(super) fn reply_acked(&mut self, reply: TransferId) {
        let one_sided = &mut self.one_sided;
        let number = one_sided.next_unreleased;
        one_sided.next_unreleased += 1;
        one_sided.unreleased.push_back((number, reply));
    }

    /// The answer to a get of the peer has ended.
    pub(super) fn reply_ended(&mut self, reply: TransferId) {
        let OneSided {
            unreleased,
            releasing,
            arrivals,
            ..
        } = &mut self.one_sided;
        // Few: each has a place in the window of what is sent.
        unreleased.retain(|(_, one)| *one != reply);
        let first = unreleased.front().map_or(u64::MAX, |(number, _)| *number);
        while let Some(released) = releasing.pop_front_if(|waiting| waiting.before <= first) {
            if arrivals.contains_key(&released.transfer) {
                self.actions.push_back(released.action);
            }
        }
    }

    /// A put of the peer that a notification follows has ended.
    pub(super) fn put_ended(&mut self, number: u64, placed: bool) {
        let Some(group) = self.one_sided.groups.get_mut(&number) else {
            return;
        };
        group.running -= 1;
        group.failed |= !placed;
        if group.running == 0 {
            self.group_ended(number);
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
        one_sided.next_peer_get += 1;
        let (covered, mut allowed) = self.cover(Kind::Get, from, bytes, Rights::allow_get)?;
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
        self.peer_is_done(transfer);
        let Some(removed) = take_out(&mut self.sends, &transfer) else {
            return;
        };
        if removed.covered.is_some() {
            self.one_sided.replies -= 1;
        }
        match (removed.counted, removed.to) {
            (Some(kind), _) => {
                self.asked.end(kind, removed.pieces);
                self.ask_queued();
            }
            (None, Destination::Put { .. } | Destination::Notification { .. }) => {
                self.dequeue(transfer, &removed);
            }
            (None, _) => {}
        }
    }

    /// The peer says nothing more of the answer to a get of its own, which it counts no longer.
    pub(super) fn peer_is_done(&mut self, transfer: TransferId) {
        if let Some(send) = self.sends.get_mut(&transfer)
            && let Some(covered) = &send.covered
            && send.counted.take().is_some()
        {
            self.taken.end(Kind::Get, covered.pieces());
        }
    }

    /// An operation that the peer began, or a get, is over.
    pub(super) fn one_sided_over(&mut self, operation: OperationId, origin: &Origin) {
        match origin {
            Origin::Posted => {}
            Origin::Get {
                from,
                request: None,
                ..
            } => {
                self.one_sided.queued_gets.remove(&operation);
                self.named(*from);
                self.ask_queued();
            }
            Origin::Get {
                pieces,
                request: Some(request),
                ..
            } => match self.one_sided.gets.get_mut(request) {
                Some(unanswered) => *unanswered = Unanswered::Ended(*pieces),
                None => {
                    self.asked.end(Kind::Get, *pieces);
                    self.ask_queued();
                }
            },
            Origin::Put { covered, .. } => {
                self.taken.end(Kind::Put, covered.pieces());
                self.one_sided.peers -= 1;
            }
            Origin::Notification => {
                self.taken.end(Kind::Notification, 0);
                self.one_sided.peers -= 1;
            }
        }
    }
}

impl OneSided {
    /// The puts before a notification that one of the peer belongs to.
    fn join_group(
        &mut self,
        transfer: TransferId,
        notified: Notified,
    ) -> Result<Option<u64>, SessionError> {
        match notified {
            Notified::No => return Ok(None),
            Notified::First => {
                // Where another one is open, its notification has ended at the peer.
                let left = self.open_group.take();
                let is_over = |group: &Group| group.running == 0;
                if let Some(left) = left.filter(|left| self.groups.get(left).is_some_and(is_over)) {
                    self.groups.remove(&left);
                }
                let (number, first) = (self.next_group, transfer);
                self.next_group += 1;
                let group = Group {
                    first,
                    came: 0,
                    running: 0,
                    failed: false,
                    notification: None,
                };
                self.groups.insert(number, group);
                self.open_group = Some(number);
            }
            Notified::Next => {}
        }
        let open = self.open_group;
        let group = open.and_then(|number| self.groups.get_mut(&number));
        let group = group.ok_or_else(|| {
            unexpected(
                "a put",
                "one before it that the same notification follows",
                format!("transfer {transfer} has none"),
            )
        })?;
        group.came = group.came.saturating_add(1);
        group.running += 1;
        Ok(open)
    }

    /// Where a put or a notification of this side waits.
    fn queue_of(&mut self, to: Destination) -> &mut BTreeMap<TransferId, Queued> {
        let is_plain = matches!(
            to,
            Destination::Put {
                notified: Notified::No,
                ..
            }
        );
        &mut self.queued[usize::from(!is_plain)]
    }
}

/// Who asks for puts and notifications.
impl Session {
    /// A put or a notification of this side leaves, or waits until the peer takes it.
    pub(super) fn start_one_sided(&mut self, transfer: TransferId, payload: Option<Payload>) {
        let Some(send) = self.sends.get(&transfer) else {
            return;
        };
        let to = send.to;
        let one_sided = &mut self.one_sided;
        let group = match to {
            Destination::Put {
                notified: Notified::First | Notified::Next,
                ..
            } => Some(*one_sided.starting.get_or_insert(transfer)),
            Destination::Notification { count: 1.., .. } => {
                one_sided.starting = None;
                None
            }
            _ => None,
        };
        let queued = Queued { payload, group };
        if one_sided.queue_of(to).is_empty() && self.takes(transfer) {
            self.ask_for_room(transfer, queued);
        } else {
            self.one_sided.queue_of(to).insert(transfer, queued);
        }
    }

    /// Whether the peer takes this put or notification now; it counts from here on.
    fn takes(&mut self, transfer: TransferId) -> bool {
        let (Some(agreed), Some(send)) = (&self.agreed, self.sends.get_mut(&transfer)) else {
            return false;
        };
        let kind = match send.to {
            Destination::Put { to, .. } if self.piece_lists.may_name(&agreed.limits, to) => {
                Kind::Put
            }
            Destination::Put { .. } => return false,
            _ => Kind::Notification,
        };
        let fits = self.asked.begin(&agreed.limits, kind, send.pieces).is_ok();
        send.counted = fits.then_some(kind);
        fits
    }

    /// Asks the peer to take a put or a notification.
    fn ask_for_room(&mut self, transfer: TransferId, queued: Queued) {
        let Some(send) = self.sends.get(&transfer) else {
            return;
        };
        let (mut to, level, bytes) = (send.to, send.asked, send.bytes);
        let mut named = None;
        if let Destination::Put { to, notified } = &mut to {
            named = Some(*to);
            *to = self.name_on_wire(*to);
            let asked = &mut self.one_sided.asked_group;
            *notified = match queued.group {
                None => Notified::No,
                group if *asked == group => Notified::Next,
                group => {
                    *asked = group;
                    Notified::First
                }
            };
        }
        let (stage, frame) = match queued.payload {
            Some(payload) => {
                let stage = SendStage::Eager(EagerSend {
                    crc32c: payload.crc32c(),
                    placed: false,
                    verdict: None,
                });
                let frame = Frame::Eager {
                    transfer,
                    level,
                    to,
                    payload,
                };
                (stage, frame)
            }
            None => {
                let frame = Frame::Waiting {
                    transfer,
                    level,
                    bytes,
                    to,
                };
                (SendStage::Waiting, frame)
            }
        };
        if let Some(send) = self.sends.get_mut(&transfer) {
            send.asking = matches!(stage, SendStage::Waiting);
            send.stage = stage;
        }
        self.transmit.push_back(frame);
        if let Some(extent) = named {
            self.named(extent);
        }
    }

    /// A put or a notification ends that the peer has not heard of.
    fn dequeue(&mut self, transfer: TransferId, send: &Outgoing) {
        let Some(queued) = self.one_sided.queue_of(send.to).remove(&transfer) else {
            return;
        };
        if queued.payload.is_some() {
            self.eager_used -= eager_cost(send.bytes, send.pieces);
        }
        if let Destination::Put { to, .. } = send.to {
            self.named(to);
        }
        self.ask_queued();
    }

    /// Asks for what is queued, the oldest first, as far as the peer takes it.
    pub(super) fn ask_queued(&mut self) {
        if self.ended() {
            return;
        }
        let Some(limits) = self.agreed.map(|agreed| agreed.limits) else {
            return;
        };
        for queue in 0..self.one_sided.queued.len() {
            while let Some((transfer, _)) = self.one_sided.queued[queue].first_key_value()
                && let transfer = *transfer
                && self.takes(transfer)
            {
                self.one_sided.credit_came = self.has_room(OperationId::send(transfer));
                if let Some(queued) = self.one_sided.queued[queue].remove(&transfer) {
                    self.ask_for_room(transfer, queued);
                }
            }
        }
        while let Some(operation) = self.one_sided.queued_gets.first().copied()
            && self.ask_for_get(&limits, operation)
        {
            self.one_sided.credit_came = self.has_room(operation);
            self.one_sided.queued_gets.remove(&operation);
        }
    }

    /// The peer takes an operation that was queued, since it was heard last: the operation waits from then on for what
    /// comes of it. When that was.
    pub(super) fn has_room(&mut self, operation: OperationId) -> Time {
        let came = self.heard();
        let course = Self::course(&mut self.sends, &mut self.receives, operation);
        if let Some(course) = course {
            course.clock.progressed(came);
        }
        came
    }
}

/// The initiator of gets.
impl Session {
    /// Starts a get: asks for a piece of a window of the peer.
    ///
    /// # Errors
    /// When the bounds of the session do not allow it, or it closes. Nothing was started then.
    pub fn get(&mut self, now: Time, request: GetRequest) -> Result<OperationId, RequestError> {
        self.check_room(self.own_receives())?;
        let GetRequest {
            from,
            bytes,
            level,
            deadlines,
        } = request;
        if bytes > super::MAX_TRANSFER_BYTES {
            return Err(RequestError::TooLong { bytes });
        }
        let pieces = self.piece_lists.queue(from, bytes)?;
        let origin = Origin::Get {
            from,
            pieces,
            request: None,
        };
        let operation = self.insert_receive(now, origin, bytes, level, deadlines);
        self.one_sided.queued_gets.insert(operation);
        self.ask_queued();
        Ok(operation)
    }

    /// Asks the owner for a get, if it takes that now.
    fn ask_for_get(&mut self, limits: &Limits, operation: OperationId) -> bool {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return true;
        };
        let (bytes, level) = (receive.capacity, receive.asked);
        let Origin::Get {
            from,
            pieces,
            request,
        } = &mut receive.origin
        else {
            return true;
        };
        if !self.piece_lists.may_name(limits, *from)
            || self.asked.begin(limits, Kind::Get, *pieces).is_err()
        {
            return false;
        }
        let (number, named) = (self.one_sided.next_get, *from);
        self.one_sided.next_get += 1;
        *request = Some(number);
        let unanswered = Unanswered::Running(operation);
        self.one_sided.gets.insert(number, unanswered);
        let from = self.name_on_wire(named);
        self.transmit.push_back(Frame::Get {
            request: number,
            from,
            bytes,
            level,
        });
        self.named(named);
        true
    }

    /// The peer answers a get with a transfer.
    pub(super) fn replied(
        &mut self,
        now: Time,
        frame: &'static str,
        request: u64,
        arrival: Arrival,
    ) -> Result<(), SessionError> {
        let operation = match self.answered(frame, request)? {
            Unanswered::Running(operation) => operation,
            Unanswered::Ended(pieces) => {
                self.refuse(arrival, RefuseReason::Cancelled);
                self.asked.end(Kind::Get, pieces);
                self.ask_queued();
                return Ok(());
            }
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
        match self.answered("refuse-get", request)? {
            Unanswered::Running(operation) => {
                let cause = EndCause::Refused { reason };
                self.end_receive(operation, Err((cause, Delivered::None)));
            }
            Unanswered::Ended(pieces) => {
                self.asked.end(Kind::Get, pieces);
                self.ask_queued();
            }
        }
        Ok(())
    }

    /// The get that is answered.
    fn answered(&mut self, frame: &'static str, request: u64) -> Result<Unanswered, SessionError> {
        let answered = self.one_sided.gets.remove(&request);
        answered.ok_or_else(|| {
            unexpected(
                frame,
                "a get that was asked for, once",
                format!("request {request} was not"),
            )
        })
    }
}

#[cfg(test)]
impl Session {
    /// Nothing of one-sided transfers is left but windows.
    pub(super) fn assert_nothing_one_sided(&self) {
        let OneSided {
            arrivals,
            peers,
            groups,
            open_group,
            queued,
            queued_gets,
            releasing,
            gets,
            peer_gets,
            replies,
            ..
        } = &self.one_sided;
        assert!(arrivals.is_empty(), "{arrivals:?}");
        // One may wait for a notification that has ended at the peer.
        assert!(
            groups.keys().all(|one| *open_group == Some(*one)),
            "{groups:?}"
        );
        assert!(queued.iter().all(BTreeMap::is_empty), "{queued:?}");
        assert!(gets.is_empty() && queued_gets.is_empty(), "{gets:?}");
        assert!(peer_gets.is_empty(), "{peer_gets:?}");
        assert!(releasing.is_empty(), "{releasing:?}");
        assert_eq!((*peers, *replies), (0, 0));
        let nothing = UnderWay::default();
        assert_eq!((&self.asked, &self.taken), (&nothing, &nothing));
        self.piece_lists.assert_nothing_queued();
    }
}

//! What the peer does in windows of this side: puts into them, gets from them, and notifications.
//!
//! A put is a transfer whose first frame names a place in a window that it goes to. The
//! owner of the window checks that, asks its caller for the memory, and takes the transfer as if a
//! receive for it had been posted. A get asks the owner of a window for such a transfer. A
//! notification is one to the program itself: the owner takes it once every put that it follows is
//! placed, and drops it where one failed.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use zeroize::Zeroizing;

use super::Session;
use super::action::{Action, Covered, OperationId};
use super::config::{Deadlines, MAX_NOTIFICATION_BYTES};
use super::error::{Delivered, EndCause, SessionError};
use super::matching::Arrival;
use super::operation::{Operation, Origin};
use super::stall::OperationKind;
use super::unexpected;
use crate::frame::{Eager, Extent, Level, Notified, RefuseReason, TimeLeft, TransferId};
use crate::pieces::PieceList;
use crate::time::Time;
use crate::window::{Place, Rights, WindowSecret};

#[derive(Debug)]
struct OwnWindow {
    secret: Zeroizing<WindowSecret>,
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

/// An arrival of a peer that has got pieces whose memory this side's network still holds: the peer
/// may write there now, and the program that is notified may use it.
#[derive(Debug)]
struct Releasing {
    transfer: TransferId,
    /// What the caller is asked for once the answers before this one are released.
    action: Action,
    before: u64,
}

/// How long what the peer began may take, and since when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed {
    pub(super) since: Time,
    pub(super) deadlines: Deadlines,
}

impl Allowed {
    pub(super) fn new(since: Time, left: TimeLeft) -> Self {
        let deadlines = left.into();
        Self { since, deadlines }
    }
}

/// An operation that the peer was not asked to take.
#[derive(Debug)]
pub(super) struct Queued {
    /// Its bytes, where they travel with the frame that asks.
    pub(super) eager: Option<Eager>,
    /// The first of the puts before a notification, of a put that one follows.
    pub(super) group: Option<TransferId>,
}

/// Windows of this side, and what is under way in those of both.
#[derive(Debug, Default)]
pub(super) struct OneSided {
    windows: BTreeMap<u64, OwnWindow>,
    next_window: u64,
    /// How often windows were opened or closed.
    changed: u64,
    /// Transfers of the peer that the caller has yet to accept, or that wait for puts.
    pub(super) arrivals: BTreeMap<TransferId, (Arrival, Origin, Allowed)>,
    groups: BTreeMap<u64, Group>,
    next_group: u64,
    /// The one whose notification is to come.
    open_group: Option<u64>,
    /// What the peer does not take yet: puts; apart, those before a notification, and
    /// notifications, which wait for its program too; and gets.
    pub(super) queued: [BTreeMap<OperationId, Queued>; 3],
    /// The first put of those that the program starts now, and of those that were asked for last,
    /// before a notification.
    pub(super) starting: Option<TransferId>,
    pub(super) asked_group: Option<TransferId>,
    /// When something that was queued could leave.
    pub(super) credit_came: Time,
    /// Notifications that wait until the program has collected others, and how many of how many
    /// bytes it has not.
    pub(super) due: VecDeque<TransferId>,
    unread: (u64, u64),
    /// Answers that the peer has got and this side's network has not let go of, counted in their
    /// order.
    unreleased: VecDeque<(u64, OperationId)>,
    next_unreleased: u64,
    /// Arrivals that wait for those, in their order.
    releasing: VecDeque<Releasing>,
    /// Gets that have left and are not answered, by their requests.
    pub(super) gets: BTreeMap<u64, OperationId>,
    pub(super) next_get: u64,
    /// Requests of the peer that the caller has yet to answer, and what they ask for.
    pub(super) peer_gets: BTreeMap<u64, (Covered, Allowed)>,
    next_peer_get: u64,
}

impl OneSided {
    /// Forgets what has not begun.
    pub(super) fn clear(&mut self) {
        self.arrivals.clear();
        self.peer_gets.clear();
        self.groups.clear();
        self.open_group = None;
        self.releasing.clear();
        self.due.clear();
        self.unreleased.clear();
        self.gets.clear();
    }

    pub(super) fn expose(&mut self, secret: WindowSecret, bytes: u64, rights: Rights) -> u64 {
        let window = self.next_window;
        self.next_window += 1;
        let opened = OwnWindow {
            secret: Zeroizing::new(secret),
            bytes,
            rights,
        };
        self.windows.insert(window, opened);
        self.changed += 1;
        window
    }

    pub(super) fn window(&self, window: u64) -> Option<Place> {
        let secret = *self.windows.get(&window)?.secret;
        let offset = 0;
        Some(Place {
            window,
            secret,
            offset,
        })
    }

    /// Closes a window: what the peer has begun there that nobody accepted or answered; `None` if
    /// there is none.
    pub(super) fn revoke(&mut self, window: u64) -> Option<(Vec<TransferId>, Vec<u64>)> {
        self.windows.remove(&window)?;
        self.changed += 1;
        Some(self.unanswered_of(|covered| covered.is_some_and(|covered| covered.names(window))))
    }

    /// All that nobody accepted or answered.
    pub(super) fn unanswered(&self) -> (Vec<TransferId>, Vec<u64>) {
        self.unanswered_of(|_| true)
    }

    fn unanswered_of(
        &self,
        is_meant: impl Fn(Option<&Covered>) -> bool,
    ) -> (Vec<TransferId>, Vec<u64>) {
        let arrivals = self.arrivals.iter();
        let arrivals = arrivals.filter(|(_, (_, origin, _))| is_meant(origin.covered()));
        let gets = self.peer_gets.iter();
        let gets = gets.filter(|(_, (covered, _))| is_meant(Some(covered)));
        (
            arrivals.map(|(transfer, _)| *transfer).collect(),
            gets.map(|(request, _)| *request).collect(),
        )
    }

    fn check(
        &self,
        place: &Place,
        bytes: u64,
        allow: fn(Rights) -> bool,
    ) -> Result<(), RefuseReason> {
        let window = self.windows.get(&place.window);
        let Some(window) = window.filter(|window| *window.secret == place.secret) else {
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
}

impl Session {
    /// An arrival that was not accepted, which it will not be any more.
    pub(super) fn take_arrival(&mut self, transfer: TransferId) -> Option<Arrival> {
        let (arrival, origin, _) = self.one_sided.arrivals.remove(&transfer)?;
        let pieces = origin.covered().map_or(0, Covered::pieces);
        self.taken.end(origin.kind(), pieces);
        match origin {
            Origin::PeerPut {
                group: Some(group), ..
            } => self.put_ended(group, false),
            Origin::PeerNotification { group, is_told } => {
                let groups = &mut self.one_sided.groups;
                if let Some(group) = group.and_then(|group| groups.get_mut(&group)) {
                    group.notification = None;
                }
                if is_told {
                    self.notifications_collected(1, arrival.bytes);
                }
            }
            _ => {}
        }
        Some(arrival)
    }

    /// The peer writes into windows.
    pub(super) fn put_arrived(
        &mut self,
        arrival: Arrival,
        to: Extent,
        notified: Notified,
        within: Allowed,
    ) -> Result<(), SessionError> {
        let (transfer, bytes) = (arrival.transfer, arrival.bytes);
        let (covered, allowed) = self.cover(OperationKind::PeerPut, to, bytes)?;
        let origin = Origin::PeerPut {
            covered: covered.clone(),
            group: self.one_sided.join_group(transfer, notified)?,
        };
        let unaccepted = (arrival, origin, within);
        self.one_sided.arrivals.insert(transfer, unaccepted);
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
        kind: OperationKind,
        extent: Extent,
        bytes: u64,
    ) -> Result<(Covered, Result<(), RefuseReason>), SessionError> {
        let limits = &self.config.ours.limits;
        let allow = match kind {
            OperationKind::PeerGet => Rights::allow_get,
            _ => Rights::allow_put,
        };
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
        now: Time,
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
        self.taken
            .begin(limits, OperationKind::PeerNotification, 0)?;
        let one_sided = &mut self.one_sided;
        let group = match count {
            0 => None,
            _ => one_sided.open_group.take(),
        };
        let origin = Origin::PeerNotification {
            group,
            is_told: false,
        };
        // It waits for the program; its sender ends it when its own time is over.
        let allowed = Allowed::new(now, TimeLeft::ANY);
        one_sided
            .arrivals
            .insert(transfer, (arrival, origin, allowed));
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
        let OneSided { due, arrivals, .. } = &mut self.one_sided;
        due.push_back(transfer);
        if due.len() > 2 * self.config.ours.limits.notifications as usize {
            // Of some that have ended at the peer meanwhile.
            due.retain(|one| arrivals.contains_key(one));
        }
        self.tell_notifications();
    }

    /// Tells of notifications, as far as the program has collected those before.
    fn tell_notifications(&mut self) {
        while let Some(transfer) = self.one_sided.due.front().copied() {
            let OneSided {
                arrivals, unread, ..
            } = &mut self.one_sided;
            if let Some((arrival, origin, _)) = arrivals.get_mut(&transfer) {
                let (count, bytes) = (unread.0 + 1, unread.1 + arrival.bytes);
                let limits = &self.config.ours.limits;
                let fits = count <= limits.notifications.into()
                    && bytes <= self.config.bounds.unread_bytes;
                if unread.0 > 0 && !fits {
                    return;
                }
                *unread = (count, bytes);
                if let Origin::PeerNotification { is_told, .. } = origin {
                    *is_told = true;
                }
                let action = Action::NotificationArrives {
                    transfer,
                    bytes: arrival.bytes,
                    eager: arrival.eager.is_some(),
                };
                self.ask_for(transfer, action);
            }
            self.one_sided.due.pop_front();
        }
    }

    /// The program has collected so many notifications of so many bytes in all: others have their
    /// room.
    pub fn notifications_collected(&mut self, count: u64, bytes: u64) {
        let (unread, unread_bytes) = &mut self.one_sided.unread;
        *unread = unread.saturating_sub(count);
        *unread_bytes = unread_bytes.saturating_sub(bytes);
        self.tell_notifications();
    }

    /// Whether notifications wait until the program has collected others.
    pub fn has_postponed(&self) -> bool {
        !self.one_sided.due.is_empty()
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
    pub(super) fn reply_acked(&mut self, reply: OperationId) {
        let one_sided = &mut self.one_sided;
        let number = one_sided.next_unreleased;
        one_sided.next_unreleased += 1;
        one_sided.unreleased.push_back((number, reply));
    }

    /// The answer to a get of the peer has ended.
    pub(super) fn reply_ended(&mut self, reply: OperationId) {
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
        within: Allowed,
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
        let (covered, mut allowed) = self.cover(OperationKind::PeerGet, from, bytes)?;
        let asked = (covered.clone(), within);
        self.one_sided.peer_gets.insert(request, asked);
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

    /// The peer answers a get with a transfer.
    pub(super) fn replied(
        &mut self,
        now: Time,
        frame: &'static str,
        request: u64,
        arrival: Arrival,
    ) -> Result<(), SessionError> {
        let (operation, is_live) = self.answered(frame, request)?;
        if !is_live {
            self.refuse(arrival, RefuseReason::Cancelled);
            self.forget(operation);
            return Ok(());
        }
        let expected = self.operations.get(operation).map_or(0, |get| get.bytes);
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
        let (operation, is_live) = self.answered("refuse-get", request)?;
        if is_live {
            let cause = EndCause::Refused { reason };
            self.end_with(operation, Err((cause, Delivered::None)));
        } else {
            self.forget(operation);
        }
        Ok(())
    }

    /// The get that is answered, and whether it has not ended here before.
    fn answered(
        &mut self,
        frame: &'static str,
        request: u64,
    ) -> Result<(OperationId, bool), SessionError> {
        let answered = self.one_sided.gets.remove(&request);
        let operation = answered.ok_or_else(|| {
            unexpected(
                frame,
                "a get that was asked for, once",
                format!("request {request} was not"),
            )
        })?;
        let it = self.operations.get(operation);
        Ok((operation, it.is_some_and(Operation::is_live)))
    }
}

#[cfg(test)]
impl Session {
    /// Nothing of one-sided transfers is left but windows.
    pub(super) fn assert_nothing_one_sided(&self) {
        let OneSided {
            arrivals,
            groups,
            open_group,
            queued,
            releasing,
            gets,
            peer_gets,
            ..
        } = &self.one_sided;
        assert!(arrivals.is_empty(), "{arrivals:?}");
        // One may wait for a notification that has ended at the peer.
        assert!(
            groups.keys().all(|one| *open_group == Some(*one)),
            "{groups:?}"
        );
        assert!(queued.iter().all(BTreeMap::is_empty), "{queued:?}");
        assert!(gets.is_empty() && peer_gets.is_empty(), "{gets:?}");
        assert!(releasing.is_empty(), "{releasing:?}");
        let nothing = super::limits::UnderWay::default();
        assert_eq!((&self.asked, &self.taken), (&nothing, &nothing));
        self.piece_lists.assert_nothing_queued();
    }
}

//! What the peer says.

use super::Session;
use super::action::{Action, OperationId};
use super::config::{Agreed, CHUNK_GRAIN_BYTES, MAX_EXPOSED_BYTES, MAX_TRANSFER_BYTES};
use super::error::{ConnectionFailure, Delivered, EndCause, SessionError};
use super::limits::{POSTED, within};
use super::matching::{Announced, Arrival, PostedWindow, fits};
use super::one_sided::Allowed;
use super::operation::{Moving, Operation, Origin, Stage};
use super::stream::Plan;
use super::{LIVE, is_not, unexpected};
use crate::frame::{
    Destination, Eager, Frame, GoodbyeReason, Grant, Level, Limits, NumberUse, PlacedChunks,
    RefuseReason, Role, Settings, Tag, TransferId,
};
use crate::plan::ChunkPlan;
use crate::time::Time;

/// Frames that wait of an operation, at most: it is asked for or answered, cancelled and let go.
const FRAMES_EACH: u64 = 4;

impl Session {
    /// Takes a frame of the peer.
    ///
    /// # Errors
    /// When the peer broke the protocol; the caller then calls [`Session::fail`].
    pub fn frame(&mut self, now: Time, frame: Frame) -> Result<(), SessionError> {
        if self.ended() {
            return Ok(());
        }
        self.liveness.heard(now);
        if self.transmit.len() as u64 > self.config.bounds.backlog {
            self.check_backlog()?;
        }
        if self.agreed.is_none() && !matches!(frame, Frame::Settings(_) | Frame::Goodbye { .. }) {
            return Err(unexpected("first frame", "settings", "another one arrived"));
        }
        match frame {
            Frame::Settings(theirs) => return self.take_settings(now, theirs),
            Frame::Setup { payload } => self.actions.push_back(Action::Setup(payload)),
            Frame::Ready => {
                if std::mem::replace(&mut self.peer_ready, true) {
                    return Err(unexpected("ready", "it once", "it arrived again"));
                }
                self.actions.push_back(Action::PeerReady);
                self.begin_moving();
            }
            Frame::Waiting {
                transfer,
                level,
                bytes,
                to,
            } => {
                let arrival = Arrival::new(transfer, level, bytes, to);
                return self.arrived(now, "waiting", arrival, to);
            }
            Frame::Eager {
                transfer,
                level,
                to,
                payload,
            } => {
                let mut arrival = Arrival::new(transfer, level, payload.len() as u64, to);
                arrival.eager = Some(Eager::Bytes(payload));
                return self.arrived(now, "eager", arrival, to);
            }
            Frame::Exposed {
                transfer,
                level,
                to,
                at,
            } => {
                let mut arrival = Arrival::new(transfer, level, at.bytes.into(), to);
                arrival.eager = Some(Eager::Exposed(at));
                return self.arrived(now, "exposed", arrival, to);
            }
            Frame::Get {
                request,
                from,
                bytes,
                level,
                left,
            } => {
                let allowed = Allowed::new(now, left);
                return self.asked_for(request, from, bytes, level, allowed);
            }
            Frame::Pieces { list, last, part } => {
                let limits = &self.config.ours.limits;
                return self.piece_lists.take_part(limits, list, last, &part);
            }
            Frame::DropPieces { list } => return self.piece_lists.take_drop(list),
            Frame::RefuseGet { request, reason } => return self.get_refused(request, reason),
            Frame::Grant { transfer, grant } => return self.granted(now, transfer, grant),
            Frame::Posted {
                tag,
                number,
                capacity,
                grant,
            } => return self.posted(now, tag, number, capacity, grant),
            Frame::Unpost { tag, number } => return self.unposted(now, tag, number),
            Frame::Unposted { tag, number, used } => {
                return self.unpost_answered(now, tag, number, used);
            }
            Frame::Forget { tag, number } => {
                let forgotten = self.matching.forget_received(tag, number);
                self.transmit.push_back(Frame::Forgotten { tag, forgotten });
            }
            Frame::Forgotten { tag, forgotten } => return self.forget_answered(tag, forgotten),
            Frame::Refuse { transfer, reason } => return self.refused(now, transfer, reason),
            Frame::EagerDone { transfer } => return self.eager_done(now, transfer),
            Frame::EagerCredit { bytes } => {
                let (used, arrived) = (self.eager_used, u64::from(bytes));
                self.eager_used = used.checked_sub(arrived).ok_or_else(|| {
                    let found = format!("{arrived} bytes of {used} came back");
                    unexpected("eager credit", "no more than is in use", found)
                })?;
            }
            Frame::Placed { transfer, chunks } => return self.acknowledged(now, transfer, chunks),
            Frame::Digest { transfer, tag } => {
                return self.peer_digest(now, transfer, tag);
            }
            Frame::Verdict {
                transfer,
                tag,
                matches,
            } => return self.verdict(now, transfer, tag, matches),
            Frame::Cancel {
                transfer,
                from,
                reason,
                detail,
            } => {
                return self.cancelled_by_peer(now, transfer, from, reason, &detail);
            }
            Frame::Cancelled { transfer, from } => return self.peer_quiet(now, transfer, from),
            Frame::Heartbeat { counter } => {
                let expected = self.liveness.expected_beat;
                if counter != expected {
                    let found = format!("{counter} arrived, not {expected}");
                    return Err(unexpected(
                        "heartbeat",
                        "numbers that count up by one",
                        found,
                    ));
                }
                self.liveness.expected_beat += 1;
            }
            Frame::Goodbye { reason, detail } => {
                self.transmit.push_back(Frame::GoodbyeAck);
                let detail = detail.to_string();
                let failure = (reason == GoodbyeReason::Error).then(|| {
                    let detail = detail.clone();
                    ConnectionFailure::PeerFailed { detail }
                });
                self.end_all(now, &EndCause::PeerClosed { reason, detail }, failure);
            }
            Frame::Redial { lane } => self.actions.push_back(Action::Redial { lane }),
            // The stream's; a caller that does not resume has no use for it.
            Frame::Received { .. } => {}
            Frame::GoodbyeAck => {
                if !self.goodbye_sent() {
                    return Err(unexpected(
                        "goodbye ack",
                        "a goodbye before it",
                        "none was sent",
                    ));
                }
                self.end_all(now, &EndCause::Closed, None);
            }
        }
        Ok(())
    }

    /// Whether the peer reads what it asks for: no more answers wait than operations may be under
    /// way, and tags be forgotten.
    fn check_backlog(&self) -> Result<(), SessionError> {
        let theirs = self.agreed.map(|agreed| agreed.limits);
        let limits = [Some(self.config.ours.limits), theirs];
        let operations: u64 = limits.iter().flatten().map(Limits::operations).sum();
        let tags = u64::from(self.config.ours.limits.tags);
        let limit = self.config.bounds.backlog + FRAMES_EACH * operations + tags;
        if self.transmit.len() as u64 <= limit {
            return Ok(());
        }
        let what = "answers waiting that it does not read";
        Err(SessionError::TooMany { what, limit })
    }

    fn take_settings(&mut self, now: Time, theirs: Box<Settings>) -> Result<(), SessionError> {
        if self.agreed.is_some() {
            return Err(unexpected("settings", "them once", "they arrived again"));
        }
        let mut agreed = Agreed::new(&self.config.ours, &theirs)?;
        if self.config.addressed {
            // The network spreads chunks over lanes of its own.
            agreed.channels = 1;
        }
        let [sends, receives] = &mut self.streams;
        sends.configure(agreed.channels, agreed.send_window);
        receives.configure(agreed.channels, agreed.receive_window);
        self.liveness.configure(now, agreed.heartbeat);
        self.agreed = Some(agreed);
        self.actions.push_back(Action::PeerSettings(theirs));
        self.ask_queued();
        self.begin_unroomed();
        self.ask_unasked();
        Ok(())
    }

    /// The send that a frame of its receiver names.
    fn live(&mut self, frame: &'static str, transfer: TransferId) -> Live<'_> {
        let found = self.operations.find(Role::Sender, transfer);
        found.ok_or_else(|| is_not(frame, LIVE, transfer))
    }

    fn granted(
        &mut self,
        now: Time,
        transfer: TransferId,
        grant: Grant,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "grant";
        let (level, agreed) = (grant.level, self.agreed);
        let (operation, it) = self.live(FRAME, transfer)?;
        let Some(agreed) = agreed.filter(|_| matches!(it.stage, Stage::Asked)) else {
            return Err(is_not(FRAME, "a transfer that waits", transfer));
        };
        let (bytes, asked) = (it.bytes, it.asked);
        if level < asked {
            return Err(unexpected(
                FRAME,
                "the level that was asked for",
                format!("{level:?} arrived for transfer {transfer}, not {asked:?}"),
            ));
        }
        let cut = grant.plan(FRAME, transfer, bytes, &agreed)?.cut();
        let place = self.streams[Role::Sender as usize].end();
        if self.config.addressed {
            self.send_windows.name(FRAME, grant.window)?;
        } else if grant.window != place {
            return Err(unexpected(
                FRAME,
                "its first chunk's number",
                format!(
                    "{} arrived for transfer {transfer}, not {place}",
                    grant.window
                ),
            ));
        }
        self.waits_no_more(operation);
        self.begin_granted(now, operation, cut, grant.window, level);
        Ok(())
    }

    /// The peer has a destination for a send: its chunks go there, behind those of others.
    pub(super) fn begin_granted(
        &mut self,
        now: Time,
        operation: OperationId,
        cut: ChunkPlan,
        window: u64,
        level: Level,
    ) {
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        let channels = self.agreed.map_or(1, |agreed| agreed.channels);
        let own = it.chunk_bytes.filter(|_| self.config.addressed);
        let cut = own.map_or(cut, |bytes| ChunkPlan::even(cut.bytes(), bytes));
        let stream = &mut self.streams[Role::Sender as usize];
        let plan = Plan::new(cut, stream.end(), channels, window);
        let bytes = plan.bytes();
        stream.append(operation, &cut);
        it.level = level;
        it.stage = Stage::Moving(Box::new(Moving::new(plan, false)));
        it.clock.progressed(now);
        if it.is_live() {
            self.actions
                .push_back(matched(operation, operation.transfer(), Some(&plan), bytes));
            if level == Level::Verified {
                it.digests.computing = true;
                self.actions
                    .push_back(Action::ComputeDigest { operation, bytes });
            }
        } else {
            stream.drop_from(operation, plan.first_sequence);
        }
        self.pump(Role::Sender);
        self.settle(now, operation);
    }

    fn refused(
        &mut self,
        now: Time,
        transfer: TransferId,
        reason: RefuseReason,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "refuse";
        let (operation, it) = self.live(FRAME, transfer)?;
        let is_legal = match &it.stage {
            Stage::Asked => true,
            Stage::Eager { done, .. } => !done && it.digests.theirs.is_none(),
            _ => false,
        };
        if !is_legal {
            let expected = "a transfer that was not granted or placed";
            return Err(is_not(FRAME, expected, transfer));
        }
        let bytes = it.bytes;
        let cause = match reason {
            RefuseReason::TooLarge { capacity } if capacity >= bytes => {
                return Err(unexpected(
                    FRAME,
                    "a capacity below its length",
                    format!("{capacity} holds the {bytes} of transfer {transfer}"),
                ));
            }
            RefuseReason::TooLarge { capacity } => EndCause::TooLarge { bytes, capacity },
            reason => EndCause::Refused { reason },
        };
        if it.is_stopping() {
            // The cancel crossed the refusal; its answer is still to come.
            it.stage = Stage::Queued;
            if matches!(it.origin, Origin::PeerGet { .. }) {
                self.uncount(operation);
            }
            self.settle(now, operation);
        } else {
            self.end_with(operation, Err((cause, Delivered::None)));
        }
        Ok(())
    }

    fn eager_done(&mut self, now: Time, transfer: TransferId) -> Result<(), SessionError> {
        const FRAME: &str = "eager done";
        let (operation, it) = self.live(FRAME, transfer)?;
        match &mut it.stage {
            Stage::Eager { done, .. } if it.is_begun && !*done => *done = true,
            _ => return Err(is_not(FRAME, "an eager transfer, once", transfer)),
        }
        it.clock.progressed(now);
        self.settle(now, operation);
        Ok(())
    }

    fn acknowledged(
        &mut self,
        now: Time,
        transfer: TransferId,
        chunks: PlacedChunks,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "placed";
        let holds = self.config.hold_until_placed;
        let found = self.operations.find(Role::Sender, transfer);
        let (operation, it) = found.ok_or_else(|| is_not(FRAME, LIVE, transfer))?;
        let (is_quiet, is_reported) = (it.is_quiet(), it.is_reported());
        let Stage::Moving(moving) = &mut it.stage else {
            return Err(is_not(FRAME, "a granted transfer", transfer));
        };
        let was_got = moving.all_placed();
        let stream = &mut self.streams[Role::Sender as usize];
        for index in chunks.iter() {
            let problem = if !moving.posted.contains(index) {
                "was never sent"
            } else if !moving.placed.insert(index) {
                "was acknowledged before"
            } else {
                let chunk = moving.plan.chunk(index);
                moving.placed_bytes += u64::from(chunk.length);
                stream.chunk_moved(now, operation, index, true);
                self.actions
                    .push_back(Action::ChunkAcknowledged { operation, chunk });
                if holds && moving.passed.contains(index) && !is_quiet {
                    stream.release(&chunk);
                }
                continue;
            };
            let chunks = moving.plan.chunks;
            return Err(unexpected(
                FRAME,
                "each chunk once, which was sent",
                format!("chunk {index} of {chunks} of transfer {transfer} {problem}"),
            ));
        }
        let is_got = !was_got && moving.all_placed();
        it.clock.progressed(now);
        if is_got && matches!(it.origin, Origin::PeerGet { .. }) && !is_reported {
            self.reply_acked(operation);
        }
        if holds {
            self.pump(Role::Sender);
        }
        self.settle(now, operation);
        Ok(())
    }

    fn verdict(
        &mut self,
        now: Time,
        transfer: TransferId,
        tag: u128,
        matches: bool,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "verdict";
        let (operation, it) = self.live(FRAME, transfer)?;
        let is_eager = matches!(it.stage, Stage::Eager { .. });
        let is_due = it.digests.theirs.is_none()
            && match &it.stage {
                Stage::Eager { .. } => it.is_begun,
                Stage::Moving(moving) => moving.all_placed(),
                _ => false,
            };
        let Some(expected) = it.digests.ours.filter(|_| is_due) else {
            let expected = "a placed transfer whose checksum was sent, once";
            return Err(is_not(FRAME, expected, transfer));
        };
        if matches != (tag == expected) {
            return Err(unexpected(
                FRAME,
                "an outcome that follows from the tag",
                format!("{tag:#x} arrived for transfer {transfer}, not {expected:#x}"),
            ));
        }
        if matches && is_eager && it.asked < Level::Verified {
            return Err(unexpected(
                FRAME,
                "a transfer to be verified",
                format!("transfer {transfer} is eager and not"),
            ));
        }
        it.digests.theirs = Some(tag);
        it.clock.progressed(now);
        self.settle(now, operation);
        Ok(())
    }

    fn peer_digest(
        &mut self,
        now: Time,
        transfer: TransferId,
        tag: u128,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "digest";
        let was_named = |window| window < self.posting.next_window;
        let found = self.operations.find(Role::Receiver, transfer);
        if found.is_none() && transfer.window().is_some_and(was_named) {
            // Its window was closed before.
            return Ok(());
        }
        let (operation, it) = found.ok_or_else(|| is_not(FRAME, LIVE, transfer))?;
        let is_wanted = it.digests.theirs.is_none()
            && it.level == Level::Verified
            && matches!(it.stage, Stage::Posted(_) | Stage::Moving(_));
        if !is_wanted {
            let expected = "a granted transfer to be verified, once";
            return Err(is_not(FRAME, expected, transfer));
        }
        it.digests.theirs = Some(tag);
        if !it.is_matched() {
            // Its first chunk is still to come.
            self.matching.is_sent(it.tag);
            return Ok(());
        }
        it.clock.progressed(now);
        self.settle(now, operation);
        Ok(())
    }
}

type Live<'a> = Result<(OperationId, &'a mut Operation), SessionError>;

impl Grant {
    /// How it cuts a transfer of so many bytes.
    fn plan(
        self,
        frame: &'static str,
        transfer: TransferId,
        bytes: u64,
        agreed: &Agreed,
    ) -> Result<Plan, SessionError> {
        let (most, chunk_bytes) = (agreed.chunk_bytes, self.chunk_bytes);
        let are_agreed =
            chunk_bytes <= most && chunk_bytes > 0 && chunk_bytes.is_multiple_of(CHUNK_GRAIN_BYTES);
        let cut = ChunkPlan::new(bytes, chunk_bytes, self.taper).filter(|_| are_agreed);
        let cut = cut.ok_or_else(|| {
            let found = format!(
                "{self:?} cuts the {bytes} bytes of transfer {transfer}, of {most} at most"
            );
            unexpected(frame, "chunks as agreed, which make the transfer", found)
        })?;
        Ok(Plan::named(cut, self.window))
    }
}

/// Receives of the peer, which a send may find a window of.
impl Session {
    /// The peer has posted a receive.
    fn posted(
        &mut self,
        now: Time,
        tag: Tag,
        number: u64,
        capacity: u64,
        grant: Grant,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "posted";
        let agreed = self.agreed.filter(|_| self.config.addressed);
        let Some(agreed) = agreed else {
            return Err(unexpected(
                FRAME,
                "a network with addressed windows",
                "this one is ordered",
            ));
        };
        let transfer = TransferId::to_window(grant.window);
        if capacity == 0 || capacity > MAX_TRANSFER_BYTES {
            return Err(unexpected(
                FRAME,
                "a window that a transfer fits into, and no longer than any",
                format!("transfer {transfer} has one of {capacity} bytes"),
            ));
        }
        let plan = grant.plan(FRAME, transfer, capacity, &agreed)?;
        self.send_windows.name(FRAME, grant.window)?;
        let posted = PostedWindow {
            capacity,
            plan,
            level: grant.level,
        };
        let counts = self.matching.sends.entry(tag).or_default();
        let first = counts.announced.max(counts.next);
        if counts.posted.contains_key(&number) {
            return Err(unexpected(
                FRAME,
                "each number once",
                format!("number {number} of tag {} arrived", tag.0),
            ));
        }
        if number >= first {
            let before = usize::try_from(number - first).unwrap_or(usize::MAX);
            let before = self.send_windows.ahead.saturating_add(before);
            within(POSTED, before, 1, self.config.ours.limits.windows)?;
            self.send_windows.ahead = before + 1;
        }
        counts.announced = counts.announced.max(number + 1);
        if number >= counts.next {
            counts.posted.insert(number, Some(posted));
            self.number_held(tag);
        } else {
            self.window_came(now, tag, number, posted);
        }
        Ok(())
    }

    /// A receive has ended that the peer had announced: its number is skipped, unless a send has
    /// it.
    fn unposted(&mut self, now: Time, tag: Tag, number: u64) -> Result<(), SessionError> {
        let counts = self.matching.sends.get_mut(&tag);
        let counts = counts.filter(|counts| number < counts.announced);
        let counts = counts.ok_or_else(|| {
            unexpected(
                "unpost",
                "a number that was announced",
                format!("{number} of tag {} arrived", tag.0),
            )
        })?;
        if number >= counts.next {
            counts.posted.insert(number, None);
            self.pass_ended(tag);
            self.number_held(tag);
            return Ok(());
        }
        let operation = counts.numbered.get(&number).copied();
        let it = operation.and_then(|operation| self.operations.get(operation));
        let is_in_window = it.is_some_and(|it| it.moving().is_some());
        match operation.filter(|_| is_in_window) {
            Some(operation) => self.leave_window(now, operation),
            None => self.number_is(tag, number, NumberUse::Used),
        }
        Ok(())
    }

    /// A send went to a window that was closed before it came: it asks, unless it has ended here.
    fn leave_window(&mut self, now: Time, operation: OperationId) {
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        let (tag, Some(number), Some(wire)) = (it.tag, it.number, it.wire) else {
            return;
        };
        if it.is_stopping() {
            // The peer was told of that by the window's name, and answers it.
            return self.number_is(tag, number, NumberUse::Ended);
        }
        let is_reported = it.is_reported();
        let Stage::Moving(moving) = &mut it.stage else {
            return;
        };
        moving.is_leaving = true;
        let first = moving.plan.first_sequence;
        self.streams[Role::Sender as usize].drop_from(operation, first);
        it.wire = None;
        it.clock.progressed(now);
        let is_busy = it.is_busy();
        self.operations.unname(operation, wire);
        if is_reported {
            // Its bytes are the program's again, and the peer has taken none of them.
            self.number_is(tag, number, NumberUse::Ended);
            self.release(operation);
            self.drop_sent(operation);
            self.forget(operation);
        } else if is_busy {
            self.actions.push_back(Action::Withdraw { operation });
        } else {
            self.window_left(operation);
        }
    }

    /// The data plane has let go of a send whose window was closed: it asks for another receive,
    /// which the announced one accounts for.
    pub(super) fn window_left(&mut self, operation: OperationId) {
        self.release(operation);
        self.drop_sent(operation);
        self.ask_peer(operation);
        self.has_left(operation, NumberUse::Used);
    }

    /// A send has left its window, and goes on or ends.
    pub(super) fn has_left(&mut self, operation: OperationId, used: NumberUse) {
        let it = self.operations.get(operation);
        if let Some((tag, number)) = it.and_then(|it| Some((it.tag, it.number?))) {
            self.number_is(tag, number, used);
        }
    }

    /// The peer has forgotten a count, or goes on with it.
    fn forget_answered(&mut self, tag: Tag, forgotten: bool) -> Result<(), SessionError> {
        let counts = self.matching.sends.get_mut(&tag);
        let Some(counts) = counts.filter(|counts| counts.is_forgetting) else {
            return Err(unexpected(
                "forgotten",
                "a tag that was to be forgotten",
                format!("tag {} was not", tag.0),
            ));
        };
        counts.is_forgetting = false;
        let windows = &mut self.send_windows;
        windows.forgetting = windows.forgetting.saturating_sub(1);
        // What the peer keeps for receives of its own it does not count, until a send comes again.
        windows.counted_tags -= usize::from(std::mem::take(&mut counts.is_counted));
        if forgotten {
            windows.ahead -= counts.announced.saturating_sub(counts.next) as usize;
            (counts.next, counts.announced, counts.is_used) = (0, 0, false);
            counts.posted.clear();
        }
        windows.unroomed.append(&mut counts.held);
        self.tidy_sent(tag);
        self.begin_unroomed();
        Ok(())
    }
}

/// Transfers that the peer offers, and the receives they are matched to.
impl Session {
    fn arrived(
        &mut self,
        now: Time,
        frame: &'static str,
        mut arrival: Arrival,
        to: Destination,
    ) -> Result<(), SessionError> {
        let transfer = arrival.transfer;
        arrival.pieces = self.piece_lists.pieces_kept(to);
        self.check_name(frame, transfer, arrival.eager.is_some(), to)?;
        let limit = match &arrival.eager {
            Some(Eager::Bytes(_)) => self.config.ours.eager_limit.into(),
            Some(Eager::Exposed(_)) => MAX_EXPOSED_BYTES,
            None => MAX_TRANSFER_BYTES,
        };
        if arrival.bytes > limit {
            let found = format!("transfer {transfer} has {} of {limit}", arrival.bytes);
            return Err(unexpected(frame, "no more bytes than agreed", found));
        }
        if arrival.eager.is_some() {
            let credit = u64::from(self.config.ours.eager_credit);
            let used = self.eager_held + arrival.credit();
            if used > credit {
                let found = format!("transfer {transfer} makes it {used} bytes of {credit}");
                return Err(unexpected(
                    frame,
                    "no more credit used than there is",
                    found,
                ));
            }
            self.eager_held = used;
        }
        match to {
            Destination::Receive { .. } => self.arrived_of_tag(now, frame, arrival),
            // What answers a get of this side is under way, and a close finishes that.
            Destination::Put { .. } | Destination::Notification { .. } if self.closing() => {
                self.refuse(arrival, RefuseReason::Shutdown);
                Ok(())
            }
            Destination::Put { to, notified, left } => {
                let allowed = Allowed::new(now, left);
                self.put_arrived(arrival, to, notified, allowed)
            }
            Destination::Reply { request } => self.replied(now, frame, request, arrival),
            Destination::Notification { first, count } => {
                self.notification_arrived(now, frame, arrival, first, count)
            }
        }
    }

    /// Names of transfers increase, but for those of sends that ask late, or anew.
    fn check_name(
        &mut self,
        frame: &'static str,
        transfer: TransferId,
        is_eager: bool,
        to: Destination,
    ) -> Result<(), SessionError> {
        let expected = TransferId(self.next_arrival);
        // Puts and notifications may have waited for room, and bring their payload then.
        let is_late = transfer < expected;
        let is_known = || {
            self.operations.named(Role::Receiver, transfer).is_some()
                || self.matching.has_arrival(transfer)
                || self.waits(transfer)
        };
        if is_late && (is_eager && to.tag().is_some() || is_known()) || transfer.window().is_some()
        {
            let found = format!("{transfer} arrived, not {expected}");
            return Err(unexpected(frame, "transfers that count up", found));
        }
        self.next_arrival = self.next_arrival.max(transfer.0 + 1);
        Ok(())
    }

    /// A transfer of the peer meets the receive of its number, or waits for it.
    fn arrived_of_tag(
        &mut self,
        now: Time,
        frame: &'static str,
        arrival: Arrival,
    ) -> Result<(), SessionError> {
        let (tag, number) = (arrival.tag, arrival.number);
        let limits = self.config.ours.limits;
        let is_asking = arrival.eager.is_none();
        if self.matching.is_next(tag, number, is_asking, &limits)? {
            return self.meet(now, arrival, Some(&limits));
        }
        let counts = self.matching.receives_of(tag);
        match counts.announced.get_mut(&number) {
            // It asked before it knew of the window, and its bytes were faster.
            None if number < counts.next && is_asking && self.config.addressed => return Ok(()),
            None | Some(Announced::Ended(Some(_))) => {
                self.matching.tidy(tag);
                return Err(repeated(frame, &arrival));
            }
            Some(Announced::Ended(None)) => {
                self.matching.end_announced(tag, number, Some(arrival));
            }
            Some(Announced::Receive(operation)) => {
                let operation = *operation;
                let it = self.operations.get_mut(operation);
                match it.map(|it| (&it.stage, &mut it.number)) {
                    Some((Stage::Posted(posted), _)) if posted.asked_by.is_some() => {
                        return Err(repeated(frame, &arrival));
                    }
                    Some((Stage::Posted(_), _)) => self.finds_window(operation, arrival),
                    Some((_, its_number)) => {
                        *its_number = None;
                        self.matching.take_announced(tag, number);
                        self.match_up(now, operation, arrival);
                    }
                    None => {}
                }
            }
        }
        self.matching.is_sent(tag);
        self.matching.check_tags(&limits)?;
        self.post_candidates();
        Ok(())
    }

    /// A transfer of the peer meets the first receive that has no number, or waits for one.
    pub(super) fn meet(
        &mut self,
        now: Time,
        arrival: Arrival,
        limits: Option<&Limits>,
    ) -> Result<(), SessionError> {
        if self.closing() {
            self.refuse(arrival, RefuseReason::Shutdown);
            return Ok(());
        }
        let counts = self.matching.receives_of(arrival.tag);
        if counts.is_in_order(arrival.number)
            && let Some(operation) = counts.queue.pop_front()
        {
            self.match_up(now, operation, arrival);
            return Ok(());
        }
        self.matching.add_arrival(arrival, limits)
    }

    pub(super) fn refuse(&mut self, arrival: Arrival, reason: RefuseReason) {
        self.drop_arrival(&arrival);
        self.transmit.push_back(Frame::Refuse {
            transfer: arrival.transfer,
            reason,
        });
    }

    pub(super) fn drop_arrival(&mut self, arrival: &Arrival) {
        if arrival.eager.is_some() {
            self.return_credit(arrival.credit());
        }
    }

    /// A transfer without a window came for a posted receive: whether its sender finds the window
    /// anyway. Else that is closed first, and the transfer is taken then.
    fn finds_window(&mut self, operation: OperationId, arrival: Arrival) {
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        let (tag, is_eager) = (it.tag, arrival.eager.is_some());
        let Stage::Posted(posted) = &mut it.stage else {
            return;
        };
        let fits = !is_eager && fits(it.bytes, it.asked, arrival.bytes, arrival.level);
        let transfer = arrival.transfer;
        if fits && !posted.closing {
            posted.asked_by = Some(arrival);
            return self.operations.name(operation, transfer);
        }
        let (window, was_closing) = (posted.window, std::mem::replace(&mut posted.closing, true));
        let number = it.number.take();
        it.offered = Some(Box::new(arrival));
        // What the peer still says of its window means nothing.
        it.digests.theirs = None;
        self.operations.name(operation, transfer);
        let counts = self.matching.receives_of(tag);
        counts.vain = counts.vain.saturating_add(is_eager.into());
        if let Some(number) = number {
            self.matching.take_announced(tag, number);
        }
        if !was_closing {
            self.operations
                .unname(operation, TransferId::to_window(window));
            self.actions.push_back(Action::Withdraw { operation });
        }
    }

    /// The transfer that waits for this receive.
    pub(super) fn take_offered(&mut self, operation: OperationId) -> Option<Arrival> {
        let arrival = self.operations.get_mut(operation)?.offered.take()?;
        self.operations.unname(operation, arrival.transfer);
        Some(*arrival)
    }

    /// A receive at this stage is posted no more, nor to be.
    pub(super) fn leave_posting(&mut self, operation: OperationId, stage: &Stage) {
        self.posting.candidates.remove(&operation);
        if let Stage::Posted(posted) = stage {
            self.posting.open -= 1;
            let window = TransferId::to_window(posted.window);
            self.operations.unname(operation, window);
            if let Some(asked_by) = &posted.asked_by {
                self.operations.unname(operation, asked_by.transfer);
            }
        }
    }

    /// A receive ends that has no transfer: takes it out of the count. Its number, if it has one,
    /// is the peer's to use or to skip, unless that has ended the send of it.
    pub(super) fn uncount_receive(&mut self, operation: OperationId) {
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        let tag = it.tag;
        if !matches!(it.origin, Origin::Receive { .. }) {
            return;
        }
        let Some(number) = it.number.take() else {
            let queue = &mut self.matching.receives_of(tag).queue;
            if let Ok(at) = queue.binary_search(&operation) {
                queue.remove(at);
            }
            return self.matching.tidy(tag);
        };
        if it.wire.is_some() {
            self.matching.is_sent(tag);
            self.matching.take_announced(tag, number);
            return;
        }
        let mut asked_by = None;
        if let Stage::Posted(posted) = &mut it.stage {
            // What the peer still says of its window means nothing.
            let window = TransferId::to_window(posted.window);
            asked_by = posted.asked_by.take();
            self.operations.unname(operation, window);
        }
        if let Some(asked_by) = &asked_by {
            self.operations.unname(operation, asked_by.transfer);
        }
        if !self.ended() {
            self.matching.end_announced(tag, number, asked_by);
            self.transmit.push_back(Frame::Unpost { tag, number });
        }
    }

    /// The peer says what becomes of the number of a receive that has ended.
    fn unpost_answered(
        &mut self,
        now: Time,
        tag: Tag,
        number: u64,
        used: NumberUse,
    ) -> Result<(), SessionError> {
        let counts = self.matching.receives_of(tag);
        let Some(Announced::Ended(_)) = counts.announced.get(&number) else {
            self.matching.tidy(tag);
            return Err(unexpected(
                "unposted",
                "the number of a receive that has ended",
                format!("{number} of tag {} arrived", tag.0),
            ));
        };
        let ended = self.matching.take_announced(tag, number);
        if used == NumberUse::Forgotten {
            self.matching.begin_again(tag)?;
        }
        if let Some(Announced::Ended(Some(arrival))) = ended {
            match used {
                NumberUse::Used => self.meet(now, arrival, None)?,
                _ => self.drop_arrival(&arrival),
            }
        }
        while let Some((operation, arrival)) = self.matching.pair(tag, None) {
            self.match_up(now, operation, arrival);
        }
        let queue = self.matching.receives_of(tag).queue.iter().copied();
        self.posting.candidates.extend(queue);
        self.matching.tidy(tag);
        self.post_candidates();
        Ok(())
    }

    /// A transfer meets its receive, which no window is open of.
    pub(super) fn match_up(&mut self, now: Time, operation: OperationId, arrival: Arrival) {
        let (credit, transfer, bytes) = (arrival.credit(), arrival.transfer, arrival.bytes);
        let is_bare = self.is_bare(bytes);
        let (Some(it), Some(agreed)) = (self.operations.get_mut(operation), self.agreed) else {
            return;
        };
        if bytes > it.bytes {
            // A peer that lies has written to it before.
            let (capacity, delivered) = (it.bytes, it.delivered());
            self.refuse(arrival, RefuseReason::TooLarge { capacity });
            let cause = EndCause::TooLarge { bytes, capacity };
            return self.end_with(operation, Err((cause, delivered)));
        }
        it.clock.progressed(now);
        let is_fenced = matches!(it.origin, Origin::Receive { fenced: true });
        if is_fenced && arrival.eager.is_none() && self.config.addressed {
            it.offered = Some(Box::new(arrival));
            return self.operations.name(operation, transfer);
        }
        let level = it.asked.max(arrival.level);
        if let Some(payload) = arrival.eager {
            // What travelled in the clear is not what its sender sent, whatever its checksum says.
            let most = if is_bare || matches!(payload, Eager::Exposed(_)) {
                Level::Placed
            } else {
                Level::Verified
            };
            let level = level.min(most);
            (it.wire, it.bytes, it.level) = (Some(transfer), bytes, level);
            it.digests.theirs = match level {
                Level::Verified => payload.crc32c(),
                _ => None,
            };
            it.stage = Stage::Eager {
                done: false,
                verdict_wanted: arrival.level == Level::Verified,
                credit,
            };
            self.operations.name(operation, transfer);
            let matched = matched(operation, transfer, None, bytes);
            self.urgent.push_back(matched);
            let deliver = Action::DeliverEager { operation, payload };
            return self.urgent.push_back(deliver);
        }
        let (pieces, tag) = (it.pieces, it.tag);
        self.operations.name(operation, transfer);
        // The name that it bears now is no other's transfer.
        let is_alone = self.operations.names(Role::Receiver) == self.posting.open + 1;
        let cut = self.config.cut(bytes, pieces, agreed.chunk_bytes, is_alone);
        let plan = if self.config.addressed {
            let window = self.posting.name_window();
            if bytes > 0 {
                self.urgent.push_back(Action::OpenWindow {
                    operation,
                    window,
                    cut,
                    tag,
                });
            }
            Plan::named(cut, window)
        } else {
            let stream = &mut self.streams[Role::Receiver as usize];
            let first = stream.end();
            stream.append(operation, &cut);
            Plan::new(cut, first, agreed.channels, first)
        };
        self.begin_matched(operation, transfer, plan, level);
        let grant = plan.grant(level);
        self.transmit.push_back(Frame::Grant { transfer, grant });
        self.pump(Role::Receiver);
        self.settle(now, operation);
    }

    /// The chunks of a transfer are to come for this receive.
    pub(super) fn begin_matched(
        &mut self,
        operation: OperationId,
        transfer: TransferId,
        plan: Plan,
        level: Level,
    ) {
        let bytes = plan.bytes();
        self.actions
            .push_back(matched(operation, transfer, Some(&plan), bytes));
        if let Some(it) = self.operations.get_mut(operation) {
            (it.wire, it.bytes, it.level) = (Some(transfer), bytes, level);
            it.stage = Stage::Moving(Box::new(Moving::new(plan, self.config.addressed)));
        }
    }
}

fn repeated(frame: &'static str, arrival: &Arrival) -> SessionError {
    let found = format!("{} arrived of tag {}", arrival.number, arrival.tag.0);
    unexpected(frame, "a number that no send of its tag had before", found)
}

fn matched(
    operation: OperationId,
    transfer: TransferId,
    plan: Option<&Plan>,
    bytes: u64,
) -> Action {
    Action::Matched {
        operation,
        transfer,
        bytes,
        first_sequence: plan.map_or(0, |plan| plan.first_sequence),
        chunks: plan.map_or(0, |plan| plan.chunks),
    }
}

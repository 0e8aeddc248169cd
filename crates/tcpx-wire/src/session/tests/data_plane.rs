//! What the data planes of a pair do, and what a session must never ask of them.

use crate::ChunkPlan;
use std::collections::BTreeSet;

use super::model::*;
use super::pair::{Event, Pair};
use super::*;
use crate::crc::crc32c;
use crate::frame::TransferId;

impl Pair {
    pub(super) fn become_quiet(&mut self, at: usize, operation: OperationId) {
        let side = &mut self.sides[at];
        let watched = side.operations.get_mut(&operation).unwrap();
        watched.quiet = true;
        let sends = operation.sent_transfer().is_some();
        let lanes = if sends {
            &mut side.sends
        } else {
            &mut side.receives
        };
        let agreed = *side.session.agreed().unwrap();
        // The sequence number of a chunk follows from any posted one.
        let open = watched.window.filter(|_| !sends);
        let held = std::mem::take(&mut watched.held);
        if let Some(window) = open {
            side.windows.remove(&window);
            watched.window_open = false;
        }
        for index in held.into_iter().filter(|_| open.is_none()) {
            // A network lets go of a chunk that it had not sent when it becomes quiet.
            side.kept.retain(|_, held| *held != (operation, index));
            let channel = watched_channel(&side.session, operation, index, agreed.channels);
            lanes.release(channel);
        }
        for queue in lanes.posted.values_mut() {
            queue.retain(|(_, of, _)| *of != operation);
        }
        if std::mem::take(&mut watched.withdrawn) {
            (watched.quiet, watched.matched) = (false, None);
            (watched.window, watched.stopped) = (None, None);
            watched.digesting = false;
            watched.placed_bytes = 0;
            watched.generation += 1;
            watched.placed.clear();
        }
        side.session.data_quiet(self.now, operation);
    }

    /// Matches the data at the head of a channel with the receives posted there: both ascend, so a
    /// later receive means that the transfer of the data was dropped.
    pub(super) fn accept(&mut self, at: usize, channel: u16) {
        loop {
            let side = &mut self.sides[at];
            let Some(head) = side.heads.get_mut(&channel) else {
                return;
            };
            let Some((sequence, length)) = head.front().copied() else {
                return;
            };
            let posted = side.receives.posted.entry(channel).or_default();
            let Some(found) = posted.iter().position(|(posted, ..)| *posted >= sequence) else {
                return;
            };
            head.pop_front();
            if posted[found].0 > sequence {
                continue;
            }
            let Some((_, operation, chunk)) = posted.remove(found) else {
                return;
            };
            assert_eq!(chunk.length, length, "both sides cut alike");
            let watched = side.operations.get_mut(&operation).unwrap();
            let matched = watched.matched.map(|(transfer, _)| transfer);
            assert_eq!(
                matched,
                side.data_of.get(&sequence).copied(),
                "a stranger's bytes"
            );
            if watched.quiet {
                continue;
            }
            watched.placed_bytes += u64::from(length);
            side.session
                .chunk_arrived(self.now, operation, chunk.index, length.into());
            if !self.fault_plan.no_unpack {
                let index = chunk.index;
                let generation = 0;
                self.schedule(
                    at,
                    Event::Placed {
                        operation,
                        index,
                        channel,
                        generation,
                    },
                );
            }
        }
    }

    /// A chunk reaches its window, in whichever order.
    pub(super) fn packet(&mut self, at: usize, window: u64, chunk: (u32, u64, u32), total: u64) {
        let side = &mut self.sides[at];
        let Some(open) = side.windows.get_mut(&window) else {
            // It was closed before.
            return;
        };
        let operation = open.operation;
        let watched = side.operations.get_mut(&operation).unwrap();
        let closing = watched.stopped.is_some() || watched.withdrawn;
        if closing && self.random.chance(50) {
            return;
        }
        assert!((1..=open.cut.bytes()).contains(&total), "beyond the window");
        let (index, offset, length) = chunk;
        let plan = open.plan.unwrap_or_else(|| {
            // As of data planes that take longer chunks than were granted.
            let length = match index {
                0 => u64::from(length),
                before => offset / u64::from(before),
            };
            match length > open.cut.chunk_bytes().into() {
                true => ChunkPlan::even(total, length as u32),
                false => open.cut.for_total(total),
            }
        });
        assert_eq!(plan.bytes(), total);
        if open.plan.replace(plan).is_none() {
            side.session.window_begins(self.now, operation, plan);
            if self.random.chance(50) {
                // Only its header has come yet.
                let packet = Event::Packet {
                    window,
                    chunk,
                    total,
                };
                return self.schedule(at, packet);
            }
        }
        assert_eq!(plan.range(index).1, length, "both sides cut alike");
        assert!(open.seen.insert(index), "chunk {index} came twice");
        watched.placed_bytes += u64::from(length);
        watched.held.insert(index);
        let generation = watched.generation;
        side.session
            .chunk_arrived(self.now, operation, index, length.into());
        if !self.fault_plan.no_unpack {
            let channel = 0;
            self.schedule(
                at,
                Event::Placed {
                    operation,
                    index,
                    channel,
                    generation,
                },
            );
        }
    }

    pub(super) fn act(&mut self, at: usize, action: Action) {
        let side = &mut self.sides[at];
        assert!(side.closed.is_none(), "after Closed: {action:?}");
        let is_notification = matches!(action, Action::NotificationArrives { .. });
        match action {
            Action::PeerSettings(_) | Action::PeerReady | Action::Setup(_) => {}
            Action::OpenWindow {
                operation,
                window,
                cut,
                ..
            } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                assert!(
                    watched.outcome.is_none() && !watched.window_open && watched.stopped.is_none()
                );
                assert!(cut.bytes() <= watched.bytes && cut.count() > 0);
                (watched.window, watched.window_open) = (Some(window), true);
                let open = OpenWindow {
                    operation,
                    cut,
                    plan: None,
                    seen: BTreeSet::new(),
                };
                let newest = side.windows.last_key_value();
                assert!(newest.is_none_or(|(newest, _)| *newest < window));
                side.windows.insert(window, open);
            }
            Action::Redial { lane } => side.asked_for.push(lane),
            // It may come after the drop.
            Action::ChunkAcknowledged { chunk, .. } => {
                side.kept.remove(&chunk.sequence);
            }
            Action::ChunkDropped { chunk } => {
                let kept = side.kept.remove(&chunk.sequence);
                assert!(kept.is_some(), "{chunk:?} was not kept");
            }
            Action::Matched {
                operation,
                transfer,
                chunks,
                ..
            } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                assert!(watched.outcome.is_none());
                let before = watched.matched.replace((transfer, chunks));
                // A send whose window was closed begins anew.
                assert!(operation.sent_transfer().is_some() || before.is_none());
            }
            Action::PostSend {
                operation,
                chunk,
                transfer,
                window,
                total,
                ..
            } => {
                let agreed = *side.session.agreed().unwrap();
                let addressed = side.session.config.addressed;
                let known = match addressed {
                    true => side.named.contains(&window),
                    false => side.granted.contains(&transfer),
                };
                assert!(known, "posted before the window was known");
                side.sends
                    .post(chunk, &agreed, agreed.send_window, !addressed);
                let watched = side.operations.get_mut(&operation).unwrap();
                assert!(watched.outcome.is_none() && watched.stopped.is_none());
                assert_eq!(watched.matched.map(|(matched, _)| matched), Some(transfer));
                watched.transfer = Some(transfer);
                if addressed {
                    watched.window = Some(window);
                    let before = side.sent_to.insert(window, operation);
                    assert!(before.is_none_or(|before| before == operation));
                }
                assert!(watched.held.insert(chunk.index));
                side.kept.insert(chunk.sequence, (operation, chunk.index));
                let generation = watched.generation;
                let Chunk { index, channel, .. } = chunk;
                if self.fault_plan.no_send {
                    return;
                }
                self.schedule(
                    at,
                    Event::Sent {
                        operation,
                        index,
                        channel,
                        generation,
                    },
                );
                if self.fault_plan.lose_data {
                    return;
                }
                if !addressed {
                    return self.transport(1 - at, chunk, transfer);
                }
                let most = self.fault_plan.data.unwrap_or(self.fault_plan.jitter);
                let delay = Duration::from_micros(self.random.below(most) + 1);
                let packet = Event::Packet {
                    window,
                    chunk: (chunk.index, chunk.offset, chunk.length),
                    total,
                };
                self.schedule_at(1 - at, self.now + delay, packet);
            }
            Action::PostReceive {
                operation,
                chunk,
                transfer,
                ..
            } => {
                let agreed = *side.session.agreed().unwrap();
                side.receives
                    .post(chunk, &agreed, agreed.receive_window, true);
                let watched = side.operations.get_mut(&operation).unwrap();
                assert!(watched.outcome.is_none() && watched.stopped.is_none());
                assert!(chunk.offset + u64::from(chunk.length) <= watched.bytes);
                assert_eq!(watched.matched.map(|(matched, _)| matched), Some(transfer));
                watched.transfer = Some(transfer);
                assert!(watched.held.insert(chunk.index));
                let posted = side.receives.posted.entry(chunk.channel).or_default();
                posted.push_back((chunk.sequence, operation, chunk));
                self.accept(at, chunk.channel);
            }
            Action::PutArrives {
                transfer, bytes, ..
            }
            | Action::NotificationArrives {
                transfer, bytes, ..
            } => {
                if let Some(operation) = side.session.accept(self.now, transfer) {
                    let before = side.accepted.insert(transfer, operation);
                    assert_eq!(before, None, "accepted twice");
                    self.watch_peers(at, operation, bytes);
                    let watched = self.sides[at].operations.get_mut(&operation).unwrap();
                    watched.is_notification = is_notification;
                }
            }
            Action::GetArrives {
                request,
                bytes,
                level,
                ..
            } => {
                let answer = SendRequest {
                    to: Destination::Reply { request },
                    ..send(0, bytes, level)
                };
                if let Ok(operation) = side.session.send(self.now, answer) {
                    self.watch_peers(at, operation, bytes);
                }
            }
            Action::DeliverEager { operation, payload } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                assert!(payload.bytes() <= watched.bytes && watched.copied.is_none());
                let payload = match payload {
                    Eager::Bytes(payload) => payload.into_bytes(),
                    // It is read at once, or never where its sender has let go of it.
                    Eager::Exposed(exposed) => {
                        watched.copying = true;
                        let (transfer, _) = watched.matched.unwrap();
                        let sent = OperationId::new(Role::Sender, transfer.0);
                        let sent = self.sides[1 - at].operations.get(&sent);
                        if sent.is_some_and(|sent| sent.outcome.is_none()) {
                            let side = &mut self.sides[at];
                            let watched = side.operations.get_mut(&operation).unwrap();
                            watched.copying = false;
                            watched.copied = Some(vec![0; exposed.bytes as usize]);
                            side.session.eager_copied(self.now, operation);
                        }
                        return;
                    }
                };
                assert!(watched.matched.is_some());
                watched.copying = true;
                watched.copied = Some(payload);
                if !self.fault_plan.no_unpack {
                    self.schedule(at, Event::Copied { operation });
                }
            }
            Action::ComputeDigest { operation, bytes } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                watched.digesting = true;
                let wrong = self.fault_plan.corrupt && operation.sent_transfer().is_none();
                let right = match &watched.copied {
                    Some(payload) => crc32c(payload),
                    None => digest_of(bytes),
                };
                let crc32c = right ^ u32::from(wrong);
                if !self.fault_plan.no_digest {
                    self.schedule(at, Event::Digest { operation, crc32c });
                }
            }
            Action::StopData { operation } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                assert!(
                    watched.touches_memory() && watched.stopped.is_none(),
                    "needless or repeated stop"
                );
                watched.stopped = Some(self.now);
                if !self.fault_plan.no_quiet {
                    self.schedule_quiet(at, operation);
                }
            }
            Action::Withdraw { operation } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                assert!(watched.stopped.is_none() && !watched.withdrawn);
                assert!(watched.touches_memory());
                watched.withdrawn = true;
                // Where nothing was posted the data plane has nothing to let go of.
                if !self.fault_plan.no_quiet || !watched.touches_memory() {
                    self.schedule_quiet(at, operation);
                }
            }
            Action::Complete {
                operation,
                outcome,
                memory,
            } => {
                let collected = outcome.as_ref().ok().map(|completed| completed.bytes);
                self.completed(at, operation, outcome, memory);
                if let Some(bytes) = collected
                    && self.sides[at].operations[&operation].is_notification
                {
                    self.schedule(at, Event::Collected { bytes });
                }
            }
            Action::Closed { failure } => {
                let ended = |watched: &Watched| watched.outcome.is_some();
                assert!(
                    side.operations.values().all(ended),
                    "closed before the operations"
                );
                side.closed = Some(failure);
            }
        }
    }

    fn completed(
        &mut self,
        at: usize,
        operation: OperationId,
        outcome: Result<Completed, OperationError>,
        memory: Memory,
    ) {
        let watched = self.sides[at].operations.get_mut(&operation).unwrap();
        assert!(watched.outcome.is_none(), "{operation:?} completed twice");
        // A data plane that has yet to say so may be quiet.
        let held = memory == Memory::Held;
        let is_right = match held {
            true => !watched.quiet,
            false => !watched.touches_memory(),
        };
        assert!(is_right, "{operation:?} {outcome:?}");
        let soon = self.sides[at].session.config.bounds.answer_timeout;
        let is_early = watched.stopped.is_some_and(|at| self.now < at + soon);
        assert!(!held || !is_early, "it may still let go of {operation:?}");
        if let Ok(Completed { bytes, level }) = outcome {
            match operation.sent_transfer() {
                Some(transfer) if level >= Level::Placed => {
                    let window = watched.window;
                    self.check_placed(1 - at, transfer, window, bytes)
                }
                Some(_) => {}
                None if watched.copied.is_some() => {}
                None => assert_eq!(watched.placed_bytes, bytes, "no wrong success"),
            }
        }
        let watched = self.sides[at].operations.get_mut(&operation).unwrap();
        watched.outcome = Some(outcome);
        watched.memory = Some(memory);
    }

    /// A sender was told that everything is placed: it must be.
    fn check_placed(&self, receiver: usize, transfer: TransferId, window: Option<u64>, bytes: u64) {
        let side = &self.sides[receiver];
        let found = side.operations.values().find(|watched| {
            watched.held.is_empty()
                && match window {
                    Some(_) => watched.window == window,
                    None => watched.transfer == Some(transfer),
                }
                && watched.bytes >= bytes
                && watched.copied.is_none()
                && watched.placed_bytes > 0
        });
        match found {
            Some(watched) => assert_eq!(watched.placed_bytes, bytes, "no wrong success"),
            // Eager and empty transfers have no chunks.
            None => {
                let most = u64::from(side.session.config.ours.eager_limit);
                assert!(bytes <= most.max(MAX_EXPOSED_BYTES));
            }
        }
    }

    fn transport(&mut self, to: usize, chunk: Chunk, transfer: TransferId) {
        let most = self.fault_plan.data.unwrap_or(self.fault_plan.jitter);
        let delay = Duration::from_micros(self.random.below(most) + 1);
        let side = &mut self.sides[to];
        let channel = chunk.channel;
        let at = side.data_at.entry(channel).or_insert(self.now);
        *at = (*at).max(self.now + delay);
        let at = *at;
        side.data
            .entry(channel)
            .or_default()
            .push_back((chunk.sequence, chunk.length));
        side.data_of.insert(chunk.sequence, transfer);
        self.schedule_at(to, at, Event::Data { channel });
    }
}

fn watched_channel(session: &Session, operation: OperationId, index: u32, channels: u16) -> u16 {
    let it = session.operations.get(operation).unwrap();
    let first = it.moving().unwrap().plan.first_sequence;
    ((first + u64::from(index)) % u64::from(channels)) as u16
}

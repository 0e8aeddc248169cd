//! Heartbeats: proof of life of the control connection, both ways; and lanes that one side lacks.

use std::time::Duration;

use super::Session;
use super::error::ConnectionFailure;
use crate::frame::Frame;
use crate::time::Time;

#[derive(Debug)]
pub(super) struct Liveness {
    interval: Duration,
    dead_after: Duration,
    heard: Time,
    /// When silence from here has lasted long enough.
    beat_due: Time,
    next_beat: u64,
    pub(super) expected_beat: u64,
}

impl Liveness {
    pub(super) fn new(now: Time, interval: Duration, dead_after: Duration) -> Self {
        Self {
            interval,
            dead_after,
            heard: now,
            beat_due: now + interval,
            next_beat: 0,
            expected_beat: 0,
        }
    }

    pub(super) fn configure(&mut self, now: Time, interval: Duration) {
        self.interval = interval;
        self.beat_due = self.beat_due.min(now + interval);
    }

    pub(super) fn heard(&mut self, now: Time) {
        self.heard = self.heard.max(now);
    }

    pub(super) fn transmitted(&mut self, now: Time) {
        self.beat_due = self.beat_due.max(now + self.interval);
    }

    pub(super) fn next_due(&self) -> Time {
        self.beat_due.min(self.heard + self.dead_after)
    }
}

impl Session {
    /// When the peer was last heard.
    pub fn heard(&self) -> Time {
        self.liveness.heard
    }

    /// Something of the peer has come, be it a part of a frame: it lives, though a frame takes its time.
    pub fn hear(&mut self, now: Time) {
        self.liveness.heard(now);
    }

    /// Says something to the peer now, a heartbeat ahead of its time if there is nothing else: what the
    /// peer's system makes of it tells whether the way to it still works.
    pub fn probe(&mut self, now: Time) {
        if !self.ended() {
            self.beat(now);
        }
    }

    /// Asks the peer to dial a lane that this side lacks and cannot dial.
    pub fn ask_for_lane(&mut self, lane: u16) {
        if !self.ended() {
            self.transmit.push_back(Frame::Redial { lane });
        }
    }

    fn beat(&mut self, now: Time) {
        // A frame that waits is proof enough once it leaves.
        if self.transmit.len() == 0 {
            let counter = self.liveness.next_beat;
            self.liveness.next_beat += 1;
            self.transmit.push_back(Frame::Heartbeat { counter });
        }
        self.liveness.transmitted(now);
    }

    pub(super) fn check_liveness(&mut self, now: Time) {
        let Liveness {
            heard,
            dead_after: limit,
            ..
        } = self.liveness;
        if heard + limit <= now {
            let silent = now.saturating_since(heard);
            return self.fail(now, ConnectionFailure::PeerDead { silent, limit });
        }
        if self.liveness.beat_due <= now {
            self.beat(now);
        }
    }
}

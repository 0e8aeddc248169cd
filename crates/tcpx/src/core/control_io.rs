//! Frames in and out.

use tcpx_wire::Frame;
use tcpx_wire::session::{Output, Takes};

use super::Core;
use crate::error::Error;

impl Core {
    /// Reads frames until the turn has taken its time; `true` if there were any.
    pub(super) fn read_control(&mut self) -> bool {
        if self.ending.has_begun() && !self.ending.is_loss() {
            // The session is over and waits for its operations to let go of their memory.
            self.ending.peer_closed = self.ending.peer_closed || self.control.drain();
        }
        if self.ending.has_begun() || self.ending.peer_closed {
            return false;
        }
        let mut any = false;
        let heard = self.session.heard();
        loop {
            match self.control.receive() {
                Ok(Some(frame)) => {
                    any = true;
                    let is_message = matches!(frame, Frame::Eager { .. } | Frame::Exposed { .. });
                    let is_list = matches!(frame, Frame::Pieces { .. });
                    let is_seen_to =
                        matches!(frame, Frame::Received { .. }) && self.resume.is_some();
                    if !is_seen_to && let Err(error) = self.session.frame(self.clock.now(), frame) {
                        self.fail(Error::protocol(self.peer, error));
                        break;
                    }
                    if is_message {
                        // While the core has it in its cache; the next one comes in the same
                        // buffer. To a GPU it takes longest.
                        while self.perform_next(Takes::Urgent) {}
                    }
                    if self.clock.is_spent(is_list) {
                        break;
                    }
                }
                Ok(None) => break,
                Err(end) => {
                    self.control_ended(end);
                    any = true;
                    break;
                }
            }
        }
        if self.control.has_heard() {
            self.session.note_peer_alive(self.clock.now());
        }
        self.tell_that_peer_was_heard(heard);
        any
    }

    /// Takes frames from the session as long as there is room, and its last ones in any case:
    /// nobody would say them later. `true` if there were any.
    pub(super) fn queue_frames(&mut self) -> bool {
        if self.ending.is_loss() {
            return false;
        }
        let mut any = false;
        while self.session.ended() || self.control.has_room() {
            let frame = match self.session.poll(Takes::Frames(self.clock.now())) {
                None => break,
                Some(Output::Frame(frame)) => frame,
                Some(Output::Action(action)) => {
                    self.perform(action);
                    continue;
                }
            };
            any = true;
            if let Err(end) = self.control.queue(frame) {
                self.control_ended(end);
                break;
            }
        }
        any
    }

    /// Sends what the session has to say, as far as the socket takes it and it may not wait; `true`
    /// if there was anything.
    pub(super) fn write_control(&mut self) -> bool {
        let mut any = false;
        if self.may_hold() {
            return any;
        }
        loop {
            let queued = self.queue_frames();
            any |= queued;
            let is_full = !self.control.has_room();
            if !self.ending.is_loss() {
                self.control.flush();
            }
            if !queued || !is_full || self.control.wants_write() {
                return any;
            }
        }
    }

    /// Sends what there is to say, unless it may wait for what comes next.
    pub(crate) fn speak(&mut self) {
        self.write_control();
        self.perform_actions();
    }

    /// Whether all that there is to say may wait for what comes next.
    fn may_hold(&self) -> bool {
        if self.control.wants_write() || self.ending.is_loss() {
            return false;
        }
        let (waiting, sends) = (self.session.waiting(), self.session.sends_under_way());
        self.pace.holds(&waiting, sends)
    }
}

//! The part of a receive comm's connection that has to do with another one taking its place.

use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_net::export::{Log, NetError};
use tcpx_lanes::health::STALL_BEHIND;
use tcpx_lanes::monitor::{Look, TICK};
use tcpx_lanes::socket_calls::{Ended, Moved, ended};

use super::Inbound;
use crate::header::{HEADER_BYTES, Record};
use crate::link::Link;
use crate::resume::{ACKNOWLEDGED_AT_LAST, ACKNOWLEDGED_TOGETHER, Waiting, report_read};

/// Longest time between two words of a receive that waits.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

impl Inbound {
    /// The connection broke; `false` where that is the end.
    pub(super) fn lose_link(&mut self, why: &str) -> bool {
        let (Some(comeback), None) = (&self.comeback, self.sent_in_all) else {
            return false;
        };
        // Where what came was not what the sender sealed, it has to hear of it; and it hears
        // answers first.
        for link in self.answers.take().iter().chain([&self.link]) {
            tcpx_lanes::socket::abort(link.as_fd());
        }
        let door = (self.door != 0).then(|| SocketAddr::new(comeback.peer, self.door));
        self.waiting = Some(Waiting::new(why.to_owned(), door));
        true
    }

    /// Goes on over another connection, if one came; fails if there is no use in waiting for it.
    pub(super) fn come_back(&mut self) -> Result<(), NetError> {
        let Some(comeback) = &self.comeback else {
            return Ok(());
        };
        let Some([link, answers]) = comeback.inbox.take() else {
            let Some(waiting) = &mut self.waiting else {
                return Ok(());
            };
            let is_there = || matches!(ended(self.link.as_fd()), Ok(Ended::Not));
            let why = match waiting.is_first && !is_there() {
                true => Some("end of stream".to_owned()),
                false => waiting.in_vain(Instant::now()),
            };
            return why.map_or(Ok(()), |why| Err(self.closed(why)));
        };
        // What has arrived need not be sent again.
        match self.read() {
            Err(error) if !std::mem::take(&mut self.peer_closed) => return Err(error),
            _ => {}
        }
        // Nothing of the one before is read once this one is.
        tcpx_lanes::socket::abort(self.link.as_fd());
        self.link = Arc::new(link);
        self.waiting = None;
        (self.bytes_told, self.short_untold) = (self.bytes_read, 0);
        if !matches!(
            report_read(&answers, self.bytes_read, false),
            Ok(Moved::Bytes(_))
        ) {
            self.answers = Some(Arc::new(answers));
            self.lose_link("it took no bytes");
            return Ok(());
        }
        if let Some(lanes) = self.lanes.as_ref().filter(|lanes| lanes.is_joined()) {
            // What is told twice is no news.
            let _ = answers.send_whole(&lanes.last_grant().encode(Record::Grant));
        }
        self.answers = Some(Arc::new(answers));
        Ok(())
    }

    /// Where what the sender must hear goes.
    pub(super) fn answers(&self) -> &Link {
        self.answers.as_ref().unwrap_or(&self.link)
    }

    /// The sender must not wait for a receiver that gave up, nor a fork's copy of a socket keep it
    /// waiting. What it was told comes first.
    pub(super) fn hang_up(&mut self) {
        self.comeback = None;
        for link in self.answers.iter().chain([&self.link]) {
            let _ = link.shutdown(Shutdown::Both);
        }
    }

    /// A receive has waited for long: if the sender has sent more, that does not come.
    pub(super) fn ask_sender(&mut self) {
        let waited = self.stall.waited();
        let Some(answers) = self.answers.as_ref().filter(|_| waited >= self.asks_after) else {
            return;
        };
        let is_behind = self.waiting.is_some() || self.header_bytes == HEADER_BYTES;
        if self.next < self.ring.posted() && !is_behind {
            let _ = report_read(answers, self.bytes_read, true);
        }
        self.asks_after = waited + waited.min(LONGEST_WAIT);
    }

    /// Bytes moved, or nothing is waited for.
    pub(super) fn moved_on(&mut self) {
        self.stall.moved();
        self.asks_after = STALL_BEHIND;
    }

    /// Says now and then how far the stream was read; a host that calls nothing more leaves that to
    /// the monitor.
    pub(super) fn acknowledge(&mut self) {
        let untold = self.bytes_read - self.bytes_told;
        if untold == 0 {
            return;
        }
        if let Some(comeback) = &self.comeback {
            comeback.inbox.monitor_handle.request_check();
        }
        let is_due = self.short_untold >= ACKNOWLEDGED_TOGETHER || untold >= ACKNOWLEDGED_AT_LAST;
        if std::mem::take(&mut self.owes_answer) || is_due {
            self.report_position();
        }
    }

    /// Says how far the stream was read; whether the sender was told. One that was not has lost the
    /// connection, and asks again over the next one.
    fn report_position(&mut self) -> bool {
        let Some(answers) = &self.answers else {
            return false;
        };
        let is_reported = matches!(
            report_read(answers, self.bytes_read, false),
            Ok(Moved::Bytes(_))
        );
        if is_reported {
            (self.bytes_told, self.short_untold) = (self.bytes_read, 0);
        }
        is_reported
    }

    /// The monitor's turn, for a host that calls nothing: another connection takes the place of one
    /// that broke, and the sender hears what was read. `before`: bytes that were read at the last
    /// turn.
    pub(crate) fn tend(&mut self, before: &mut u64, log: &Log) -> Look {
        let Some(comeback) = &self.comeback else {
            return Look::Gone;
        };
        comeback.inbox.monitor_handle.lower();
        if comeback.inbox.has_news() {
            // The host is told by its next call.
            let _ = self.progress(log);
        }
        // Whoever reads on tells it by itself.
        let is_quiet = std::mem::replace(before, self.bytes_read) == self.bytes_read;
        let is_reported = self.bytes_told == self.bytes_read;
        if is_reported || is_quiet && !self.report_position() {
            // What could not be told is what the next connection begins with.
            return Look::Asleep;
        }
        if let Some(comeback) = &self.comeback {
            comeback.inbox.monitor_handle.keep();
        }
        Look::In(TICK)
    }
}

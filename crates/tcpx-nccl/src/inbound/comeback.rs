//! The part of a receive comm's connection that has to do with another one taking its place.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use nccl_net::export::NetError;
use tcpx_lanes::socket_calls::Moved;

use super::Inbound;
use crate::header::Record;
use crate::resume::{ACKNOWLEDGED_AT_LAST, ACKNOWLEDGED_TOGETHER, Waiting, tell};

impl Inbound {
    /// The connection broke; `false` where that is the end.
    pub(super) fn leave(&mut self, why: &str) -> bool {
        let (Some(comeback), Some(door), None) = (&self.comeback, self.door, self.sent_in_all)
        else {
            return false;
        };
        comeback.tail.replace(None);
        // Where what came was not what the sender sealed, it has to hear of it.
        tcpx_lanes::socket::abort(self.link.as_fd());
        let door = (door != 0).then(|| SocketAddr::new(comeback.peer, door));
        self.waiting = Some(Waiting::new(why.to_owned(), door));
        true
    }

    /// Goes on over another connection, if one came; fails if there is no use in waiting for it.
    pub(super) fn come_back(&mut self) -> Result<(), NetError> {
        let Some(comeback) = &self.comeback else {
            return Ok(());
        };
        let Some(link) = comeback.inbox.take() else {
            let waiting = self.waiting.as_mut();
            let why = waiting.and_then(|waiting| waiting.in_vain(Instant::now()));
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
        if !matches!(tell(&self.link, self.bytes_read), Ok(Moved::Bytes(_))) {
            self.leave("it took no bytes");
            return Ok(());
        }
        if let Some(comeback) = &self.comeback {
            // Only now may the monitor say anything.
            comeback.tail.read(self.bytes_read);
            comeback.tail.told(self.bytes_read);
            comeback.tail.replace(Some(&self.link));
        }
        if let Some(lanes) = self.lanes.as_ref().filter(|lanes| lanes.is_joined()) {
            // What is told twice is no news.
            let moved = self.link.send_whole(&lanes.told().encode(Record::Grant));
            self.sent(&moved);
        }
        Ok(())
    }

    /// Says now and then how far the stream was read; who reads nothing more leaves that to the monitor.
    pub(super) fn acknowledge(&mut self) {
        let untold = self.bytes_read - self.bytes_told;
        if untold == 0 || self.door.is_none() || self.waiting.is_some() {
            return;
        }
        let tail = self.comeback.as_ref().map(|comeback| &comeback.tail);
        if let Some(tail) = tail {
            tail.read(self.bytes_read);
        }
        let owes = std::mem::take(&mut self.owes_answer);
        let is_due = self.short_untold >= ACKNOWLEDGED_TOGETHER || untold >= ACKNOWLEDGED_AT_LAST;
        if !owes && !is_due {
            return;
        }
        let moved = tell(&self.link, self.bytes_read);
        if matches!(moved, Ok(Moved::Bytes(_))) {
            (self.bytes_told, self.short_untold) = (self.bytes_read, 0);
            if let Some(tail) = tail {
                tail.told(self.bytes_read);
            }
        }
        self.sent(&moved);
    }

    /// A call that sent a record has answered: where it says that the connection broke, reading will say that it
    /// ended.
    pub(super) fn sent(&self, moved: &io::Result<Moved>) {
        if let Some(comeback) = &self.comeback {
            comeback.tail.sent(moved);
        }
    }

    /// The connection has ended for who reads; whether it broke.
    pub(super) fn is_broken(&self) -> bool {
        self.comeback
            .as_ref()
            .is_some_and(|comeback| comeback.tail.is_broken())
    }
}

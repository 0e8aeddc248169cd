//! The part of a send comm's connection that has to do with another one taking its place.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_net::ResultCode;
use nccl_net::export::NetError;
use tcpx_lanes::monitor::{Look, TICK, Watched};
use tcpx_lanes::resend::{Impossible, Next};
use tcpx_lanes::socket_calls::Moved;

use super::{Source, State};
use crate::error;
use crate::header::HEADER_BYTES;
use crate::plugin::Shared;
use crate::resume::{Redial, STEP, copied_bytes, is_reset};
use crate::status::Glance;

/// How long a comm that closes waits for a connection that is away: what was sent is its word.
const CLOSE_TIME: Duration = Duration::from_secs(1);
/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(1);

impl State {
    /// Whether nothing can be written now.
    pub(super) fn is_away(&self) -> bool {
        self.redial.as_ref().is_some_and(Redial::is_away)
    }

    /// Whether there is no connection to read from.
    pub(super) fn is_lost(&self) -> bool {
        self.redial.as_ref().is_some_and(Redial::is_lost)
    }

    /// The connection broke; `false` where that is the end.
    pub(super) fn lose(&mut self, why: String) -> bool {
        let Some(redial) = self.redial.as_mut().filter(|_| !self.has_ended) else {
            return false;
        };
        redial.lose(why);
        (self.is_broken, self.before) = (false, None);
        tcpx_lanes::socket::abort(self.link.as_fd());
        self.record_bytes = 0;
        if let Some(attention) = &self.attention {
            attention.hurry();
        }
        true
    }

    /// Dials where the connection broke.
    pub(super) fn come_back(&mut self) -> Result<(), NetError> {
        let Some(redial) = self.redial.as_mut().filter(|redial| redial.is_active()) else {
            return Ok(());
        };
        match redial.step(Instant::now()) {
            Ok(None) => Ok(()),
            Ok(Some(link)) => {
                // It may be alive and only silent: then its end must not reach the receiver before this one does.
                let before = std::mem::replace(&mut self.link, Arc::new(link));
                self.before = Some(before);
                self.is_broken = false;
                self.record_bytes = 0;
                Ok(())
            }
            // A receiver that has everything may end before its lanes' answers are heard.
            Err(_) if self.is_with_lanes() => Ok(()),
            Err(why) => Err(self.closed(why)),
        }
    }

    /// The receiver has read up to here.
    pub(super) fn heard(&mut self, read: u64) -> Result<(), NetError> {
        let redial = self
            .redial
            .as_mut()
            .filter(|redial| redial.is_positioning());
        let result = match redial {
            Some(redial) => {
                redial.positioned();
                if let Some(before) = self.before.take() {
                    tcpx_lanes::socket::abort(before.as_fd());
                }
                self.resend.rewind(read)
            }
            None => self.resend.acknowledged(read),
        };
        result.map_err(|impossible| match impossible {
            Impossible::Position {
                first,
                last,
                arrived,
            } => {
                let expected = format!("a receiver that has read {first} to {last} bytes");
                error::protocol(&self.name, expected, arrived)
            }
            Impossible::Lost { sequence } => {
                let (comm, limit) = (&self.name, copied_bytes(self.carriage.is_some()));
                let why = format!(
                    "{comm}: the connection broke while message {sequence} was on its way, which cannot be sent again: \
                     without lanes host messages up to {limit} bytes can be; set TCPX_NET_LANES=2 on this host"
                );
                NetError::new(ResultCode::SystemError, why)
            }
        })
    }

    /// The connection has answered a call that offered it bytes.
    pub(super) fn wrote(&mut self, moved: io::Result<Moved>) -> Result<usize, NetError> {
        match moved {
            Ok(Moved::Bytes(bytes)) => {
                self.resend.wrote(bytes);
                match &self.attention {
                    Some(attention) => attention.draw(),
                    // Nobody tells what was read, and nothing is sent again.
                    None if self.resend.next() == Next::New => self.resend.forget(),
                    None => {}
                }
                Ok(bytes)
            }
            Ok(Moved::WouldBlock | Moved::End) => Ok(0),
            Err(error) => {
                self.is_broken |= is_reset(&error);
                // The receiver may have said why before it hung up.
                self.read_back()?;
                if self.is_away() || self.lose(error.to_string()) {
                    return Ok(0);
                }
                Err(self.closed(error.to_string()))
            }
        }
    }

    /// A message of the comm's own connection is written whole, for the first time: retains what the receiver may
    /// lack.
    pub(super) fn retain(&mut self, sequence: u64, header: &[u8; HEADER_BYTES], end: u64) {
        let Some(request) = self.ring.by_sequence(sequence) else {
            return;
        };
        let Source::Host(span) = request.source else {
            return;
        };
        if self.redial.is_none() {
            return;
        }
        if request.size <= copied_bytes(self.carriage.is_some()) {
            let payload = match span.is_empty() {
                true => &[][..],
                // SAFETY: memory that the host registered and leaves alone until the request is done.
                false => unsafe { std::slice::from_raw_parts(span.start(), span.len()) },
            };
            self.resend.copy_last([header, payload]);
        } else if self.carriage.is_some() {
            // Rare: long messages take lanes.
            request.held = Some(end);
        } else {
            self.resend.lose_last();
        }
    }

    /// Before the comm closes: a connection that is away is waited for, for a while.
    pub(super) fn finish_coming_back(&mut self, shared: &Shared) {
        let until = Instant::now() + CLOSE_TIME;
        let is_over = |state: &Self| state.next == state.ring.posted();
        while self.failure.is_none()
            && is_over(self)
            && (self.is_away() || self.resend.next() != Next::New)
            && Instant::now() < until
        {
            // What fails is the end of the loop.
            let _ = self.progress(shared);
            std::thread::sleep(LOOK);
        }
    }

    /// The monitor's turn, for a host that calls nothing.
    fn tend(&mut self, shared: &Shared) -> Look {
        if self.has_ended {
            return Look::Gone;
        }
        if let Some(attention) = &self.attention {
            attention.lower();
        }
        // The host is told by its next call.
        let _ = self.progress(shared);
        let unread = self.resend.is_unread().then(|| self.resend.read());
        let Some(redial) = self.redial.as_mut().filter(|_| self.failure.is_none()) else {
            return Look::Asleep;
        };
        if !redial.is_lost() {
            redial.look(Instant::now(), &self.link, unread);
        }
        if unread.is_none() && !redial.is_away() && !redial.is_active() {
            return Look::Asleep;
        }
        if let Some(attention) = &self.attention {
            attention.keep();
        }
        Look::In(if redial.is_active() { STEP } else { TICK })
    }
}

/// A comm as the monitor knows it.
#[derive(Debug)]
pub(super) struct Tended(pub(super) Glance<State>, pub(super) Arc<Shared>);

impl Watched for Tended {
    fn look(&mut self) -> Look {
        let Self(comm, shared) = self;
        comm.look(|state| state.tend(shared), Look::In(TICK), Look::Gone)
    }
}

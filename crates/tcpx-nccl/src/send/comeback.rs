//! The part of a send comm's connection that has to do with another one taking its place.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use nccl_net::ResultCode;
use nccl_net::export::NetError;
use tcpx_lanes::monitor::{Look, TICK, Watched};
use tcpx_lanes::redial::STEP;
use tcpx_lanes::resend::{Impossible, NextPart};
use tcpx_lanes::socket_calls::{self as socket, Moved};

use super::{Source, State};
use crate::error;
use crate::header::HEADER_BYTES;
use crate::lanes::runtime::Runtime;
use crate::plugin::ProcessState;
use crate::resume::copied_bytes;
use crate::ring::Ring;
use crate::status::Glance;

impl State {
    /// The connection broke.
    pub(super) fn lose(&mut self, why: String) {
        self.resume.lose(why);
        // An end in order would be the comm's.
        let before = std::mem::take(&mut self.before);
        for link in before.iter().chain([&self.link, &self.answers]) {
            tcpx_lanes::socket::abort(link.as_fd());
        }
        self.record_bytes = 0;
        self.monitor_handle.hurry();
    }

    /// Dials where the connection broke.
    pub(super) fn come_back(&mut self) -> Result<(), NetError> {
        if !self.resume.is_active() {
            return Ok(());
        }
        // Only the kernel has those bytes, which it may still bring.
        let must_stay = self.resend.has_lost();
        match self.resume.step(Instant::now(), must_stay) {
            Ok(None) => Ok(()),
            Ok(Some([link, answers])) => {
                // They may be alive and only silent: then their end must not reach the receiver
                // before these do.
                self.before = vec![
                    std::mem::replace(&mut self.link, Arc::new(link)),
                    std::mem::replace(&mut self.answers, Arc::new(answers)),
                ];
                self.record_bytes = 0;
                Ok(())
            }
            // A receiver that has everything may end before its lanes' answers are heard.
            Err(_) if self.is_with_lanes() => Ok(()),
            Err(why) => Err(self.closed(why)),
        }
    }

    /// The receiver has read up to here.
    pub(super) fn heard(&mut self, read: u64, waits: bool) -> Result<(), NetError> {
        let result = if self.resume.is_positioning() {
            self.resume.positioned();
            for before in self.before.drain(..) {
                tcpx_lanes::socket::abort(before.as_fd());
            }
            self.resend.rewind(read)
        } else {
            self.resend.acknowledged(read)
        };
        if waits {
            self.resume.wanted(Instant::now(), read);
        }
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
                let (comm, limit) = (&self.name, copied_bytes(self.send_path.is_some()));
                let why = format!(
                    "{comm}: the connection broke while message {sequence} was on its way, which cannot be sent again: \
                     without lanes host messages up to {limit} bytes can be; set TCPX_NET_LANES=2 on all hosts"
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
                self.monitor_handle.request_check();
                Ok(bytes)
            }
            Ok(Moved::WouldBlock | Moved::End) => Ok(0),
            Err(error) => {
                // The receiver may have said why before it hung up.
                self.read_back()?;
                if !self.resume.is_away() {
                    self.lose(error.to_string());
                }
                Ok(0)
            }
        }
    }

    /// A message of the comm's own connection is written whole, for the first time: retains what
    /// the receiver may lack.
    pub(super) fn retain(&mut self, sequence: u64, header: &[u8; HEADER_BYTES], end: u64) {
        let Some(request) = self.ring.by_sequence(sequence) else {
            return;
        };
        let Source::Host(span) = request.source else {
            return;
        };
        if request.size <= copied_bytes(self.send_path.is_some()) {
            let payload = match span.is_empty() {
                true => &[][..],
                // SAFETY: memory that the host registered and leaves alone until the request is
                // done.
                false => unsafe { std::slice::from_raw_parts(span.start(), span.len()) },
            };
            self.resend.copy_last([header, payload]);
        } else if self.send_path.is_some() {
            // Rare: long messages take lanes.
            request.held = Some(end);
        } else {
            self.resend.lose_last();
        }
    }

    /// Whether the receiver has read every message of a comm that closed, and the kernel has the
    /// rest.
    pub(super) fn is_over(&self) -> bool {
        self.resend.read() >= self.messages_end && self.resend.next() == NextPart::New
    }

    /// Whether payload's connection is there no more: nothing comes on it but its end.
    fn has_hung_up(&self) -> bool {
        let moved = socket::receive_bytes(&*self.link, &mut [0]);
        !matches!(moved, Ok(Moved::WouldBlock))
    }

    /// The monitor's turn, for a host that calls nothing.
    fn tend(&mut self, shared: &ProcessState) -> Look {
        self.monitor_handle.lower();
        // The host is told by its next call.
        let _ = self.progress(shared);
        let unread = self.resend.is_unread().then(|| self.resend.read());
        // Also one that the receiver never had, as it waits for the other one of the pair.
        let waits = unread.is_some() || self.resume.is_away();
        if waits && !self.resume.is_lost() && self.has_hung_up() {
            // The receiver may have said why.
            let _ = self.read_back();
            if self.failure.is_none() && !self.resume.is_lost() {
                self.lose("it ended".to_owned());
            }
        }
        let must_stay = self.resend.has_lost();
        if self.failure.is_some() {
            return Look::Asleep;
        }
        let resume = &mut self.resume;
        if !resume.is_lost() && !must_stay {
            resume.check_link(Instant::now(), &self.link, unread);
        }
        if unread.is_none() && !resume.is_away() && !resume.is_active() {
            return Look::Asleep;
        }
        self.monitor_handle.keep();
        Look::In(if resume.is_active() { STEP } else { TICK })
    }
}

/// A comm as the monitor knows it.
#[derive(Debug)]
pub(super) struct Tended(pub(super) Glance<State>, pub(super) Arc<ProcessState>);

impl Watched for Tended {
    fn check_liveness(&mut self) -> Look {
        let Self(comm, shared) = self;
        comm.with_comm(|state| state.tend(shared), Look::In(TICK), Look::Gone)
    }
}

/// What is left of a comm that closed well: what it has sent and its receiver may not have read,
/// which arrives although connections break.
#[derive(Debug)]
pub(super) struct Rest {
    state: State,
    shared: Arc<ProcessState>,
    /// Without it the monitor would end.
    _runtime: Arc<Runtime>,
}

impl Rest {
    /// Has the monitor look after it until the receiver has read it, or is gone.
    pub(super) fn start(state: State, shared: Arc<ProcessState>, runtime: Arc<Runtime>) {
        // The memory of its requests is the host's again.
        let (ring, next) = (Ring::new(), 0);
        let rest = Self {
            state: State {
                ring,
                next,
                ..state
            },
            shared,
            _runtime: Arc::clone(&runtime),
        };
        // Without a thread, what the kernel has is all that arrives; the comm's own watch has made
        // one.
        let _ = runtime.watch_over(rest);
    }
}

impl Watched for Rest {
    fn check_liveness(&mut self) -> Look {
        let Self { state, shared, .. } = self;
        let look = state.tend(shared);
        // Of a message whose memory its host took back amid a resend there is no more.
        let is_cut = matches!(state.resend.next(), NextPart::Message(..));
        if state.failure.is_some() || is_cut || state.is_over() {
            let _ = state.link.shutdown(Shutdown::Write);
            return Look::Gone;
        }
        match look {
            Look::Asleep => Look::In(TICK),
            look => look,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::time::Duration;

    use super::*;
    use crate::config::Config;
    use crate::header::{Header, Record};
    use crate::link::Link;
    use crate::plugin::TcpxPlugin;
    use crate::resume::Resume;
    use crate::send::{Comeback, SendComm};

    #[test]
    fn a_pair_that_breaks_before_the_answer_is_lost() {
        let config = Config {
            interfaces: "lo".to_owned(),
            lanes: Some(0),
            ..Config::default()
        };
        let host = nccl_net::export::HostLogger::default();
        let shared = TcpxPlugin::with_config(config, host).unwrap().shared();
        for breaks in [false, true] {
            let runtime = shared.runtime().unwrap();
            let [(link, _far), (answers, _back), (first, _)] = [(); 3].map(|()| Link::bare());
            let resume = Resume::of_nobody();
            let comeback = Comeback {
                resume,
                first,
                door: 0,
                runtime,
            };
            let number = shared.number();
            let shared = Arc::clone(&shared);
            let comm = SendComm::new(
                Arc::clone(&shared),
                [link, answers],
                number,
                String::new(),
                None,
                comeback,
            )
            .unwrap();
            let mut state = comm.lock();
            state.lose("it was reset".to_owned());
            let [(link, mut far), (answers, mut back)] = [Link::bare(), Link::bare()];
            state.resume.came([link, answers]);
            state.come_back().unwrap();
            assert!(state.resume.is_away() && !state.resume.is_lost());
            let mut hello = [0; crate::lanes::hello::Greeting::BYTES];
            far.read_exact(&mut hello).unwrap();
            if breaks {
                tcpx_lanes::socket::abort(far.as_fd());
            } else {
                let read = Header {
                    sequence: 0,
                    size: 0,
                };
                back.write_all(&read.encode(Record::Read)).unwrap();
            }
            let until = Instant::now() + Duration::from_secs(60);
            while state.resume.is_away() && !state.resume.is_lost() {
                assert!(Instant::now() < until, "it waits for the receiver");
                state.tend(&shared);
            }
            assert_eq!(state.resume.is_lost(), breaks);
        }
    }
}

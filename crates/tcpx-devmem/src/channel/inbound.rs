//! The way in: receives on the payload lane, its tokens, and receives on the ordinary lane.

use std::io;

use crate::cmsg::Dialect;
use crate::tokens::Returned;

use super::{DevmemChannel, PEER_ENDED, is_the_peers_end};
use crate::calls::Arrival;
use crate::inflow::Came;
use tcpx_net::channel::Completion;
use tcpx_net::error::ChannelError;

/// Receives of one poll; the rest waits for the next one, which comes at once.
const RECEIVES: usize = 32;
/// Most bytes that one receive is offered.
const MOST_RECEIVE: usize = 1 << 20;
/// Records of one receive at first, and at most. What 1,024 cannot describe comes with the next
/// one.
const RECORDS: usize = 1024;
const MOST_RECORDS: usize = 4 * RECORDS;
/// `ETOOSMALL`, which the kernel keeps for itself otherwise: no room for one record.
const TOO_SMALL: i32 = 525;

impl DevmemChannel {
    /// Receives from the payload lane what there is.
    pub(super) fn receive(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        for _ in 0..RECEIVES {
            // A token that is free may be handed out again by the next receive.
            self.give_back_or_fail_over(out)?;
            if self.failed_over {
                return Ok(());
            }
            let (Some(offer), Some(socket)) = (
                self.inflow.offer(MOST_RECEIVE),
                Self::socket_of(&self.payload),
            ) else {
                return Ok(());
            };
            let arrival = if self.inflow.target().is_some() {
                if self.control.is_empty() {
                    let bytes = Dialect::Mainline.control_bytes(RECORDS);
                    self.control.resize(bytes, 0);
                }
                self.calls.receive(socket, &offer.slice, &mut self.control)
            } else {
                let plain = self.calls.receive_plain(socket, &offer.slice);
                plain.map(|bytes| Arrival {
                    bytes,
                    ..Arrival::default()
                })
            };
            let arrival = match arrival {
                Ok(arrival) => arrival,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.inflow.relieve(out);
                    return Ok(());
                }
                Err(error) if error.raw_os_error() == Some(TOO_SMALL) && self.more_control() => {
                    continue;
                }
                Err(error) if is_the_peers_end(&error) => {
                    return self.fail_over(PEER_ENDED.to_owned(), out);
                }
                Err(error) => {
                    return self.fail_over(receive_failed(&error), out);
                }
            };
            if arrival.bytes == 0 {
                return self.fail_over(PEER_ENDED.to_owned(), out);
            }
            let control = self.control.get(..arrival.control_bytes).unwrap_or(&[]);
            let came = self
                .inflow
                .arrived(&offer, arrival.bytes, control, arrival.truncated, out);
            match came {
                Ok(Came::Plain) => self.lands_plain(out),
                Ok(Came::Expected) => {}
                Err(error) => {
                    let why = format!("a receive cannot be believed: {error}");
                    return self.fail_over(why, out);
                }
            }
        }
        Ok(())
    }

    /// Makes room for more records; false when there is plenty.
    fn more_control(&mut self) -> bool {
        let most = Dialect::Mainline.control_bytes(MOST_RECORDS);
        let more = (self.control.len() * 2).min(most);
        let grows = more > self.control.len();
        self.control.resize(more, 0);
        grows
    }

    /// Gives tokens back. One that the kernel does not take ends the payload lane, whose close
    /// gives it back.
    pub(super) fn give_back_or_fail_over(
        &mut self,
        out: &mut Vec<Completion>,
    ) -> Result<(), ChannelError> {
        self.give_back();
        match self.stuck_tokens.take() {
            Some(why) => self.fail_over(format!("tokens cannot be given back: {why}"), out),
            None => Ok(()),
        }
    }

    /// Gives the tokens of consumed parts back to the kernel; what it says against that waits for
    /// [`Self::give_back_or_fail_over`].
    pub(super) fn give_back(&mut self) {
        if let Err(why) = self.try_give_back() {
            self.inflow.forget_tokens();
            self.stuck_tokens = Some(why);
        }
    }

    fn try_give_back(&mut self) -> Result<(), String> {
        let Some(socket) = Self::socket_of(&self.payload) else {
            self.inflow.forget_tokens();
            return Ok(());
        };
        while let Some(batch) = self.inflow.returns().batch(Dialect::Mainline) {
            let answer = loop {
                let answer =
                    self.calls
                        .give_back(socket, batch.level(), batch.option(), batch.as_bytes());
                match answer {
                    Ok(answer) => break answer,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error.to_string()),
                }
            };
            match batch.answered(answer) {
                // A part: the same batch comes again.
                Ok(Returned::All | Returned::Part { .. }) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// Receives what comes on the ordinary lane.
    pub(super) fn receive_ordinary(
        &mut self,
        out: &mut Vec<Completion>,
    ) -> Result<(), ChannelError> {
        for _ in 0..RECEIVES {
            match self.receive_some(out) {
                Ok(Ok(true)) => {}
                Ok(done) => return done.map(drop),
                Err(error) => {
                    return match error.kind() {
                        io::ErrorKind::WouldBlock => Ok(()),
                        io::ErrorKind::UnexpectedEof => {
                            self.peer_closed = true;
                            Ok(())
                        }
                        _ => Err(self.system("reading the ordinary lane", error)),
                    };
                }
            }
        }
        Ok(())
    }

    /// Takes a header, or bytes of a chunk; `false` while there is no room for them.
    fn receive_some(
        &mut self,
        out: &mut Vec<Completion>,
    ) -> io::Result<Result<bool, ChannelError>> {
        let Some(lane) = &mut self.ordinary else {
            return Ok(Ok(false));
        };
        if lane.skip > 0 {
            self.stats.bytes_discarded += lane.discard()?;
        } else if lane.take > 0 {
            let Some(offer) = self.inflow.offer(MOST_RECEIVE) else {
                return Ok(Ok(false));
            };
            let bytes = self.calls.receive_plain(lane.socket(), &offer.slice)?;
            if bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            lane.take = lane.take.saturating_sub(bytes as u64);
            let taken = self.inflow.arrived(&offer, bytes, &[], false, out);
            taken.map_err(io::Error::other)?;
        } else {
            let header = lane.header()?;
            match self.inflow.missing_of(header) {
                Ok(Some((skip, take))) => lane.begin(skip, take),
                Ok(None) => return Ok(Ok(false)),
                Err(expected) => return Ok(Err(self.protocol(expected, format!("{header:?}")))),
            }
            return Ok(self.fail_over(PEER_ENDED.to_owned(), out).map(|()| true));
        }
        Ok(Ok(true))
    }
}

fn receive_failed(error: &io::Error) -> String {
    let meaning = match error.raw_os_error() {
        Some(libc::ENODEV) => "plain and device memory are mixed in one packet",
        Some(libc::EFAULT) => "the kernel cannot hand the next bytes out",
        Some(TOO_SMALL) => "the kernel finds no room for one record",
        _ => return format!("receiving device memory failed: {error}"),
    };
    format!("receiving device memory failed: {meaning} ({error})")
}

//! The way in: receives, tokens, and what the peer says on the companion.

use std::io;

use crate::cmsg::Dialect;
use crate::tokens::Returned;

use super::{DevmemChannel, PEER_ENDED, Path, is_the_peers_end};
use crate::calls::Arrival;
use crate::companion::{Read, Word};
use crate::inflow::Came;
use tcpx_net::channel::Completion;
use tcpx_net::error::ChannelError;

/// Receives of one poll; the rest waits for the next one, which comes at once.
const RECEIVES: usize = 32;
/// Most bytes that one receive is offered.
const MOST_RECEIVE: usize = 1 << 20;
/// Records of one receive at first, and at most. What 1,024 cannot describe comes with the next one.
const RECORDS: usize = 1024;
const MOST_RECORDS: usize = 4 * RECORDS;
/// `ETOOSMALL`, which the kernel keeps for itself otherwise: no room for one record.
const TOO_SMALL: i32 = 525;

impl DevmemChannel {
    /// Receives from the payload connection what there is.
    pub(super) fn receive(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        for _ in 0..RECEIVES {
            // A token that is free may be handed out again by the next receive.
            self.give_back_or_leave(out);
            if self.way_in != Path::Payload {
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
                    self.leave_in(PEER_ENDED.to_owned(), out);
                    return Ok(());
                }
                Err(error) => {
                    self.leave_in(receive_failed(&error), out);
                    return Ok(());
                }
            };
            if arrival.bytes == 0 {
                self.leave_in(PEER_ENDED.to_owned(), out);
                return Ok(());
            }
            let control = self.control.get(..arrival.control_bytes).unwrap_or(&[]);
            let came = self
                .inflow
                .arrived(&offer, arrival.bytes, control, arrival.truncated, out);
            match came {
                Ok(Came::Plain) => self.lands_plain(out),
                Ok(Came::Expected) => {}
                Err(error) => {
                    self.leave_in(format!("a receive cannot be believed: {error}"), out);
                    return Ok(());
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

    /// Gives tokens back. One that the kernel does not take ends the way in on this connection, whose
    /// close gives it back.
    pub(super) fn give_back_or_leave(&mut self, out: &mut Vec<Completion>) {
        self.give_back();
        if let Some(why) = self.stuck_tokens.take() {
            self.leave_in(format!("tokens cannot be given back: {why}"), out);
        }
    }

    /// Gives the tokens of consumed parts back to the kernel; what it says against that waits for
    /// [`Self::give_back_or_leave`].
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

    /// Gives the payload connection up for receiving: the rest is to come on the companion. What has
    /// come so far stays good.
    pub(super) fn leave_in(&mut self, why: String, out: &mut Vec<Completion>) {
        if self.way_in != Path::Payload {
            return;
        }
        self.way_in = Path::Companion;
        let place = self.inflow.received();
        if let Some(companion) = &mut self.companion {
            companion.say(Word::Move(place));
        }
        // The peer answers with the place from which on it wants ours.
        self.leave_out(&why);
        self.path_changed(why, out);
    }

    /// Reads what the peer says, and payload that comes on the companion.
    pub(super) fn read_companion(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        for _ in 0..RECEIVES {
            let Some(companion) = &mut self.companion else {
                return Ok(());
            };
            let read = if companion.brings_payload() {
                let Some(offer) = self.inflow.offer(MOST_RECEIVE) else {
                    return Ok(());
                };
                match self.calls.receive_plain(companion.socket(), &offer.slice) {
                    Ok(0) => Ok(Read::End),
                    Ok(bytes) => {
                        let taken = self.inflow.arrived(&offer, bytes, &[], false, out);
                        taken.map_err(|error| {
                            self.system("recv", io::Error::other(error.to_string()))
                        })?;
                        continue;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Read::Nothing),
                    Err(error) => Err(error),
                }
            } else {
                companion.read_word()
            };
            match read {
                Ok(Read::Word(word)) => self.heard(word, out)?,
                Ok(Read::Nothing) => return Ok(()),
                Ok(Read::End) => {
                    self.peer_closed = true;
                    return Ok(());
                }
                Err(error) => return Err(self.system("reading the companion connection", error)),
            }
        }
        Ok(())
    }

    fn heard(&mut self, word: Word, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        let chunks = match word {
            Word::Have(place) => self.outflow.confirm(place, out),
            Word::Move(place) => {
                // Behind its word the peer sends payload alone, from where we say.
                let why = "the peer asked for another path; its own output says why";
                self.leave_in(why.to_owned(), out);
                self.way_out = Path::Companion;
                self.writable = true;
                let chunks = self.outflow.rewind(place, out);
                // The companion cannot send out of a slot.
                self.stage.leave_slots(&mut self.outflow);
                chunks
            }
        };
        match chunks {
            Ok(chunks) => {
                self.stats.chunks_sent += chunks;
                Ok(())
            }
            Err(bad) => Err(self.protocol(
                format!("a place from {} to {}", bad.least, bad.most),
                format!("{word:?}"),
            )),
        }
    }

    /// Says how far the stream has come, when chunks have ended since the last time.
    pub(super) fn tell_peer(&mut self) {
        let ended = self.inflow.stats().chunks_received;
        if self.way_in == Path::Payload
            && ended != self.told
            && let Some(companion) = &mut self.companion
        {
            companion.say(Word::Have(self.inflow.received()));
            self.told = ended;
        }
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

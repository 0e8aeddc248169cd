//! The sending end of a lane: takes the next chunk whenever its socket has room.

use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::event::epoll;

use super::chunk::CHUNK_HEADER_BYTES;
use super::lane_set::LaneSet;
use super::looper::{Lane, Turn};
use super::outlet::Chunk;
use crate::socket::{self, Moved, Span, Stream};

/// Bytes of a turn, so that the lanes of a loop advance together.
const TURN_BYTES: usize = 2 << 20;

#[derive(Debug)]
struct Leaving {
    chunk: Chunk,
    header: [u8; CHUNK_HEADER_BYTES],
    /// Header and payload bytes in the socket.
    written: usize,
}

/// One lane.
#[derive(Debug)]
pub(super) struct TransmitLane {
    set: Arc<LaneSet>,
    number: usize,
    stream: Stream,
    leaving: Option<Leaving>,
}

impl TransmitLane {
    pub(super) const fn new(set: Arc<LaneSet>, number: usize, stream: Stream) -> Self {
        Self {
            set,
            number,
            stream,
            leaving: None,
        }
    }

    /// Finds a chunk unless one is under way; `false` when there is nothing to send.
    fn find(&mut self) -> bool {
        if self.leaving.is_some() {
            return true;
        }
        loop {
            let Some(chunk) = self.set.pop() else {
                self.set.rest(self.number);
                if !self.set.has_work() {
                    return false;
                }
                self.set.unrest(self.number);
                continue;
            };
            if chunk.is_stale() {
                continue;
            }
            self.leaving = Some(Leaving {
                header: chunk.header.encode(),
                chunk,
                written: 0,
            });
            return true;
        }
    }

    /// One call; 0 when the socket is full.
    fn write(&mut self) -> Result<usize, String> {
        let Some(leaving) = &mut self.leaving else {
            return Ok(0);
        };
        let header = &leaving.header[leaving.written.min(CHUNK_HEADER_BYTES)..];
        let payload_written = leaving.written.saturating_sub(CHUNK_HEADER_BYTES);
        let spans = [
            Span::of(header),
            leaving.chunk.payload.from(payload_written),
        ];
        // SAFETY: the header is ours; the payload is registered memory that its comm keeps for as
        // long as the chunk lives.
        match unsafe { socket::send(&self.stream, &spans) } {
            Moved::Bytes(bytes) => {
                leaving.written += bytes;
                if leaving.written == CHUNK_HEADER_BYTES + leaving.chunk.header.len as usize
                    && let Some(leaving) = self.leaving.take()
                {
                    leaving.chunk.sent();
                }
                Ok(bytes)
            }
            Moved::Later | Moved::End => Ok(0),
            Moved::Broken(error) => Err(error.to_string()),
        }
    }

    /// A lane carries nothing back, so whatever can be read is its end.
    fn look_for_end(&self) -> Result<(), String> {
        match socket::receive_bytes(&self.stream, &mut [0; 1]) {
            Moved::Later => Ok(()),
            Moved::End => Err("end of stream".to_owned()),
            Moved::Bytes(_) => Err("the peer sent bytes where none belong".to_owned()),
            Moved::Broken(error) => Err(error.to_string()),
        }
    }

    fn fail(&mut self, why: &str) -> Turn {
        let peer = self
            .stream
            .peer_addr()
            .map_or_else(|_| "the peer".to_owned(), |peer| peer.to_string());
        self.set.fail(format!("a lane to {peer} broke: {why}"));
        Turn::End
    }
}

impl Drop for TransmitLane {
    fn drop(&mut self) {
        if self.leaving.take().is_some() {
            // Half a chunk must not look like a whole stream.
            let _ =
                socket2::SockRef::from(&*self.stream).set_linger(Some(std::time::Duration::ZERO));
            self.set.fail("a lane ended within a chunk".to_owned());
        } else if self.set.is_open() {
            // Its loop ended or took no more lanes: chunks might wait for it without an end.
            self.set.fail("a lane was given up".to_owned());
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

impl Lane for TransmitLane {
    fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn interest(&self) -> epoll::EventFlags {
        epoll::EventFlags::OUT | epoll::EventFlags::RDHUP
    }

    fn turn(&mut self) -> Turn {
        let mut budget = TURN_BYTES;
        while budget > 0 {
            if self.set.failure().is_some() {
                return Turn::End;
            }
            if !self.find() {
                if self.set.is_closing() {
                    return Turn::End;
                }
                return match self.look_for_end() {
                    Ok(()) => Turn::Rest,
                    Err(why) => self.fail(&why),
                };
            }
            match self.write() {
                Ok(0) => {
                    return match self.look_for_end() {
                        Ok(()) => Turn::Rest,
                        Err(why) => self.fail(&why),
                    };
                }
                Ok(bytes) => budget = budget.saturating_sub(bytes),
                Err(why) => return self.fail(&why),
            }
        }
        Turn::Again
    }
}

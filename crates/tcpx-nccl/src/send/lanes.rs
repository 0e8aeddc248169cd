//! The part of a send comm that has to do with lanes.

use nccl_net::export::{NetError, RequestId};

use super::{POLLS_BETWEEN_LOOKS, Progress, Source, State};
use crate::error;
use crate::lanes::send_path::SendPath;

/// What the jobs of its sends do, for errors.
const COPYING: &str = "copying a send out of GPU memory";

impl State {
    /// How far a request is; `None` for one that is not in flight.
    pub(super) fn standing(&mut self, id: RequestId) -> Option<Progress> {
        let read = self.resend.read();
        let (sequence, request) = self.ring.find(id)?;
        let send_stream = self.send_path.as_ref().map(SendPath::send_stream);
        Some(match (request.on_lanes, send_stream) {
            (true, Some(send_stream)) if request.written == request.size => {
                if send_stream.is_sent(sequence) {
                    Progress::Done
                } else {
                    Progress::OnLanes
                }
            }
            (false, _) if request.done(read) => Progress::Done,
            _ => Progress::Waiting,
        })
    }

    /// The host takes memory back: nothing reads it when this returns. Gives the failure of a comm
    /// that had requests there; NCCL frees memory before it closes a comm that it aborts.
    pub(super) fn give_up(&mut self, memory: u64) -> Result<Option<NetError>, NetError> {
        let send_stream = self.send_path.as_ref().map(SendPath::send_stream);
        let read = self.resend.read();
        let found = self.ring.find_first(|sequence, request| {
            let over = match send_stream {
                Some(send_stream) if request.on_lanes => {
                    request.written == request.size && send_stream.is_sent(sequence)
                }
                _ => request.done(read),
            };
            request.memory == memory && !over
        });
        let held = || error::memory_held(&self.name);
        let Some(sequence) = found else {
            // Of a comm that was given up, which may hold this memory for another message.
            let is_held = send_stream
                .is_some_and(|send_stream| send_stream.is_closed() && send_stream.is_borrowing());
            return if is_held { Err(held()) } else { Ok(None) };
        };
        let failure = error::deregistered(&self.name, sequence);
        let failure = self.failure.get_or_insert(failure).clone();
        if let Some(send_path) = &self.send_path {
            send_path.close();
        }
        // The receiver must not wait for what will not come.
        let _ = self.link.shutdown(std::net::Shutdown::Both);
        match &self.send_path {
            Some(send_path) if send_path.send_stream().is_borrowing() => Err(held()),
            _ => Ok(Some(failure)),
        }
    }

    /// One call in many, so that an end of the comm's own connection is seen soon.
    pub(super) const fn is_time_to_look(&mut self) -> bool {
        self.polls = self.polls.wrapping_add(1);
        self.failure.is_some() || self.polls.is_multiple_of(POLLS_BETWEEN_LOOKS)
    }

    /// Whether lanes have all that is left, and still hold some of it: how that ends is theirs to
    /// say, and they do when they end themselves.
    pub(super) fn is_with_lanes(&self) -> bool {
        self.next == self.ring.posted()
            && self
                .send_path
                .as_ref()
                .is_some_and(|c| c.send_stream().is_busy())
    }

    /// Whether copies out of GPU memory go well.
    pub(super) fn look_at_gpu(&self) -> Result<(), NetError> {
        match &self.send_path {
            Some(send_path) => send_path
                .look_at_gpu()
                .map_err(error::copy(&self.name, COPYING)),
            None => Ok(()),
        }
    }

    pub(super) fn check_lanes(&mut self) -> Result<(), NetError> {
        match &self.send_path {
            Some(_) if self.is_with_lanes() => Ok(()),
            Some(send_path) => {
                let standing = send_path.set().check(&self.name);
                if standing.is_err() {
                    // A refusal explains more than the lanes that ended after it.
                    self.read_back()?;
                }
                standing
            }
            None => Ok(()),
        }
    }

    /// Whether the message whose turn it is goes over lanes: it lies in GPU memory, or it is large,
    /// none of it is on the comm's own connection, and the receiver grants.
    pub(super) fn takes_lanes(&mut self) -> bool {
        if self.send_path.is_none() {
            return false;
        }
        let above = if self.granting {
            self.lanes_above
        } else {
            usize::MAX
        };
        self.ring.by_sequence(self.next).is_some_and(|request| {
            let is_for_lanes = match request.source {
                Source::Host(_) => request.size > above,
                Source::Device(_) => true,
            };
            // Chunks in the queue stay there whatever the receiver says later.
            let has_begun = request.written > 0 || self.link.has_begun();
            request.on_lanes || (is_for_lanes && !has_begun)
        })
    }

    /// Queues the message whose turn it is, once its receive is posted; the bytes queued now.
    pub(super) fn load(&mut self) -> Result<usize, NetError> {
        let sequence = self.next;
        let stream = self.stream_number;
        let (Some(send_path), Some(request)) = (&self.send_path, self.ring.by_sequence(sequence))
        else {
            return Ok(0);
        };
        if sequence >= self.granted {
            return Ok(0);
        }
        request.on_lanes = true;
        let before = request.written;
        request.written = send_path
            .queue((stream, sequence), &request.source, request.size, before)
            .map_err(error::copy(&self.name, COPYING))?;
        let queued = request.written - before;
        if request.written == request.size {
            self.next += 1;
        }
        Ok(queued)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::Arc;

    use nccl_net::export::{Buffer, HostLogger, MemoryRegion, NetComm, NetSend, RequestId};

    use super::*;
    use crate::config::Config;
    use crate::header::{Header, Record};
    use crate::lanes::lane_set::LaneSet;
    use crate::lanes::send_path::Route;
    use crate::lanes::send_stream::Chunk;
    use crate::link::Link;
    use crate::memory::Memory;
    use crate::plugin::{ProcessState, TcpxPlugin};
    use crate::resume::Resume;
    use crate::send::{Comeback, SendComm};

    const BYTES: usize = 300_000;

    fn plugin() -> TcpxPlugin {
        let config = Config {
            interfaces: "lo".to_owned(),
            lanes: Some(1),
            threads: Some(1),
            ..Config::default()
        };
        TcpxPlugin::with_config(config, HostLogger::default()).unwrap()
    }

    struct Fixture {
        comm: SendComm,
        set: Arc<LaneSet>,
        memory: Memory,
        bytes: Vec<u8>,
        /// What the comm sends, and the receiver's answers.
        peer: Option<[TcpStream; 2]>,
        /// Bytes that the receiver has read.
        read: u64,
    }

    impl Fixture {
        /// A comm whose receiver has granted a message, with lanes that nobody drives.
        fn new() -> Self {
            Self::of(plugin().shared())
        }

        fn of(shared: Arc<ProcessState>) -> Self {
            let runtime = shared.runtime().unwrap();
            let set = LaneSet::without_lanes(true);
            let route = Route {
                set: Arc::clone(&set),
                _runtime: Arc::clone(&runtime),
            };
            let [(link, peer), (answers, mut back), (first, _)] = [(); 3].map(|()| Link::bare());
            let send_path = SendPath::new(route, BYTES);
            let number = shared.number();
            let name = number.to_string();
            let comeback = Comeback {
                resume: Resume::of_nobody(),
                first,
                door: 0,
                runtime,
            };
            let links = [link, answers];
            let comm = SendComm::new(shared, links, number, name, send_path, comeback).unwrap();
            peer.set_nonblocking(true).unwrap();
            let grant = Header {
                sequence: 1,
                size: 5,
            };
            back.write_all(&grant.encode(Record::Grant)).unwrap();
            let mut bytes = vec![3; BYTES];
            let region = MemoryRegion {
                data: bytes.as_mut_ptr(),
                len: BYTES,
                cuda: false,
            };
            let memory = comm.register(region).unwrap();
            Self {
                comm,
                set,
                memory,
                bytes,
                peer: Some([peer, back]),
                read: 0,
            }
        }

        fn send(&mut self) -> RequestId {
            self.send_bytes(BYTES)
        }

        fn send_bytes(&mut self, len: usize) -> RequestId {
            let data = self.bytes.as_mut_ptr();
            let buffer = Buffer { data, len };
            self.comm.isend(buffer, 0, &self.memory).unwrap().unwrap()
        }

        /// The receiver reads what has come, and says so.
        fn receive(&mut self) {
            let [peer, back] = self.peer.as_mut().unwrap();
            let before = self.read;
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = peer.read(&mut bytes) {
                self.read += count as u64;
            }
            if self.read > before {
                let read = Header {
                    sequence: self.read,
                    size: 0,
                };
                back.write_all(&read.encode(Record::Read)).unwrap();
            }
        }

        /// Whether a message of so many bytes, which is over before the next one, takes lanes.
        fn takes_lanes(&mut self, len: usize) -> bool {
            let [_, back] = self.peer.as_mut().unwrap();
            let granted = self.comm.lock().next + 1;
            let grant = Header {
                sequence: granted,
                size: 5,
            };
            back.write_all(&grant.encode(Record::Grant)).unwrap();
            while self.comm.lock().granted < granted {
                self.comm.lock().read_back().unwrap();
            }
            let request = self.send_bytes(len);
            let mut was_queued = false;
            while self.comm.test(request).unwrap().is_none() {
                while let Some(chunk) = self.set.chunks.pop() {
                    chunk.acknowledged();
                    was_queued = true;
                }
                self.receive();
            }
            was_queued
        }

        /// The message in the hands of a lane, and its receiver gone.
        fn with_a_lane(&mut self) -> (RequestId, Vec<Chunk>) {
            let request = self.send();
            let mut chunks: Vec<Chunk> = Vec::new();
            while chunks.is_empty() {
                assert_eq!(self.comm.test(request).unwrap(), None);
                chunks.extend(std::iter::from_fn(|| self.set.chunks.pop()));
            }
            assert!(chunks.iter_mut().all(Chunk::begin));
            drop(self.peer.take());
            for _ in 0..10 * POLLS_BETWEEN_LOOKS {
                assert_eq!(self.comm.test(request).unwrap(), None, "lanes have all");
            }
            (request, chunks)
        }
    }

    #[test]
    fn comms_in_turns_leave_the_thread_at_half_the_length() {
        let shared = plugin().shared();
        let (mut one, mut other) = (Fixture::of(Arc::clone(&shared)), Fixture::of(shared));
        let limit = Config::default().inline_bytes;
        assert!(!one.takes_lanes(limit / 2));
        assert!(!one.takes_lanes(limit) && one.takes_lanes(limit + 1));
        for _ in 0..2 {
            assert!(other.takes_lanes(limit) && one.takes_lanes(limit / 2 + 1));
        }
        assert!(!other.takes_lanes(limit / 2) && !one.takes_lanes(limit / 2));
        assert!(!one.takes_lanes(limit), "the other one has stopped");
    }

    #[test]
    fn a_receiver_that_closes_early_leaves_the_send_done() {
        let mut fixture = Fixture::new();
        let (request, chunks) = fixture.with_a_lane();
        // A lane of a process that ends may be the first to say so.
        fixture.set.fail("end of stream".to_owned());
        assert_eq!(fixture.comm.test(request).unwrap(), None);
        chunks.into_iter().for_each(Chunk::acknowledged);
        assert_eq!(fixture.comm.test(request).unwrap(), Some(BYTES));
        let buffer = Buffer {
            data: fixture.bytes.as_mut_ptr(),
            len: BYTES,
        };
        let mut next = fixture.comm.isend(buffer, 0, &fixture.memory);
        while let Ok(Some(request)) = next {
            next = fixture.comm.test(request).map(|_| Some(request));
        }
        assert!(next.is_err(), "{next:?}");
    }

    #[test]
    fn memory_that_a_lane_still_reads_cannot_be_deregistered() {
        let mut fixture = Fixture::new();
        let (_, chunks) = fixture.with_a_lane();
        let Fixture { comm, memory, .. } = fixture;
        assert!(comm.deregister(memory).is_err());
        drop(chunks);
    }

    #[test]
    fn a_send_whose_lane_ends_without_an_answer_fails() {
        let mut fixture = Fixture::new();
        let (request, chunks) = fixture.with_a_lane();
        fixture.set.fail("reset".to_owned());
        drop(chunks);
        let failed = |_| fixture.comm.test(request).is_err();
        assert!((0..2 * POLLS_BETWEEN_LOOKS).any(failed));
    }
}

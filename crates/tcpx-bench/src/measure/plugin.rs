//! Messages through the table of an NCCL plugin file, driven as NCCL drives it: each end polls its
//! requests in one thread.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_net::{
    Accepting, Handle128, LoadOptions, MemoryHandle, MemoryType, Plugin, PostOutcome, RecvComm,
    SendComm,
};

use crate::Error;
use crate::end::{Part, timed};
use crate::orders::{Mode, Run};

const TAG: i32 = 1;
/// Bytes of the piece that fills a comm's memory, over and over.
const PIECE_BYTES: usize = 64 << 10;

fn failed(error: impl ToString) -> Error {
    Error::failed(error.to_string(), "look at what the plugin says")
}

/// Memory of a comm, and the place in it for each message in flight, as NCCL has them.
struct Memory {
    handle: MemoryHandle,
    posted: usize,
}

impl Memory {
    /// Where the next message goes or comes from.
    fn place(&self, bytes: usize) -> usize {
        let places = (self.handle.len() / bytes.max(1)).max(1);
        self.posted % places * bytes
    }
}

/// One pair of comms between the ends.
struct Pair {
    send: SendComm,
    source: Memory,
    receive: RecvComm,
    sink: Memory,
}

impl Pair {
    /// Posts a message; whether the plugin took it.
    fn post(&mut self, sends: bool, bytes: usize) -> Result<bool, Error> {
        let memory = if sends {
            &mut self.source
        } else {
            &mut self.sink
        };
        let at = memory.place(bytes);
        let posted = match sends {
            true => self.send.isend(&memory.handle, at, bytes, TAG),
            false => self.receive.irecv(&memory.handle, at, bytes, TAG),
        };
        let is_posted = matches!(posted.map_err(failed)?, PostOutcome::Posted(_));
        memory.posted += usize::from(is_posted);
        Ok(is_posted)
    }

    /// Whether the oldest message is over.
    fn test(&mut self, sends: bool) -> Result<bool, Error> {
        let done = match sends {
            true => self.send.test_head().map(|done| done.is_some()),
            false => self.receive.test_head().map(|done| done.is_some()),
        };
        done.map_err(failed)
    }
}

/// One end's plugin and comms.
pub(crate) struct Comms {
    plugin: Plugin,
    listening: Vec<Accepting>,
    pairs: Vec<Pair>,
    limit: Duration,
}

impl Comms {
    /// Loads and begins the plugin; a step that does not move ends after `limit`.
    pub(crate) fn load(path: &Path, limit: Duration) -> Result<Self, Error> {
        let plugin = Plugin::load(LoadOptions::new(path)).map_err(failed)?;
        plugin.init().map_err(failed)?;
        match plugin.devices().map_err(failed)? {
            0 => Err(failed("the plugin has no devices")),
            _ => Ok(Self {
                plugin,
                listening: Vec::new(),
                pairs: Vec::new(),
                limit,
            }),
        }
    }

    /// Listens for so many pairs.
    pub(crate) fn listen(&mut self, count: usize) -> Result<Vec<Vec<u8>>, Error> {
        let mut handles = Vec::new();
        for _ in 0..count {
            let (handle, listening) = self.plugin.listen(0).map_err(failed)?;
            self.listening.push(listening.accept());
            handles.push(handle.0.to_vec());
        }
        Ok(handles)
    }

    /// Connects through the peer's handles and accepts on our own, both polled until they are done.
    pub(crate) fn connect(&mut self, handles: &[Vec<u8>], bytes: usize) -> Result<(), Error> {
        let until = Instant::now() + self.limit;
        for (handle, mut listening) in handles.iter().zip(std::mem::take(&mut self.listening)) {
            let handle = <[u8; 128]>::try_from(handle.as_slice()).map_err(failed)?;
            let mut connecting = self.plugin.connect(0, Handle128(handle)).map_err(failed)?;
            let (mut send, mut receive) = (None, None);
            let (send, receive) = loop {
                if send.is_none() {
                    send = connecting.poll().map_err(failed)?;
                }
                if receive.is_none() {
                    receive = listening.poll().map_err(failed)?;
                }
                match (send, receive) {
                    (Some(send), Some(receive)) => break (send, receive),
                    _ if Instant::now() > until => return Err(failed("the comms do not connect")),
                    (some, other) => (send, receive) = (some, other),
                }
            };
            let (data, kind) = (memory(bytes)?, MemoryType::Host);
            let at = data.as_ptr().cast_mut();
            let owner = Arc::new(data);
            // SAFETY: the registration keeps the memory, which nothing else reads or writes.
            let source = unsafe { send.register_owned(at, bytes, kind, owner) };
            let (data, kind) = (memory(bytes)?, MemoryType::Host);
            let at = data.as_ptr().cast_mut();
            let owner = Arc::new(data);
            // SAFETY: as above.
            let sink = unsafe { receive.register_owned(at, bytes, kind, owner) };
            let of = |handle| Memory { handle, posted: 0 };
            self.pairs.push(Pair {
                source: of(source.map_err(failed)?),
                sink: of(sink.map_err(failed)?),
                send,
                receive,
            });
        }
        Ok(())
    }

    /// Closes all comms.
    pub(crate) fn close(&mut self) {
        self.pairs.clear();
    }

    /// Every comm moves `count` messages one way, `window` of them in flight.
    fn stream(&mut self, bytes: usize, window: u16, count: u32, sends: bool) -> Result<(), Error> {
        let mut until = Instant::now() + self.limit;
        let mut left = vec![(count, 0); self.pairs.len()];
        while left
            .iter()
            .any(|(to_post, running)| to_post + u32::from(*running) > 0)
        {
            let mut moved = false;
            for (pair, (to_post, running)) in self.pairs.iter_mut().zip(&mut left) {
                while *to_post > 0 && *running < window && pair.post(sends, bytes)? {
                    (*to_post, *running, moved) = (*to_post - 1, *running + 1, true);
                }
                while *running > 0 && pair.test(sends)? {
                    (*running, moved) = (*running - 1, true);
                }
            }
            if moved {
                until = Instant::now() + self.limit;
            } else if Instant::now() > until {
                return Err(failed("nothing moves"));
            } else {
                // The other end needs a core too.
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// One end's part: messages to the other end one way, or one there and one back. The time of
    /// each half of a round trip where this end measures.
    pub(crate) fn take_part(&mut self, run: &Run, measures: bool) -> Result<Part, Error> {
        let bytes = usize::try_from(run.bytes).unwrap_or(usize::MAX);
        timed(|| {
            let mut part = Part::default();
            if run.mode != Mode::Latency {
                self.stream(bytes, run.depth, run.count, measures)?;
                return Ok(part);
            }
            for _ in 0..run.count {
                let started = Instant::now();
                self.stream(bytes, 1, 1, measures)?;
                self.stream(bytes, 1, 1, !measures)?;
                part.times.push(started.elapsed() / 2);
            }
            Ok(part)
        })
    }
}

/// Memory that was only read would be one page of zeros, whose lending says nothing.
fn memory(bytes: usize) -> Result<Vec<u8>, Error> {
    let mut piece = vec![0; PIECE_BYTES];
    getrandom::fill(&mut piece).map_err(failed)?;
    Ok(piece.iter().copied().cycle().take(bytes).collect())
}

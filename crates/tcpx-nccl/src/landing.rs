//! A receive comm's use of lanes: which receives they may fill, and when the sender hears of it.

use std::sync::Arc;

use nccl_net::export::Buffer;

use crate::header::Header;
use crate::lanes::hello::GroupId;
use crate::lanes::recv_stream::RecvStream;
use crate::lanes::runtime::Runtime;
use crate::lanes::to_gpu::ToGpu;
use crate::memory::DeviceSlice;

/// Small messages in a row after which grants stop: they would cost a call for each receive.
const SMALL_IN_A_ROW: u32 = 64;
/// Receives that one grant tells of together, while the sender has others.
const TOGETHER: u64 = 4;
/// Calls of `test` for each look at the comm's connection, while messages come over lanes.
const POLLS_A_LOOK: u32 = 8;

/// The lanes' part of a receive comm. Dropping it takes the comm's memory away from them.
#[derive(Debug)]
pub(crate) struct Landing {
    pub(crate) recv_stream: Arc<RecvStream>,
    pub(crate) runtime: Arc<Runtime>,
    inline_bytes: u64,
    /// Large messages come, so receives are granted as they are posted.
    granting: bool,
    /// A receive into device memory is posted, which only lanes can fill.
    needed: bool,
    /// The sender believes so.
    told: bool,
    granted: u64,
    small: u32,
    polls: u32,
    moves: u64,
}

impl Landing {
    /// `number` names the comm in this process.
    pub(crate) fn new(runtime: Arc<Runtime>, number: u64, inline_bytes: usize) -> Self {
        // 0 is no stream.
        let recv_stream = Arc::new(RecvStream::new(number + 1));
        runtime.registry.open(&recv_stream);
        Self {
            recv_stream,
            runtime,
            inline_bytes: inline_bytes as u64,
            granting: false,
            needed: false,
            told: false,
            granted: 0,
            small: 0,
            polls: 0,
            moves: 0,
        }
    }

    /// The sender's lanes have a name; `false` when they had one before.
    pub(crate) fn join(&mut self, group: GroupId) -> bool {
        self.recv_stream.join(self.runtime.registry.group(group))
    }

    pub(crate) fn is_joined(&self) -> bool {
        self.recv_stream.group().is_some()
    }

    /// A receive is posted; `device` is its buffer where it lies in device memory.
    pub(crate) fn post(&mut self, sequence: u64, buffer: Buffer, device: Option<DeviceSlice>) {
        self.needed |= device.is_some();
        self.recv_stream.post(sequence, buffer, device);
    }

    /// The message for device memory that [`Self::comes_inline`] was told of is to be read.
    pub(crate) fn to_gpu(&self, sequence: u64, bytes: u64) -> Option<ToGpu> {
        self.recv_stream
            .claim_inline(sequence, bytes)
            .map(ToGpu::new)
    }

    /// A message comes over the comm's own connection; `false` when lanes carry it already.
    pub(crate) fn comes_inline(&mut self, sequence: u64, bytes: u64) -> bool {
        if bytes > self.inline_bytes {
            self.granting = self.is_joined();
            self.small = 0;
        } else if self.granting {
            self.small += 1;
            self.granting = self.small < SMALL_IN_A_ROW;
        }
        self.recv_stream.withdraw(sequence)
    }

    /// What to tell the sender now, after `posted` receives of which `open` are not over.
    pub(crate) fn grant(&mut self, posted: u64, open: usize) -> Option<Header> {
        if self.needed && self.is_joined() {
            self.needed = false;
            self.granting = true;
            self.small = 0;
        }
        if !self.granting {
            let off = Header {
                sequence: self.granted,
                size: 0,
            };
            return std::mem::take(&mut self.told).then_some(off);
        }
        let news = posted - self.granted;
        let known = (open as u64).saturating_sub(news);
        if news == 0 || (news < TOGETHER && known > TOGETHER) {
            return None;
        }
        self.granted = posted;
        self.told = true;
        Some(Header {
            sequence: posted,
            size: self.recv_stream.id,
        })
    }

    /// What the sender was told last, for one that may not have heard it.
    pub(crate) fn last_grant(&self) -> Header {
        Header {
            sequence: self.granted,
            size: if self.told { self.recv_stream.id } else { 0 },
        }
    }

    /// Bytes of a message that lanes brought whole.
    pub(crate) fn landed(&mut self, sequence: u64) -> Option<usize> {
        let (written, total) = self.recv_stream.progress(sequence)?;
        if written < total {
            return None;
        }
        self.small = 0;
        usize::try_from(total).ok()
    }

    /// Whether lanes brought all of a message: then none touches its memory any more.
    pub(crate) fn is_whole(&self, sequence: u64) -> bool {
        self.recv_stream
            .progress(sequence)
            .is_some_and(|(written, total)| written >= total)
    }

    /// Takes the comm's memory away from the lanes; `false` when one may still write there.
    pub(crate) fn close(&self) -> bool {
        self.runtime.registry.close(&self.recv_stream)
    }

    /// Whether a lane may still write to the memory of a comm that was closed.
    pub(crate) fn is_held(&self) -> bool {
        self.recv_stream.is_closed() && !self.recv_stream.close()
    }

    /// Whether this poll should look at the comm's connection.
    pub(crate) const fn is_time_to_look(&mut self) -> bool {
        self.polls = self.polls.wrapping_add(1);
        !self.granting || self.polls.is_multiple_of(POLLS_A_LOOK)
    }

    /// Whether lanes moved bytes since the last call.
    pub(crate) fn has_moved(&mut self) -> bool {
        let moves = self.recv_stream.moves();
        std::mem::replace(&mut self.moves, moves) != moves
    }

    /// Whether the sender has no lanes any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.recv_stream
            .group()
            .is_some_and(|group| group.is_gone())
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // Its host hears of memory that is held where it closes the comm.
        let _ = self.close();
    }
}

//! The private request of Google's plugin, read here and nowhere else.
//!
//! The interface promises nothing of what a request points to; this layout is that of GPUDirectTCPX
//! 3.1. So no transfer depends on it: what a transfer needs comes from the device queue. It serves
//! diagnosis, where the interface is silent: how many bytes of a request that does not end are
//! missing.
//!
//! The kernel copies it, so that an address that cannot be read is an answer and no fault, and a
//! thread of the plugin may write meanwhile. It is believed only when all of it agrees with what
//! was posted.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::{offset_of, size_of};
use std::ptr::NonNull;

use crate::comm::{CommCore, RecvComm, SendComm};
use crate::constants::{UNPACK_QUEUE_DEPTH, UNPACK_SLOT_ENTRIES};
use crate::memory::MemoryType;
use crate::queue::QueueSlot;
use crate::request::{RequestRing, Ticket};

/// The plugin whose requests are laid out so.
const PLUGIN: &str = "GPUDirectTCPX_v7";
/// Bytes of a request.
const BYTES: usize = 128;

/// A queue slot as the plugin keeps it; pointers as numbers, because nothing follows them.
#[repr(C)]
struct RawSlot {
    active: u8,
    idx: u64,
    mem: u64,
    cnt: u64,
    cnt_cache: u64,
    fds_cnt: u64,
    pgtok_cnts: u64,
    fds: u64,
    pgtoks: u64,
}

const _: () = assert!(size_of::<RawSlot>() == 72);
const _: () = assert!(offset_of!(RawSlot, idx) == 8);
const _: () = assert!(offset_of!(RawSlot, mem) == 16);
const _: () = assert!(offset_of!(RawSlot, cnt) == 24);
const _: () = assert!(offset_of!(RawSlot, cnt_cache) == 32);
const _: () = assert!(offset_of!(RawSlot, pgtoks) == 64);

/// A request as the plugin keeps it.
#[repr(C)]
struct RawRequest {
    comm: u64,
    data: u64,
    op: c_int,
    mem_type: c_int,
    next_sock_id: c_int,
    next_size: c_int,
    offset: c_int,
    size: c_int,
    size_pending: c_int,
    gpu_mem_fd: c_int,
    gpu_mem_off: c_int,
    unpack_slot: RawSlot,
}

const _: () = assert!(size_of::<RawRequest>() == BYTES);
const _: () = assert!(offset_of!(RawRequest, data) == 8);
const _: () = assert!(offset_of!(RawRequest, op) == 16);
const _: () = assert!(offset_of!(RawRequest, mem_type) == 20);
const _: () = assert!(offset_of!(RawRequest, size) == 36);
const _: () = assert!(offset_of!(RawRequest, size_pending) == 40);
const _: () = assert!(offset_of!(RawRequest, unpack_slot) == 56);

/// What the host knows of a request.
#[derive(Clone, Copy, Debug)]
struct PostedRequest {
    comm: u64,
    data: u64,
    len: usize,
    kind: MemoryType,
    /// The queue slot that a receive takes.
    slot: Option<QueueSlot>,
}

/// What Google's plugin keeps of a request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrivateRequest {
    /// Bytes of the message, as far as the plugin knows; those posted, before a receive's message
    /// came.
    pub size: usize,
    /// Of these, bytes that have not moved.
    pub pending: usize,
    /// Fragments in the queue slot, once a receive has one.
    pub fragments: Option<usize>,
}

impl fmt::Display for PrivateRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes have not moved", self.pending, self.size)?;
        match self.fragments {
            Some(fragments) => write!(f, ", {fragments} fragments are in its queue slot"),
            None => Ok(()),
        }
    }
}

/// Reads a request of the plugin; `None` for one that cannot be read, or is laid out otherwise.
fn read(request: NonNull<c_void>, posted: &PostedRequest) -> Option<PrivateRequest> {
    let mut bytes = [0_u8; BYTES];
    let local = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: BYTES,
    };
    let remote = libc::iovec {
        iov_base: request.as_ptr(),
        iov_len: BYTES,
    };
    // SAFETY: the kernel writes at most 128 bytes to our array; what it reads may be any address of
    // this process, which it checks.
    let copied = unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
    };
    (usize::try_from(copied) == Ok(BYTES))
        .then(|| parse(&bytes, posted))
        .flatten()
}

/// A copy of a request, if all of it agrees with what was posted.
fn parse(bytes: &[u8; BYTES], posted: &PostedRequest) -> Option<PrivateRequest> {
    // SAFETY: as many bytes as the structure has, all of whose fields are integers.
    let raw: RawRequest = unsafe { bytes.as_ptr().cast::<RawRequest>().read_unaligned() };
    let up_to = |most: usize, found: c_int| {
        let number = usize::try_from(found).ok();
        number.filter(|found| *found <= most)
    };
    let same = raw.comm == posted.comm && raw.data == posted.data;
    if !same || raw.mem_type != posted.kind.raw() {
        return None;
    }
    let size = up_to(posted.len, raw.size)?;
    let pending = up_to(size, raw.size_pending)?;
    let slot = &raw.unpack_slot;
    let fragments = match (slot.active, posted.slot) {
        (0, _) => None,
        (1, Some(own)) if slot.idx % UNPACK_QUEUE_DEPTH as u64 == own.index() as u64 => {
            let count = usize::try_from(slot.cnt_cache).ok();
            Some(count.filter(|count| *count <= UNPACK_SLOT_ENTRIES)?)
        }
        // A send has none.
        _ => return None,
    };
    Some(PrivateRequest {
        size,
        pending,
        fragments,
    })
}

/// What the plugin keeps of a comm's oldest request, if there is one and the layout may be known.
fn look_inside(
    core: &CommCore,
    ring: &RequestRing,
    slot: impl FnOnce(Ticket) -> Option<QueueSlot>,
) -> Option<PrivateRequest> {
    let head = ring.head()?;
    if core.plugin.name() != PLUGIN {
        return None;
    }
    core.with_comm(|comm| {
        let posted = PostedRequest {
            comm: comm.addr() as u64,
            data: head.data.addr() as u64,
            len: head.len,
            kind: head.memory.memory_type(),
            slot: slot(head.ticket),
        };
        read(head.request, &posted)
    })
    .ok()
    .flatten()
}

impl SendComm {
    /// For diagnosis: what Google's plugin keeps of the oldest send in flight. `None` when there is
    /// none, for every other plugin, and where it does not agree with what was posted.
    pub fn look_inside_head(&self) -> Option<PrivateRequest> {
        look_inside(&self.core, &self.ring, |_| None)
    }
}

impl RecvComm {
    /// For diagnosis: what Google's plugin keeps of the oldest receive in flight. `None` as for
    /// sends.
    pub fn look_inside_head(&self) -> Option<PrivateRequest> {
        let slot = |ticket: Ticket| Some(QueueSlot::of_receive(ticket.0));
        look_inside(&self.core, &self.ring, slot)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POSTED: PostedRequest = PostedRequest {
        comm: 0x7000_1000,
        data: 0x7000_2000,
        len: 65_536,
        kind: MemoryType::Cuda,
        slot: Some(QueueSlot::of_receive(19)),
    };

    /// A receive of 5000 bytes, 904 of which are missing.
    fn bytes() -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &POSTED.comm.to_ne_bytes());
        put(8, &POSTED.data.to_ne_bytes());
        put(20, &2_i32.to_ne_bytes());
        put(36, &5000_i32.to_ne_bytes());
        put(40, &904_i32.to_ne_bytes());
        put(56, &[1]);
        put(64, &3_u64.to_ne_bytes());
        put(88, &7_u64.to_ne_bytes());
        bytes
    }

    #[test]
    fn a_request_tells_how_far_it_is() {
        let found = parse(&bytes(), &POSTED).expect("it agrees");
        let text = "904 of 5000 bytes have not moved, 7 fragments are in its queue slot";
        assert_eq!(found.to_string(), text);
        // The same from where it lies.
        let place = bytes();
        assert_eq!(read(NonNull::from(&place).cast(), &POSTED), Some(found));
    }

    #[test]
    fn whatever_disagrees_with_what_was_posted_is_not_believed() {
        for (at, value, field) in [
            (0, 1, "comm"),
            (8, 1, "data"),
            (20, 1, "mem_type"),
            (39, 0x80, "size"),
            (38, 1, "size"),
            (43, 0x80, "size_pending"),
            (41, 0x7f, "size_pending"),
            (56, 2, "unpack_slot.active"),
            (64, 4, "unpack_slot.idx"),
            (90, 1, "unpack_slot.cnt_cache"),
        ] {
            let mut bytes = bytes();
            bytes[at] = value;
            assert_eq!(parse(&bytes, &POSTED), None, "{field}");
        }
        let send = PostedRequest {
            slot: None,
            ..POSTED
        };
        assert_eq!(parse(&bytes(), &send), None);
    }

    #[test]
    fn an_address_that_cannot_be_read_is_an_answer() {
        for address in [64, usize::MAX - 4096] {
            let nowhere = NonNull::new(std::ptr::without_provenance_mut(address)).expect("not 0");
            assert_eq!(read(nowhere, &POSTED), None);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_give_an_answer_within_what_was_posted(
            noise in proptest::collection::vec(any::<u8>(), BYTES),
            keep in 0_usize..=BYTES,
        ) {
            let mut all = bytes();
            all[keep..].copy_from_slice(&noise[keep..]);
            if let Some(found) = parse(&all, &POSTED) {
                prop_assert!(found.pending <= found.size && found.size <= POSTED.len);
                prop_assert!(found.fragments.is_none_or(|n| n <= UNPACK_SLOT_ENTRIES));
            }
        }
    }
}

//! The table behind every pointer that C holds.
//!
//! A handle is a number in a pointer's clothes: what it names, where its entry lies, and how often
//! that place was used before. Its top bit is set, so that it is no address of the process and
//! following it by mistake faults at once.

use std::num::NonZeroUsize;
use std::sync::{Arc, PoisonError, RwLock};

use tcpx::{CompletionQueue, Region};

use crate::engine::connection::Connection;
use crate::engine::endpoint::Endpoint;
use crate::engine::transfer::Transfer;
use crate::engine::window::Window;
use crate::error::{Failure, Outcome};
use crate::plugin::codes::TCPX_BAD_HANDLE;
use crate::plugin::end::End;
use crate::plugin::memory::Registered;
use crate::plugin::setup::Listener;

const _: () = assert!(usize::BITS == 64, "handles need 64-bit pointers");

const MARK: usize = 1 << 63;
const KIND_SHIFT: u32 = 59;
const KIND_MASK: usize = 0b1111;
const GENERATION_SHIFT: u32 = 28;
const MAX_GENERATION: u32 = (1 << 31) - 1;
const INDEX_SHIFT: u32 = 4;
const INDEX_MASK: usize = (1 << 24) - 1;
/// The low bits are 0: C may take a handle for an aligned pointer.
const LOW_MASK: usize = (1 << INDEX_SHIFT) - 1;

/// What a handle names; the plugin calls' kinds come first, then the engine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Listen = 1,
    Send = 2,
    Recv = 3,
    Memory = 4,
    Request = 5,
    Endpoint = 6,
    Connection = 7,
    Region = 8,
    Window = 9,
    Transfer = 10,
    Queue = 11,
}

/// Each kind, what messages call it, and how such a handle ends; in the order of the kinds'
/// numbers.
const KINDS: [(Kind, &str, &str); 11] = [
    (Kind::Listen, "a listen comm", "tcpx_close_listen"),
    (Kind::Send, "a send comm", "tcpx_close_send"),
    (Kind::Recv, "a receive comm", "tcpx_close_recv"),
    (
        Kind::Memory,
        "registered memory",
        "tcpx_dereg_mr or the close of its comm",
    ),
    (
        Kind::Request,
        "a request",
        "done == 1 (a send), tcpx_irecv_consumed, or the close of its comm",
    ),
    (Kind::Endpoint, "an endpoint", "tcpx_endpoint_close"),
    (Kind::Connection, "a connection", "tcpx_connection_close"),
    (Kind::Region, "a region", "tcpx_region_release"),
    (Kind::Window, "a window", "tcpx_window_revoke"),
    (Kind::Transfer, "a transfer", "tcpx_transfer_release"),
    (Kind::Queue, "a queue", "tcpx_queue_close"),
];

impl Kind {
    const fn words(self) -> &'static str {
        KINDS[self as usize - 1].1
    }

    const fn ending(self) -> &'static str {
        KINDS[self as usize - 1].2
    }

    /// Whether the plugin calls have such handles, not the engine.
    const fn is_of_plugin(self) -> bool {
        self as usize <= Self::Request as usize
    }
}

/// A value that C keeps for us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Handle(NonZeroUsize);

impl Handle {
    fn new(kind: Kind, index: usize, generation: u32) -> Self {
        let bits = MARK
            | (kind as usize) << KIND_SHIFT
            | (generation as usize) << GENERATION_SHIFT
            | index << INDEX_SHIFT;
        Self(NonZeroUsize::MIN.saturating_add(bits - 1))
    }

    /// As C sees it.
    pub(crate) fn to_pointer<T>(self) -> *mut T {
        std::ptr::without_provenance_mut(self.0.get())
    }

    fn parts(address: usize) -> Option<(Kind, usize, u32)> {
        if address & MARK == 0 || address & LOW_MASK != 0 {
            return None;
        }
        let number = address >> KIND_SHIFT & KIND_MASK;
        let (kind, ..) = *KINDS.get(number.checked_sub(1)?)?;
        let index = address >> INDEX_SHIFT & INDEX_MASK;
        let generation = (address >> GENERATION_SHIFT) as u32 & MAX_GENERATION;
        Some((kind, index, generation))
    }
}

/// What the table holds.
#[derive(Clone, Debug)]
pub(crate) enum Object {
    Listen(Arc<Listener>),
    Send(Arc<End>),
    Recv(Arc<End>),
    Memory(Arc<Registered>),
    /// A request of a comm, by its number there.
    Request(Arc<End>, u64),
    Endpoint(Arc<Endpoint>),
    Connection(Arc<Connection>),
    Region(Region),
    Window(Arc<Window>),
    Transfer(Arc<Transfer>),
    Queue(CompletionQueue),
}

impl Object {
    const fn kind(&self) -> Kind {
        match self {
            Self::Listen(_) => Kind::Listen,
            Self::Send(_) => Kind::Send,
            Self::Recv(_) => Kind::Recv,
            Self::Memory(_) => Kind::Memory,
            Self::Request(..) => Kind::Request,
            Self::Endpoint(_) => Kind::Endpoint,
            Self::Connection(_) => Kind::Connection,
            Self::Region(_) => Kind::Region,
            Self::Window(_) => Kind::Window,
            Self::Transfer(_) => Kind::Transfer,
            Self::Queue(_) => Kind::Queue,
        }
    }
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    object: Option<T>,
}

/// Places that are used again, each time with another generation.
#[derive(Debug)]
struct Table<T> {
    slots: Vec<Slot<T>>,
    free: Vec<usize>,
}

impl<T> Table<T> {
    const fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }

    fn insert(&mut self, kind: Kind, object: T) -> Option<Handle> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() > INDEX_MASK => return None,
            None => {
                self.slots.push(Slot {
                    generation: 0,
                    object: None,
                });
                self.slots.len() - 1
            }
        };
        let slot = &mut self.slots[index];
        slot.object = Some(object);
        Some(Handle::new(kind, index, slot.generation))
    }

    fn at(&self, index: usize, generation: u32) -> Option<&T> {
        let slot = self.slots.get(index)?;
        slot.object
            .as_ref()
            .filter(|_| slot.generation == generation)
    }

    fn remove(&mut self, handle: Handle) -> Option<T> {
        let (_, index, generation) = Handle::parts(handle.0.get())?;
        let slot = self.slots.get_mut(index)?;
        if slot.generation != generation {
            return None;
        }
        let object = slot.object.take()?;
        // A place that has been used 2^31 times rests for ever: no handle comes back.
        if slot.generation < MAX_GENERATION {
            slot.generation += 1;
            self.free.push(index);
        }
        Some(object)
    }
}

static TABLE: RwLock<Table<Object>> = RwLock::new(Table::new());

/// Enters an object. Nothing panics while the table is locked.
pub(crate) fn insert(object: Object) -> Outcome<Handle> {
    let kind = object.kind();
    TABLE
        .write()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(kind, object)
        .ok_or_else(|| {
            Failure::usage(
                "16,777,216 handles are open: close, finish and release what is not needed",
            )
        })
}

/// Enters an object and gives its handle to C.
///
/// # Safety
/// `to` can be written.
pub(crate) unsafe fn enter<T>(object: Object, to: *mut *mut T) -> Outcome<()> {
    let handle = insert(object)?;
    // SAFETY: the caller's promise.
    unsafe { to.write(handle.to_pointer()) };
    Ok(())
}

/// Takes handles out; those that are gone already are no matter.
pub(crate) fn remove(handles: impl IntoIterator<Item = Handle>) {
    let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
    let objects: Vec<_> = handles
        .into_iter()
        .filter_map(|handle| table.remove(handle))
        .collect();
    drop(table);
    // Their ends may call the plugin: not under the table's lock.
    drop(objects);
}

/// Takes a handle out that was looked up before; another thread may have been faster.
pub(crate) fn take(handle: Handle) -> Outcome<()> {
    let taken = TABLE
        .write()
        .unwrap_or_else(PoisonError::into_inner)
        .remove(handle);
    // Its end may call the program's code: not under the table's lock.
    match taken {
        Some(_) => Ok(()),
        None => Err(Failure::closed("the handle")),
    }
}

/// What a pointer from C names; `argument` is its name in the header.
fn find(argument: &'static str, pointer: *const u8, wanted: &[Kind]) -> Outcome<(Handle, Object)> {
    let wanted_words = || {
        let words: Vec<_> = wanted.iter().map(|kind| kind.words()).collect();
        words.join(" or ")
    };
    let address = pointer.addr();
    let Some(handle) = NonZeroUsize::new(address).map(Handle) else {
        return Err(Failure::argument(format!(
            "{argument} is NULL, {} is needed{}",
            wanted_words(),
            if wanted.iter().any(|kind| kind.is_of_plugin()) {
                "; a call that succeeds with NULL means \"not yet\" or \"no room now\""
            } else {
                ""
            }
        )));
    };
    let Some((kind, index, generation)) = Handle::parts(address) else {
        return Err(Failure::new(
            TCPX_BAD_HANDLE,
            format!(
                "{argument} is {address:#x}, which libtcpx did not give out: pass {}",
                wanted_words()
            ),
        ));
    };
    if !wanted.contains(&kind) {
        return Err(Failure::new(
            TCPX_BAD_HANDLE,
            format!("{argument} is {}: pass {}", kind.words(), wanted_words()),
        ));
    }
    let table = TABLE.read().unwrap_or_else(PoisonError::into_inner);
    match table.at(index, generation) {
        Some(object) if object.kind() == kind => Ok((handle, object.clone())),
        _ => Err(Failure::new(
            TCPX_BAD_HANDLE,
            format!(
                "{argument} is {} that has ended: it does with {}; do not use it after",
                kind.words(),
                kind.ending()
            ),
        )),
    }
}

/// Functions that find the object of one kind by the argument of that name.
macro_rules! lookups {
    ($($name:ident($argument:literal): $kind:ident => $object:ty,)*) => {$(
        pub(crate) fn $name<T>(pointer: *const T) -> Outcome<(Handle, $object)> {
            match find($argument, pointer.cast(), &[Kind::$kind])? {
                (handle, Object::$kind(object)) => Ok((handle, object)),
                _ => Err(mismatch()),
            }
        }
    )*};
}

lookups! {
    listener("listen_comm"): Listen => Arc<Listener>,
    sender("send_comm"): Send => Arc<End>,
    receiver("recv_comm"): Recv => Arc<End>,
    memory("mhandle"): Memory => Arc<Registered>,
    endpoint("endpoint"): Endpoint => Arc<Endpoint>,
    connection("connection"): Connection => Arc<Connection>,
    region("region"): Region => Region,
    window("window"): Window => Arc<Window>,
    transfer("transfer"): Transfer => Arc<Transfer>,
    queue("queue"): Queue => CompletionQueue,
}

pub(crate) fn either_end<T>(pointer: *const T) -> Outcome<Arc<End>> {
    match find("comm", pointer.cast(), &[Kind::Send, Kind::Recv])? {
        (_, Object::Send(end) | Object::Recv(end)) => Ok(end),
        _ => Err(mismatch()),
    }
}

pub(crate) fn request<T>(pointer: *const T) -> Outcome<(Arc<End>, u64)> {
    match find("request", pointer.cast(), &[Kind::Request])? {
        (_, Object::Request(end, number)) => Ok((end, number)),
        _ => Err(mismatch()),
    }
}

/// `find` has compared the kinds.
fn mismatch() -> Failure {
    Failure::new(TCPX_BAD_HANDLE, "the handle is of another kind")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reused_place_does_not_answer_to_its_old_handle() {
        let mut table = Table::new();
        let first = table.insert(Kind::Send, 1).unwrap();
        let other = table.insert(Kind::Recv, 2).unwrap();
        assert_eq!(table.remove(first), Some(1));
        let second = table.insert(Kind::Send, 3).unwrap();
        assert_ne!(first, second);
        let (_, index, generation) = Handle::parts(second.0.get()).unwrap();
        assert_eq!(Handle::parts(first.0.get()).unwrap().1, index);
        assert_eq!(table.at(index, generation), Some(&3));
        assert_eq!(table.remove(first), None);
        assert_eq!(table.at(index, generation), Some(&3));
        assert_eq!(table.remove(other), Some(2));
    }

    #[test]
    fn a_place_whose_generations_are_used_up_rests() {
        let mut table = Table::new();
        let handle = table.insert(Kind::Memory, ()).unwrap();
        assert!(table.remove(handle).is_some());
        table.slots[0].generation = MAX_GENERATION;
        let last = table.insert(Kind::Memory, ()).unwrap();
        assert!(table.remove(last).is_some());
        let elsewhere = table.insert(Kind::Memory, ()).unwrap();
        assert_eq!(Handle::parts(elsewhere.0.get()).unwrap().1, 1);
    }

    #[test]
    fn every_part_of_a_handle_is_read_back_and_no_address_is_one() {
        for (place, (kind, ..)) in KINDS.into_iter().enumerate() {
            assert_eq!(kind as usize, place + 1);
            for (index, generation) in [(0, 0), (INDEX_MASK, MAX_GENERATION), (5, 7)] {
                let handle = Handle::new(kind, index, generation);
                let pointer = handle.to_pointer::<u8>();
                assert_eq!(
                    Handle::parts(pointer.addr()),
                    Some((kind, index, generation))
                );
            }
        }
        let local = 0_u64;
        for address in [
            1,
            16,
            (&raw const local).addr(),
            MARK,
            usize::MAX,
            MARK | 1 << 4,
        ] {
            assert_eq!(Handle::parts(address), None, "{address:#x}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_pointer_is_said() {
        let text = |pointer: usize| {
            request(std::ptr::without_provenance::<u8>(pointer))
                .unwrap_err()
                .text
        };
        assert!(text(0).contains("request is NULL"));
        assert!(text(0xdead_bee0).contains("did not give out"));
        let listening = Handle::new(Kind::Listen, 3, 0);
        assert!(text(listening.0.get()).contains("request is a listen comm"));
        let ended = Handle::new(Kind::Request, 0, MAX_GENERATION);
        assert!(text(ended.0.get()).contains("has ended"));
    }
}

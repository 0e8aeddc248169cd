//! The kernel of small copies that stays, on the CPU: it looks for orders when the thread that has launched it
//! looks at any stream, or anyone at its own.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::{self, ThreadId};

use super::world::world;
use super::{Fault, INVALID_VALUE, OK, Operation, World, pointer};

thread_local! {
    /// What the driver does with launches of this thread.
    static LAUNCHES: Cell<Launches> = const { Cell::new(Launches::Return) };
    /// No launch of this thread comes before this is opened.
    static ROOM: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// What tests make of couriers and want to know, by the address of the ring of orders.
#[derive(Default)]
pub(super) struct Couriers {
    deserted: HashSet<u64>,
    hurried: HashSet<u64>,
    done: HashMap<u64, usize>,
}

/// The kernel that looks for orders at this address leaves without another look.
pub(crate) fn desert(orders: u64) {
    world(|world| world.couriers.deserted.insert(orders));
}

/// The kernel that looks for orders at this address carries out what is there and leaves, in one step.
pub(crate) fn hurry(orders: u64) {
    world(|world| world.couriers.hurried.insert(orders));
}

/// How many orders at this address were carried out.
pub(crate) fn orders_done(orders: u64) -> usize {
    world(|world| world.couriers.done.get(&orders).copied()).unwrap_or(0)
}

/// Asked about the stream of the kernel that looks for orders at this address, the driver fails.
pub(crate) fn lose_courier(orders: u64) {
    world(|world| {
        let is_there = |operation: &Operation| matches!(operation, Operation::Stay(stay) if stay.orders == orders);
        for (stream, queue) in &world.streams {
            if queue.iter().any(is_there) {
                world.lost.insert(*stream, Fault::Query);
            }
        }
    });
}

/// What the driver does with launches of couriers.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Launches {
    Return,
    WaitForTheirEnd,
    Fail,
}

/// For launches of this thread.
pub(crate) fn set_launches(launches: Launches) {
    LAUNCHES.set(launches);
}

/// Keeps couriers that this thread launches from coming until the gate is opened.
pub(crate) fn fill_gpu() -> Arc<AtomicBool> {
    let gate = Arc::new(AtomicBool::new(false));
    ROOM.set(Some(Arc::clone(&gate)));
    gate
}

/// Queues a launch.
pub(super) fn launch(world: &mut World, stream: usize, stay: Stay) -> i32 {
    let launches = LAUNCHES.get();
    let Some(queue) = world.streams.get_mut(&stream) else {
        return INVALID_VALUE;
    };
    if launches == Launches::Fail {
        return INVALID_VALUE;
    }
    let pools = world.pools.entry(stream).or_default();
    pools.insert(stay.orders as usize);
    queue.push_back(Operation::Stay(stay));
    while launches == Launches::WaitForTheirEnd && world.run_courier(stream) {}
    OK
}

/// What a look has found.
#[derive(PartialEq)]
enum Seen {
    Nothing,
    Order,
    Leave,
}

/// `tcpx_stay` of `kernels/courier.cu`, and how far the kernel is.
pub(super) struct Stay {
    orders: u64,
    come: u64,
    left: u64,
    stay: u32,
    number: u32,
    patience: u32,
    most: u32,
    looks: u32,
    spent: u32,
    is_here: bool,
    caller: ThreadId,
    room: Option<Arc<AtomicBool>>,
}

/// A word in the memory of the code under test.
fn word<'a>(at: u64) -> &'a AtomicU32 {
    // SAFETY: the code under test promises an aligned word that stays until the kernel has left.
    unsafe { AtomicU32::from_ptr(pointer(at as usize).cast()) }
}

impl Stay {
    /// # Safety
    /// The parameter must be a `tcpx_stay`.
    pub(super) unsafe fn new(parameter: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let (longs, shorts) = unsafe {
            let shorts = parameter.add(24).cast::<[u32; 4]>().read();
            (parameter.cast::<[u64; 3]>().read(), shorts)
        };
        let ([orders, come, left], [stay, number, patience, most]) = (longs, shorts);
        Self {
            orders,
            come,
            left,
            stay,
            number,
            patience,
            most,
            looks: 0,
            spent: 0,
            is_here: false,
            caller: thread::current().id(),
            room: ROOM.with_borrow(Option::clone),
        }
    }

    /// Comes, looks once, or leaves; whether it stays.
    fn step(&mut self, couriers: &mut Couriers) -> bool {
        let has_room = |gate: &Arc<AtomicBool>| gate.load(Ordering::SeqCst);
        if !self.room.as_ref().is_none_or(has_room) {
            return true;
        }
        if !self.is_here {
            self.is_here = true;
            word(self.come).store(self.stay, Ordering::Release);
            return true;
        }
        let leaves = couriers.deserted.remove(&self.orders)
            || couriers.hurried.remove(&self.orders) && {
                while self.look(couriers) == Seen::Order {}
                true
            }
            || self.looks == self.patience
            || self.spent >= self.most
            || self.look(couriers) == Seen::Leave;
        if leaves {
            word(self.left).store(self.stay, Ordering::Release);
        }
        !leaves
    }

    /// Carries out the next order if it is there.
    fn look(&mut self, couriers: &mut Couriers) -> Seen {
        self.spent += 1;
        self.looks += 1;
        let line = self.orders + u64::from(self.number % 16 * 64);
        let mut values = [0; 8];
        for (at, value) in values.iter_mut().enumerate() {
            let at = pointer(line as usize + at * 8).cast();
            // SAFETY: as for words.
            let seen = unsafe { AtomicU64::from_ptr(at) }.load(Ordering::Acquire);
            if (seen >> 32) as u32 != self.number {
                return Seen::Nothing;
            }
            *value = seen as u32;
        }
        let [
            from_low,
            from_high,
            to_low,
            to_high,
            length,
            end_low,
            end_high,
            told,
        ] = values;
        if length == u32::MAX {
            return Seen::Leave;
        }
        let whole = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        let (from, to) = (whole(from_low, from_high), whole(to_low, to_high));
        // SAFETY: the code under test promises that both are there until the end is told; freed memory is
        // poisoned and never unmapped.
        unsafe { pointer(to as usize).copy_from(pointer(from as usize), length as usize) };
        *couriers.done.entry(self.orders).or_default() += 1;
        word(whole(end_low, end_high)).store(told, Ordering::Release);
        self.number = self.number.wrapping_add(1);
        self.spent += 1 + length / 4096;
        self.looks = 0;
        Seen::Order
    }
}

impl World {
    /// Lets every kernel of this thread that is first in its stream do its next step.
    pub(super) fn run_couriers(&mut self) {
        let caller = thread::current().id();
        let of_this_thread = |queue: &&mut VecDeque<Operation>| matches!(queue.front(), Some(Operation::Stay(stay)) if stay.caller == caller);
        for queue in self.streams.values_mut().filter(of_this_thread) {
            step(queue, &mut self.couriers);
        }
    }

    /// Lets a kernel that is first in this stream do its next step; whether one was there.
    pub(super) fn run_courier(&mut self, stream: usize) -> bool {
        let queue = self.streams.get_mut(&stream);
        queue.is_some_and(|queue| step(queue, &mut self.couriers))
    }
}

fn step(queue: &mut VecDeque<Operation>, couriers: &mut Couriers) -> bool {
    let Some(Operation::Stay(stay)) = queue.front_mut() else {
        return false;
    };
    if !stay.step(couriers) {
        queue.pop_front();
    }
    true
}

//! Memory of the fake driver.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::c_void;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::{INVALID_VALUE, OK, World, answer, pointer};

/// What freed memory is filled with.
const FREED: u8 = 0xDD;
/// Longer memory takes no pages before it is used: each GPU of a test has some.
const UNTOUCHED: usize = 64 << 20;
/// Most bytes of freed memory that are kept.
const KEPT: usize = 64 << 20;

pub(super) fn allocate(world: &mut World, len: usize) -> Option<usize> {
    if len > 1 << 40 {
        return None;
    }
    let align = if len < 2 << 20 { 256 } else { 4096 };
    let layout = Layout::from_size_align(len, align).unwrap();
    let memory = if len < UNTOUCHED {
        // SAFETY: the crate never asks the driver for no bytes.
        unsafe {
            let memory = alloc(layout);
            memory.write_bytes(0x77, len);
            memory
        }
    } else {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, flags) };
        mapped.ok()?.cast()
    };
    let address = memory.expose_provenance();
    world.memory.insert(address, layout);
    Some(address)
}

pub(super) fn release(world: &mut World, address: usize) -> i32 {
    let Some(layout) = world.memory.remove(&address) else {
        return INVALID_VALUE;
    };
    // What is allocated there later is other memory.
    let own = address..address + layout.size();
    world.untraceable.retain(|at, _| !own.contains(at));
    // SAFETY: allocated with that layout.
    unsafe { pointer(address).write_bytes(FREED, layout.size()) };
    // Kept for a while, so that late users read the poison.
    world.freed.push_back((address, layout));
    while world
        .freed
        .iter()
        .map(|(_, layout)| layout.size())
        .sum::<usize>()
        > KEPT
    {
        if let Some((address, layout)) = world.freed.pop_front() {
            // SAFETY: allocated or mapped with that layout and forgotten here.
            unsafe {
                if layout.size() < UNTOUCHED {
                    dealloc(pointer(address), layout);
                } else {
                    munmap(pointer(address).cast(), layout.size()).unwrap();
                }
            }
        }
    }
    OK
}

/// All memory of the fake is mapped host memory.
pub(super) fn describe(world: &World, value: *mut c_void, attribute: i32, address: usize) -> i32 {
    use crate::driver::sys::CUpointer_attribute as Attribute;
    const START: i32 = Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as i32;
    const SIZE: i32 = Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE as i32;
    const HOST: i32 = Attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER as i32;
    let around = world
        .memory
        .iter()
        .find(|(start, layout)| (**start..**start + layout.size()).contains(&address));
    match (around, attribute) {
        (Some((start, _)), START) => answer(value.cast::<u64>(), *start as u64),
        (Some((_, layout)), SIZE) => answer(value.cast::<usize>(), layout.size()),
        (Some(_), HOST) => answer(value.cast::<usize>(), address),
        _ => INVALID_VALUE,
    }
}

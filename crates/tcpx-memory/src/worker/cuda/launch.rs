//! Launches of the kernels, each followed by its slot.

use super::cut::{Cut, List};
use super::feed::{self, Inline, Room};
use super::kernel::{Kernels, LaunchEnds, Source};
use super::slots::{FIRST_ENTRIES, LIST_ENTRIES, LIST_SOURCES, LaunchSlots};
use crate::driver::Api;
use crate::error::CudaError;

/// Launches for as many pieces as a launch takes; `Ok(false)` when no slot is free. `inline` is
/// room to write in.
///
/// # Safety
/// The context is current. Every descriptor's source, from the pool, and destination must be
/// device-addressable and stay valid and unused by others until all slots have landed.
pub(super) unsafe fn pieces(
    api: &Api,
    kernels: &Kernels,
    (slots, inline): (&mut LaunchSlots, &mut Inline),
    ends: LaunchEnds,
    cut: &mut Cut,
    list: List<'_>,
) -> Result<bool, CudaError> {
    let Some(slot) = slots.take() else {
        return Ok(false);
    };
    let (at, address) = slots.list(slot);
    let (shape, source) = match feed::carry(cut, list, inline) {
        Some(shape) => (shape, Source::Inline(inline)),
        None => {
            let most = if cut.is_at_start() {
                FIRST_ENTRIES
            } else {
                LIST_ENTRIES
            };
            let room = Room {
                at,
                sources: LIST_SOURCES,
                entries: LIST_ENTRIES,
            };
            // SAFETY: the slot's list has that room, and no launch reads it now.
            let shape = unsafe { feed::map(cut, list, room, most) };
            (shape, Source::Mapped(address))
        }
    };
    let stream = slots.stream();
    let flag = slots.arm(slot);
    // SAFETY: the caller's promise; the slot's list stays until the slot has landed.
    let launched = unsafe { kernels.unpack(api, stream, ends, shape, source, flag) };
    launched.inspect_err(|_| slots.disarm(slot)).map(|()| true)
}

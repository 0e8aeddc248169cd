//! The kernel that stays for small copies, loaded once for a context, and who may call it.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::{Current, Function, Gpu, Module};
use crate::driver::Api;
use crate::error::CudaError;

/// PTX text for the driver's own compiler, with the zero that it wants at the end.
const PTX: &str = concat!(include_str!("../ptx/courier.ptx"), "\0");

/// How many of a context may call couriers at a time. Each courier takes a block of a multiprocessor, and reads
/// across the bus without a pause.
const MOST: usize = 2;
/// How long a place belongs to who has called a courier: far longer than one stays, though one that finds no
/// room on the GPU comes even later.
const TERM: Duration = Duration::from_millis(20);

/// What a context has for couriers.
#[derive(Default)]
pub(super) struct Couriers {
    code: OnceLock<Result<(Module, Function), CudaError>>,
    /// Who may call one, and until when.
    places: Mutex<Vec<(u64, Instant)>>,
}

impl Couriers {
    /// Ends the module; the context is current, and no courier is there.
    pub(super) fn unload(&self, api: &Api) {
        if let Some(Ok((module, _))) = self.code.get() {
            module.unload(api);
        }
    }
}

impl Gpu {
    /// The kernel, loaded by the first who asks.
    ///
    /// # Errors
    /// [`CudaError::KernelUnavailable`], or the driver's refusal.
    pub(crate) fn courier_kernel(&self) -> Result<Function, CudaError> {
        let load = || {
            let _current = Current::enter(self)?;
            let module = Module::load(self, PTX)?;
            let function = module.function(self, c"tcpx_courier");
            let function = function.inspect_err(|_| module.unload(self.api()))?;
            Ok((module, function))
        };
        let code = self.0.couriers.code.get_or_init(load);
        code.clone().map(|(_, function)| function)
    }

    /// Whether this caller may call a courier at this time, or another one.
    pub(crate) fn may_call_courier(&self, caller: u64, now: Instant) -> bool {
        let places = self.0.couriers.places.lock();
        let mut places = places.unwrap_or_else(PoisonError::into_inner);
        places.retain(|(holder, until)| *holder != caller && *until > now);
        let free = places.len() < MOST;
        if free {
            places.push((caller, now + TERM));
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_have_couriers_at_a_time_and_others_follow_when_those_have_no_more_use() {
        let gpu = Gpu::fake();
        let now = Instant::now();
        for caller in 0..MOST as u64 {
            assert!(gpu.may_call_courier(caller, now));
        }
        let late = MOST as u64;
        assert!(!gpu.may_call_courier(late, now));
        // Who goes on keeps the place.
        assert!(gpu.may_call_courier(0, now + TERM / 2));
        assert!(gpu.may_call_courier(late, now + TERM));
        assert!(!gpu.may_call_courier(1, now + TERM));
        assert!(gpu.may_call_courier(1, now + TERM + TERM / 2));
    }
}

//! The ncclTuner plugin ABI, v3 to v5: how a network chooses its number of channels in NCCL.
//!
//! NCCL looks for a tuner in the file of the network plugin when no other is named. A tuner here says
//! how many channels a collective takes, and whether the low-latency protocol (LL) is worth it; the
//! rest stays NCCL's choice.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::export::HostLogger;
use crate::result::{RawResult, ResultCode};
use crate::tables::LoggerFn;

/// A tuner of one communicator. Implement it and export it with
/// [`export_tuner!`](crate::export_tuner).
pub trait Tuner: Sized + Send + Sync + 'static {
    /// Name in the table.
    const NAME: &'static CStr;

    /// A tuner for a communicator of `ranks` processes on `nodes` hosts; `None` to leave it alone.
    fn start(logger: HostLogger, ranks: usize, nodes: usize) -> Option<Self>;

    /// What suits a collective of `bytes`.
    fn choose(&self, bytes: usize) -> Choice;
}

/// What a tuner says of one collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Channels.
    pub channels: u32,
    /// Whether NCCL may choose LL, which sends a flag with every four bytes.
    pub low_latency: bool,
    /// Whether NCCL may choose LL128, which sends a flag with every 120 bytes.
    pub low_latency_128: bool,
}

/// Kinds of collectives: broadcast, reduce, all-gather, reduce-scatter, all-reduce. Higher numbers are sends and receives.
const COLLECTIVES: c_int = 5;
/// Places of the protocols in a row of NCCL's table of costs.
const LL: usize = 0;
const LL128: usize = 1;
const SIMPLE: usize = 2;
/// Protocols in a row.
const PROTOCOLS: c_int = 3;
/// Marks a way that is not to be taken.
const IGNORE: f32 = -1.0;
/// More rows than NCCL has algorithms would be another table.
const MAX_ALGORITHMS: c_int = 64;

/// Takes a protocol out of the costs, for every algorithm that can do without.
///
/// # Safety
/// `costs` points to `algorithms` rows of three numbers, which nothing else writes.
unsafe fn forbid(protocol: usize, costs: *mut f32, algorithms: c_int) {
    let rows = usize::try_from(algorithms).unwrap_or(0);
    for row in 0..rows {
        // SAFETY: inside the table.
        let row = unsafe {
            std::slice::from_raw_parts_mut(costs.wrapping_add(row * PROTOCOLS as usize), 3)
        };
        if row[SIMPLE] >= 0.0 {
            row[protocol] = IGNORE;
        }
    }
}

type GetInfoV3 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    *mut *mut f32,
    c_int,
    c_int,
    *mut c_int,
) -> RawResult;
type GetInfoV4 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    *mut *mut f32,
    c_int,
    c_int,
    c_int,
    *mut c_int,
) -> RawResult;
type InitV3 = unsafe extern "C" fn(usize, usize, Option<LoggerFn>, *mut *mut c_void) -> RawResult;
type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    usize,
    usize,
    Option<LoggerFn>,
    *mut c_void,
    *mut c_void,
) -> RawResult;
type End = unsafe extern "C" fn(*mut c_void) -> RawResult;

macro_rules! tuner_tables {
    ($($(#[$doc:meta])* $name:ident, $function:ident {
        $init:ident: $init_form:ty, $get_info:ident: $info_form:ty
    })*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        #[repr(C)]
        pub struct $name {
            /// Name of the tuner.
            pub name: *const c_char,
            /// Starts it for one communicator.
            pub init: $init_form,
            /// Asks for one collective.
            pub get_coll_info: $info_form,
            /// Ends it.
            pub end: End,
        }

        // SAFETY: constant functions and a constant string.
        unsafe impl Sync for $name {}

        const _: () = assert!(size_of::<$name>() == 32);

        #[doc = concat!("The [`", stringify!($name), "`] of a tuner.")]
        pub const fn $function<T: Tuner>() -> $name {
            $name {
                name: T::NAME.as_ptr(),
                init: $init::<T>,
                get_coll_info: $get_info::<T>,
                end: end::<T>,
            }
        }
    )*};
}

tuner_tables! {
    /// `ncclTunerPlugin_v3`.
    TunerV3, tuner_v3 { init_v3: InitV3, get_info_v3: GetInfoV3 }
    /// `ncclTunerPlugin_v4`.
    TunerV4, tuner_v4 { init_v3: InitV3, get_info_v4: GetInfoV4 }
    /// `ncclTunerPlugin_v5`.
    TunerV5, tuner_v5 { init_v5: InitV5, get_info_v4: GetInfoV4 }
}

/// Runs one call; a panic leaves NCCL to its own tuning.
fn guard(body: impl FnOnce() -> Result<(), ResultCode>) -> RawResult {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ResultCode::Success.to_raw(),
        Ok(Err(code)) => code.to_raw(),
        Err(payload) => {
            // A payload may panic when dropped, outside of any catch; leak it.
            std::mem::forget(payload);
            ResultCode::InternalError.to_raw()
        }
    }
}

unsafe extern "C" fn init_v3<T: Tuner>(
    ranks: usize,
    nodes: usize,
    logger: Option<LoggerFn>,
    context: *mut *mut c_void,
) -> RawResult {
    guard(|| {
        if context.is_null() {
            return Err(ResultCode::InvalidArgument);
        }
        // SAFETY: the host passes its logger, which lives as long as the process.
        let logger = unsafe { HostLogger::new(logger) };
        let tuner = T::start(logger, ranks, nodes).map(Box::new);
        let made = tuner.map_or(std::ptr::null_mut(), |tuner| Box::into_raw(tuner).cast());
        // SAFETY: an out pointer of the host, not NULL.
        unsafe { context.write(made) };
        Ok(())
    })
}

unsafe extern "C" fn init_v5<T: Tuner>(
    context: *mut *mut c_void,
    _comm_id: u64,
    ranks: usize,
    nodes: usize,
    logger: Option<LoggerFn>,
    _domains: *mut c_void,
    _constants: *mut c_void,
) -> RawResult {
    // SAFETY: forwarded.
    unsafe { init_v3::<T>(ranks, nodes, logger, context) }
}

unsafe extern "C" fn get_info_v3<T: Tuner>(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    _operations: c_int,
    costs: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    channels: *mut c_int,
) -> RawResult {
    guard(|| {
        // SAFETY: NULL, or what `init_v3` made and `end` has not taken.
        let tuner = unsafe { context.cast::<T>().as_ref() };
        let Some(tuner) = tuner.filter(|_| (0..COLLECTIVES).contains(&collective)) else {
            return Ok(());
        };
        if channels.is_null() {
            return Err(ResultCode::InvalidArgument);
        }
        let choice = tuner.choose(bytes);
        let is_known_table = protocols == PROTOCOLS && (0..=MAX_ALGORITHMS).contains(&algorithms);
        for (protocol, allowed) in [(LL, choice.low_latency), (LL128, choice.low_latency_128)] {
            if !allowed && !costs.is_null() && is_known_table {
                // SAFETY: NCCL passes its table of rows under this type.
                unsafe { forbid(protocol, costs.cast(), algorithms) };
            }
        }
        // SAFETY: an out pointer of the host, not NULL.
        unsafe { channels.write(c_int::try_from(choice.channels).unwrap_or(c_int::MAX)) };
        Ok(())
    })
}

unsafe extern "C" fn get_info_v4<T: Tuner>(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    operations: c_int,
    costs: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _registered: c_int,
    channels: *mut c_int,
) -> RawResult {
    // SAFETY: forwarded.
    unsafe {
        get_info_v3::<T>(
            context, collective, bytes, operations, costs, algorithms, protocols, channels,
        )
    }
}

unsafe extern "C" fn end<T: Tuner>(context: *mut c_void) -> RawResult {
    guard(|| {
        if !context.is_null() {
            // SAFETY: `init_v3` made it with Box, and the host uses it no more.
            drop(unsafe { Box::from_raw(context.cast::<T>()) });
        }
        Ok(())
    })
}

/// Exports a [`Tuner`] under the names `ncclTunerPlugin_v3` to `v5`.
#[macro_export]
macro_rules! export_tuner {
    ($tuner:ty) => {
        /// The ncclTuner v3 table.
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static ncclTunerPlugin_v3: $crate::tuner::TunerV3 = $crate::tuner::tuner_v3::<$tuner>();
        /// The ncclTuner v4 table.
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static ncclTunerPlugin_v4: $crate::tuner::TunerV4 = $crate::tuner::tuner_v4::<$tuner>();
        /// The ncclTuner v5 table.
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static ncclTunerPlugin_v5: $crate::tuner::TunerV5 = $crate::tuner::tuner_v5::<$tuner>();
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Half(usize);

    impl Tuner for Half {
        const NAME: &'static CStr = c"half";

        fn start(_: HostLogger, ranks: usize, nodes: usize) -> Option<Self> {
            (nodes > 1).then_some(Self(ranks))
        }

        fn choose(&self, bytes: usize) -> Choice {
            assert_ne!(bytes, 1, "one byte");
            Choice {
                channels: self.0 as u32 / 2,
                low_latency: bytes < 100,
                low_latency_128: bytes < 101,
            }
        }
    }

    fn ask(table: &TunerV5, context: *mut c_void, collective: c_int, bytes: usize) -> (i32, i32) {
        let mut channels = -1;
        let costs = [[1.0f32, 2.0, 3.0], [4.0, 5.0, IGNORE], [IGNORE; 3]];
        let mut left = costs;
        let table_of_costs = left.as_mut_ptr().cast();
        // SAFETY: a context of this table, an out pointer of this frame.
        let rc = unsafe {
            (table.get_coll_info)(
                context,
                collective,
                bytes,
                1,
                table_of_costs,
                3,
                3,
                0,
                &raw mut channels,
            )
        };
        let mut wanted = costs;
        if rc == 0 && !context.is_null() && collective < 5 && bytes >= 100 {
            wanted[0][LL] = IGNORE;
        }
        if rc == 0 && !context.is_null() && collective < 5 && bytes >= 101 {
            // The second algorithm has no Simple protocol, and keeps what it has.
            wanted[0][LL128] = IGNORE;
        }
        assert_eq!(left, wanted);
        (rc, channels)
    }

    #[test]
    fn a_panic_in_a_tuner_leaves_the_choice_to_nccl() {
        let table = tuner_v5::<Half>();
        for (nodes, channels) in [(2, 4), (1, -1)] {
            let mut context = std::ptr::null_mut();
            let none = std::ptr::null_mut();
            // SAFETY: an out pointer of this frame, no callbacks.
            let rc = unsafe { (table.init)(&raw mut context, 1, 8, nodes, None, none, none) };
            assert_eq!(rc, 0);
            for bytes in 99..=101 {
                assert_eq!(ask(&table, context, 4, bytes), (0, channels));
            }
            assert_eq!(ask(&table, context, 77, 1), (0, -1));
            if nodes > 1 {
                let quiet = std::panic::take_hook();
                std::panic::set_hook(Box::new(|_| {}));
                assert_eq!(ask(&table, context, 0, 1), (3, -1));
                std::panic::set_hook(quiet);
            }
            // SAFETY: the context is not used again.
            assert_eq!(unsafe { (table.end)(context) }, 0);
        }
        // SAFETY: NULL is refused.
        let rc = unsafe { (tuner_v3::<Half>().init)(2, 2, None, std::ptr::null_mut()) };
        assert_eq!(rc, 4);
    }
}

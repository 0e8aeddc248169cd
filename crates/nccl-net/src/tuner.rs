//! The ncclTuner plugin ABI, v3 to v6: how a network chooses its number of channels in NCCL.
//!
//! NCCL looks for a tuner in the file of the network plugin when no other is named, and takes the
//! newest table that it knows: v4 in NCCL 2.27, v5 from 2.28 on, v6 from 2.30 on. A tuner here says
//! how many channels a collective takes, and whether the low-latency protocols (LL, LL128) are
//! worth it; the rest stays NCCL's choice.
//!
//! NCCL passes its estimate of each way (algorithm and protocol) in microseconds, -1 where a way
//! cannot be taken, and then takes the least. What a tuner writes must mean the same to each
//! version: up to 2.30 a way is a candidate while its number is not negative, whoever wrote it;
//! from 2.31 on the candidates are chosen before the tuner is asked, and every number that it
//! leaves is a time, a negative one the shortest of all. So a tuner here never forbids: it makes a
//! way dear, and never touches one that cannot be taken.

#[cfg(test)]
mod selection;

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

/// Kinds of collectives: broadcast, reduce, all-gather, reduce-scatter, all-reduce. Higher numbers
/// are sends and receives.
const COLLECTIVES: c_int = 5;
/// Cost in microseconds of a way that is not wanted: more than any that is, and less than what NCCL
/// begins its search with, [`f32::MAX`]. NCCL up to 2.27 begins with an hour, and does not see such
/// a way at all.
const DEAR: f32 = 1e30;
/// Protocols in a row of a table of costs: LL, LL128 and Simple, in NCCL's order.
const PROTOCOLS: usize = 3;
/// More rows than NCCL has algorithms would be another table.
const MAX_ALGORITHMS: c_int = 64;

/// Makes the ways of unwanted protocols dear. Ways that cannot be taken stay so; where there are
/// none but unwanted ones, all stay as they are.
fn make_dear(costs: &mut [[f32; PROTOCOLS]], is_wanted: [bool; PROTOCOLS]) {
    let is_way = |cost: f32| cost >= 0.0;
    let mut ways = costs.iter().flat_map(|row| row.iter().zip(is_wanted));
    if !ways.any(|(cost, is_wanted)| is_wanted && is_way(*cost)) {
        return;
    }
    for (cost, is_wanted) in costs
        .iter_mut()
        .flat_map(|row| row.iter_mut().zip(is_wanted))
    {
        if !is_wanted && is_way(*cost) {
            *cost = DEAR;
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
type GetChunkSizeV6 =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, c_int, c_int, *mut usize) -> RawResult;

macro_rules! tuner_tables {
    ($($(#[$doc:meta])* $name:ident, $function:ident {
        $init:ident: $init_form:ty, $get_info:ident: $info_form:ty $(, $chunk_form:ty)?
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
            $(/// Asks for the bytes of a chunk; none keeps NCCL's own.
            pub get_chunk_size: Option<$chunk_form>,)?
        }

        // SAFETY: constant functions and a constant string.
        unsafe impl Sync for $name {}

        const _: () = assert!(
            std::mem::offset_of!($name, init) == 8
                && std::mem::offset_of!($name, get_coll_info) == 16
                && std::mem::offset_of!($name, end) == 24
        );

        #[doc = concat!("The [`", stringify!($name), "`] of a tuner.")]
        pub const fn $function<T: Tuner>() -> $name {
            $name {
                name: T::NAME.as_ptr(),
                init: $init::<T>,
                get_coll_info: $get_info::<T>,
                end: end::<T>,
                $(get_chunk_size: None::<$chunk_form>,)?
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
    /// `ncclTunerPlugin_v6`.
    TunerV6, tuner_v6 { init_v5: InitV5, get_info_v4: GetInfoV4, GetChunkSizeV6 }
}

const _: () = assert!(
    size_of::<TunerV3>() == 32
        && size_of::<TunerV4>() == 32
        && size_of::<TunerV5>() == 32
        && size_of::<TunerV6>() == 40
        && std::mem::offset_of!(TunerV6, get_chunk_size) == 32
);

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
        let rows = (0..=MAX_ALGORITHMS)
            .contains(&algorithms)
            .then(|| usize::try_from(algorithms).unwrap_or(0));
        if let Some(rows) = rows
            && !costs.is_null()
            && usize::try_from(protocols) == Ok(PROTOCOLS)
        {
            // SAFETY: NCCL passes its table under this type: a row of one number for each protocol
            // for each algorithm, which nobody else touches during the call.
            let costs = unsafe { std::slice::from_raw_parts_mut(costs.cast(), rows) };
            make_dear(costs, [choice.low_latency, choice.low_latency_128, true]);
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

/// Exports a [`Tuner`] under the names `ncclTunerPlugin_v3` to `v6`.
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
        /// The ncclTuner v6 table.
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static ncclTunerPlugin_v6: $crate::tuner::TunerV6 = $crate::tuner::tuner_v6::<$tuner>();
    };
}

#[cfg(test)]
mod tests {
    use super::selection::{CostPlace, Costs, IGNORE, Selection, usual_costs};
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

    type Ask<'a> = &'a dyn Fn(c_int, usize, *mut *mut f32, c_int, *mut c_int) -> RawResult;

    /// A table as NCCL passes it for many bytes, with ways that cannot be taken; what is left of
    /// it, with the result and the channels.
    fn ask_tuner(ask: Ask<'_>, collective: c_int, bytes: usize) -> (i32, i32, Costs) {
        let (mut channels, mut left) = (-1, usual_costs(64 << 20));
        let rc = ask(
            collective,
            bytes,
            left.as_mut_ptr().cast(),
            3,
            &raw mut channels,
        );
        (rc, channels, left)
    }

    /// Asks each table in turn, about a communicator of eight ranks.
    fn with_each_table(nodes: usize, mut check: impl FnMut(Ask<'_>)) {
        let none = std::ptr::null_mut();
        macro_rules! each {
            ($($table:expr, [$($before:expr),*], [$($after:expr),*], [$($registered:expr),*];)*) => {$(
                let (table, mut context) = ($table, std::ptr::null_mut());
                let place = &raw mut context;
                // SAFETY: an out pointer of this frame, no callbacks.
                let rc = unsafe { (table.init)($($before(place),)* 8, nodes, None $(, $after(place))*) };
                assert_eq!(rc, 0);
                check(&|collective, bytes, costs, protocols, channels| {
                    // SAFETY: a context of this table, a table of costs and an out pointer of the
                    // caller.
                    unsafe {
                        (table.get_coll_info)(
                            context, collective, bytes, 1, costs, 7, protocols $(, $registered)*, channels,
                        )
                    }
                });
                // SAFETY: the context is not used again.
                assert_eq!(unsafe { (table.end)(context) }, 0);
            )*};
        }
        let itself = |place| place;
        each! {
            tuner_v3::<Half>(), [], [itself], [];
            tuner_v4::<Half>(), [], [itself], [0];
            tuner_v5::<Half>(), [itself, |_| 1], [|_| none, |_| none], [0];
            tuner_v6::<Half>(), [itself, |_| 1], [|_| none, |_| none], [0];
        }
    }

    #[test]
    fn what_is_not_wanted_is_dear_to_every_version_of_nccl() {
        let simple_ring = Some(CostPlace {
            algorithm: 1,
            protocol: 2,
        });
        with_each_table(2, |table| {
            for (bytes, unwanted) in [(99, &[][..]), (100, &[0]), (101, &[0, 1])] {
                let offered = usual_costs(64 << 20);
                let (rc, channels, left) = ask_tuner(table, 4, bytes);
                assert_eq!((rc, channels), (0, 4));
                for (algorithm, protocol) in (0..7).flat_map(|row| (0..3).map(move |at| (row, at)))
                {
                    let (before, after) = (offered[algorithm][protocol], left[algorithm][protocol]);
                    let is_dear = before != IGNORE && unwanted.contains(&protocol);
                    assert_eq!(after, if is_dear { DEAR } else { before });
                }
                for selection in Selection::ALL {
                    assert_eq!(selection.choose(&offered, &left), simple_ring);
                }
                // Also where LL seems quickest, as NCCL takes it to be over what it holds for a
                // fast network.
                let mut quick = usual_costs(8);
                let offered = quick;
                assert_eq!(table(4, bytes, quick.as_mut_ptr().cast(), 3, &mut 0), 0);
                for selection in Selection::ALL {
                    let protocol = selection.choose(&offered, &quick).unwrap().protocol();
                    assert_eq!(protocol, ["LL", "LL128", "Simple"][unwanted.len()]);
                }
            }
        });
    }

    #[test]
    fn where_a_program_allows_nothing_else_all_costs_stay() {
        with_each_table(2, |table| {
            let mut costs = usual_costs(64 << 20);
            for row in &mut costs {
                row[2] = IGNORE;
            }
            let offered = costs;
            assert_eq!(table(4, 101, costs.as_mut_ptr().cast(), 3, &mut 0), 0);
            assert_eq!(costs, offered);
        });
    }

    #[test]
    fn costs_of_an_unknown_shape_are_left_alone() {
        with_each_table(2, |table| {
            let mut costs = [[5.0f32; 4]; 7];
            assert_eq!(table(4, 101, costs.as_mut_ptr().cast(), 4, &mut 0), 0);
            assert_eq!(costs, [[5.0; 4]; 7]);
            assert_eq!(table(4, 101, std::ptr::null_mut(), 3, &mut 0), 0);
            assert_eq!(
                table(4, 101, std::ptr::null_mut(), 3, std::ptr::null_mut()),
                4
            );
        });
    }

    #[test]
    fn a_panic_in_a_tuner_leaves_the_choice_to_nccl() {
        let untouched = usual_costs(64 << 20);
        // Within a host the tuner does not start; numbers above the collectives are sends and
        // receives.
        with_each_table(1, |table| {
            assert_eq!(ask_tuner(table, 4, 101), (0, -1, untouched));
        });
        with_each_table(2, |table| {
            assert_eq!(ask_tuner(table, 77, 1), (0, -1, untouched));
            let quiet = std::panic::take_hook();
            std::panic::set_hook(Box::new(|_| {}));
            assert_eq!(ask_tuner(table, 0, 1), (3, -1, untouched));
            std::panic::set_hook(quiet);
        });
        // SAFETY: NULL is refused.
        let rc = unsafe { (tuner_v3::<Half>().init)(2, 2, None, std::ptr::null_mut()) };
        assert_eq!(rc, 4);
    }
}

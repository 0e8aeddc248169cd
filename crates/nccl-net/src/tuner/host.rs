//! Asking the tuner of a plugin file, as NCCL does.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use super::{ALGORITHMS, COLLECTIVES, Costs, End, GetInfoV3, GetInfoV4, InitV3, InitV5, PROTOCOLS};
use crate::error::CallError;
use crate::logger::plugin_logger;
use crate::result::{RawResult, ResultCode};

/// Names of the tables, newest first: the order of search.
pub(crate) const SYMBOLS: [(u32, &str); 4] = [
    (6, "ncclTunerPlugin_v6"),
    (5, "ncclTunerPlugin_v5"),
    (4, "ncclTunerPlugin_v4"),
    (3, "ncclTunerPlugin_v3"),
];

/// The number of an all-reduce among NCCL's collectives.
const ALL_REDUCE: c_int = COLLECTIVES - 1;
/// `double`s of NCCL's table of constants, v5 and v6.
const CONSTANTS: usize = 144;

/// What all tables begin with.
#[repr(C)]
struct Table {
    name: *const c_char,
    init: Option<unsafe extern "C" fn()>,
    get_coll_info: Option<unsafe extern "C" fn()>,
    end: Option<End>,
}

const _: () = assert!(size_of::<Table>() == 32);

#[derive(Clone, Copy)]
enum Init {
    V3(InitV3),
    V5(InitV5),
}

#[derive(Clone, Copy)]
enum GetInfo {
    V3(GetInfoV3),
    V4(GetInfoV4),
}

/// The tuner of a plugin, started for one communicator that does not exist.
pub struct LoadedTuner {
    version: u32,
    name: String,
    get_info: GetInfo,
    end: End,
    context: *mut c_void,
    /// A tuner may keep what it was shown.
    _shown: Box<Shown>,
}

/// What v5 and v6 show a tuner at its start.
struct Shown {
    /// NVLink domains, and the ranks of the smallest and of the largest one.
    domains: [c_int; 3],
    constants: [f64; CONSTANTS],
}

/// What a tuner answered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer {
    /// Channels; `None` leaves them to NCCL.
    pub channels: Option<u32>,
    /// What is left of the costs.
    pub costs: Costs,
}

impl LoadedTuner {
    /// Starts the tuner of a table for `nodes` hosts of one rank each; `None` where the table lacks a function.
    ///
    /// # Safety
    /// A table of this version lies at `address`, in a library that stays.
    pub(crate) unsafe fn start(
        version: u32,
        address: usize,
        nodes: usize,
    ) -> Option<Result<Self, CallError>> {
        let table: *const Table = ptr::with_exposed_provenance(address);
        // SAFETY: every table begins so.
        let table = unsafe { &*table };
        let (init, get_info, end) = (table.init?, table.get_coll_info?, table.end?);
        // SAFETY: the functions of a version have these forms.
        let (init, get_info) = unsafe {
            use std::mem::transmute;
            type Any = unsafe extern "C" fn();
            match version {
                3 => (
                    Init::V3(transmute::<Any, InitV3>(init)),
                    GetInfo::V3(transmute::<Any, GetInfoV3>(get_info)),
                ),
                4 => (
                    Init::V3(transmute::<Any, InitV3>(init)),
                    GetInfo::V4(transmute::<Any, GetInfoV4>(get_info)),
                ),
                _ => (
                    Init::V5(transmute::<Any, InitV5>(init)),
                    GetInfo::V4(transmute::<Any, GetInfoV4>(get_info)),
                ),
            }
        };
        let mut shown = Box::new(Shown {
            domains: [c_int::try_from(nodes).unwrap_or(c_int::MAX), 1, 1],
            constants: [0.0; CONSTANTS],
        });
        let mut context = ptr::null_mut();
        let logger = Some(plugin_logger());
        // SAFETY: an out pointer of this frame; what is shown lives as long as the tuner.
        let rc = unsafe {
            match init {
                Init::V3(init) => init(nodes, nodes, logger, &raw mut context),
                Init::V5(init) => init(
                    &raw mut context,
                    1,
                    nodes,
                    nodes,
                    logger,
                    shown.domains.as_mut_ptr().cast(),
                    shown.constants.as_mut_ptr().cast(),
                ),
            }
        };
        let name = if table.name.is_null() {
            String::new()
        } else {
            // SAFETY: the name in a table is a static string.
            let name = unsafe { CStr::from_ptr(table.name) };
            name.to_string_lossy().into_owned()
        };
        Some(checked("init of the tuner", rc).map(|()| Self {
            version,
            name,
            get_info,
            end,
            context,
            _shown: shown,
        }))
    }

    /// Version of its table.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Name in the table.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Asks for an all-reduce of `bytes` whose ways have these costs.
    ///
    /// # Errors
    /// The tuner said no.
    pub fn all_reduce(&self, bytes: usize, costs: &Costs) -> Result<Answer, CallError> {
        let (mut left, mut channels) = (*costs, 0);
        let table = left.as_mut_ptr().cast();
        let (rows, columns) = (ALGORITHMS.len() as c_int, PROTOCOLS.len() as c_int);
        let place = &raw mut channels;
        // SAFETY: the tuner was started and not ended; the table and the number are of this frame.
        let rc = unsafe {
            match self.get_info {
                GetInfo::V3(ask) => ask(
                    self.context,
                    ALL_REDUCE,
                    bytes,
                    1,
                    table,
                    rows,
                    columns,
                    place,
                ),
                GetInfo::V4(ask) => ask(
                    self.context,
                    ALL_REDUCE,
                    bytes,
                    1,
                    table,
                    rows,
                    columns,
                    0,
                    place,
                ),
            }
        };
        checked("getCollInfo of the tuner", rc)?;
        Ok(Answer {
            channels: u32::try_from(channels)
                .ok()
                .filter(|channels| *channels > 0),
            costs: left,
        })
    }
}

impl Drop for LoadedTuner {
    fn drop(&mut self) {
        // SAFETY: it was started, and is not used again. Nobody is left to take an error.
        let _ = unsafe { (self.end)(self.context) };
    }
}

impl std::fmt::Debug for LoadedTuner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadedTuner")
            .field("version", &self.version)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

fn checked(call: &'static str, rc: RawResult) -> Result<(), CallError> {
    match ResultCode::from_raw(rc) {
        ResultCode::Success => Ok(()),
        rc => Err(CallError::new(call, rc)),
    }
}

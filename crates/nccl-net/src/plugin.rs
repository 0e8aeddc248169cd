//! A loaded plugin: started once, then asked for devices and connections.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::adapt::{Calls, Start, missing_functions};
use crate::error::{CallError, HostError, LoadError};
use crate::finalize;
use crate::library::{CallObserver, CallReport, Found, LoadOptions, find};
use crate::lock;
use crate::properties::Properties;
use crate::result::{RawResult, ResultCode};
use crate::tables::AbiVersion;

/// Devices that a plugin may plausibly report.
const MAX_DEVICES: c_int = 4096;

/// A loaded plugin. Clones share it.
///
/// The library stays loaded for the life of the process: plugins start threads of their own.
/// Letting go of the last share calls `finalize` (v11 and later) on a thread made for it and waits
/// at most 5 s; the observer hears of one that has not returned by then as
/// [`ResultCode::InProgress`].
#[derive(Clone)]
pub struct Plugin {
    pub(crate) inner: Arc<PluginInner>,
}

pub(crate) struct PluginInner {
    path: PathBuf,
    name: String,
    version: AbiVersion,
    address: usize,
    start: Start,
    /// Once `init` has returned.
    calls: OnceLock<Started>,
    observer: Option<CallObserver>,
    phase: Mutex<Phase>,
    device_count: OnceLock<usize>,
}

/// What the table held once `init` had returned.
struct Started {
    name: String,
    calls: Calls,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Loaded,
    Ready,
    Failed,
}

/// Tables that were initialised, by address. Before v11 a second `init` in a process is an error
/// of some plugins and undefined for others.
static INITIALISED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

impl Plugin {
    /// Loads a plugin. Nothing of it runs yet, except the constructors of the library.
    pub fn load(options: LoadOptions) -> Result<Self, LoadError> {
        let found = find(&options)?;
        Ok(Self::from_found(found, options))
    }

    pub(crate) fn from_found(found: Found, options: LoadOptions) -> Self {
        // SAFETY: the name in a table is a static string.
        let name = unsafe { found.start.name() };
        Self {
            inner: Arc::new(PluginInner {
                path: options.path,
                name,
                version: found.version,
                address: found.address,
                start: found.start,
                calls: OnceLock::new(),
                observer: options.observer,
                phase: Mutex::new(Phase::Loaded),
                device_count: OnceLock::new(),
            }),
        }
    }

    /// Starts the plugin and then reads its table, which `init` may fill: some plugins have only a
    /// name and `init` before it, and NCCL reads the pointers afterwards too. Once only; after a
    /// failure it stays unusable.
    ///
    /// # Errors
    /// `init` failed, or it left the table without a function that every use needs.
    pub fn init(&self) -> Result<(), HostError> {
        static COMMUNICATORS: AtomicU64 = AtomicU64::new(1);
        let inner = &*self.inner;
        let mut phase = lock(&inner.phase);
        if *phase != Phase::Loaded {
            return Err(HostError::AlreadyInitialised);
        }
        if !inner.start.has_context() && !lock(&INITIALISED).insert(inner.address) {
            return Err(HostError::AlreadyInitialised);
        }
        let communicator = COMMUNICATORS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the first init of this table, or of a version that allows several.
        let (rc, context) = unsafe { inner.start.init(communicator) };
        *phase = Phase::Failed;
        inner.report("init", rc)?;
        // SAFETY: the table stays where it was found; this `init` gave the context.
        let calls = unsafe { Calls::read(inner.version, inner.address, &inner.start, context) };
        let calls = calls.map_err(|function| HostError::MissingFunction {
            version: inner.version,
            function,
        })?;
        // SAFETY: the name in a table is a static string.
        let name = unsafe { calls.name() };
        inner.calls.get_or_init(|| Started { name, calls });
        *phase = Phase::Ready;
        Ok(())
    }

    /// Number of devices.
    pub fn devices(&self) -> Result<usize, HostError> {
        let inner = &*self.inner;
        inner.ready()?;
        if let Some(count) = inner.device_count.get() {
            return Ok(*count);
        }
        let mut count = 0;
        // SAFETY: the plugin is initialised.
        inner.report("devices", unsafe { inner.calls()?.devices(&mut count) })?;
        if count > MAX_DEVICES {
            return Err(HostError::DeviceCount { count });
        }
        let devices = usize::try_from(count).map_err(|_| HostError::DeviceCount { count })?;
        Ok(*inner.device_count.get_or_init(|| devices))
    }

    /// Properties of one device.
    pub fn properties(&self, dev: usize) -> Result<Properties, HostError> {
        let dev = self.device(dev)?;
        // SAFETY: initialised, and the device exists.
        let (rc, properties) = unsafe { self.inner.calls()?.properties(dev) };
        self.inner.report("getProperties", rc)?;
        Ok(properties)
    }

    /// Functions that the table in use leaves out after `init`, as the C interface names them. A
    /// host may do without each of them, else `init` has failed.
    ///
    /// # Errors
    /// The plugin was not started.
    pub fn missing_functions(&self) -> Result<Vec<String>, HostError> {
        let inner = &*self.inner;
        inner.ready()?;
        // SAFETY: the table stays where it was found.
        Ok(unsafe { missing_functions(inner.version, inner.address) })
    }

    /// Name in the table; `init` may change it.
    pub fn name(&self) -> &str {
        let started = self.inner.calls.get();
        started.map_or(&self.inner.name, |started| &started.name)
    }

    /// Version of the table in use.
    pub fn version(&self) -> AbiVersion {
        self.inner.version
    }

    /// The file it was loaded from.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Checks a device number.
    pub(crate) fn device(&self, dev: usize) -> Result<c_int, HostError> {
        let count = self.devices()?;
        if dev >= count {
            return Err(HostError::NoSuchDevice { dev, count });
        }
        c_int::try_from(dev).map_err(|_| HostError::NoSuchDevice { dev, count })
    }
}

impl PluginInner {
    /// What a plugin that was started can do.
    pub(crate) fn calls(&self) -> Result<&Calls, HostError> {
        let started = self.calls.get().ok_or(HostError::NotInitialised)?;
        Ok(&started.calls)
    }

    fn ready(&self) -> Result<(), HostError> {
        match *lock(&self.phase) {
            Phase::Ready => Ok(()),
            Phase::Loaded => Err(HostError::NotInitialised),
            Phase::Failed => Err(HostError::InitFailed),
        }
    }

    /// Tells the observer, and turns a result code into a result.
    pub(crate) fn report(&self, call: &'static str, rc: RawResult) -> Result<(), CallError> {
        let rc = ResultCode::from_raw(rc);
        if let Some(observer) = &self.observer {
            observer(&CallReport { call, rc });
        }
        match rc {
            ResultCode::Success => Ok(()),
            rc => Err(CallError::new(call, rc)),
        }
    }
}

impl Drop for PluginInner {
    fn drop(&mut self) {
        let phase = *self.phase.get_mut().unwrap_or_else(PoisonError::into_inner);
        if phase == Phase::Ready
            && let Some(finalize) = self
                .calls
                .get()
                .and_then(|started| started.calls.finalize())
        {
            // Nobody is left to take an error; the observer hears of it.
            let observer = self.observer.take();
            // SAFETY: initialised; every comm holds a share of this value, so none is left;
            // libraries are never unloaded.
            unsafe { finalize.run(observer, finalize::LONGEST) };
        }
    }
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plugin")
            .field("name", &self.inner.name)
            .field("version", &self.inner.version)
            .field("path", &self.inner.path)
            .finish_non_exhaustive()
    }
}

//! Process-wide state of an exported plugin: the instance, its strings, the connects in progress.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use super::connects::Connects;
use super::error::NetError;
use super::fork::PerProcess;
use super::host_logger::{HostLogger, Log};
use super::traits::NetPlugin;
use crate::lock;
use crate::result::{RawResult, ResultCode};

/// Different property strings that may be handed out; each lives for ever.
const MAX_STRINGS: usize = 4096;

/// The state that an exported plugin keeps for the process. Made by [`crate::export_plugin!`].
#[derive(Debug)]
pub struct PluginCell<P: NetPlugin> {
    plugin: OnceLock<(P, Log)>,
    starting: PerProcess<Mutex<()>>,
    strings: PerProcess<Mutex<BTreeSet<&'static CStr>>>,
    connects: PerProcess<Mutex<Connects<P::Connect>>>,
}

impl<P: NetPlugin> PluginCell<P> {
    /// An empty cell, for a `static`.
    pub const fn new() -> Self {
        Self {
            plugin: OnceLock::new(),
            starting: PerProcess::new(),
            strings: PerProcess::new(),
            connects: PerProcess::new(),
        }
    }

    /// Starts the plugin unless it runs already.
    pub(super) fn start(&self, logger: HostLogger) -> Result<(), NetError> {
        let _starting = lock(self.starting.get());
        if self.plugin.get().is_some() {
            return Ok(());
        }
        let log = Log::new(logger, P::NAME);
        // It is not stored yet, so a failure has to be logged here.
        let plugin = P::init(logger).inspect_err(|error| log.warn(&error.to_string()))?;
        // The lock makes this thread the only one that sets it.
        let _ = self.plugin.set((plugin, log));
        Ok(())
    }

    pub(super) fn plugin(&self) -> Result<&P, NetError> {
        self.plugin.get().map(|(plugin, _)| plugin).ok_or_else(|| {
            NetError::invalid_usage("the plugin was not initialised: call init first")
        })
    }

    /// A copy of `text` at an address that stays good; the same text gives the same address.
    pub(super) fn intern(&self, text: &str) -> Result<&'static CStr, NetError> {
        let text = CString::new(text)
            .map_err(|_| NetError::internal("a property string holds a NUL byte"))?;
        let mut strings = lock(self.strings.get());
        if let Some(known) = strings.get(text.as_c_str()) {
            return Ok(known);
        }
        if strings.len() >= MAX_STRINGS {
            return Err(NetError::internal("property strings change without end"));
        }
        let kept: &'static CStr = Box::leak(text.into_boxed_c_str());
        strings.insert(kept);
        Ok(kept)
    }

    /// Takes the connect that `token` names out of the table.
    pub(super) fn take_connect(&self, token: u64) -> Option<P::Connect> {
        lock(self.connects.get()).take(token)
    }

    /// Keeps a connect for its next poll and names it, by `token` again or by a new one.
    ///
    /// Tokens are random: handle bytes come from a peer, and must not reach another connect.
    pub(super) fn keep_connect(
        &self,
        token: Option<u64>,
        connect: P::Connect,
    ) -> Result<u64, NetError> {
        lock(self.connects.get()).keep(token, connect, Instant::now())
    }

    /// Runs one exported call: errors and panics are logged and become result codes.
    pub(super) fn guard(
        &self,
        call: &'static str,
        body: impl FnOnce() -> Result<(), NetError>,
    ) -> RawResult {
        // State reachable after a panic is behind locks that recover, or belongs to the plugin,
        // whose duty it is to answer errors after one.
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(())) => ResultCode::Success.to_raw(),
            Ok(Err(error)) => {
                self.log_error(call, &error);
                error.code().to_raw()
            }
            Err(payload) => {
                let what = payload
                    .downcast_ref::<&str>()
                    .copied()
                    .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
                    .unwrap_or("no message");
                self.log_error(call, &NetError::internal(format!("panicked: {what}")));
                // A payload may panic when dropped, outside of any catch; leak it.
                std::mem::forget(payload);
                ResultCode::InternalError.to_raw()
            }
        }
    }

    fn log_error(&self, call: &str, error: &NetError) {
        if let Some((_, log)) = self.plugin.get() {
            log.warn(&format!("{call}: {error}"));
        }
    }
}

impl<P: NetPlugin> Default for PluginCell<P> {
    fn default() -> Self {
        Self::new()
    }
}

//! The native half of the Python package `tcpx`.
//!
//! The Python half (`python/tcpx/`) holds what users import: it adds `await` to the transfers of
//! this module and defines the exceptions. No thread of the engine ever takes the interpreter's
//! lock; every wait of a Python thread releases it.

mod completions;
mod connection;
mod endpoint;
mod error;
mod held;
mod memory;
mod opening;
mod options;
mod transfer;
mod window;

use pyo3::prelude::*;

/// Locks what a panic may have left locked: whoever changes it leaves nothing half done where it
/// can panic.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// What `tcpx` imports; everything public is re-exported there.
#[pymodule(gil_used = false)]
mod _tcpx {
    #[pymodule_export]
    use super::completions::Completions;
    #[pymodule_export]
    use super::connection::Connection;
    #[pymodule_export]
    use super::endpoint::{Endpoint, connect, dial, generate_key, reachable};
    #[pymodule_export]
    use super::held::stop_releasing;
    #[pymodule_export]
    use super::opening::{Closing, Dialling, NextConnection};
    #[pymodule_export]
    use super::transfer::{PyReport, Transfer};
    #[pymodule_export]
    use super::window::{Batch, NextNotification, Window};

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

//! Errors of the engine as exceptions of `tcpx`.

use pyo3::prelude::*;
use pyo3::types::PyType;
use tcpx::{Error, ErrorKind};

/// The exception of `tcpx._errors` for an error: its class, and its facts as attributes.
pub(crate) fn raise(error: Error) -> PyErr {
    Python::attach(|py| build(py, &error).unwrap_or_else(|failure| failure))
}

/// The same, for an outcome.
pub(crate) fn check<T>(outcome: Result<T, Error>) -> PyResult<T> {
    outcome.map_err(raise)
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let class = py.import("tcpx._errors")?.getattr(class(error.kind()))?;
    let class = class.cast_into::<PyType>()?;
    let value = class.call1((error.to_string(),))?;
    value.setattr("peer", error.peer().map(|peer| peer.to_string()))?;
    value.setattr("tag", error.tag())?;
    value.setattr(
        "delivered",
        error.delivered().map(|delivered| delivered.to_string()),
    )?;
    value.setattr("check", error.check())?;
    Ok(PyErr::from_value(value))
}

const fn class(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Connect => "ConnectError",
        ErrorKind::TimedOut => "TimeoutError",
        ErrorKind::ConnectionLost => "ConnectionLost",
        ErrorKind::Closed => "ClosedError",
        ErrorKind::Cancelled => "CancelledError",
        ErrorKind::TooLarge => "TooLargeError",
        ErrorKind::Corrupt => "CorruptError",
        ErrorKind::Operation => "TransferError",
        ErrorKind::Setting => "SettingError",
        ErrorKind::Memory => "MemoryError",
        _ => "Error",
    }
}

/// The caller's own wait has run out; what it waited for goes on.
pub(crate) fn wait_ran_out(py: Python<'_>, seconds: f64) -> PyErr {
    let text = format!("not done within {seconds} s; it goes on: wait again, or cancel it");
    own(py, "TimeoutError", &text)
}

/// An argument cannot work.
pub(crate) fn setting(text: &str) -> PyErr {
    Python::attach(|py| own(py, "SettingError", text))
}

/// Memory that cannot be moved, or not so.
pub(crate) fn unfit(text: &str) -> PyErr {
    Python::attach(|py| own(py, "MemoryError", text))
}

/// The operating system refused something.
pub(crate) fn system(what: &str, error: &std::io::Error) -> PyErr {
    Python::attach(|py| own(py, "Error", &format!("{what}: {error}")))
}

/// An object was used after its end.
pub(crate) fn closed(what: &str) -> PyErr {
    Python::attach(|py| own(py, "ClosedError", &format!("{what}; open a new one")))
}

fn own(py: Python<'_>, class: &str, text: &str) -> PyErr {
    let value = py
        .import("tcpx._errors")
        .and_then(|module| module.getattr(class))
        .and_then(|class| class.call1((text,)));
    match value {
        Ok(value) => PyErr::from_value(value),
        Err(error) => error,
    }
}

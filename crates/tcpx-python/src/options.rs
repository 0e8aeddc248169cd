//! Arguments of Python as settings of the engine.

use std::collections::HashMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use tcpx::{After, Auth, Deadlines, Gpu, Level, Options, ProgressMode, TcpNetwork, TcpOptions};

use crate::error::check;

/// Seconds as a duration, also infinity.
pub(crate) fn duration(what: &str, seconds: f64) -> PyResult<Duration> {
    // A century is no limit for a wait, and can be added to any clock.
    const LONGEST: f64 = 100.0 * 365.0 * 24.0 * 3600.0;
    let seconds = if seconds > LONGEST { LONGEST } else { seconds };
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        crate::error::setting(&format!(
            "{what}: expected seconds of at least 0, got {seconds}"
        ))
    })
}

/// The argument `tag`.
pub(crate) fn tag(number: &Bound<'_, PyAny>) -> PyResult<u64> {
    argument("tag", number)
}

/// The argument `offset`.
pub(crate) fn offset(number: &Bound<'_, PyAny>) -> PyResult<u64> {
    argument("offset", number)
}

fn argument(what: &str, number: &Bound<'_, PyAny>) -> PyResult<u64> {
    number.extract().map_err(|error: PyErr| {
        match error.is_instance_of::<PyOverflowError>(number.py()) {
            true => out_of_range(what, 64, number),
            false => error,
        }
    })
}

/// A number of 32 bits among the settings.
fn setting(what: &str, number: i128) -> PyResult<u32> {
    u32::try_from(number).map_err(|_| out_of_range(what, 32, number))
}

fn out_of_range(what: &str, bits: u32, number: impl Display) -> PyErr {
    crate::error::setting(&format!(
        "{what}: expected a number of 0 to 2^{bits}-1, got {number}"
    ))
}

/// A completion level by its name.
pub(crate) fn level(name: &str) -> PyResult<Level> {
    match name {
        "sent" => Ok(Level::Sent),
        "placed" => Ok(Level::Placed),
        "verified" => Ok(Level::Verified),
        other => Err(crate::error::setting(&format!(
            "level: expected \"sent\", \"placed\" or \"verified\", got {other:?}"
        ))),
    }
}

pub(crate) const fn level_name(level: Level) -> &'static str {
    match level {
        Level::Sent => "sent",
        Level::Placed => "placed",
        Level::Verified => "verified",
    }
}

/// Limits of one transfer: `timeout` in all, `stall` without progress.
pub(crate) fn deadlines(timeout: Option<f64>, stall: Option<f64>) -> PyResult<Option<Deadlines>> {
    if timeout.is_none() && stall.is_none() {
        return Ok(None);
    }
    let total = timeout
        .map(|seconds| duration("timeout", seconds))
        .transpose()?;
    let stall = match (stall, total) {
        (Some(seconds), _) => duration("stall", seconds)?,
        // The time in all is what the caller has set; a shorter limit of ours must not end it
        // before.
        (None, Some(total)) => total,
        (None, None) => Deadlines::default().stall,
    };
    Ok(Some(Deadlines { stall, total }))
}

/// What a transfer of GPU memory waits for on the GPU.
///
/// `stream` is an address or number, a torch or CUDA stream object (`cuda_stream`,
/// `__cuda_stream__`), `"ready"` for nothing at all, or `None`: for a torch tensor torch's current
/// stream of its GPU, else the default streams.
pub(crate) fn after(
    stream: Option<&Bound<'_, PyAny>>,
    on_gpu: bool,
    torch_gpu: Option<u32>,
    py: Python<'_>,
) -> PyResult<After> {
    if let Some(stream) = stream
        && stream.extract::<&str>().is_ok_and(|word| word == "ready")
    {
        return Ok(After::Nothing);
    }
    if !on_gpu {
        return match stream {
            None => Ok(After::DefaultStreams),
            Some(_) => Err(crate::error::setting(
                "stream: the memory is not on a GPU; wait for the stream, then start",
            )),
        };
    }
    let handle = match (stream, torch_gpu) {
        (Some(stream), _) => stream_handle(stream)?,
        (None, Some(number)) => {
            let current = py
                .import("torch")?
                .getattr("cuda")?
                .call_method1("current_stream", (number,))?;
            stream_handle(&current)?
        }
        (None, None) => return Ok(After::DefaultStreams),
    };
    // SAFETY: the caller's stream is one that lives, as the guide says of streams.
    Ok(unsafe { After::stream(handle) })
}

fn stream_handle(stream: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(handle) = stream.extract::<u64>() {
        return Ok(handle);
    }
    if stream.hasattr("__cuda_stream__")? {
        let (_, handle): (u64, u64) = stream.call_method0("__cuda_stream__")?.extract()?;
        return Ok(handle);
    }
    stream.getattr("cuda_stream")?.extract()
}

/// Who makes progress, by its name.
fn progress_mode(name: &str) -> PyResult<ProgressMode> {
    match name {
        "background" => Ok(ProgressMode::Background),
        "manual" => Ok(ProgressMode::Manual),
        other => Err(crate::error::setting(&format!(
            "progress: expected \"background\" or \"manual\", got {other:?}"
        ))),
    }
}

/// Settings that an endpoint and a connection share: a dictionary of the package.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    key: Option<String>,
    key_file: Option<PathBuf>,
    insecure: bool,
    encrypt: bool,
    local: Option<String>,
    progress: String,
    limits: Option<HashMap<String, i128>>,
    gpu: Option<i128>,
    timeout: Option<f64>,
}

impl Settings {
    /// Of a side that listens: with a fresh key if it was given none.
    pub(crate) fn listening(&self) -> PyResult<Options> {
        let auth = match self.auth()? {
            Some(auth) => auth,
            None => Auth::Key(check(tcpx::generate_key())?),
        };
        self.options(auth)
    }

    /// Of a side that connects.
    pub(crate) fn connecting(&self) -> PyResult<Options> {
        let missing = || {
            crate::error::setting(
                "key: the key that the listening side printed is needed (TCPX_KEY, key=... or key_file=...)",
            )
        };
        self.options(self.auth()?.ok_or_else(missing)?)
    }

    /// How the two sides prove themselves; `None` where no key was given.
    fn auth(&self) -> PyResult<Option<Auth>> {
        let wrong = |why: String| crate::error::setting(&why);
        Ok(match (&self.key, &self.key_file, self.insecure) {
            (None, None, false) => None,
            (None, None, true) => Some(Auth::Insecure),
            (Some(text), None, false) => {
                Some(Auth::parse(text).map_err(|error| wrong(error.to_string()))?)
            }
            (None, Some(path), false) => {
                Some(Auth::of_file(path).map_err(|error| wrong(error.to_string()))?)
            }
            (_, _, true) => return Err(wrong("insecure=True takes no key".to_owned())),
            (Some(_), Some(_), false) => {
                return Err(wrong("key and key_file: give one of the two".to_owned()));
            }
        })
    }

    fn options(&self, auth: Auth) -> PyResult<Options> {
        let mut network = TcpOptions::default();
        if let Some(text) = &self.local {
            let wrong = || format!("local: expected \"auto\", \"on\" or \"off\", got {text:?}");
            let local = text.parse();
            network.local = local.map_err(|_| crate::error::setting(&wrong()))?;
        }
        let mut options = Options::new(Arc::new(TcpNetwork::new(network)), auth);
        options.encrypt = self.encrypt;
        options.progress = progress_mode(&self.progress)?;
        let limits = &mut options.limits;
        for (name, value) in self.limits.iter().flatten() {
            *match name.as_str() {
                "puts" => &mut limits.puts,
                "notifications" => &mut limits.notifications,
                "gets" => &mut limits.gets,
                "asks" => &mut limits.asks,
                "windows" => &mut limits.windows,
                "tags" => &mut limits.tags,
                "pieces" => &mut limits.pieces,
                "list_windows" => &mut limits.list_windows,
                other => {
                    let wrong = format!(
                        "limits: there is none of the name {other:?}; there are puts, notifications, gets, asks, windows, \
                         tags, pieces and list_windows"
                    );
                    return Err(crate::error::setting(&wrong));
                }
            } = setting(&format!("limits[{name:?}]"), *value)?;
        }
        if let Some(ordinal) = self.gpu {
            let ordinal = setting("gpu", ordinal)?;
            let no_gpu = |error| crate::error::setting(&format!("gpu={ordinal}: {error}"));
            options.gpu = Some(Gpu::open(ordinal).map_err(no_gpu)?);
        }
        if let Some(seconds) = self.timeout {
            options.connect_timeout = duration("timeout", seconds)?;
        }
        Ok(options)
    }
}

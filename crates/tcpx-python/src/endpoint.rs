//! Listening, accepting and connecting.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use tcpx::Gpu;

use crate::connection::Connection;
use crate::error::{check, raise};
use crate::options::{auth, duration, options};

/// An accepting thread looks this often whether a signal has come, or the endpoint was closed.
const LOOK: Duration = Duration::from_millis(100);

/// A listening port that accepts connections until it is closed.
#[pyclass(frozen, subclass, module = "tcpx._tcpx")]
#[derive(Debug)]
pub(crate) struct Endpoint {
    endpoint: Mutex<Option<Arc<tcpx::Endpoint>>>,
    address: SocketAddr,
    key: Option<String>,
    gpu: Option<Gpu>,
}

impl Endpoint {
    fn open(&self) -> PyResult<Arc<tcpx::Endpoint>> {
        let endpoint = self.endpoint.lock().unwrap_or_else(PoisonError::into_inner);
        endpoint
            .clone()
            .ok_or_else(|| crate::error::closed("the endpoint is closed"))
    }

    fn is_closed(&self) -> bool {
        self.endpoint
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_none()
    }
}

#[pymethods]
impl Endpoint {
    #[new]
    #[pyo3(signature = (listen, *, key=None, insecure=false, gpu=None, timeout=None))]
    fn new(
        py: Python<'_>,
        listen: &str,
        key: Option<&str>,
        insecure: bool,
        gpu: Option<u32>,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let generated = match key {
            None if !insecure => Some(generate_key()?),
            _ => None,
        };
        let key = key.or(generated.as_deref());
        let auth = auth(key, insecure)?;
        let key = auth.client_key().map(|key| key.to_text());
        let options = options(auth, gpu, timeout)?;
        let gpu = options.gpu.clone();
        let (endpoint, address) = py.detach(|| {
            let address = resolve(listen)?;
            let endpoint = check(tcpx::Endpoint::listen(address, options))?;
            let address = endpoint.local_addr();
            Ok::<_, PyErr>((endpoint, address))
        })?;
        Ok(Self {
            endpoint: Mutex::new(Some(Arc::new(endpoint))),
            address,
            key,
            gpu,
        })
    }

    /// `(host, port)` that it listens on.
    #[getter]
    fn address(&self) -> (String, u16) {
        (self.address.ip().to_string(), self.address.port())
    }

    /// The key that connecting sides need; `None` without one.
    #[getter]
    fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// Waits for the next peer. Without a limit it waits until the endpoint is closed.
    #[pyo3(signature = (timeout=None))]
    fn _accept(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Connection> {
        let deadline = match timeout {
            Some(seconds) => Some(Instant::now() + duration("timeout", seconds)?),
            None => None,
        };
        loop {
            let endpoint = self.open()?;
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let limit = left.map_or(LOOK, |left| left.min(LOOK));
            let outcome = py.detach(move || endpoint.accept(limit));
            match outcome {
                Ok(connection) => return Ok(Connection::new(connection, self.gpu.clone())),
                Err(error) if is_nobody(&error) => {}
                Err(error) => return Err(raise(error)),
            }
            py.check_signals()?;
            if left.is_some_and(|left| left <= limit) {
                return Err(crate::error::wait_ran_out(py, timeout.unwrap_or_default()));
            }
        }
    }

    /// Stops listening. Connections that it accepted live on.
    fn close(&self, py: Python<'_>) {
        let endpoint = self
            .endpoint
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        py.detach(move || drop(endpoint));
    }

    #[getter]
    fn closed(&self) -> bool {
        self.is_closed()
    }

    fn __repr__(&self) -> String {
        let state = if self.is_closed() {
            "closed"
        } else {
            "listening"
        };
        format!("<tcpx.Endpoint {state} on {}>", self.address)
    }
}

/// Nobody has come within the limit of one look.
fn is_nobody(error: &tcpx::Error) -> bool {
    matches!(
        error,
        tcpx::Error::Network(tcpx::NetworkError::AcceptTimedOut { .. })
    )
}

/// Connects to a listening endpoint.
#[pyfunction]
#[pyo3(signature = (address, *, key=None, insecure=false, gpu=None, timeout=None))]
pub(crate) fn connect(
    py: Python<'_>,
    address: &str,
    key: Option<&str>,
    insecure: bool,
    gpu: Option<u32>,
    timeout: Option<f64>,
) -> PyResult<Connection> {
    let options = options(auth(key, insecure)?, gpu, timeout)?;
    py.detach(|| {
        let address = resolve(address)?;
        let connection = check(tcpx::Endpoint::connect(address, &options))?;
        Ok(Connection::new(connection, options.gpu.clone()))
    })
}

/// A fresh key for a listening side.
#[pyfunction]
pub(crate) fn generate_key() -> PyResult<String> {
    Ok(check(tcpx::generate_key())?.to_text())
}

fn resolve(address: &str) -> PyResult<SocketAddr> {
    let mut found = address.to_socket_addrs().map_err(|error| {
        PyOSError::new_err(format!(
            "{address:?}: {error}; give HOST:PORT, such as 10.0.0.2:12345 or [fe80::1%eth0]:12345"
        ))
    })?;
    found
        .next()
        .ok_or_else(|| PyOSError::new_err(format!("{address:?} has no address")))
}

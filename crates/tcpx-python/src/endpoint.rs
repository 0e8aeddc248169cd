//! Listening, accepting and connecting.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use pyo3::prelude::*;
use tcpx_net::{every_address, interfaces};

use crate::connection::Connection;
use crate::error::{check, raise, setting};
use crate::opening::{Dialling, Listening, NextConnection, is_nobody};
use crate::options::Settings;
use crate::transfer::wait_for;

/// A listening port that accepts connections until it is closed.
#[pyclass(frozen, subclass, module = "tcpx._tcpx")]
pub(crate) struct Endpoint {
    listening: Arc<Listening>,
    address: SocketAddr,
    key: Option<String>,
}

#[pymethods]
impl Endpoint {
    #[new]
    fn new(py: Python<'_>, listen: &str, settings: Settings) -> PyResult<Self> {
        let options = settings.listening()?;
        let key = options.auth.client_key().map(|key| key.to_text());
        let address = py.detach(|| resolve(listen))?;
        let endpoint = py.detach(|| tcpx::Endpoint::listen(address, options.clone()));
        let endpoint = check(endpoint)?;
        let address = endpoint.local_addr();
        Ok(Self {
            listening: Listening::new(endpoint, options),
            address,
            key,
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
        wait_for(py, timeout, |limit| {
            let endpoint = self.listening.open()?;
            let before = self.listening.left_behind();
            match before.unwrap_or_else(|| py.detach(move || endpoint.accept(limit))) {
                Ok(connection) => Ok(Some(Connection::new(connection, &self.listening.options))),
                Err(error) if is_nobody(&error) => Ok(None),
                Err(error) => Err(raise(error)),
            }
        })
    }

    /// The next connection, for an event loop.
    fn _next(&self) -> NextConnection {
        NextConnection(Arc::clone(&self.listening))
    }

    /// Stops listening. Connections that it accepted live on.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.listening.close());
    }

    #[getter]
    fn closed(&self) -> bool {
        self.listening.is_closed()
    }

    fn __repr__(&self) -> String {
        let state = if self.listening.is_closed() {
            "closed"
        } else {
            "listening"
        };
        format!("<tcpx.Endpoint {state} on {}>", self.address)
    }
}

/// Connects to a listening endpoint.
#[pyfunction]
pub(crate) fn connect(py: Python<'_>, address: &str, settings: Settings) -> PyResult<Connection> {
    let dialling = Dialling::start(address.to_owned(), settings.connecting()?)?;
    // The settings bound it.
    wait_for(py, None, |limit| dialling.within(py, limit))
}

/// Starts to connect, for an event loop.
#[pyfunction]
pub(crate) fn dial(address: String, settings: Settings) -> PyResult<Dialling> {
    Dialling::start(address, settings.connecting()?)
}

/// A fresh key for a listening side.
#[pyfunction]
pub(crate) fn generate_key() -> PyResult<String> {
    Ok(check(tcpx::generate_key())?.to_text())
}

/// The address that other hosts most likely reach who listens on `address`.
#[pyfunction]
pub(crate) fn reachable(address: IpAddr) -> String {
    interfaces::reachable(address).to_string()
}

fn resolve(address: &str) -> PyResult<SocketAddr> {
    if let Some(Ok(port)) = address.strip_prefix(':').map(str::parse) {
        return Ok((every_address(), port).into());
    }
    let mut found = address.to_socket_addrs().map_err(|error| {
        setting(&format!(
            "{address:?}: {error}; give HOST:PORT, such as 10.0.0.2:12345 or [fe80::1%eth0]:12345, or :12345 to listen on \
             every address"
        ))
    })?;
    found
        .next()
        .ok_or_else(|| setting(&format!("{address:?} has no address")))
}

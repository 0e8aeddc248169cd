//! Where connections begin.

use std::ffi::{c_char, c_int};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use tcpx::{Auth, ClientKey, Error, NetworkError};

use super::connection::enter;
use super::failure::{again, guard, setting};
use super::options::connection_options;
use super::text::{duration, give_text, needed, text};
use super::types::{TCPX_KEY_MAX, tcpx_connection, tcpx_endpoint, tcpx_options};
use crate::error::Outcome;
use crate::handles::{self, Object};

const _: () = assert!(ClientKey::TEXT_CHARACTERS < TCPX_KEY_MAX);

/// A listening endpoint and the key that it shares.
#[derive(Debug)]
pub(crate) struct Endpoint {
    endpoint: tcpx::Endpoint,
    key: Option<ClientKey>,
}

/// Makes a key, at most TCPX_KEY_MAX bytes with the NUL. For programs that hand a key to both
/// sides; an endpoint without one makes its own.
///
/// # Safety
/// `buffer` is NULL or has `room` bytes; `needed_bytes` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_key_generate(
    buffer: *mut c_char,
    room: usize,
    needed_bytes: *mut usize,
) -> c_int {
    guard("tcpx_key_generate", || {
        let key = tcpx::generate_key()?.to_text();
        // SAFETY: the caller's promise.
        unsafe { give_text(&key, buffer, room, needed_bytes) }
    })
}

/// Listens at `address`, "HOST:PORT"; port 0 takes a free one. `options` may be NULL.
///
/// Keep the endpoint as long as the connections that it accepted: lanes that died come back to it.
///
/// # Safety
/// `address` is NULL or a string; `options` is NULL or filled; `endpoint` is NULL or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_endpoint_listen(
    address: *const c_char,
    options: *const tcpx_options,
    endpoint: *mut *mut tcpx_endpoint,
) -> c_int {
    guard("tcpx_endpoint_listen", || {
        needed("endpoint", endpoint)?;
        // SAFETY: the caller's promise.
        let address = resolve(unsafe { text("address", address) }?)?;
        // SAFETY: the caller's promise.
        let options =
            unsafe { connection_options(options, || Ok(Auth::Key(tcpx::generate_key()?))) }?;
        let key = options.auth.client_key();
        let listening = Endpoint {
            endpoint: tcpx::Endpoint::listen(address, options)?,
            key,
        };
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { handles::enter(Object::Endpoint(Arc::new(listening)), endpoint) }
    })
}

fn resolve(address: &str) -> Outcome<SocketAddr> {
    let found = address.to_socket_addrs().map_err(|error| {
        setting(format!(
            "address {address:?}: {error}; give HOST:PORT, such as 10.0.0.2:12345 or [fe80::1%eth0]:0"
        ))
    })?;
    found
        .into_iter()
        .next()
        .ok_or_else(|| setting(format!("address {address:?} leads nowhere")))
}

/// Where an endpoint listens, "ADDRESS:PORT".
///
/// # Safety
/// `buffer` is NULL or has `room` bytes; `needed_bytes` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_endpoint_address(
    endpoint: *mut tcpx_endpoint,
    buffer: *mut c_char,
    room: usize,
    needed_bytes: *mut usize,
) -> c_int {
    guard("tcpx_endpoint_address", || {
        let (_, endpoint) = handles::endpoint(endpoint)?;
        let address = endpoint.endpoint.local_addr().to_string();
        // SAFETY: the caller's promise.
        unsafe { give_text(&address, buffer, room, needed_bytes) }
    })
}

/// The client's key: what the connecting side puts into tcpx_options.key, at most TCPX_KEY_MAX
/// bytes with the NUL. Whoever reads it can connect, and cannot listen with it. "" for an endpoint
/// without a key.
///
/// # Safety
/// `buffer` is NULL or has `room` bytes; `needed_bytes` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_endpoint_key(
    endpoint: *mut tcpx_endpoint,
    buffer: *mut c_char,
    room: usize,
    needed_bytes: *mut usize,
) -> c_int {
    guard("tcpx_endpoint_key", || {
        let (_, endpoint) = handles::endpoint(endpoint)?;
        let key = endpoint
            .key
            .as_ref()
            .map_or_else(String::new, ClientKey::to_text);
        // SAFETY: the caller's promise.
        unsafe { give_text(&key, buffer, room, needed_bytes) }
    })
}

/// Waits for the next connection with a peer; TCPX_AGAIN when there is none within `timeout_ms`.
/// What is being set up then is for the next call. Peers that cannot prove themselves are turned
/// away and do not end the wait. Any error but TCPX_ERR_HANDLE is about one peer: call it again.
/// tcpx_endpoint_close ends a wait.
///
/// # Safety
/// `connection` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_endpoint_accept(
    endpoint: *mut tcpx_endpoint,
    timeout_ms: u32,
    connection: *mut *mut tcpx_connection,
) -> c_int {
    guard("tcpx_endpoint_accept", || {
        needed("connection", connection)?;
        let (_, listening) = handles::endpoint(endpoint)?;
        match listening.endpoint.accept(duration(timeout_ms)) {
            // SAFETY: not NULL, and the caller lets us write there.
            Ok(accepted) => unsafe { enter(accepted, connection) },
            Err(Error::Network(NetworkError::AcceptTimedOut { .. })) => Err(again(
                "nobody has connected in the time given: call again; if a peer tries, check that a \
                 firewall lets the port through and that it has this key",
            )),
            Err(error) => {
                // Another thread may have closed it.
                handles::endpoint(endpoint)?;
                Err(error.into())
            }
        }
    })
}

/// Connects to another endpoint with this one's settings and key; it may accept peers meanwhile.
/// Otherwise as tcpx_connect.
///
/// # Safety
/// As for tcpx_connect.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_endpoint_connect(
    endpoint: *mut tcpx_endpoint,
    address: *const c_char,
    connection: *mut *mut tcpx_connection,
) -> c_int {
    guard("tcpx_endpoint_connect", || {
        needed("connection", connection)?;
        let (_, endpoint) = handles::endpoint(endpoint)?;
        // SAFETY: the caller's promise.
        let address = unsafe { text("address", address) }?;
        let made = endpoint.endpoint.connect_to(address)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { enter(made, connection) }
    })
}

/// Stops listening; waits in tcpx_endpoint_accept end with TCPX_ERR_HANDLE. Connections live on.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_endpoint_close(endpoint: *mut tcpx_endpoint) -> c_int {
    guard("tcpx_endpoint_close", || {
        let (handle, endpoint) = handles::endpoint(endpoint)?;
        handles::take(handle)?;
        endpoint.endpoint.close();
        Ok(())
    })
}

/// Connects to a listening endpoint at `address`, "HOST:PORT"; every address of a name is tried.
/// `options` holds at least the endpoint's key. A connection that was lost is not restored: connect
/// again.
///
/// # Safety
/// `address` is NULL or a string; `options` is NULL or filled; `connection` is NULL or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_connect(
    address: *const c_char,
    options: *const tcpx_options,
    connection: *mut *mut tcpx_connection,
) -> c_int {
    guard("tcpx_connect", || {
        needed("connection", connection)?;
        // SAFETY: the caller's promise.
        let address = unsafe { text("address", address) }?;
        let no_key = || {
            Err(setting(
                "options.key is NULL: pass the key that tcpx_endpoint_key gave on the listening side, \
                 or set insecure on both",
            ))
        };
        // SAFETY: the caller's promise.
        let options = unsafe { connection_options(options, no_key) }?;
        let made = tcpx::Endpoint::connect(address, &options)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { enter(made, connection) }
    })
}

//! From a device to a pair of comms, and their end.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nccl_net::constants::HANDLE_BYTES;
use nccl_net::{Accepting, Connecting, Handle128, ListenComm, RecvComm, SendComm};

use crate::error::{Failure, Outcome, guard};
use crate::handles::{self, Object};
use crate::plugin::end::End;
use crate::plugin::library::{device, plugin};
use crate::plugin::types::{tcpx_listen_comm, tcpx_recv_comm, tcpx_send_comm};

/// Connects that may be under way at once.
const MAX_CONNECTS: usize = 4096;
/// How long the first call of a connect polls: some programs call once and expect a comm.
const FIRST_CALL: Duration = Duration::from_secs(1);
/// A plugin has no descriptor to wait on.
const POLL_PAUSE: Duration = Duration::from_millis(1);

/// A listen comm and how far its one accept has come.
#[derive(Debug)]
pub(crate) struct Listener(Mutex<Listening>);

#[derive(Debug)]
enum Listening {
    Waiting(ListenComm),
    Accepting(Accepting),
    /// It gave its comm, or failed.
    Spent,
    Closed,
}

impl Listener {
    fn accept(&self) -> Outcome<Option<RecvComm>> {
        let mut state = self.0.lock().map_err(|_| Failure::poisoned())?;
        let mut accepting = match std::mem::replace(&mut *state, Listening::Spent) {
            Listening::Waiting(listen) => listen.accept(),
            Listening::Accepting(accepting) => accepting,
            Listening::Spent => {
                return Err(Failure::usage(
                    "this listen comm gave its connection, or failed: one tcpx_listen is good for \
                     one connection; close it and listen again",
                ));
            }
            Listening::Closed => {
                *state = Listening::Closed;
                return Err(Failure::closed("the listen comm"));
            }
        };
        let comm = accepting.poll()?;
        if comm.is_none() {
            *state = Listening::Accepting(accepting);
        }
        Ok(comm)
    }

    fn close(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(std::mem::replace(&mut *state, Listening::Closed));
    }
}

/// A connect under way, found again by its device and handle.
#[derive(Debug)]
struct Attempt {
    dev: usize,
    handle: Handle128,
    /// `None` once it has ended.
    connecting: SharedConnecting,
}

static CONNECTS: Mutex<Vec<Attempt>> = Mutex::new(Vec::new());

type SharedConnecting = Arc<Mutex<Option<Connecting>>>;

/// The attempt that is under way, or a new one; and how long to poll it.
fn attempt(dev: usize, handle: Handle128) -> Outcome<(SharedConnecting, Duration)> {
    let mut connects = CONNECTS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = connects
        .iter()
        .find(|known| known.dev == dev && known.handle == handle);
    if let Some(known) = known {
        return Ok((Arc::clone(&known.connecting), Duration::ZERO));
    }
    if connects.len() >= MAX_CONNECTS {
        return Err(Failure::usage(format!(
            "{MAX_CONNECTS} connects are under way: poll them until they end, or give them up with \
             tcpx_connect_abandon"
        )));
    }
    let connecting = Arc::new(Mutex::new(Some(plugin()?.connect(dev, handle)?)));
    connects.push(Attempt {
        dev,
        handle,
        connecting: Arc::clone(&connecting),
    });
    Ok((connecting, FIRST_CALL))
}

/// Takes an attempt out of the list; whether it was there.
fn forget(dev: usize, handle: Handle128) -> Option<SharedConnecting> {
    let mut connects = CONNECTS.lock().unwrap_or_else(PoisonError::into_inner);
    let at = connects
        .iter()
        .position(|known| known.dev == dev && known.handle == handle)?;
    Some(connects.swap_remove(at).connecting)
}

fn connect(dev: usize, handle: Handle128) -> Outcome<Option<SendComm>> {
    let (connecting, time) = attempt(dev, handle)?;
    let deadline = Instant::now() + time;
    // Only polls of the same attempt wait here; the list is free.
    let mut state = connecting.lock().map_err(|_| Failure::poisoned())?;
    let Some(attempt) = &mut *state else {
        return Err(Failure::usage(
            "another thread polled the same connect and it has ended: poll each from one thread",
        ));
    };
    loop {
        let polled = attempt.poll();
        if !matches!(polled, Ok(None)) {
            *state = None;
            drop(forget(dev, handle));
            return Ok(polled?);
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(POLL_PAUSE);
    }
}

/// # Safety
/// `handle` is NULL or 128 readable bytes.
unsafe fn read_handle(handle: *const c_void) -> Outcome<Handle128> {
    if handle.is_null() {
        return Err(Failure::argument(
            "handle is NULL: pass the 128 bytes of the peer's tcpx_listen",
        ));
    }
    // SAFETY: by the caller's promise.
    Ok(Handle128(unsafe {
        handle.cast::<[u8; HANDLE_BYTES]>().read_unaligned()
    }))
}

fn out_argument<T>(name: &str, out: *mut T) -> Outcome<()> {
    if out.is_null() {
        return Err(Failure::argument(format!(
            "{name} is NULL: pass where the answer goes"
        )));
    }
    Ok(())
}

/// Listens on device `dev`. Fills the 128 bytes at `handle` (a tcpx_handle), which the peer's
/// tcpx_connect_v5 needs; how they get there is yours. Does not block.
///
/// # Safety
/// `handle` is NULL or 128 writable bytes, `listen_comm` NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_listen(
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut tcpx_listen_comm,
) -> c_int {
    guard("tcpx_listen", || {
        out_argument("handle", handle)?;
        out_argument("listen_comm", listen_comm)?;
        let (bytes, listen) = plugin()?.listen(device(dev)?)?;
        let listener = Listener(Mutex::new(Listening::Waiting(listen)));
        let entered = handles::insert(Object::Listen(Arc::new(listener)))?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe {
            handle.cast::<[u8; HANDLE_BYTES]>().write_unaligned(bytes.0);
            listen_comm.write(entered.to_pointer());
        }
        Ok(())
    })
}

/// Connects to a peer that listens. The first call polls the plugin for up to one second, so that
/// programs that call once get their comm. TCPX_SUCCESS with NULL in `*send_comm` means not yet:
/// call again with the same device and the same 128 bytes, until there is a comm, an error, or your
/// own deadline has passed (then call tcpx_connect_abandon). Poll one connect from one thread.
///
/// `send_dev_handle` may be NULL; if not, it receives NULL: the sending side has no device queue.
///
/// # Safety
/// `handle` is NULL or 128 readable bytes; the others are NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_connect_v5(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut tcpx_send_comm,
    send_dev_handle: *mut *mut c_void,
) -> c_int {
    guard("tcpx_connect_v5", || {
        out_argument("send_comm", send_comm)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { send_comm.write(std::ptr::null_mut()) };
        // SAFETY: by the caller's promise.
        let handle = unsafe { read_handle(handle) }?;
        let Some(comm) = connect(device(dev)?, handle)? else {
            return Ok(());
        };
        let entered = handles::insert(Object::Send(Arc::new(End::sending(comm))))?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe {
            send_comm.write(entered.to_pointer());
            if !send_dev_handle.is_null() {
                send_dev_handle.write(std::ptr::null_mut());
            }
        }
        Ok(())
    })
}

/// Gives up a connect that is not up yet. Plugins have no call for it: what they hold for the
/// attempt stays with them.
///
/// # Safety
/// `handle` is NULL or 128 readable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_connect_abandon(dev: c_int, handle: *const c_void) -> c_int {
    guard("tcpx_connect_abandon", || {
        // SAFETY: by the caller's promise.
        let handle = unsafe { read_handle(handle) }?;
        match forget(device(dev)?, handle) {
            Some(attempt) => {
                drop(attempt);
                Ok(())
            }
            None => Err(Failure::usage(
                "no connect with this device and handle is under way: it gave its comm, failed, or \
                 was never started",
            )),
        }
    })
}

/// Accepts the one connection of a listen comm. TCPX_SUCCESS with NULL in `*recv_comm` means not
/// yet: call again until there is a comm, an error, or your own deadline has passed (then close the
/// listen comm). Some plugins block here until the peer connects.
///
/// `recv_dev_handle` may be NULL; if not, it receives the address of a tcpx_device_handle, the
/// plugin's device queue, valid until the comm is closed, or NULL if there is none.
/// tcpx_wait_request reads the queue for you.
///
/// # Safety
/// The last two are NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_accept_v5(
    listen_comm: *mut tcpx_listen_comm,
    recv_comm: *mut *mut tcpx_recv_comm,
    recv_dev_handle: *mut *mut c_void,
) -> c_int {
    guard("tcpx_accept_v5", || {
        out_argument("recv_comm", recv_comm)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { recv_comm.write(std::ptr::null_mut()) };
        let (_, listener) = handles::listener(listen_comm)?;
        let Some(comm) = listener.accept()? else {
            return Ok(());
        };
        let end = Arc::new(End::receiving(comm)?);
        let device = end.device()?;
        let entered = handles::insert(Object::Recv(end))?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe {
            recv_comm.write(entered.to_pointer());
            if !recv_dev_handle.is_null() {
                recv_dev_handle.write(device.cast());
            }
        }
        Ok(())
    })
}

/// Closes a send comm: its requests and registrations end with it, done or not. The peer may not
/// have received what is in flight, nor what is done; ask it before you close.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_close_send(send_comm: *mut tcpx_send_comm) -> c_int {
    guard("tcpx_close_send", || {
        let (handle, end) = handles::sender(send_comm)?;
        handles::remove([handle]);
        end.close(handles::remove)
    })
}

/// Closes a receive comm: its requests, registrations, descriptors and its pool end with it.
/// Whatever unpacks on a GPU must have ended. Plugins take no memory back from a comm that is closed
/// with requests in flight: what they hold for its registrations then stays with them.
///
/// # Safety
/// Nobody uses the comm's pool, descriptors or device handle any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_close_recv(recv_comm: *mut tcpx_recv_comm) -> c_int {
    guard("tcpx_close_recv", || {
        let (handle, end) = handles::receiver(recv_comm)?;
        handles::remove([handle]);
        end.close(handles::remove)
    })
}

/// Closes a listen comm, accepted or not.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_close_listen(listen_comm: *mut tcpx_listen_comm) -> c_int {
    guard("tcpx_close_listen", || {
        let (handle, listener) = handles::listener(listen_comm)?;
        handles::remove([handle]);
        listener.close();
        Ok(())
    })
}

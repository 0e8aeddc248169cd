//! From a device to a pair of comms, and their end.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use nccl_net::constants::HANDLE_BYTES;
use nccl_net::{Accepting, Handle128, HostError, ListenComm, RecvComm};
use tcpx_memory::lock;

use crate::engine::text::{answer, needed};
use crate::error::{Failure, Outcome, guard};
use crate::handles::{self, Handle, Object};
use crate::plugin::close::Close;
use crate::plugin::end::End;
use crate::plugin::library::{device, plugin};
use crate::plugin::types::{tcpx_listen_comm, tcpx_recv_comm, tcpx_send_comm};

/// How long a connect is polled before its comm is given out all the same. A peer that refuses does
/// so within it.
const FIRST_POLLS: Duration = Duration::from_millis(100);

/// A listen comm and how far its one accept has come.
#[derive(Debug)]
pub(crate) struct Listener {
    state: Mutex<Listening>,
    close: Close,
}

#[derive(Debug)]
enum Listening {
    Waiting(ListenComm),
    Accepting(Accepting),
    Closed,
}

impl Listener {
    fn accept(&self) -> Outcome<Option<RecvComm>> {
        let mut state = self.state.lock().map_err(|_| Failure::poisoned())?;
        let mut accepting = match std::mem::replace(&mut *state, Listening::Closed) {
            Listening::Waiting(listen) => listen.accept(),
            Listening::Accepting(accepting) => accepting,
            Listening::Closed => return Err(Failure::closed("the listen comm")),
        };
        let comm = accepting.poll();
        // Its close may not come back: it is for `close`, which is bounded.
        *state = Listening::Accepting(accepting);
        comm.map_err(|error| match error {
            HostError::SetupEnded => Failure::usage(
                "this listen comm gave its connection, or failed: one tcpx_listen is good for one \
                 connection; close it and listen again",
            ),
            error => error.into(),
        })
    }

    fn close(self: &Arc<Self>, handle: Handle) -> Outcome<()> {
        let listener = Arc::clone(self);
        self.close.run(handle, "closeListen", &self.state, move || {
            let mut state = lock(&listener.state);
            let listening = std::mem::replace(&mut *state, Listening::Closed);
            drop(state);
            drop(listening);
            Ok(())
        })
    }
}

/// Ends whose connect was not up when it was given out.
static CONNECTS: Mutex<Vec<Weak<End>>> = Mutex::new(Vec::new());

/// Polls connects that are under way: there are plugins whose accept needs the peer's connect to be
/// polled, and the peer does the same.
fn poll_connects() {
    let mut connects = std::mem::take(&mut *lock(&CONNECTS));
    // A failure is told to who uses the comm.
    connects.retain(|end| end.upgrade().is_some_and(|end| end.is_connecting()));
    lock(&CONNECTS).append(&mut connects);
}

fn connect(dev: usize, handle: Handle128) -> Outcome<Arc<End>> {
    let end = Arc::new(End::connecting(plugin()?.connect(dev, handle)?));
    if !end.wait_connect(FIRST_POLLS)? {
        lock(&CONNECTS).push(Arc::downgrade(&end));
    }
    Ok(end)
}

/// # Safety
/// `handle` is NULL or 128 readable bytes.
unsafe fn read_handle(handle: *const c_void) -> Outcome<Handle128> {
    needed("handle", handle)?;
    // SAFETY: by the caller's promise.
    Ok(Handle128(unsafe {
        handle.cast::<[u8; HANDLE_BYTES]>().read_unaligned()
    }))
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
        needed("handle", handle)?;
        needed("listen_comm", listen_comm)?;
        let (bytes, listen) = plugin()?.listen(device(dev)?)?;
        let listener = Listener {
            state: Mutex::new(Listening::Waiting(listen)),
            close: Close::default(),
        };
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe {
            handle.cast::<[u8; HANDLE_BYTES]>().write_unaligned(bytes.0);
            handles::enter(Object::Listen(Arc::new(listener)), listen_comm)
        }
    })
}

/// Connects to a peer that listens, and gives a comm: one call is enough, before the peer accepts
/// or after. A plugin that needs longer than a moment goes on connecting while this program accepts
/// and registers memory: tcpx_reg_mr waits for it, and returns its error if there is one. NCCL
/// polls connects without an end; here each wait has one.
///
/// Closing the comm gives a connect up that is not done. Plugins have no call for that: what they
/// hold for the attempt stays with them.
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
        needed("send_comm", send_comm)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { send_comm.write(std::ptr::null_mut()) };
        // SAFETY: by the caller's promise.
        let handle = unsafe { read_handle(handle) }?;
        let end = connect(device(dev)?, handle)?;
        // SAFETY: `send_comm` is not NULL, and the caller lets us write there.
        unsafe {
            handles::enter(Object::Send(end), send_comm)?;
            answer(send_dev_handle, std::ptr::null_mut());
        }
        Ok(())
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
        needed("recv_comm", recv_comm)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { recv_comm.write(std::ptr::null_mut()) };
        let (_, listener) = handles::listener(listen_comm)?;
        poll_connects();
        let Some(comm) = listener.accept()? else {
            return Ok(());
        };
        let end = Arc::new(End::receiving(comm)?);
        let device = end.device()?;
        // SAFETY: `recv_comm` is not NULL, and the caller lets us write there.
        unsafe {
            handles::enter(Object::Recv(end), recv_comm)?;
            answer(recv_dev_handle, device.cast());
        }
        Ok(())
    })
}

/// Closes a send comm: its requests and registrations end with it, done or not. The peer may not
/// have received what is in flight, nor what is done; ask it before you close.
///
/// A plugin that does not come back from it is waited for 5 seconds, then TCPX_TIMEOUT: the comm
/// can only be closed any more, the memory registered on it must stay, and this call waits again.
/// The same holds for the other closes.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_close_send(send_comm: *mut tcpx_send_comm) -> c_int {
    guard("tcpx_close_send", || {
        let (handle, end) = handles::sender(send_comm)?;
        end.close("deregMr or closeSend", handle)
    })
}

/// Closes a receive comm: its requests, registrations, descriptors and its pool end with it.
/// Whatever unpacks on a GPU must have ended. Plugins take no memory back from a comm that is
/// closed with requests in flight: what they hold for its registrations then stays with them.
///
/// # Safety
/// Nobody uses the comm's pool, descriptors or device handle any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_close_recv(recv_comm: *mut tcpx_recv_comm) -> c_int {
    guard("tcpx_close_recv", || {
        let (handle, end) = handles::receiver(recv_comm)?;
        end.close("deregMr or closeRecv", handle)
    })
}

/// Closes a listen comm, accepted or not.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_close_listen(listen_comm: *mut tcpx_listen_comm) -> c_int {
    guard("tcpx_close_listen", || {
        let (handle, listener) = handles::listener(listen_comm)?;
        listener.close(handle)
    })
}

//! C entries for start, properties, connection set-up and close.
//!
//! Safety of every entry here and in the sibling modules: the host keeps the promises of the
//! ncclNet ABI (non-NULL pointers are good, a comm is not used after its close).

use std::ffi::{c_int, c_void};

use super::cell::PluginCell;
use super::comm::{CommBox, CommKind, checked_ptr};
use super::error::NetError;
use super::host_logger::HostLogger;
use super::traits::{Exported, NetConnect, NetListen, PeerHandle};
use crate::constants::{HANDLE_BYTES, NET_DEVICE_HOST};
use crate::device::RawDeviceHandle;
use crate::properties::{Properties, StaticStrings};
use crate::raw_properties::RawProperties;
use crate::result::RawResult;
use crate::tables::{CommConfig, LoggerFn, NetAttr, ProfilerFn};

/// Writes through an out pointer of the host.
///
/// # Safety
/// `out` is NULL or writable.
pub(super) unsafe fn write_out<T>(
    out: *mut T,
    value: T,
    what: &'static str,
) -> Result<(), NetError> {
    let out = checked_ptr::<T>(out.cast(), what)?;
    // SAFETY: non-NULL, aligned, and writable by the host's promise.
    unsafe { out.write(value) };
    Ok(())
}

/// Entries of other versions: which one they hand on to, and what of their arguments.
macro_rules! forwards {
    ($($entry:ident($($argument:ident: $kind:ty),*) => $to:ident($($passed:expr),*);)*) => {$(
        pub(crate) unsafe extern "C" fn $entry<P: Exported>($($argument: $kind),*) -> RawResult {
            // SAFETY: forwarded.
            unsafe { $to::<P>($($passed),*) }
        }
    )*};
}
pub(super) use forwards;

pub(super) type Void = *mut c_void;
pub(super) type VoidOut = *mut *mut c_void;
type DeviceOut = *mut *mut RawDeviceHandle;

forwards! {
    init_v10(logger: Option<LoggerFn>, _profiler: Option<ProfilerFn>) => init_v5(logger);
    listen_v11(_context: Void, dev: c_int, handle: Void, comm: VoidOut) => listen_v5(dev, handle, comm);
    connect_v7(dev: c_int, handle: Void, comm: VoidOut, _device: DeviceOut) => connect_v5(dev, handle, comm);
    connect_v10(dev: c_int, _config: *mut CommConfig, handle: Void, comm: VoidOut, _device: DeviceOut)
        => connect_v5(dev, handle, comm);
    connect_v11(_context: Void, dev: c_int, handle: Void, comm: VoidOut, _device: DeviceOut)
        => connect_v5(dev, handle, comm);
    // NULL asks for no device handle.
    accept_v5(listen_comm: Void, comm: VoidOut) => accept_v7(listen_comm, comm, std::ptr::null_mut());
}

fn device_index<P: Exported>(plugin: &P, dev: c_int) -> Result<usize, NetError> {
    let count = plugin.devices()?;
    usize::try_from(dev)
        .ok()
        .filter(|dev| *dev < count)
        .ok_or_else(|| {
            NetError::invalid_argument(format!("device {dev} does not exist: there are {count}"))
        })
}

pub(crate) unsafe extern "C" fn init_v5<P: Exported>(logger: Option<LoggerFn>) -> RawResult {
    let cell = P::cell();
    cell.guard("init", || {
        // SAFETY: the host passes its logger, which lives as long as the process.
        cell.start(unsafe { HostLogger::new(logger) })
    })
}

pub(crate) unsafe extern "C" fn init_v11<P: Exported>(
    context: *mut *mut c_void,
    _comm_id: u64,
    _config: *mut CommConfig,
    logger: Option<LoggerFn>,
    _profiler: Option<ProfilerFn>,
) -> RawResult {
    let cell = P::cell();
    cell.guard("init", || {
        // SAFETY: as in `init_v5`.
        cell.start(unsafe { HostLogger::new(logger) })?;
        // One plugin serves every communicator, so its cell is everybody's context.
        let shared: *const PluginCell<P> = cell;
        // SAFETY: an out pointer of the host.
        unsafe { write_out(context, shared.cast_mut().cast(), "context") }
    })
}

pub(crate) unsafe extern "C" fn finalize(_context: *mut c_void) -> RawResult {
    0
}

pub(crate) unsafe extern "C" fn set_net_attr(
    _context: *mut c_void,
    _attributes: *mut NetAttr,
) -> RawResult {
    0
}

pub(crate) unsafe extern "C" fn devices<P: Exported>(count: *mut c_int) -> RawResult {
    let cell = P::cell();
    cell.guard("devices", || {
        let found = c_int::try_from(cell.plugin()?.devices()?)
            .map_err(|_| NetError::internal("more devices than an int holds"))?;
        // SAFETY: an out pointer of the host.
        unsafe { write_out(count, found, "device count") }
    })
}

fn load_properties<P: Exported>(dev: c_int) -> Result<(Properties, StaticStrings), NetError> {
    let cell = P::cell();
    let plugin = cell.plugin()?;
    let properties = plugin.properties(device_index(plugin, dev)?)?;
    let strings = StaticStrings {
        name: cell.intern(&properties.name)?,
        pci_path: match &properties.pci_path {
            Some(path) => Some(cell.intern(path)?),
            None => None,
        },
    };
    Ok((properties, strings))
}

pub(crate) unsafe extern "C" fn get_properties<P: Exported, R: RawProperties>(
    dev: c_int,
    out: *mut R,
) -> RawResult {
    P::cell().guard("getProperties", || {
        let (properties, strings) = load_properties::<P>(dev)?;
        // SAFETY: an out pointer of the host.
        unsafe { write_out(out, properties.to_raw::<R>(dev, strings), "properties") }
    })
}

pub(crate) unsafe extern "C" fn listen_v5<P: Exported>(
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> RawResult {
    let cell = P::cell();
    cell.guard("listen", || {
        // SAFETY: out pointers of the host; a handle is 128 bytes.
        unsafe { write_out(listen_comm, std::ptr::null_mut(), "listen comm") }?;
        let handle = checked_ptr::<[u8; HANDLE_BYTES]>(handle, "handle")?;
        let plugin = cell.plugin()?;
        let (peer, listener) = plugin.listen(device_index(plugin, dev)?)?;
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..PeerHandle::BYTES].copy_from_slice(&peer.0);
        let comm = CommBox::<P>::into_raw(CommKind::Listen(listener));
        // SAFETY: as above.
        unsafe {
            handle.write(bytes);
            write_out(listen_comm, comm, "listen comm")
        }
    })
}

pub(crate) unsafe extern "C" fn connect_v5<P: Exported>(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
) -> RawResult {
    let cell = P::cell();
    cell.guard("connect", || {
        // SAFETY: out pointers of the host; a handle is 128 bytes, writable, and the same buffer
        // comes back on every poll.
        unsafe { write_out(send_comm, std::ptr::null_mut(), "send comm") }?;
        let handle = checked_ptr::<[u8; HANDLE_BYTES]>(handle, "handle")?;
        // SAFETY: as above.
        let mut bytes = unsafe { handle.read() };
        let (peer, state) = bytes.split_at_mut(PeerHandle::BYTES);
        let mut token_bytes = [0; 8];
        token_bytes.copy_from_slice(&state[..8]);
        let token = u64::from_ne_bytes(token_bytes);

        let plugin = cell.plugin()?;
        let (token, mut connect) = if token == 0 {
            let mut peer_bytes = [0; PeerHandle::BYTES];
            peer_bytes.copy_from_slice(peer);
            let dev = device_index(plugin, dev)?;
            (None, plugin.connect(dev, &PeerHandle(peer_bytes))?)
        } else {
            let connect = cell.take_connect(token).ok_or_else(|| {
                NetError::invalid_argument(
                    "the handle names no connect under way: pass a fresh copy of the peer's handle",
                )
            })?;
            (Some(token), connect)
        };
        // An error or a panic ends the connect: it is out of the table by now.
        let next = match connect.poll()? {
            Some(comm) => {
                let comm = CommBox::<P>::into_raw(CommKind::Send(comm));
                // SAFETY: an out pointer of the host.
                unsafe { write_out(send_comm, comm, "send comm") }?;
                0
            }
            None => cell.keep_connect(token, connect)?,
        };
        state[..8].copy_from_slice(&next.to_ne_bytes());
        // SAFETY: as above.
        unsafe { handle.write(bytes) };
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn accept_v7<P: Exported>(
    listen_comm: *mut c_void,
    recv_comm: *mut *mut c_void,
    device: *mut *mut RawDeviceHandle,
) -> RawResult {
    P::cell().guard("accept", || {
        // SAFETY: out pointers of the host; the inner device pointer may be NULL.
        let device = unsafe {
            write_out(recv_comm, std::ptr::null_mut(), "receive comm")?;
            device.as_ref().and_then(|inner| inner.as_mut())
        };
        // SAFETY: the host passes a listen comm of ours.
        let listener = unsafe { CommBox::<P>::from_ptr(listen_comm) }?.listener()?;
        let Some(receiver) = listener.accept()? else {
            return Ok(());
        };
        // Receives lie where they were posted, whatever the host asked for.
        if let Some(device) = device {
            *device = RawDeviceHandle::request(NET_DEVICE_HOST, 0);
        }
        let comm = CommBox::<P>::into_raw(CommKind::Recv(receiver));
        // SAFETY: an out pointer of the host.
        unsafe { write_out(recv_comm, comm, "receive comm") }
    })
}

macro_rules! closes {
    ($($entry:ident: $call:literal, $of:ident;)*) => {$(
        pub(crate) unsafe extern "C" fn $entry<P: Exported>(comm: *mut c_void) -> RawResult {
            P::cell().guard($call, || {
                // SAFETY: the host passes a comm of ours and does not use it again.
                let comm = unsafe { CommBox::<P>::close(comm, |comm| comm.$of().map(|_| ())) }?;
                comm.map_or(Ok(()), |comm| comm.kind.close())
            })
        }
    )*};
}

closes! {
    close_send: "closeSend", sender;
    close_recv: "closeRecv", receiver;
    close_listen: "closeListen", listener;
}

//! Export and host side against each other: one plugin in memory, driven through the table of
//! every version.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};

use crate::adapt::Calls;
use crate::export::{
    Accepted, Buffer, Exported, HostLogger, MemoryRegion, NetComm, NetConnect, NetError, NetListen,
    NetPlugin, NetRecv, NetSend, PeerHandle, PluginCell, RequestId, table_v5, table_v6, table_v7,
    table_v8, table_v9, table_v10, table_v11, table_v12,
};
use crate::library::Found;
use crate::{
    AbiVersion, CallError, DeviceOffload, Handle128, HostError, LoadOptions, MemoryType, Plugin,
    PointerSupport, PostOutcome, Properties, RecvComm, ResultCode, SendComm,
};

/// Messages of one connection.
type Pipe = Arc<Mutex<VecDeque<Vec<u8>>>>;

static LISTENERS: Mutex<BTreeMap<u64, Option<Pipe>>> = Mutex::new(BTreeMap::new());
static CELL: PluginCell<Loopback> = PluginCell::new();
const REQUESTS: u32 = 4;
const TAG_THAT_PANICS: i32 = 666;

struct Loopback;
struct Listener(u64);
struct Connect {
    id: u64,
    polls: u32,
}
struct Sender {
    pipe: Pipe,
    posted: Mutex<(u32, u32)>,
}
struct Receiver {
    pipe: Pipe,
    /// Next id, and the receives in flight: where each goes.
    posted: Mutex<(u32, VecDeque<Buffer>)>,
}

impl Exported for Loopback {
    fn cell() -> &'static PluginCell<Self> {
        &CELL
    }
}

impl NetPlugin for Loopback {
    const NAME: &'static CStr = c"loopback";
    type Memory = MemoryRegion;
    type Listen = Listener;
    type Connect = Connect;
    type Send = Sender;
    type Recv = Receiver;

    fn init(_logger: HostLogger) -> Result<Self, NetError> {
        Ok(Self)
    }
    fn devices(&self) -> Result<usize, NetError> {
        Ok(2)
    }
    fn properties(&self, dev: usize) -> Result<Properties, NetError> {
        Ok(Properties {
            name: format!("mem{dev}"),
            pci_path: (dev == 1).then(|| "/sys/devices/x".to_owned()),
            guid: 77,
            pointer_support: PointerSupport::HOST,
            speed_mbps: 12_345,
            latency_us: 1.5,
            max_comms: 9,
            max_recvs: 1,
            rail_id: Some(3),
            max_p2p_bytes: Some(1 << 40),
            ..Properties::default()
        })
    }
    fn listen(&self, _dev: usize) -> Result<(PeerHandle, Listener), NetError> {
        let mut listeners = LISTENERS.lock().unwrap();
        let id = listeners.len() as u64 + 1;
        listeners.insert(id, None);
        let mut bytes = [0xA5; PeerHandle::BYTES];
        bytes[..8].copy_from_slice(&id.to_ne_bytes());
        Ok((PeerHandle(bytes), Listener(id)))
    }
    fn connect(&self, _dev: usize, handle: &PeerHandle) -> Result<Connect, NetError> {
        assert_eq!(handle.0[8..], [0xA5; PeerHandle::BYTES - 8]);
        let id = u64::from_ne_bytes(handle.0[..8].try_into().unwrap());
        Ok(Connect { id, polls: 0 })
    }
}

impl NetListen for Listener {
    type Recv = Receiver;
    fn accept(&self, device_queue: bool) -> Result<Option<Accepted<Receiver>>, NetError> {
        assert!(!device_queue, "properties offer none");
        let pipe = LISTENERS.lock().unwrap().get(&self.0).cloned().flatten();
        Ok(pipe.map(|pipe| Accepted {
            comm: Receiver {
                pipe,
                posted: Mutex::default(),
            },
            device_queue: None,
        }))
    }
}

impl NetConnect for Connect {
    type Send = Sender;
    fn poll(&mut self) -> Result<Option<Sender>, NetError> {
        self.polls += 1;
        if self.polls < 3 {
            return Ok(None);
        }
        let mut listeners = LISTENERS.lock().unwrap();
        let slot = listeners
            .get_mut(&self.id)
            .ok_or_else(|| NetError::remote("nobody listens there"))?;
        let pipe = Pipe::default();
        *slot = Some(pipe.clone());
        Ok(Some(Sender {
            pipe,
            posted: Mutex::default(),
        }))
    }
}

fn register(region: MemoryRegion) -> Result<MemoryRegion, NetError> {
    if region.cuda {
        return Err(NetError::internal("host memory only"));
    }
    Ok(region)
}

impl NetComm for Sender {
    type Memory = MemoryRegion;
    fn register(&self, region: MemoryRegion) -> Result<MemoryRegion, NetError> {
        register(region)
    }
    fn test(&self, request: RequestId) -> Result<Option<usize>, NetError> {
        let mut posted = self.posted.lock().unwrap();
        assert!(posted.1 > 0 && request.0 < REQUESTS);
        posted.1 -= 1;
        Ok(Some(0))
    }
}

impl NetSend for Sender {
    fn isend(
        &self,
        buffer: Buffer,
        tag: i32,
        memory: &MemoryRegion,
    ) -> Result<Option<RequestId>, NetError> {
        assert_ne!(tag, TAG_THAT_PANICS, "asked to");
        assert!(buffer.data >= memory.data);
        let mut posted = self.posted.lock().unwrap();
        if posted.1 == REQUESTS {
            return Ok(None);
        }
        // SAFETY: the host vouches for the buffer.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.data, buffer.len) };
        self.pipe.lock().unwrap().push_back(bytes.to_vec());
        let id = posted.0 % REQUESTS;
        posted.0 += 1;
        posted.1 += 1;
        Ok(Some(RequestId(id)))
    }
}

impl NetComm for Receiver {
    type Memory = MemoryRegion;
    fn register(&self, region: MemoryRegion) -> Result<MemoryRegion, NetError> {
        register(region)
    }
    fn test(&self, _request: RequestId) -> Result<Option<usize>, NetError> {
        let mut posted = self.posted.lock().unwrap();
        let Some(message) = self.pipe.lock().unwrap().pop_front() else {
            return Ok(None);
        };
        let buffer = posted.1.pop_front().unwrap();
        if message.len() > buffer.len {
            return Err(NetError::invalid_usage("the message is larger"));
        }
        // SAFETY: the host vouches for the buffer; the length was checked.
        unsafe { ptr::copy_nonoverlapping(message.as_ptr(), buffer.data, message.len()) };
        Ok(Some(message.len()))
    }
}

impl NetRecv for Receiver {
    fn irecv(
        &self,
        buffer: Buffer,
        _tag: i32,
        _memory: &MemoryRegion,
    ) -> Result<Option<RequestId>, NetError> {
        let mut posted = self.posted.lock().unwrap();
        if posted.1.len() as u32 == REQUESTS {
            return Ok(None);
        }
        let id = posted.0 % REQUESTS;
        posted.0 += 1;
        posted.1.push_back(buffer);
        Ok(Some(RequestId(id)))
    }
}

/// The plugin behind the table of one version, as if it had been loaded from a file.
fn plugin(version: AbiVersion) -> Plugin {
    let calls = match version {
        AbiVersion::V5 => Calls::from_v5(&table_v5::<Loopback>()),
        AbiVersion::V6 => Calls::from_v6(&table_v6::<Loopback>()),
        AbiVersion::V7 => Calls::from_v7(&table_v7::<Loopback>()),
        AbiVersion::V8 => Calls::from_v8(&table_v8::<Loopback>()),
        AbiVersion::V9 => Calls::from_v9(&table_v9::<Loopback>()),
        AbiVersion::V10 => Calls::from_v10(&table_v10::<Loopback>()),
        AbiVersion::V11 => Calls::from_v11(&table_v11::<Loopback>()),
        AbiVersion::V12 => Calls::from_v12(&table_v12::<Loopback>()),
    };
    // Made-up addresses: each stands for a table of its own.
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(1);
    let found = Found {
        version,
        calls: calls.unwrap(),
        address: NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
    };
    Plugin::from_found(found, LoadOptions::new("in memory"))
}

fn pair(plugin: &Plugin) -> (SendComm, RecvComm) {
    let (handle, listener) = plugin.listen(0).unwrap();
    let mut connecting = plugin.connect(1, handle).unwrap();
    let mut accepting = listener.accept();
    assert!(accepting.poll().unwrap().is_none());
    assert!(connecting.poll().unwrap().is_none());
    assert!(connecting.poll().unwrap().is_none());
    let sender = connecting.poll().unwrap().unwrap();
    assert_eq!(connecting.poll().unwrap_err(), HostError::SetupEnded);
    let receiver = accepting.poll().unwrap().unwrap();
    assert_eq!(accepting.poll().unwrap_err(), HostError::SetupEnded);
    (sender, receiver)
}

#[test]
fn every_version_carries_properties_connections_and_data() {
    for version in AbiVersion::ALL {
        let plugin = plugin(version);
        assert_eq!(plugin.devices().unwrap_err(), HostError::NotInitialised);
        plugin.init().unwrap();
        assert_eq!(plugin.init().unwrap_err(), HostError::AlreadyInitialised);
        assert_eq!((plugin.name(), plugin.devices().unwrap()), ("loopback", 2));

        let properties = plugin.properties(1).unwrap();
        assert_eq!(properties.name, "mem1");
        assert_eq!(properties.pci_path.as_deref(), Some("/sys/devices/x"));
        assert_eq!(plugin.properties(0).unwrap().pci_path, None);
        assert_eq!((properties.guid, properties.speed_mbps), (77, 12_345));
        assert_eq!((properties.latency_us, properties.max_comms), (1.5, 9));
        assert_eq!(properties.offload, DeviceOffload::None);
        let since = |first: AbiVersion| version >= first;
        assert_eq!(properties.reg_is_global.is_some(), since(AbiVersion::V8));
        assert_eq!(
            properties.max_p2p_bytes,
            since(AbiVersion::V9).then_some(1 << 40)
        );
        assert_eq!(
            properties.virtual_devices,
            since(AbiVersion::V9).then(|| vec![1])
        );
        assert_eq!(properties.rail_id, since(AbiVersion::V12).then_some(3));
        assert_eq!(
            plugin.properties(2).unwrap_err(),
            HostError::NoSuchDevice { dev: 2, count: 2 }
        );

        let (mut sender, mut receiver) = pair(&plugin);
        assert_eq!(receiver.device_handle(), None);
        let mut source: Vec<u8> = (0..1000_u32).map(|n| (n % 251) as u8).collect();
        let mut target = vec![0_u8; 4000];
        // SAFETY: both vectors outlive the comms.
        let (from, to) = unsafe {
            (
                sender
                    .register(source.as_mut_ptr(), source.len(), MemoryType::Host)
                    .unwrap(),
                receiver
                    .register(target.as_mut_ptr(), target.len(), MemoryType::Host)
                    .unwrap(),
            )
        };
        for n in 0..4 {
            let outcome = sender.isend(&from, n, 1000 - n, 1).unwrap();
            assert!(matches!(outcome, PostOutcome::Posted(ticket) if ticket.0 == n as u64));
            let outcome = receiver.irecv(&to, n * 1000, 1000, 1).unwrap();
            assert!(matches!(outcome, PostOutcome::Posted(_)));
        }
        // The plugin holds four, and says "not now" with a NULL request.
        assert_eq!(sender.isend(&from, 0, 1, 1).unwrap(), PostOutcome::Full);
        assert_eq!(receiver.irecv(&to, 0, 1, 1).unwrap(), PostOutcome::Full);
        for n in 0..4 {
            let done = receiver.test_head().unwrap().unwrap();
            assert_eq!((done.ticket.0, done.bytes), (n as u64, Some(1000 - n)));
            assert!(sender.test_head().unwrap().is_some());
        }
        assert_eq!(receiver.test_head().unwrap(), None);
        // A registration ends before its comm or with it, whichever the host chooses.
        drop(from);
        receiver.close().unwrap();
        drop(to);
        drop(sender);
        for n in 0..4 {
            assert_eq!(target[n * 1000..n * 1000 + 1000 - n], source[n..]);
        }
    }
}

#[test]
fn misuse_is_refused_before_it_reaches_the_plugin() {
    let plugin = plugin(AbiVersion::V7);
    plugin.init().unwrap();
    let (mut sender, mut receiver) = pair(&plugin);
    let mut bytes = vec![0_u8; 64];
    // SAFETY: the vector outlives the comms.
    let (from, to) = unsafe {
        (
            sender
                .register(bytes.as_mut_ptr(), 64, MemoryType::Host)
                .unwrap(),
            receiver
                .register(bytes.as_mut_ptr(), 64, MemoryType::Host)
                .unwrap(),
        )
    };
    assert_eq!(
        sender.isend(&to, 0, 1, 0).unwrap_err(),
        HostError::ForeignMemory
    );
    for (offset, len) in [(0, 65), (64, 1), (usize::MAX, 2)] {
        assert!(matches!(
            sender.isend(&from, offset, len, 0).unwrap_err(),
            HostError::OutOfRange { registered: 64, .. }
        ));
    }
    assert!(matches!(
        receiver.irecv(&to, 0, usize::MAX, 0).unwrap_err(),
        HostError::TooLarge { .. }
    ));
    sender.set_max_in_flight(0);
    let first = sender.isend(&from, 64, 0, 0).unwrap();
    assert!(matches!(first, PostOutcome::Posted(_)));
    assert_eq!(sender.isend(&from, 0, 1, 0).unwrap(), PostOutcome::Full);
    // SAFETY: never accessed: the plugin refuses the kind.
    let error = unsafe { receiver.register(bytes.as_mut_ptr(), 64, MemoryType::Cuda) };
    let HostError::Call(CallError { call, rc, hint }) = error.unwrap_err() else {
        panic!("expected the plugin's refusal");
    };
    assert_eq!((call, rc), ("regMr", ResultCode::InternalError));
    assert!(hint.contains("4096"));
}

#[test]
fn a_handle_of_a_peer_never_reaches_another_connect() {
    let plugin = plugin(AbiVersion::V8);
    plugin.init().unwrap();
    let mut hostile = [0xFF; 128];
    hostile[..8].copy_from_slice(&1_u64.to_ne_bytes());
    let mut connecting = plugin.connect(0, Handle128(hostile)).unwrap();
    let HostError::Call(error) = connecting.poll().unwrap_err() else {
        panic!("expected the plugin's refusal");
    };
    assert_eq!(error.rc, ResultCode::InvalidArgument);
}

#[test]
fn a_panic_in_the_plugin_becomes_an_internal_error_and_the_comm_goes_on() {
    let plugin = plugin(AbiVersion::V9);
    plugin.init().unwrap();
    let (mut sender, _receiver) = pair(&plugin);
    let mut bytes = vec![0_u8; 8];
    // SAFETY: the vector outlives the comm.
    let memory = unsafe { sender.register(bytes.as_mut_ptr(), 8, MemoryType::Host) }.unwrap();
    let HostError::Call(error) = sender.isend(&memory, 0, 8, TAG_THAT_PANICS).unwrap_err() else {
        panic!("expected an error of the call");
    };
    assert_eq!(error.rc, ResultCode::InternalError);
    assert!(matches!(
        sender.isend(&memory, 0, 8, 1).unwrap(),
        PostOutcome::Posted(_)
    ));
}

#[test]
fn null_and_foreign_pointers_of_a_host_are_answered_not_followed() {
    let table = table_v7::<Loopback>();
    let invalid = ResultCode::InvalidArgument.to_raw();
    let mut foreign = [0_u64; 64];
    let foreign: *mut c_void = foreign.as_mut_ptr().cast();
    let mut out = ptr::null_mut();
    let (mut done, mut size) = (7, 7);
    // SAFETY: NULL, or readable memory that is no comm and no request: what the checks are for.
    unsafe {
        assert_eq!(table.init.unwrap()(None), 0);
        assert_eq!(table.init.unwrap()(None), 0);
        assert_eq!(table.devices.unwrap()(ptr::null_mut()), invalid);
        assert_eq!(table.get_properties.unwrap()(-1, ptr::null_mut()), invalid);
        assert_eq!(table.get_properties.unwrap()(0, ptr::null_mut()), invalid);
        assert_eq!(
            table.listen.unwrap()(0, ptr::null_mut(), &raw mut out),
            invalid
        );
        assert_eq!(table.listen.unwrap()(0, foreign, ptr::null_mut()), invalid);
        for comm in [ptr::null_mut(), foreign] {
            out = ptr::without_provenance_mut(1);
            let rc = table.isend.unwrap()(comm, ptr::null_mut(), 0, 0, foreign, &raw mut out);
            assert_eq!((rc, out), (invalid, ptr::null_mut()));
            assert_eq!(table.close_send.unwrap()(comm), invalid);
            assert_eq!(table.dereg_mr.unwrap()(comm, foreign), invalid);
            let rc = table.accept.unwrap()(comm, &raw mut out, ptr::null_mut());
            assert_eq!(rc, invalid);
            let rc = table.test.unwrap()(comm, &raw mut done, &raw mut size);
            assert_eq!((rc, done, size), (invalid, 0, 7));
        }
        assert!(table.irecv_consumed.is_none() && table.get_device_mr.is_none());
    }
}

#[test]
fn comms_can_move_to_other_threads() {
    fn sendable<T: Send>() {}
    fn shareable<T: Send + Sync>() {}
    sendable::<SendComm>();
    sendable::<RecvComm>();
    sendable::<crate::Connecting>();
    sendable::<crate::Accepting>();
    shareable::<Plugin>();
    shareable::<crate::MemoryHandle>();
}

//! A plugin in memory, for tests: exported, then driven through the table of any version.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::CStr;
use std::ptr;
use std::sync::{Arc, Mutex};

use crate::adapt::Start;
use crate::export::{
    Buffer, Exported, HostLogger, MemoryRegion, NetComm, NetConnect, NetError, NetListen,
    NetPlugin, NetRecv, NetSend, PeerHandle, PluginCell, RequestId,
};
use crate::library::Found;
use crate::tables;
use crate::{
    AbiVersion, DeviceOffload, LoadOptions, Plugin, PointerSupport, Properties, ResultCode,
};

/// Messages of one connection.
type Pipe = Arc<Mutex<VecDeque<Vec<u8>>>>;

static LISTENERS: Mutex<BTreeMap<u64, Option<Pipe>>> = Mutex::new(BTreeMap::new());
static CELL: PluginCell<Loopback> = PluginCell::new();
const REQUESTS: u32 = 4;
pub(crate) const TAG_THAT_PANICS: i32 = 666;

pub(crate) struct Loopback;
pub(crate) struct Listener(u64);
pub(crate) struct Connect {
    id: u64,
    polls: u32,
}
pub(crate) struct Sender {
    pipe: Pipe,
    posted: Mutex<(u32, u32)>,
}
pub(crate) struct Receiver {
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
            offload: DeviceOffload::None,
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
    fn accept(&self) -> Result<Option<Receiver>, NetError> {
        let pipe = LISTENERS.lock().unwrap().get(&self.0).cloned().flatten();
        Ok(pipe.map(|pipe| Receiver {
            pipe,
            posted: Mutex::default(),
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
            .ok_or_else(|| NetError::new(ResultCode::RemoteError, "nobody listens there"))?;
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
pub(crate) fn plugin(version: AbiVersion) -> Plugin {
    load::<Loopback>(version, LoadOptions::new("in memory"))
}

pub(crate) fn load<P: Exported>(version: AbiVersion, options: LoadOptions) -> Plugin {
    let address = tables::exported::<P>(version);
    // SAFETY: the table was made above.
    let start = unsafe { Start::read(version, address) }.unwrap();
    let found = Found {
        version,
        start,
        address,
    };
    Plugin::from_found(found, options)
}

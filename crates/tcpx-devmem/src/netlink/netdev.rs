//! The family `netdev`: binding memory to queues, and what is bound.

use super::Request;

use super::client::{CallError, Client};
use crate::error::DevmemError;
use crate::kernel::Kernel;

const QUEUE_GET: u8 = 10;
const BIND_RX: u8 = 13;
const BIND_TX: u8 = 15;

const DMABUF_IFINDEX: u16 = 1;
const DMABUF_QUEUES: u16 = 2;
const DMABUF_FD: u16 = 3;
const DMABUF_ID: u16 = 4;

const QUEUE_ID: u16 = 1;
const QUEUE_IFINDEX: u16 = 2;
const QUEUE_TYPE: u16 = 3;
const QUEUE_DMABUF: u16 = 5;
const QUEUE_IO_URING: u16 = 6;
const QUEUE_XSK: u16 = 7;

/// The type of receive queues.
const RECEIVE: u32 = 0;

/// Who uses a receive queue besides the kernel itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueUse {
    /// Nobody.
    Free,
    /// Memory with this number is bound to it.
    DmaBuf(u32),
    /// An io_uring receives from it.
    IoUring,
    /// An AF_XDP socket has it.
    AfXdp,
}

/// A socket of the family, and what this kernel can do with it.
#[derive(Debug)]
pub(crate) struct Netdev {
    client: Client,
    family: u16,
    operations: Vec<u32>,
}

impl Netdev {
    pub(crate) fn open(kernel: &dyn Kernel) -> Result<Self, DevmemError> {
        let mut client = Client::open(kernel)?;
        let family = client.family("netdev")?;
        Ok(Self {
            client,
            family: family.id,
            operations: family.operations,
        })
    }

    /// Whether this kernel has the command for receiving into device memory.
    pub(crate) fn can_bind_receive(&self) -> bool {
        self.operations.contains(&BIND_RX.into())
    }

    /// Whether this kernel has the command for sending from device memory.
    pub(crate) fn can_bind_send(&self) -> bool {
        self.operations.contains(&BIND_TX.into())
    }

    /// Binds memory to a receive queue; the answer is the kernel's number for the memory. The
    /// binding lives as long as this socket.
    pub(crate) fn bind_receive(
        &mut self,
        ifindex: u32,
        queue: u32,
        fd: u32,
    ) -> Result<u32, CallError> {
        let request = Request::new(self.family, BIND_RX)
            .u32(DMABUF_IFINDEX, ifindex)
            .nested(DMABUF_QUEUES, |inside| {
                inside.u32(QUEUE_ID, queue).u32(QUEUE_TYPE, RECEIVE)
            })
            .u32(DMABUF_FD, fd);
        self.bind(&request)
    }

    /// Binds memory for sending.
    pub(crate) fn bind_send(&mut self, ifindex: u32, fd: u32) -> Result<u32, CallError> {
        let request = Request::new(self.family, BIND_TX)
            .u32(DMABUF_IFINDEX, ifindex)
            .u32(DMABUF_FD, fd);
        self.bind(&request)
    }

    fn bind(&mut self, request: &Request) -> Result<u32, CallError> {
        let mut id = None;
        self.client
            .send_request(request, self.family, |attribute| {
                if attribute.kind == DMABUF_ID {
                    id = Some(attribute.u32()?);
                }
                Ok(())
            })?;
        id.ok_or_else(|| CallError::missing("a number for the bound memory"))
    }

    /// Who uses a receive queue.
    pub(crate) fn queue_use(&mut self, ifindex: u32, queue: u32) -> Result<QueueUse, CallError> {
        let request = Request::new(self.family, QUEUE_GET)
            .u32(QUEUE_IFINDEX, ifindex)
            .u32(QUEUE_TYPE, RECEIVE)
            .u32(QUEUE_ID, queue);
        let mut used = QueueUse::Free;
        self.client
            .send_request(&request, self.family, |attribute| {
                match attribute.kind {
                    QUEUE_DMABUF => used = QueueUse::DmaBuf(attribute.u32()?),
                    QUEUE_IO_URING => used = QueueUse::IoUring,
                    QUEUE_XSK => used = QueueUse::AfXdp,
                    _ => {}
                }
                Ok(())
            })?;
        Ok(used)
    }
}

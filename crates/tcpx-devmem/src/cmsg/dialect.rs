//! The numbers in which the two kernels differ.

use tcpx_lanes::control_messages::cmsg_space;

/// Level of the socket's own options and messages.
pub const SOL_SOCKET: i32 = 1;

/// Flag of `recvmsg` that asks for device memory (`MSG_SOCK_DEVMEM`); the same in both dialects.
pub const RECEIVE_FLAG: i32 = 0x0200_0000;

/// Whose kernel describes the receive.
///
/// The mainline numbers are those of `asm-generic/socket.h` and `linux/uio.h` since Linux 6.12,
/// which x86-64 and aarch64 use. Google's are those of the public GPUDirect-TCPX plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Google's kernel: records of 12 bytes, offset u32, size u32, token u32.
    Google,
    /// The mainline kernel: `dmabuf_cmsg` of 24 bytes, offset u64, size u32, token u32,
    /// dma-buf id u32, flags u32.
    Mainline,
}

impl Dialect {
    /// Message type of a fragment in the pool.
    pub const fn device_type(self) -> i32 {
        match self {
            Self::Google => 99,
            Self::Mainline => 79,
        }
    }

    /// Message type of a fragment that was copied to the iovec.
    pub const fn linear_type(self) -> i32 {
        match self {
            Self::Google => 98,
            Self::Mainline => 78,
        }
    }

    /// Bytes of a record, the payload of both message types.
    pub const fn record_bytes(self) -> usize {
        match self {
            Self::Google => 12,
            Self::Mainline => 24,
        }
    }

    /// Option of `setsockopt` that gives tokens back.
    pub const fn return_option(self) -> i32 {
        match self {
            Self::Google => 97,
            Self::Mainline => 80,
        }
    }

    /// Bytes of a control buffer with room for `records` records and nothing else.
    ///
    /// The mainline kernel ends a receive early when the buffer is full, and refuses it with errno
    /// 525 when not one record fits. Options that add messages of their own (timestamps) need
    /// their [`cmsg_space`] on top.
    pub const fn control_bytes(self, records: usize) -> usize {
        cmsg_space(self.record_bytes()).saturating_mul(records)
    }

    /// The dialect that this one may be mistaken for.
    pub(super) const fn other(self) -> Self {
        match self {
            Self::Google => Self::Mainline,
            Self::Mainline => Self::Google,
        }
    }
}

/// What a socket's queue was bound to; every record must agree with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// A pool that Google's daemon lent.
    Google {
        /// Length of the pool in bytes.
        pool_bytes: u64,
    },
    /// A dma-buf that this process bound.
    Mainline {
        /// Length of the dma-buf in bytes.
        pool_bytes: u64,
        /// What the bind answered.
        dmabuf_id: u32,
    },
}

impl Binding {
    /// Whose records to expect.
    pub const fn dialect(self) -> Dialect {
        match self {
            Self::Google { .. } => Dialect::Google,
            Self::Mainline { .. } => Dialect::Mainline,
        }
    }

    /// Length of the pool in bytes.
    pub const fn pool_bytes(self) -> u64 {
        match self {
            Self::Google { pool_bytes } | Self::Mainline { pool_bytes, .. } => pool_bytes,
        }
    }
}

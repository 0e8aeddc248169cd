//! An XDP program and an AF_XDP socket, the smallest that there are: what else may have a queue.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const PROGRAM_LOAD: i32 = 5;
const LINK_CREATE: i32 = 28;
const TYPE_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
const GENERIC: u32 = 1 << 1;

/// `BPF_F_XDP_HAS_FRAGS`.
const HAS_FRAGMENTS: u64 = 1 << 5;

/// What packets a program takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frames {
    /// In one piece.
    Whole,
    /// With fragments too.
    Split,
}

/// A program that passes every packet, attached for as long as this lives.
#[derive(Debug)]
pub(crate) struct Program {
    _program: OwnedFd,
    _link: OwnedFd,
}

impl Program {
    pub(crate) fn attach(ifindex: u32, frames: Frames) -> io::Result<Self> {
        // r0 = 2 (XDP_PASS); exit
        let instructions: [u64; 2] = [0x0000_0002_0000_00b7, 0x95];
        let license = c"GPL";
        let mut load = [0_u64; 16];
        load[0] = u64::from(TYPE_XDP) | (instructions.len() as u64) << 32;
        load[1] = instructions.as_ptr().expose_provenance() as u64;
        load[2] = license.as_ptr().expose_provenance() as u64;
        if frames == Frames::Split {
            load[5] = HAS_FRAGMENTS << 32;
        }
        // SAFETY: the words are those of the union's part for loading; what they point at lives.
        let program = unsafe { bpf(PROGRAM_LOAD, &load) }?;
        let mut link = [0_u64; 16];
        link[0] = u64::from(program.as_raw_fd().cast_unsigned()) | u64::from(ifindex) << 32;
        link[1] = u64::from(ATTACH_XDP) | u64::from(GENERIC) << 32;
        // SAFETY: as above, for a link.
        let link = unsafe { bpf(LINK_CREATE, &link) }?;
        Ok(Self {
            _program: program,
            _link: link,
        })
    }
}

/// # Safety
/// The words must be those of the command, and pointers in them valid.
unsafe fn bpf(command: i32, attributes: &[u64; 16]) -> io::Result<OwnedFd> {
    // SAFETY: as the caller promises; the kernel reads no more than the length given.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            attributes.as_ptr(),
            size_of_val(attributes),
        )
    };
    descriptor(i32::try_from(fd).unwrap_or(-1))
}

fn descriptor(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a success is a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A socket that has a queue, in copy mode.
#[derive(Debug)]
pub(crate) struct Socket {
    _socket: OwnedFd,
    _memory: Vec<u8>,
}

impl Socket {
    pub(crate) fn bind(ifindex: u32, queue: u32) -> io::Result<Self> {
        const FRAMES: usize = 16;
        const FRAME: usize = 4096;
        // SAFETY: a plain system call.
        let socket = descriptor(unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW, 0) })?;
        let memory = vec![0_u8; (FRAMES + 1) * FRAME];
        let start = memory.as_ptr().addr().next_multiple_of(FRAME);
        // SAFETY: all zero is a value of these structures of integers.
        let mut pool: libc::xdp_umem_reg = unsafe { std::mem::zeroed() };
        pool.addr = start as u64;
        pool.len = (FRAMES * FRAME) as u64;
        pool.chunk_size = FRAME as u32;
        let _ = memory.as_ptr().expose_provenance();
        set(&socket, libc::XDP_UMEM_REG, &pool)?;
        for ring in [
            libc::XDP_UMEM_FILL_RING,
            libc::XDP_UMEM_COMPLETION_RING,
            libc::XDP_RX_RING,
        ] {
            set(&socket, ring, &(FRAMES as u32))?;
        }
        let address = libc::sockaddr_xdp {
            sxdp_family: libc::AF_XDP as u16,
            sxdp_flags: libc::XDP_COPY,
            sxdp_ifindex: ifindex,
            sxdp_queue_id: queue,
            sxdp_shared_umem_fd: 0,
        };
        // SAFETY: the address is one of this family, of the length given.
        let answer = unsafe {
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as libc::socklen_t,
            )
        };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            _socket: socket,
            _memory: memory,
        })
    }
}

fn set<T>(socket: &OwnedFd, option: i32, value: &T) -> io::Result<()> {
    // SAFETY: the value is of the length given, and the options are those of this family.
    let answer = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            option,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

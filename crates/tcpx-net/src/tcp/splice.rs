//! Sending pages instead of copies of them.
//!
//! `vmsplice` puts references to a slot's pages into a pipe, and `splice` moves them into the socket, so
//! that the sender copies nothing and the receiver, or the card, reads the slot itself. The price: the
//! slot must stay as it is until the peer has read it, which the kernel does not tell. Only the peer's
//! acknowledgement does, see [`TransmitTable`](super::transmit_table::TransmitTable).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use super::io::{Moved, Part, WIRE_CALL, address, call};

/// A pipe between slots and one socket.
#[derive(Debug)]
pub(super) struct Splice {
    read: OwnedFd,
    write: OwnedFd,
    /// Bytes in the pipe: the first of what is to be sent next.
    loaded: usize,
}

impl Splice {
    pub(super) fn new() -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // A smaller pipe works too, with more calls.
        let _ = fcntl_setpipe_size(&write, WIRE_CALL);
        Ok(Self {
            read,
            write,
            loaded: 0,
        })
    }

    /// Moves bytes of `part` to the socket. Call it with the rest until there is none: what an earlier
    /// call has loaded is the beginning of that rest.
    ///
    /// # Errors
    /// The system refuses. What was not moved can be sent in another way, and this pipe be dropped.
    pub(super) fn send(&mut self, socket: BorrowedFd<'_>, part: Part<'_>) -> io::Result<Moved> {
        if self.loaded == 0 {
            let range = libc::iovec {
                iov_base: address(&part)?.cast(),
                iov_len: part.len.min(WIRE_CALL),
            };
            // SAFETY: the range is live, and the pages stay alive by the references that the pipe takes.
            let loaded = call(|| unsafe {
                libc::vmsplice(
                    self.write.as_raw_fd(),
                    &raw const range,
                    1,
                    libc::SPLICE_F_NONBLOCK,
                )
            })?;
            match loaded {
                Moved::Bytes(bytes) => self.loaded = bytes,
                // An empty pipe has room.
                Moved::WouldBlock | Moved::End => {
                    return Err(io::Error::other("an empty pipe took nothing"));
                }
            }
        }
        let more = if part.len > self.loaded {
            libc::SPLICE_F_MORE
        } else {
            0
        };
        let null = std::ptr::null_mut();
        // SAFETY: both descriptors are open, and no offsets are passed.
        let moved = call(|| unsafe {
            libc::splice(
                self.read.as_raw_fd(),
                null,
                socket.as_raw_fd(),
                null,
                self.loaded,
                libc::SPLICE_F_NONBLOCK | more,
            )
        })?;
        if let Moved::Bytes(bytes) = moved {
            self.loaded = self.loaded.saturating_sub(bytes);
        }
        Ok(moved)
    }
}

/// Keeps a `splice` to a lane that the peer has closed from ending the process: unlike a send, it cannot
/// be told to raise no `SIGPIPE`. For threads of our own.
pub(super) fn ignore_broken_pipes() {
    // SAFETY: the set lives on the stack and is initialised before it is read; only this thread's mask
    // changes.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use tcpx_memory::{PinnedPool, Region};

    use super::*;

    fn send_all(splice: &mut Splice, to: &UnixStream, slice: &tcpx_memory::RegionSlice) -> usize {
        let mut sent = 0;
        while sent < slice.len() {
            let part = Part {
                slice,
                from: sent,
                len: slice.len() - sent,
            };
            match splice.send(to.as_fd(), part).expect("the system splices") {
                Moved::Bytes(bytes) => sent += bytes,
                Moved::WouldBlock | Moved::End => break,
            }
        }
        sent
    }

    #[test]
    fn bytes_arrive_in_order_however_full_the_socket_is() {
        let region = Region::host(PinnedPool::SLOT_BYTES).unwrap();
        let bytes: Vec<u8> = (0..region.len()).map(|at| (at / 7 % 251) as u8).collect();
        region.write_from(0, &bytes).unwrap();
        // An odd start and an odd length.
        let slice = region.slice(3..region.len() - 5).unwrap();
        let (to, mut from) = UnixStream::pair().unwrap();
        to.set_nonblocking(true).unwrap();
        let mut splice = Splice::new().unwrap();
        let (mut sent, mut got) = (0, Vec::new());
        while sent < slice.len() {
            let rest = slice.slice(sent..).unwrap();
            sent += send_all(&mut splice, &to, &rest);
            let mut some = vec![0; 4096];
            let count = from.read(&mut some).unwrap();
            got.extend_from_slice(&some[..count]);
        }
        drop((splice, to));
        from.read_to_end(&mut got).unwrap();
        assert_eq!(got, bytes[3..bytes.len() - 5]);
    }
}

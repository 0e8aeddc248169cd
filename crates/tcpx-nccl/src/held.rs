//! Sockets that a fork's child does not keep.
//!
//! A copy in a child that executes nothing would hold every connection open: the peer of a process
//! that dies, or closes, would wait for an end that never comes. So the child's copies are replaced
//! by `/dev/null` before it runs, which keeps the numbers taken and harmless.

use std::borrow::Borrow;
use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

use nccl_net::export::fork;

/// Descriptors that are followed; the few above (the usual limit is the same) stay with a child.
const MOST: usize = 1 << 20;
/// A bit for each descriptor of ours.
static OURS: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];
/// Words of `OURS` that were ever used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// What takes the place of a socket.
static NOTHING: AtomicI32 = AtomicI32::new(-1);

/// A connection of this process.
pub(crate) type Stream = Held<TcpStream>;
/// A listening socket of this process.
pub(crate) type Listener = Held<TcpListener>;

/// A socket of this process alone.
#[derive(Debug)]
pub(crate) struct Held<S: AsRawFd>(S);

impl<S: AsRawFd> Held<S> {
    pub(crate) fn new(socket: S) -> Self {
        follow(socket.as_raw_fd(), true);
        Self(socket)
    }
}

impl<S: AsRawFd> From<S> for Held<S> {
    fn from(socket: S) -> Self {
        Self::new(socket)
    }
}

impl<S: AsRawFd> Borrow<S> for Held<S> {
    fn borrow(&self) -> &S {
        &self.0
    }
}

impl<S: AsRawFd> Drop for Held<S> {
    fn drop(&mut self) {
        follow(self.0.as_raw_fd(), false);
    }
}

/// A descriptor of ours is there, or goes.
pub(crate) fn follow(descriptor: RawFd, is_there: bool) {
    let Some((word, bit)) = place(descriptor) else {
        return;
    };
    if is_there {
        watch();
        USED.fetch_max(word + 1, Ordering::SeqCst);
        OURS[word].fetch_or(bit, Ordering::SeqCst);
    } else {
        OURS[word].fetch_and(!bit, Ordering::SeqCst);
    }
}

impl<S: AsRawFd> Deref for Held<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.0
    }
}

impl<S: AsRawFd + AsFd> AsFd for Held<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn place(descriptor: RawFd) -> Option<(usize, u64)> {
    let number = usize::try_from(descriptor).ok()?;
    (number < MOST).then(|| (number / 64, 1 << (number % 64)))
}

/// Sees to it that forks are noticed.
fn watch() {
    static WATCH: OnceLock<Option<File>> = OnceLock::new();
    WATCH.get_or_init(|| {
        // Without either a child keeps copies: its parent's peers then rely on shutdowns.
        let nothing = File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .ok()?;
        NOTHING.store(nothing.as_raw_fd(), Ordering::SeqCst);
        // SAFETY: atomics and `dup3`; the file is kept loaded, and its handlers go with it.
        let _ = unsafe { fork::on_fork(let_go) };
        Some(nothing)
    });
}

/// In the child: every descriptor of the parent's becomes `/dev/null`.
unsafe extern "C" fn let_go() {
    let nothing = NOTHING.load(Ordering::SeqCst);
    for (word, bits) in OURS.iter().enumerate().take(USED.load(Ordering::SeqCst)) {
        let mut left = bits.swap(0, Ordering::SeqCst);
        while left != 0 {
            // Below 2^20.
            let descriptor = (word * 64) as RawFd + left.trailing_zeros() as RawFd;
            // SAFETY: descriptors of ours; nothing in the child uses them but through this file.
            unsafe { libc::dup3(nothing, descriptor, libc::O_CLOEXEC) };
            left &= left - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_followed_from_its_making_to_its_end() {
        let socket = Held::new(TcpListener::bind("127.0.0.1:0").unwrap());
        let (word, bit) = place(socket.as_raw_fd()).unwrap();
        assert_ne!(OURS[word].load(Ordering::SeqCst) & bit, 0);
        assert!(USED.load(Ordering::SeqCst) > word);
        assert!(place(-1).is_none() && place(i32::MAX).is_none());
    }
}

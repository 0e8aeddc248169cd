//! Memory that NIXL registered, and who uses it now.
//!
//! The memory is the caller's. Whatever points at it holds a [`Hold`], and deregistration waits for
//! the last of them. The bytes are only touched through raw pointers: the caller, and the transfers
//! that it starts, may write them at any time.

use std::any::Any;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tcpx::{Gpu, Region};
use tcpx_net::{Span, copy_spans};

use crate::info::RegionName;
use crate::lock;

/// Where the bytes are.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Host,
    Cuda(Gpu),
}

impl Kind {
    pub(crate) const fn gpu(&self) -> Option<&Gpu> {
        match self {
            Self::Host => None,
            Self::Cuda(gpu) => Some(gpu),
        }
    }
}

/// One registered piece of memory.
#[derive(Debug)]
pub(crate) struct Registered {
    /// Names it to peers.
    pub(crate) name: RegionName,
    pub(crate) address: usize,
    pub(crate) len: usize,
    pub(crate) kind: Kind,
    uses: Mutex<Uses>,
    unused: Condvar,
}

#[derive(Debug, Default)]
struct Uses {
    count: usize,
    closed: bool,
}

/// The memory is in use, and stays registered meanwhile.
#[derive(Debug)]
pub(crate) struct Hold(Arc<Registered>);

impl Drop for Hold {
    fn drop(&mut self) {
        let mut uses = lock(&self.0.uses);
        uses.count -= 1;
        // Only deregistration waits, and a wake-up that nobody waits for is a call of the kernel
        // too.
        if uses.count == 0 && uses.closed {
            self.0.unused.notify_all();
        }
    }
}

impl Hold {
    /// Copies bytes to other memory of this process. The kernel copies: where the program has taken
    /// memory away, it says so.
    ///
    /// # Errors
    /// Memory is not there, or they are not all within.
    pub(crate) fn copy_to(&self, from: u64, to: &Self, at: u64, len: u64) -> io::Result<()> {
        let place = |hold: &Self, at: u64| {
            let memory = &hold.0;
            let (at, len) = (usize::try_from(at).ok()?, usize::try_from(len).ok()?);
            let address = memory.address.checked_add(at)?;
            memory.offset_of(address, len)?;
            Some(Span::new(address as *mut u8, len))
        };
        let outside = || io::Error::from(io::ErrorKind::InvalidInput);
        let (from, to) = (place(self, from), place(to, at));
        let (from, to) = from.zip(to).ok_or_else(outside)?;
        // SAFETY: registered host memory, whose owner says that it is valid as long as it is held.
        // What else touches the bytes meanwhile is that caller's own doing.
        unsafe { copy_spans(from, to) }
    }

    /// The memory as a region of the engine; `owner` is kept as long as something points at it.
    /// Every call makes a region of its own: two transfers of one piece of memory at a time are
    /// NIXL's callers' business.
    pub(crate) fn region(self: &Arc<Self>, owner: Arc<dyn Any + Send + Sync>) -> Region {
        let memory = &self.0;
        let kept: Arc<dyn Any + Send + Sync> = Arc::new((Arc::clone(self), owner));
        match &memory.kind {
            // SAFETY: the caller of NIXL's registration says that the memory is valid until
            // deregistration, which waits for this hold. What else touches the bytes meanwhile is
            // that caller's own doing, as with every buffer that is handed to the operating system.
            Kind::Host => unsafe {
                Region::from_host_raw(memory.address as *mut u8, memory.len, kept)
            },
            // SAFETY: as above; the address is one of this GPU, as the registration said.
            Kind::Cuda(gpu) => unsafe {
                Region::from_cuda_raw(gpu, memory.address as u64, memory.len, kept)
            },
        }
    }

    /// The same for peers: what they move there at a time is their callers' business too.
    pub(crate) fn shared_region(self: &Arc<Self>) -> Region {
        let region = self.region(Arc::new(()));
        // SAFETY: it is given to the engine alone, as a window, and the engine moves bytes there by
        // transfers.
        unsafe { region.share() };
        region
    }
}

impl Registered {
    pub(crate) fn new(name: RegionName, address: usize, len: usize, kind: Kind) -> Self {
        Self {
            name,
            address,
            len,
            kind,
            uses: Mutex::default(),
            unused: Condvar::new(),
        }
    }

    pub(crate) fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Host)
    }

    /// The number of its GPU.
    pub(crate) fn gpu(&self) -> Option<u32> {
        self.kind.gpu().map(Gpu::ordinal)
    }

    /// Where `address` lies in it, if all of `len` bytes do.
    pub(crate) fn offset_of(&self, address: usize, len: usize) -> Option<usize> {
        let offset = address.checked_sub(self.address)?;
        let end = offset.checked_add(len)?;
        (end <= self.len).then_some(offset)
    }

    /// `None` once it was deregistered.
    pub(crate) fn hold(self: &Arc<Self>) -> Option<Hold> {
        let mut uses = lock(&self.uses);
        if uses.closed {
            return None;
        }
        uses.count += 1;
        Some(Hold(Arc::clone(self)))
    }

    /// Nobody gets a hold any more.
    pub(crate) fn close(&self) {
        lock(&self.uses).closed = true;
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.uses).closed
    }

    /// Waits until nothing points at it; `false` if something still does after `limit`.
    pub(crate) fn wait_unused(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut uses = lock(&self.uses);
        while uses.count > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            uses = self
                .unused
                .wait_timeout(uses, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::info::RegionNames;

    fn registered(address: usize) -> Registered {
        let name = RegionNames::generate().unwrap().of(address, 64, None);
        Registered::new(name, address, 64, Kind::Host)
    }

    #[test]
    fn deregistration_waits_for_what_points_at_the_memory() {
        let mut bytes = vec![0u8; 64];
        let memory = Arc::new(registered(bytes.as_mut_ptr() as usize));
        let hold = Arc::new(memory.hold().unwrap());
        let region = hold.region(Arc::new(()));
        memory.close();
        assert!(memory.hold().is_none());
        drop(hold);
        assert!(!memory.wait_unused(Duration::from_millis(1)));
        drop(region);
        assert!(memory.wait_unused(Duration::ZERO));
    }

    #[test]
    fn pieces_outside_of_the_memory_have_no_place() {
        let memory = registered(0x1000);
        assert_eq!(memory.offset_of(0x1008, 56), Some(8));
        assert_eq!(memory.offset_of(0x1008, 57), None);
        assert_eq!(memory.offset_of(0xfff, 1), None);
        assert_eq!(memory.offset_of(0x1000, usize::MAX), None);
    }
}

//! The descriptors of one channel behind one that its owner waits on.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

/// One of a channel's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Payload = 0,
    Ordinary = 1,
    /// Raised when something was staged, or a slot came back.
    Staging = 2,
}

const COUNT: usize = 3;

/// What a descriptor is ready for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ready {
    pub(super) read: bool,
    pub(super) write: bool,
    /// Its error queue or its end wants to be looked at.
    pub(super) error: bool,
}

/// An epoll instance, which is a descriptor itself: readable while any of those in it is ready.
#[derive(Debug)]
pub(super) struct Watch {
    epoll: OwnedFd,
    /// What is asked of each; `None`: not watched.
    wanted: [Option<EventFlags>; COUNT],
}

impl Watch {
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            wanted: [None; COUNT],
        })
    }

    /// Watches `descriptor` for these; errors are always reported while it is watched.
    pub(super) fn want(
        &mut self,
        which: Which,
        descriptor: BorrowedFd<'_>,
        flags: Option<EventFlags>,
    ) -> Result<(), Errno> {
        let wanted = &mut self.wanted[which as usize];
        if *wanted == flags {
            return Ok(());
        }
        let data = EventData::new_u64(which as u64);
        match (*wanted, flags) {
            (_, None) => epoll::delete(&self.epoll, descriptor)?,
            (None, Some(flags)) => epoll::add(&self.epoll, descriptor, data, flags)?,
            (Some(_), Some(flags)) => epoll::modify(&self.epoll, descriptor, data, flags)?,
        }
        *wanted = flags;
        Ok(())
    }

    /// The descriptor was closed, which ended its watch.
    pub(super) fn forget(&mut self, which: Which) {
        self.wanted[which as usize] = None;
    }

    /// What each descriptor is ready for now, by [`Which`].
    pub(super) fn ready(&mut self) -> Result<[Ready; COUNT], Errno> {
        let mut ready = [Ready::default(); COUNT];
        if self.wanted.iter().all(Option::is_none) {
            return Ok(ready);
        }
        let mut events = [const { MaybeUninit::<Event>::uninit() }; COUNT];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let events = match epoll::wait(&self.epoll, &mut events, Some(&now)) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => &mut [],
            Err(error) => return Err(error),
        };
        for event in events {
            let at = usize::try_from(event.data.u64()).unwrap_or(COUNT);
            let Some(ready) = ready.get_mut(at) else {
                continue;
            };
            let flags = event.flags;
            let ended = flags.intersects(EventFlags::ERR | EventFlags::HUP);
            ready.read = ended || flags.contains(EventFlags::IN);
            ready.write = ended || flags.contains(EventFlags::OUT);
            ready.error = ended;
        }
        Ok(ready)
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

//! Sleeping on a connection's own descriptors: a thread that does the engine's work is woken by the
//! peer's bytes themselves, and not by the engine's thread, which would have to be woken for them
//! first.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use tcpx_lanes::event_loop::Loop;
use tcpx_lanes::lock;

use crate::driver::{READ, READ_WRITE};
use crate::wait::{wait, wait_about};

/// Descriptors looked at after one sleep; one is enough to go on.
const EVENTS: usize = 4;
const CALLED: u64 = 0;
const CHANNELS: u64 = 1;
const CONTROL: u64 = 2;
const LANES: u64 = 3;

/// What one thread at a time sleeps on.
#[derive(Debug, Default)]
pub(super) struct Descriptors {
    /// Made when a thread first sleeps so; `None` where the system gave no descriptor.
    set: OnceLock<Option<Set>>,
    /// A thread sleeps, or is about to.
    asleep: AtomicBool,
}

#[derive(Debug)]
struct Set {
    epoll: OwnedFd,
    /// Makes the sleep end.
    call: OwnedFd,
    /// What the control socket is watched for, if it is.
    control: Mutex<Option<EventFlags>>,
    /// The event loop that the thread leads.
    lanes: Mutex<Option<Loop>>,
}

/// How a thread's sleep ended.
#[derive(Debug)]
pub(super) struct Woken {
    /// The control socket may have something to read, or its end.
    pub(super) for_control: bool,
    /// The event loop that the thread leads has something to do.
    pub(super) for_lanes: bool,
    /// The channels may have something to say.
    pub(super) for_channels: bool,
}

impl Default for Woken {
    fn default() -> Self {
        Self {
            for_control: true,
            for_lanes: false,
            for_channels: true,
        }
    }
}

impl Set {
    fn new<'a>(channels: impl Iterator<Item = BorrowedFd<'a>>) -> rustix::io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &call, EventData::new_u64(CALLED), EventFlags::IN)?;
        for channel in channels {
            epoll::add(
                &epoll,
                channel,
                EventData::new_u64(CHANNELS),
                EventFlags::IN,
            )?;
        }
        Ok(Self {
            epoll,
            call,
            control: Mutex::default(),
            lanes: Mutex::default(),
        })
    }

    fn watch_control(&self, control: BorrowedFd<'_>, write: bool) -> rustix::io::Result<()> {
        let wanted = if write { READ_WRITE } else { READ };
        let mut watched = lock(&self.control);
        let data = EventData::new_u64(CONTROL);
        match *watched {
            Some(now) if now == wanted => return Ok(()),
            Some(_) => epoll::modify(&self.epoll, control, data, wanted)?,
            None => epoll::add(&self.epoll, control, data, wanted)?,
        }
        *watched = Some(wanted);
        Ok(())
    }
}

impl Set {
    /// Watches the event loop that the thread leads, and no other one.
    fn watch_lanes(&self, lanes: Option<&Loop>) -> rustix::io::Result<()> {
        let mut watched = lock(&self.lanes);
        if watched
            .as_ref()
            .zip(lanes)
            .is_some_and(|(one, other)| one.is(other))
        {
            return Ok(());
        }
        if let Some(former) = watched.take() {
            epoll::delete(&self.epoll, &former)?;
        }
        if let Some(lanes) = lanes {
            let data = EventData::new_u64(LANES);
            epoll::add(&self.epoll, lanes, data, EventFlags::IN)?;
            *watched = Some(lanes.clone());
        }
        Ok(())
    }
}

impl Descriptors {
    /// The calling thread is about to sleep; whether it can. What others change from now on they
    /// [`call`](Self::call) it for.
    pub(super) fn prepare_sleep<'a>(
        &self,
        control: BorrowedFd<'_>,
        write: bool,
        channels: impl Iterator<Item = BorrowedFd<'a>>,
        lanes: Option<&Loop>,
    ) -> bool {
        let ready = self.watch(control, write, channels, lanes);
        self.asleep.store(ready, Ordering::SeqCst);
        ready
    }

    /// Whether the set is there and watches what is given.
    pub(super) fn watch<'a>(
        &self,
        control: BorrowedFd<'_>,
        write: bool,
        channels: impl Iterator<Item = BorrowedFd<'a>>,
        lanes: Option<&Loop>,
    ) -> bool {
        let set = self.set.get_or_init(|| Set::new(channels).ok());
        set.as_ref().is_some_and(|set| {
            let watched = set.watch_control(control, write);
            watched.and_then(|()| set.watch_lanes(lanes)).is_ok()
        })
    }

    /// The set's own descriptor, if there is one: readable while something that it watches is
    /// ready.
    pub(super) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        let set = self.set.get()?.as_ref()?;
        Some(set.epoll.as_fd())
    }

    /// A call that came when nobody slept any more says nothing.
    pub(super) fn take_call(&self) {
        if let Some(Some(set)) = self.set.get()
            && !self.is_asleep()
        {
            // Draining an empty counter is no error worth knowing.
            let _ = rustix::io::read(&set.call, &mut [0u8; 8]);
        }
    }

    /// Sleeps until there is news, at most until `until`, or a millisecond more where that need not
    /// be `exact`.
    pub(super) fn sleep(&self, until: Instant, exact: bool) -> Woken {
        let mut woken = Woken::default();
        if let Some(Some(set)) = self.set.get() {
            let left = until.saturating_duration_since(Instant::now());
            let wait = if exact { wait } else { wait_about };
            let mut space = [const { MaybeUninit::uninit() }; EVENTS];
            // Interrupted or not, the caller looks at everything.
            if let Ok((events, _)) = wait(&set.epoll, &mut space, left) {
                let has = |what| events.iter().any(|event| event.data.u64() == what);
                woken = Woken {
                    for_control: has(CONTROL),
                    for_lanes: has(LANES),
                    for_channels: has(CHANNELS),
                };
                if has(CALLED) {
                    // Draining an empty counter is no error worth knowing.
                    let _ = rustix::io::read(&set.call, &mut [0u8; 8]);
                }
            }
        }
        self.wake_up();
        woken
    }

    /// The calling thread sleeps no longer.
    pub(super) fn wake_up(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    pub(super) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::SeqCst)
    }

    /// Ends the sleep of whoever sleeps.
    pub(super) fn wake_sleeper(&self) {
        if self.asleep.swap(false, Ordering::SeqCst)
            && let Some(Some(set)) = self.set.get()
        {
            // A full counter means that a call is already under way.
            let _ = rustix::io::write(set.call.as_fd(), &1u64.to_ne_bytes());
        }
    }

    /// Another connection has taken the control connection's place: the old descriptor is closed.
    pub(super) fn control_replaced(&self) {
        if let Some(Some(set)) = self.set.get() {
            *lock(&set.control) = None;
        }
        // Who sleeps does not hear of the new one.
        self.wake_sleeper();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    /// Far more than anything here takes.
    const LONG: Duration = Duration::from_secs(60);

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let near = TcpStream::connect(address).expect("connected");
        (near, listener.accept().expect("accepted").0)
    }

    fn prepare_sleep(descriptors: &Descriptors, control: &TcpStream, write: bool) {
        assert!(descriptors.prepare_sleep(control.as_fd(), write, std::iter::empty(), None));
    }

    fn sleeps_at_once(descriptors: &Descriptors) -> bool {
        let began = Instant::now();
        descriptors.sleep(began + LONG, true);
        began.elapsed() < LONG
    }

    #[test]
    fn bytes_and_room_end_a_sleep_and_nothing_lets_it_last() {
        let descriptors = Descriptors::default();
        let (near, mut far) = pair();
        prepare_sleep(&descriptors, &near, false);
        let (began, short) = (Instant::now(), Duration::from_millis(20));
        descriptors.sleep(began + short, true);
        assert!(began.elapsed() >= short && !descriptors.is_asleep());
        prepare_sleep(&descriptors, &near, true);
        assert!(sleeps_at_once(&descriptors), "there is room to write");
        prepare_sleep(&descriptors, &near, false);
        assert!(!descriptors.sleep(Instant::now() + short, true).for_control);
        prepare_sleep(&descriptors, &near, false);
        far.write_all(b"news").expect("written");
        assert!(descriptors.sleep(Instant::now() + LONG, true).for_control);
    }

    #[test]
    fn a_call_ends_the_sleep_it_finds_and_no_later_one() {
        let descriptors = Descriptors::default();
        let (near, _far) = pair();
        descriptors.wake_sleeper();
        for before in [true, false] {
            prepare_sleep(&descriptors, &near, false);
            if before {
                descriptors.wake_sleeper();
                assert!(sleeps_at_once(&descriptors));
                continue;
            }
            std::thread::scope(|scope| {
                scope.spawn(|| descriptors.wake_sleeper());
                assert!(sleeps_at_once(&descriptors));
            });
        }
        prepare_sleep(&descriptors, &near, false);
        let (began, short) = (Instant::now(), Duration::from_millis(20));
        descriptors.sleep(began + short, true);
        assert!(began.elapsed() >= short, "an old call was heard again");
    }

    #[test]
    fn the_connection_that_takes_anothers_place_is_listened_to() {
        let descriptors = Descriptors::default();
        let (old, gone) = pair();
        prepare_sleep(&descriptors, &old, true);
        assert!(sleeps_at_once(&descriptors));
        let (new, mut far) = pair();
        drop((old, gone));
        descriptors.control_replaced();
        prepare_sleep(&descriptors, &new, false);
        far.write_all(b"news").expect("written");
        assert!(sleeps_at_once(&descriptors));
    }
}

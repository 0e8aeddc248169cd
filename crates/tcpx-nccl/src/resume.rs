//! A comm's own connection that breaks while both processes live: the sender's process dials another one, over whatever
//! way works, and the stream goes on where the receiver has read to.
//!
//! An end in order is the peer's word and final; anything else is a connection that broke. The sender dials the door of
//! the receiver's process, proves itself as a lane does and names the session of the comm's first connection. The
//! receiver closes the connection before, says how far it has read, and repeats what it grants. A comm that is gone
//! answers with the end, a process that is gone with a refusal. The receiver cannot dial: while it waits, it looks
//! whether the door of the sender's process is still there.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use tcpx_lanes::health::STALL_BEHIND;
use tcpx_lanes::lock;
use tcpx_lanes::monitor::{Attention, Look, TICK, Watched};
use tcpx_lanes::socket_calls::{self as socket, Moved};
use tcpx_lanes::tcp_info::is_unanswered;
use tcpx_wire::handshake::SessionId;

use crate::dialer::{self, Dialer};
use crate::header::{Header, Record};
use crate::held::Stream;
use crate::lanes::group::Registry;
use crate::lanes::hello::{Hello, Resumption};
use crate::lanes::lane_set::{DEAD_AFTER, LONGEST_STALL, Peer};
use crate::lanes::runtime::Runtime;
use crate::link::Link;

/// Largest message of which a copy is retained; as of a chunk on a lane. Of a longer one its own memory is sent again.
const COPIED_BYTES: usize = 64 << 10;
/// The same without lanes, where the copy of 64 KiB cost a tenth of the rate. A longer one is not sent again.
const COPIED_WITHOUT_LANES: usize = 16 << 10;

/// Largest message of which a copy is retained.
pub(crate) const fn copied_bytes(with_lanes: bool) -> usize {
    if with_lanes {
        COPIED_BYTES
    } else {
        COPIED_WITHOUT_LANES
    }
}

/// Most bytes of copies of one comm.
pub(crate) const COPIES: usize = 1 << 20;
/// After so many bytes of short messages the receiver says how far it has read: copies have room for more until then.
pub(crate) const ACKNOWLEDGED_TOGETHER: u64 = 512 << 10;
/// After so many bytes of any: nobody waits for those.
pub(crate) const ACKNOWLEDGED_AT_LAST: u64 = 8 << 20;

/// Between two steps of a connection that is dialled.
pub(crate) const STEP: Duration = Duration::from_millis(2);
/// Between two looks whether the sender's process is still there.
const LOOK: Duration = Duration::from_millis(100);

/// How a send comm's connection comes back.
#[derive(Debug)]
pub(crate) struct Redial {
    peer: Peer,
    session: SessionId,
    epoch: u32,
    dialer: Option<Box<Dialer>>,
    /// How the connection broke, until another one takes its place.
    lost: Option<String>,
    /// It has taken its place, and the receiver has not said yet how far it has read.
    is_positioning: bool,
    /// Why there will be no other.
    gone: Option<String>,
    /// When the receiver's answer to what it may lack was waited for first.
    waits: Option<(Instant, u64)>,
    /// How long it may be waited for.
    patience: Duration,
}

impl Redial {
    pub(crate) fn new(peer: Peer, session: SessionId) -> Self {
        Self {
            peer,
            session,
            epoch: 0,
            dialer: None,
            lost: None,
            is_positioning: false,
            gone: None,
            waits: None,
            patience: STALL_BEHIND,
        }
    }

    /// Whether nothing can be written now.
    pub(crate) const fn is_away(&self) -> bool {
        self.lost.is_some() || self.is_positioning
    }

    /// Whether there is no connection to read from.
    pub(crate) const fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    pub(crate) const fn is_positioning(&self) -> bool {
        self.is_positioning
    }

    /// The receiver has said how far it has read.
    pub(crate) const fn positioned(&mut self) {
        self.is_positioning = false;
    }

    /// The connection broke.
    pub(crate) fn lose(&mut self, why: String) {
        self.lost.get_or_insert(why);
        self.is_positioning = false;
    }

    /// Whether [`step`](Self::step) has something to do.
    pub(crate) const fn is_active(&self) -> bool {
        self.lost.is_some() || self.dialer.is_some()
    }

    /// Dials; gives the connection that takes the place of the one before.
    ///
    /// # Errors
    /// There will be none: why.
    pub(crate) fn step(&mut self, now: Instant) -> Result<Option<Link>, String> {
        if let Some(why) = &self.gone {
            return Err(why.clone());
        }
        if self.lost.is_some() && self.dialer.is_none() {
            self.dialer = Some(Box::new(self.peer.redialer(now)));
        }
        let Some(dialer) = &mut self.dialer else {
            return Ok(None);
        };
        let dialled = match dialer.poll(now) {
            Ok(None) => return Ok(None),
            Ok(Some(dialled)) => dialled.link,
            Err(why) => {
                self.dialer = None;
                // While there is a connection, it can be no worse than none.
                let Some(lost) = &self.lost else {
                    return Ok(None);
                };
                let why = format!("{lost}; dialling it again: {why}");
                return Err(self.gone.insert(why).clone());
            }
        };
        self.dialer = None;
        self.epoch += 1;
        let resumption = Resumption {
            session: self.session,
            epoch: self.epoch,
        };
        // A few bytes on a fresh connection always fit its buffer; where it broke already, it is dialled again.
        if let Ok(Moved::Bytes(Hello::BYTES)) = dialled.send_whole(&resumption.encode()) {
            self.lost = None;
            self.is_positioning = true;
            self.waits = None;
            return Ok(Some(dialled));
        }
        Ok(None)
    }

    /// Looks at a connection on which the receiver may lack something, and has read up to `read`. Where the peer's
    /// system answers nothing, or the receiver says nothing for too long, another connection is dialled; if that comes
    /// about, it takes the place.
    pub(crate) fn look(&mut self, now: Instant, link: &Link, read: Option<u64>) {
        let Some(read) = read else {
            (self.waits, self.patience) = (None, STALL_BEHIND);
            return;
        };
        let since = match self.waits {
            Some((since, before)) if before == read => since,
            before => {
                if before.is_some() {
                    self.patience = STALL_BEHIND;
                }
                self.waits = Some((now, read));
                now
            }
        };
        let is_late = now.saturating_duration_since(since) >= self.patience;
        if self.dialer.is_none() && (is_late || is_unanswered(link)) {
            // The receiver may just post nothing: then it is no use, and no harm, to try often.
            self.patience = (self.patience * 2).min(LONGEST_STALL);
            self.waits = Some((now, read));
            self.dialer = Some(Box::new(self.peer.redialer(now)));
        }
    }
}

/// Connections that take the place of a receive comm's own one, as the door hands them over.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    has_news: AtomicBool,
    next: Mutex<(u32, Option<Link>)>,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, (u32, Option<Link>)> {
        lock(&self.next)
    }

    /// A connection came; one of an older epoch is dropped.
    pub(crate) fn put(&self, epoch: u32, link: Link) {
        let mut next = self.lock();
        if epoch > next.0 {
            *next = (epoch, Some(link));
            self.has_news.store(true, Ordering::Release);
        }
    }

    /// The connection that came last, once.
    pub(crate) fn take(&self) -> Option<Link> {
        if !self.has_news.load(Ordering::Relaxed) {
            return None;
        }
        let mut next = self.lock();
        self.has_news.store(false, Ordering::Relaxed);
        next.1.take()
    }

    /// The comm takes none any more.
    pub(crate) fn close(&self) {
        *self.lock() = (u32::MAX, None);
    }
}

/// A receive comm's part in that; dropping it refuses connections from then on.
#[derive(Debug)]
pub(crate) struct Comeback {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) tail: Arc<Tail>,
    /// Of the sender's process.
    pub(crate) peer: IpAddr,
    session: SessionId,
    registry: Arc<Registry>,
}

impl Comeback {
    /// For a comm whose first connection came about in this session.
    pub(crate) fn new(
        runtime: &Runtime,
        session: SessionId,
        peer: IpAddr,
        link: &Arc<Link>,
    ) -> io::Result<Self> {
        let tail = Arc::new(Tail::new(link, runtime.monitor.attention()));
        runtime
            .monitor
            .watch(Box::new(WatchedTail(Arc::downgrade(&tail), 0)))?;
        let inbox = Arc::new(Inbox::default());
        runtime.registry.expect(session, &inbox);
        Ok(Self {
            inbox,
            tail,
            peer,
            session,
            registry: Arc::clone(&runtime.registry),
        })
    }
}

impl Drop for Comeback {
    fn drop(&mut self) {
        self.registry.forget(self.session);
        self.inbox.close();
        self.tail.replace(None);
    }
}

/// A receive comm that waits for another connection.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// How the one before broke.
    pub(crate) why: String,
    since: Instant,
    /// The door of the sender's process, once it is known.
    door: Option<SocketAddr>,
    look: Presence,
}

/// Whether the sender's process is there.
#[derive(Debug)]
enum Presence {
    /// To be looked at again then.
    At(Instant),
    /// A connection to its door is under way.
    Dialling(Stream),
    /// It is there, and does nothing else: its end would be the process's.
    There(Stream),
}

impl Waiting {
    pub(crate) fn new(why: String, door: Option<SocketAddr>) -> Self {
        let now = Instant::now();
        Self {
            why,
            since: now,
            door,
            look: Presence::At(now),
        }
    }

    /// Why there is no use in waiting any longer, if there is none.
    pub(crate) fn in_vain(&mut self, now: Instant) -> Option<String> {
        if now.saturating_duration_since(self.since) >= DEAD_AFTER {
            let seconds = DEAD_AFTER.as_secs();
            return Some(format!(
                "{}, and did not come back in {seconds} s",
                self.why
            ));
        }
        let door = self.door?;
        let again = Presence::At(now + LOOK);
        self.look = match std::mem::replace(&mut self.look, Presence::At(now)) {
            Presence::At(at) if now < at => Presence::At(at),
            Presence::At(_) => match dialer::dial(None, door) {
                Ok(stream) => Presence::Dialling(stream),
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    return Some(format!("{}, and its process is gone", self.why));
                }
                Err(_) => again,
            },
            Presence::Dialling(stream) => match dialer::dialled(&stream) {
                Ok(true) => Presence::There(stream),
                Ok(false) => Presence::Dialling(stream),
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    return Some(format!("{}, and its process is gone", self.why));
                }
                // The way there is broken too.
                Err(_) => again,
            },
            Presence::There(stream) => match socket::receive_bytes(&stream, &mut [0; 64]) {
                Ok(Moved::WouldBlock) => Presence::There(stream),
                // It has ended, or is tired of us.
                _ => again,
            },
        };
        None
    }
}

/// What the receiver has read of a comm's connection, for who tells the sender when its host calls nothing.
#[derive(Debug)]
pub(crate) struct Tail {
    read: AtomicU64,
    told: AtomicU64,
    /// None while the connection is away.
    link: Mutex<Option<Arc<Link>>>,
    /// A call that sent has heard of a reset, which hides it from those that read: they find an end.
    is_broken: AtomicBool,
    attention: Attention,
}

impl Tail {
    pub(crate) fn new(link: &Arc<Link>, attention: Attention) -> Self {
        Self {
            read: AtomicU64::new(0),
            told: AtomicU64::new(0),
            link: Mutex::new(Some(Arc::clone(link))),
            is_broken: AtomicBool::new(false),
            attention,
        }
    }

    /// The receiver has read up to here.
    pub(crate) fn read(&self, read: u64) {
        self.read.store(read, Ordering::Relaxed);
        self.attention.draw();
    }

    /// And has said so.
    pub(crate) fn told(&self, read: u64) {
        self.told.store(read, Ordering::Relaxed);
    }

    /// Another connection took the place, or there is none now.
    pub(crate) fn replace(&self, link: Option<&Arc<Link>>) {
        *lock(&self.link) = link.cloned();
        self.is_broken.store(false, Ordering::SeqCst);
    }

    /// Whether a call that sent has found the connection broken.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::SeqCst)
    }

    /// What a call that sent has answered; whether it took the record.
    pub(crate) fn sent(&self, moved: &io::Result<Moved>) -> bool {
        if moved.as_ref().is_err_and(is_reset) {
            self.is_broken.store(true, Ordering::SeqCst);
        }
        matches!(moved, Ok(Moved::Bytes(_)))
    }

    /// Tells the sender; whether it was told.
    pub(crate) fn tell(&self) -> bool {
        let link = lock(&self.link);
        let read = self.read.load(Ordering::Relaxed);
        let Some(link) = &*link else {
            return false;
        };
        let is_told = self.sent(&tell(link, read));
        if is_told {
            self.told(read);
        }
        is_told
    }
}

/// Whether a call that sent says that the connection broke. Behind an end in order the system says `EPIPE`.
pub(crate) fn is_reset(error: &io::Error) -> bool {
    error.kind() != io::ErrorKind::BrokenPipe
}

/// Says how far the receiver has read. A sender that takes nothing now is told later.
pub(crate) fn tell(link: &Link, read: u64) -> io::Result<Moved> {
    let record = Header {
        sequence: read,
        size: 0,
    };
    link.send_whole(&record.encode(Record::Read))
}

/// A [`Tail`] as the monitor knows it; with how far the receiver had read at the last look.
#[derive(Debug)]
pub(crate) struct WatchedTail(pub(crate) Weak<Tail>, pub(crate) u64);

impl Watched for WatchedTail {
    fn look(&mut self) -> Look {
        let Some(tail) = self.0.upgrade() else {
            return Look::Gone;
        };
        tail.attention.lower();
        let (read, told) = (
            tail.read.load(Ordering::Relaxed),
            tail.told.load(Ordering::Relaxed),
        );
        if read <= told {
            return Look::Asleep;
        }
        tail.attention.keep();
        // Whoever reads on tells it by itself.
        let is_quiet = std::mem::replace(&mut self.1, read) == read;
        if is_quiet && !tail.tell() {
            // It is away; the next connection begins with it.
            tail.attention.lower();
            return Look::Asleep;
        }
        Look::In(TICK)
    }
}

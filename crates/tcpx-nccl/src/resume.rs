//! A comm's own pair of connections, for what it sends and for what its receiver answers. Where it
//! breaks while both processes live, the sender's process dials another pair, over whatever way
//! works, and the stream goes on where the receiver has read to. The first pair comes in the same
//! way.
//!
//! An end in order is the peer's word and final; a connection broke if it was reset, or the peer's
//! system leaves packets unanswered. Silence says nothing: a receiver may read nothing for as long
//! as it likes. One that has waited for bytes, and says so, while they are long under way, has a
//! broken connection too.
//!
//! The sender dials the door of the receiver's process, proves itself as a lane does and names the
//! session of the connection that introduced the comm. The receiver closes the pair before, says
//! how far it has read, and repeats what it grants. A comm that is gone answers with the end, a
//! process that is gone with a refusal. The receiver cannot dial: while it waits, it looks whether
//! the door of the sender's process is still there.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tcpx_lanes::dial::Way;
use tcpx_lanes::health::STALL_BEHIND;
use tcpx_lanes::monitor::MonitorHandle;
use tcpx_lanes::redial::{DialState, News, Redial};
use tcpx_lanes::socket;
use tcpx_lanes::socket_calls::Moved;
use tcpx_lanes::tcp_info::is_unanswered;
use tcpx_lanes::{Congestion, SocketError, lock};
use tcpx_wire::handshake::SessionId;

use crate::dialer::{AGAIN_TIME, PairDialer};
use crate::header::{Header, Record};
use crate::held::Stream;
use crate::lanes::group::Registry;
use crate::lanes::hello::{Greeting, Resumption};
use crate::lanes::lane_set::{DEAD_AFTER, Peer};
use crate::lanes::runtime::Runtime;
use crate::link::Link;

/// Largest message of which a copy is retained; as of a chunk on a lane. Of a longer one its own
/// memory is sent again.
const COPIED_BYTES: usize = 64 << 10;
/// The same without lanes, where the copy of 64 KiB cost a tenth of the rate. A longer one is not
/// sent again.
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
/// After so many bytes of short messages the receiver says how far it has read: copies have room
/// for more until then.
pub(crate) const ACKNOWLEDGED_TOGETHER: u64 = 512 << 10;
/// After so many bytes of any: nobody waits for those.
pub(crate) const ACKNOWLEDGED_AT_LAST: u64 = 8 << 20;

/// Between two looks whether the sender's process is still there.
const LOOK: Duration = Duration::from_millis(500);

/// How a send comm's connections come back.
#[derive(Debug)]
pub(crate) struct Resume {
    peer: Peer,
    session: SessionId,
    epoch: u32,
    redial: Redial<PairDialer>,
    /// How they broke, until others take their place; nothing of those that were never there.
    lost: Option<String>,
    /// They may have broken.
    is_doubtful: bool,
    /// They have taken their place, and the receiver has not said yet how far it has read.
    is_positioning: bool,
    /// Why there will be no others.
    gone: Option<String>,
    /// Since when the receiver has read no further than this, with more under way.
    waits: Option<(Instant, u64)>,
}

impl Resume {
    pub(crate) fn new(peer: Peer, session: SessionId) -> Self {
        Self {
            peer,
            session,
            epoch: 0,
            redial: Redial::default(),
            lost: Some(String::new()),
            is_doubtful: false,
            is_positioning: false,
            gone: None,
            waits: None,
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
        self.lost.is_some() || self.is_doubtful
    }

    /// Dials; gives the connections, payload's first, that take the place of those before. Those
    /// that are not lost stay where they `must_stay`.
    ///
    /// # Errors
    /// There will be none: why.
    pub(crate) fn step(
        &mut self,
        now: Instant,
        must_stay: bool,
    ) -> Result<Option<[Link; 2]>, String> {
        if let Some(why) = &self.gone {
            return Err(why.clone());
        }
        self.is_doubtful &= !must_stay;
        let place = match (&self.lost, self.is_doubtful) {
            (Some(_), _) => DialState::Vacant,
            (None, true) => DialState::Doubtful,
            (None, false) => DialState::Filled,
        };
        let peer = &self.peer;
        let dial = |_| Some(PairDialer::new(|| peer.dialer(now + AGAIN_TIME)));
        let mut news = self.redial.advance(now, &[place], dial);
        if let [News::Vacate(_)] = news[..] {
            // Nobody else holds it.
            news = self.redial.advance(now, &[DialState::Vacant], |_| None);
        }
        let mut unreached = None;
        for one in news {
            match one {
                News::Fill(lane, links) => {
                    // Also where one has broken already: the other one's peer may hear of it.
                    self.epoch += 1;
                    let resumption = Resumption {
                        session: self.session,
                        epoch: self.epoch,
                    };
                    if !Greeting::Comm(resumption).send(&links) {
                        self.redial.broke(lane);
                        continue;
                    }
                    (self.lost, self.is_doubtful, self.waits) = (None, false, None);
                    self.is_positioning = true;
                    return Ok(Some(links));
                }
                News::Failed(_, error) => unreached = Some(error),
                News::Vacate(_) => {}
            }
        }
        // While there is a connection, it can be no worse than none.
        self.is_doubtful &= unreached.is_none();
        let Some(lost) = &self.lost else {
            return Ok(None);
        };
        let bare = self.redial.bare(now);
        let is_over = bare.is_some_and(|bare| bare >= DEAD_AFTER);
        let why = match unreached {
            Some(error) if error.is_answer() || is_over => error.to_string(),
            _ if is_over => format!("nobody answered in {} s", DEAD_AFTER.as_secs()),
            _ => return Ok(None),
        };
        let why = match lost.as_str() {
            "" => why,
            lost => format!("{lost}; dialling it again: {why}"),
        };
        Err(self.gone.insert(why).clone())
    }

    /// Looks at a connection on which the receiver may lack something, and has read up to `read`.
    /// Where the peer's system answers nothing, another pair is dialled; if that comes about, it
    /// takes the place.
    pub(crate) fn check_link(&mut self, now: Instant, link: &Link, read: Option<u64>) {
        self.waits = match (read, self.waits) {
            (Some(read), Some(waits)) if waits.1 == read => Some(waits),
            (read, _) => read.map(|read| (now, read)),
        };
        self.is_doubtful |= self.waits.is_some() && is_unanswered(link);
    }

    /// The receiver, which has read up to `read`, has waited for more. Where that has been under
    /// way for too long, it does not come.
    pub(crate) fn wanted(&mut self, now: Instant, read: u64) {
        let waits = self.waits.filter(|(_, before)| *before == read);
        let is_late =
            waits.is_some_and(|(since, _)| now.saturating_duration_since(since) >= STALL_BEHIND);
        if is_late && !self.is_doubtful {
            self.waits = Some((now, read));
            self.is_doubtful = true;
        }
    }
}

#[cfg(test)]
impl Resume {
    /// Of a comm whose receiver nobody reaches.
    pub(crate) fn of_nobody() -> Self {
        Self {
            lost: None,
            ..Self::new(Peer::nobody(), SessionId([1; 16]))
        }
    }

    /// A pair has come about.
    pub(crate) fn came(&mut self, pair: [Link; 2]) {
        self.redial.came(0, pair);
    }
}

/// Connections of a receive comm's, as the door hands them over.
#[derive(Debug)]
pub(crate) struct LinkInbox {
    has_news: AtomicBool,
    next: Mutex<NextLink>,
    /// The comm takes what came and tells what it has read, although its host calls nothing.
    pub(crate) monitor_handle: MonitorHandle,
}

#[derive(Debug, Default)]
struct NextLink {
    /// Of the pair that came last.
    epoch: u32,
    came: Option<[Link; 2]>,
}

impl LinkInbox {
    pub(crate) fn new(monitor_handle: MonitorHandle) -> Self {
        Self {
            has_news: AtomicBool::new(false),
            next: Mutex::default(),
            monitor_handle,
        }
    }

    fn lock(&self) -> MutexGuard<'_, NextLink> {
        lock(&self.next)
    }

    /// A pair came, payload's first, that takes the place of the one before; one of an older epoch
    /// is dropped.
    pub(crate) fn put(&self, epoch: u32, pair: [Link; 2]) {
        let mut next = self.lock();
        if epoch > next.epoch {
            let came = Some(pair);
            *next = NextLink { epoch, came };
            self.has_news.store(true, Ordering::Release);
            self.monitor_handle.hurry();
        }
    }

    pub(crate) fn has_news(&self) -> bool {
        self.has_news.load(Ordering::Relaxed)
    }

    /// What came last, once.
    pub(crate) fn take(&self) -> Option<[Link; 2]> {
        if !self.has_news() {
            return None;
        }
        let mut next = self.lock();
        self.has_news.store(false, Ordering::Relaxed);
        next.came.take()
    }

    /// The comm takes none any more.
    pub(crate) fn close(&self) {
        let (epoch, came) = (u32::MAX, None);
        *self.lock() = NextLink { epoch, came };
    }
}

/// A receive comm's part in that; dropping it refuses connections from then on.
#[derive(Debug)]
pub(crate) struct Comeback {
    pub(crate) inbox: Arc<LinkInbox>,
    /// Of the sender's process.
    pub(crate) peer: IpAddr,
    session: SessionId,
    registry: Arc<Registry>,
}

impl Comeback {
    /// For a comm that is introduced in this session; the monitor has to
    /// [watch](LinkInbox::monitor_handle) it.
    pub(crate) fn new(runtime: &Runtime, session: SessionId, peer: IpAddr) -> Self {
        let inbox = Arc::new(LinkInbox::new(runtime.monitor.handle()));
        runtime.registry.expect(session, &inbox);
        Self {
            inbox,
            peer,
            session,
            registry: Arc::clone(&runtime.registry),
        }
    }
}

impl Drop for Comeback {
    fn drop(&mut self) {
        self.registry.forget(self.session);
        self.inbox.close();
    }
}

/// A receive comm that waits for another connection.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// How the one before broke.
    pub(crate) why: String,
    since: Instant,
    /// The door of the sender's process, if it is known.
    door: Option<SocketAddr>,
    look: PeerLiveness,
    /// There was none before: the connection that introduced the comm is there as long as its
    /// sender.
    pub(crate) is_first: bool,
}

/// Whether the sender's process is there.
#[derive(Debug)]
enum PeerLiveness {
    /// To be looked at again then.
    At(Instant),
    /// A connection to its door is under way, since then. It says nothing.
    Dialling(Stream, Instant),
}

impl Waiting {
    /// For the first pair.
    pub(crate) fn first() -> Self {
        Self {
            is_first: true,
            ..Self::new("the comm was introduced".to_owned(), None)
        }
    }

    pub(crate) fn new(why: String, door: Option<SocketAddr>) -> Self {
        let now = Instant::now();
        Self {
            why,
            since: now,
            door,
            look: PeerLiveness::At(now),
            is_first: false,
        }
    }

    /// Why there is no use in waiting any longer, if there is none.
    pub(crate) fn in_vain(&mut self, now: Instant) -> Option<String> {
        if now.saturating_duration_since(self.since) >= DEAD_AFTER {
            let seconds = DEAD_AFTER.as_secs();
            return Some(format!(
                "{}, and no connection came in {seconds} s",
                self.why
            ));
        }
        let door = self.door?;
        let look = match std::mem::replace(&mut self.look, PeerLiveness::At(now + LOOK)) {
            PeerLiveness::At(at) if now < at => {
                self.look = PeerLiveness::At(at);
                return None;
            }
            PeerLiveness::At(_) => {
                let begun = socket::begin_connect(&Way::to(door), &Congestion::Automatic);
                begun.map(|stream| (Stream::new(stream), now))
            }
            PeerLiveness::Dialling(stream, since) => Ok((stream, since)),
        };
        let is_there = look.and_then(|(stream, since)| {
            let is_there = socket::is_connected(&stream, door, since)?;
            if !is_there {
                self.look = PeerLiveness::Dialling(stream, since);
            }
            Ok(is_there)
        });
        let is_gone = matches!(is_there, Err(SocketError::Refused { .. }));
        // With another error the way there is broken too.
        is_gone.then(|| format!("{}, and its process is gone", self.why))
    }
}

/// Says how far the receiver has read, and whether it `waits` for more. A sender that takes nothing
/// now is told later.
pub(crate) fn report_read(link: &Link, read: u64, waits: bool) -> io::Result<Moved> {
    let record = Header {
        sequence: read,
        size: waits.into(),
    };
    link.send_whole(&record.encode(Record::Read))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;

    use tcpx_lanes::monitor::Monitor;

    use super::*;

    #[test]
    fn only_a_receiver_that_waits_in_vain_is_dialled() {
        let (link, _far) = Link::bare();
        let (mut resume, start) = (Resume::of_nobody(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        resume.check_link(start, &link, Some(5));
        resume.check_link(after(3600), &link, Some(5));
        assert!(!resume.is_active(), "it reads nothing");
        resume.check_link(after(3600), &link, Some(9));
        resume.wanted(after(3602), 9);
        resume.wanted(after(3610), 5);
        assert!(!resume.is_active(), "it may be on its way");
        resume.wanted(after(3603), 9);
        assert!(resume.is_active());
    }

    #[test]
    fn connections_stay_whose_bytes_only_the_kernel_has() {
        let (link, _far) = Link::bare();
        let (mut resume, start) = (Resume::of_nobody(), Instant::now());
        resume.check_link(start, &link, Some(5));
        resume.wanted(start + STALL_BEHIND, 5);
        assert!(resume.is_active());
        assert!(matches!(resume.step(start, true), Ok(None)));
        assert!(!resume.is_active());
        // There is nothing to lose any more.
        resume.lose("it was reset".to_owned());
        assert!(matches!(resume.step(start, true), Ok(None)));
        assert!(resume.is_active() && resume.is_lost());
    }

    #[test]
    fn a_pair_of_which_one_broke_is_no_half_of_the_next_one() {
        let (mut resume, now) = (Resume::of_nobody(), Instant::now());
        resume.lose("it was reset".to_owned());
        let mut epochs = Vec::new();
        for breaks in [true, false] {
            let [(link, mut far), (answers, _far)] = [Link::bare(), Link::bare()];
            if breaks {
                socket::abort(answers.as_fd());
            }
            resume.came([link, answers]);
            let came = resume.step(now, false).unwrap();
            assert_eq!(came.is_none(), breaks);
            let mut hello = [0; Greeting::BYTES];
            far.read_exact(&mut hello).unwrap();
            epochs.push(Greeting::decode(&hello).unwrap().0);
        }
        assert_ne!(epochs[0], epochs[1]);
    }

    #[test]
    fn a_comm_takes_what_came_last() {
        let inbox = LinkInbox::new(Monitor::new("monitor").handle());
        let pair = || [Link::bare().0, Link::bare().0];
        inbox.put(2, pair());
        inbox.put(1, pair());
        assert!(inbox.take().is_some());
        inbox.put(2, pair());
        assert!(inbox.take().is_none(), "it was there");
        inbox.close();
        inbox.put(3, pair());
        assert!(inbox.take().is_none());
    }
}

//! What the kernel counted on a TCP stream (`TCP_INFO`, tcp(7)).

use std::mem::{MaybeUninit, offset_of};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use tcpx_status::LaneReport;

/// Payload bytes of a stream, both ways.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TcpCounters {
    /// Sent, again or not (Linux 4.19 and later).
    pub sent: u64,
    /// Received, each byte once.
    pub received: u64,
    /// Packets that were sent again.
    pub retransmits: u64,
}

/// How far a stream's sending side is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Transport {
    /// Bytes that the peer's system has acknowledged (Linux 4.2 and later, else 0).
    pub acknowledged: u64,
    /// Packets that it has not acknowledged yet.
    pub in_flight: u32,
    /// Bytes that were not sent yet.
    pub unsent: u32,
    /// For how long it has had something under way, in microseconds (Linux 4.10 and later, else 0).
    pub busy_micros: u64,
    /// Most bytes of a packet.
    pub packet: u32,
    /// How often the oldest of them was to be sent again because nothing came back in time; where
    /// none is under way, how often the peer's system was asked in vain whether it has room.
    pub tries: u8,
    /// Since the peer's system acknowledged anything, be it again.
    pub answered_ago: Duration,
    /// Since payload was sent, be it again.
    pub sent_ago: Duration,
    /// What an answer takes, as a rule.
    pub round_trip: Duration,
}

impl Transport {
    /// Bytes that the peer's system has not acknowledged, at most.
    pub fn backlog(&self) -> u64 {
        u64::from(self.unsent) + u64::from(self.in_flight) * u64::from(self.packet)
    }

    /// As `tries`, but those that tell something: a system without room answers out-of-place
    /// packets twice a second at most (`tcp_invalid_ratelimit`), so that one question without an
    /// answer is nothing unusual.
    pub fn vain_tries(&self) -> u8 {
        match self.in_flight {
            0 => self.tries.saturating_sub(1),
            _ => self.tries,
        }
    }

    /// The peer's system has everything that the stream was given.
    pub fn is_drained(&self) -> bool {
        self.in_flight == 0 && self.unsent == 0
    }

    /// Whether the last try is one that the peer's system would have answered by now: it came long
    /// enough after the answer before, and long enough ago. Questions about room are no payload,
    /// and two of them take as long.
    fn owes_an_answer(&self) -> bool {
        let is_due = self.sent_ago >= self.round_trip + LATE;
        let was_free = self.answered_ago >= self.sent_ago + ANSWER;
        self.in_flight == 0 || (is_due && was_free)
    }
}

/// How far a stream is; `None` where it is no TCP stream.
pub fn transport(socket: &impl AsFd) -> Option<Transport> {
    let (info, _) = tcp_info(socket)?;
    Some(Transport {
        acknowledged: info.tcpi_bytes_acked,
        in_flight: info.tcpi_unacked,
        unsent: info.tcpi_notsent_bytes,
        busy_micros: info.tcpi_busy_time,
        packet: info.tcpi_snd_mss,
        // Without a route nothing leaves, and the system asks for room instead.
        tries: match (info.tcpi_unacked, info.tcpi_notsent_bytes) {
            (0, 1..) => info.tcpi_probes,
            _ => info.tcpi_retransmits,
        },
        answered_ago: Duration::from_millis(info.tcpi_last_ack_recv.into()),
        sent_ago: Duration::from_millis(info.tcpi_last_data_sent.into()),
        round_trip: Duration::from_micros(info.tcpi_rtt.into()),
    })
}

/// What the status tells of a lane's stream.
pub fn lane_report(stream: &impl AsFd, lane: u16, peer: SocketAddr) -> LaneReport {
    let counters = tcp_counters(stream).unwrap_or_default();
    let transport = transport(stream).unwrap_or_default();
    LaneReport {
        channel: 0,
        lane,
        peer: peer.to_string(),
        bytes_sent: counters.sent,
        bytes_received: counters.received,
        retransmits: counters.retransmits,
        round_trip_us: u64::try_from(transport.round_trip.as_micros()).unwrap_or(u64::MAX),
        backlog_bytes: transport.backlog(),
    }
}

/// Bytes that a stream was given so far, counted as [`Transport::acknowledged`] counts them; `None`
/// where it is no TCP stream.
pub fn given(socket: &impl AsFd) -> Option<u64> {
    loop {
        let before = transport(socket)?.acknowledged;
        let mut queued: libc::c_int = 0;
        // SAFETY: the kernel writes one integer (tcp(7), SIOCOUTQ, which has the number of
        // TIOCOUTQ); the descriptor is borrowed for the call.
        let asked =
            unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut queued) };
        let queued = u64::try_from(queued).ok().filter(|_| asked == 0)?;
        // An acknowledgement between the two would count twice.
        if transport(socket)?.acknowledged == before {
            return Some(before + queued);
        }
    }
}

/// So often the oldest packet was sent again in vain when its way counts as broken: after some 600
/// ms within a site, and later where answers take longer.
const VAIN_TRIES: u8 = 2;
/// And so long ago its last answer was, at least. A system without room answers questions about it
/// twice a second at most (`tcp_invalid_ratelimit`), so where tries follow each other faster than
/// usual, two alone say nothing.
const ANSWER: Duration = Duration::from_millis(550);
/// Longer than an answer takes on its way, on a busy host.
const LATE: Duration = Duration::from_millis(50);

/// Whether the peer's system answers nothing of what was sent on a stream, so that the way to it is
/// broken, or the system gone. A process that rests does not keep its system from answering.
pub fn is_unanswered(socket: &impl AsFd) -> bool {
    transport(socket).is_some_and(|transport| {
        let waits = !transport.is_drained();
        let tried = transport.tries >= VAIN_TRIES && transport.answered_ago >= ANSWER;
        waits && tried && transport.owes_an_answer()
    })
}

/// The counters of a stream; `None` where the kernel is too old to keep them.
pub fn tcp_counters(socket: &impl AsFd) -> Option<TcpCounters> {
    let (info, length) = tcp_info(socket)?;
    let needed = offset_of!(libc::tcp_info, tcpi_bytes_sent) + size_of::<u64>();
    (length >= needed).then_some(TcpCounters {
        sent: info.tcpi_bytes_sent,
        received: info.tcpi_bytes_received,
        retransmits: info.tcpi_total_retrans.into(),
    })
}

/// What the kernel tells, and how many bytes of it; the rest is zero.
fn tcp_info(socket: &impl AsFd) -> Option<(libc::tcp_info, usize)> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = libc::socklen_t::try_from(size_of::<libc::tcp_info>()).ok()?;
    // SAFETY: the kernel writes at most `length` bytes to `info`, which has that many; the
    // descriptor is borrowed for the call. There is no safe binding for this option.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if done != 0 {
        return None;
    }
    // SAFETY: every field is an integer, so zeroes and whatever the kernel wrote are values.
    let info = unsafe { info.assume_init() };
    Some((info, usize::try_from(length).ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    use super::*;

    #[test]
    fn what_was_given_is_acknowledged_in_the_end() {
        let (mut near, mut far) = connected();
        let start = given(&near).expect("a TCP stream");
        near.write_all(&[7; 100_000]).expect("there is room");
        let end = given(&near).expect("a TCP stream");
        assert_eq!(end - start, 100_000);
        far.read_exact(&mut [0; 100_000]).expect("all of it");
        let until = Instant::now() + Duration::from_secs(60);
        while transport(&near).expect("a TCP stream").acknowledged < end {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
    }

    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("an address");
        let client = TcpStream::connect(address).expect("connected");
        let (server, _) = listener.accept().expect("accepted");
        (client, server)
    }

    #[test]
    fn the_kernel_counts_what_was_sent_and_received() {
        let (mut client, mut server) = connected();
        client.write_all(&[7; 10_000]).expect("written");
        let mut all = [0; 10_000];
        server.read_exact(&mut all).expect("read");
        let counted = |stream: &TcpStream| tcp_counters(stream).expect("counters");
        assert_eq!(counted(&server).received, 10_000);
        assert_eq!(counted(&client).sent, 10_000);
        assert_eq!(counted(&client).received, 0);
    }

    #[test]
    fn what_an_answer_took_is_known_after_a_reset() {
        let (mut client, mut server) = connected();
        client.write_all(&[7; 10_000]).expect("written");
        server.read_exact(&mut [0; 10_000]).expect("read");
        rustix::net::sockopt::set_socket_linger(&server, Some(Duration::ZERO)).expect("a socket");
        drop(server);
        client.read_exact(&mut [0]).expect_err("reset");
        // What it was before may have changed with an acknowledgement that came late.
        assert!(transport(&client).expect("figures").round_trip > Duration::ZERO);
    }

    #[test]
    fn the_system_of_a_process_that_takes_nothing_answers() {
        let (mut client, _server) = connected();
        client.set_nonblocking(true).expect("a socket");
        while client.write(&[7; 65536]).is_ok() {}
        // Several times as long as a way may be broken.
        let until = Instant::now() + 5 * ANSWER;
        while Instant::now() < until {
            assert!(!is_unanswered(&client));
            std::thread::sleep(ANSWER / 20);
        }
    }

    /// The answer to the second try was held back, and the third comes later: the way is whole.
    /// Where the third gets none either, it is not.
    #[test]
    fn a_try_that_came_too_soon_after_an_answer_says_nothing() {
        let at = |answered: u64, sent: u64| Transport {
            in_flight: 1,
            tries: VAIN_TRIES,
            answered_ago: Duration::from_millis(answered),
            sent_ago: Duration::from_millis(sent),
            round_trip: Duration::from_millis(1),
            ..Transport::default()
        };
        for (answered, sent, owes) in [
            (600, 200, false),
            (1199, 799, false),
            (1200, 0, false),
            (1300, 100, true),
            (650, 60, true),
        ] {
            assert_eq!(
                at(answered, sent).owes_an_answer(),
                owes,
                "{answered} {sent}"
            );
        }
    }

    #[test]
    fn what_is_no_tcp_stream_has_no_counters() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        assert_eq!(tcp_counters(&one), None);
    }
}

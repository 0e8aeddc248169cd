//! A channel against a peer that is played by hand, over real sockets: wherever the payload lane
//! ends, every byte comes once, and headers that cannot be end the channel.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tcpx_memory::Region;

use super::*;
use crate::calls::LinuxSockets;
use crate::landing::LandingRing;
use crate::ordinary::{HEADER_BYTES, Header};
use tcpx_net::channel::Payload;

/// Far beyond what anything here takes.
const LONG: Duration = Duration::from_secs(60);

fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    for stream in [&ours, &theirs] {
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
    }
    (ours, theirs)
}

/// A channel without a pool, and the peer's ends of its lanes.
struct Scene {
    channel: DevmemChannel,
    payload: TcpStream,
    ordinary: TcpStream,
    out: Vec<Completion>,
}

impl Scene {
    fn new() -> Self {
        let (ours, payload) = connected();
        let (beside, ordinary) = connected();
        let signal = Arc::new(Waker::new().unwrap());
        let parts = Parts {
            name: "a channel".to_owned(),
            plain_name: "a channel over plain TCP".to_owned(),
            calls: Arc::new(LinuxSockets),
            payload: ours.into(),
            ordinary: beside.into(),
            rule: None,
            inflow: Inflow::new(None, LandingRing::new().unwrap()),
            stage: Stage::new(&[], None, Arc::clone(&signal)).unwrap(),
            signal,
            window: 64,
        };
        Self {
            channel: DevmemChannel::new(parts).unwrap(),
            payload,
            ordinary,
            out: Vec::new(),
        }
    }

    /// Lets the channel work until `done` says so, with the peer's reading in between.
    fn until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        let started = Instant::now();
        loop {
            let mut out = std::mem::take(&mut self.out);
            self.channel.poll(&mut out).unwrap();
            self.out = out;
            if done(self) {
                return;
            }
            assert!(started.elapsed() < LONG, "{:?}", self.channel);
            self.wait();
        }
    }

    /// For something to do, a short while at most.
    fn wait(&self) {
        let Readiness::Fd(ready) = self.channel.readiness() else {
            panic!("it has a descriptor");
        };
        let mut wait = [
            PollFd::new(&ready, PollFlags::IN),
            PollFd::new(&self.payload, PollFlags::IN),
            PollFd::new(&self.ordinary, PollFlags::IN),
        ];
        let limit = Timespec::try_from(Duration::from_millis(20)).unwrap();
        poll(&mut wait, Some(&limit)).unwrap();
    }

    /// What there is on a connection, at most so much; `None` at its end.
    fn read(mut from: &TcpStream, most: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; most];
        match from.read(&mut bytes) {
            Ok(0) if most > 0 => None,
            Ok(count) => {
                bytes.truncate(count);
                Some(bytes)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Some(Vec::new()),
            Err(error) => panic!("{error}"),
        }
    }

    /// The peer gives the payload lane up.
    fn announce(&self) {
        (&self.ordinary).write_all(&NOTHING.encode()).unwrap();
    }

    fn sent(&self) -> Vec<u64> {
        let token = |one: &Completion| match one {
            Completion::Sent { token } => Some(*token),
            _ => None,
        };
        self.out.iter().filter_map(token).collect()
    }

    fn changes(&self) -> usize {
        let is_one = |one: &&Completion| matches!(one, Completion::PathChanged { .. });
        self.out.iter().filter(is_one).count()
    }
}

/// What a side says first on the ordinary lane.
const NOTHING: Header = Header {
    sequence: 0,
    length: 0,
};

/// Byte `place` of the stream.
fn content(place: u64) -> u8 {
    (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn region(start: u64, bytes: usize) -> Region {
    let region = Region::host(bytes).unwrap();
    let content: Vec<u8> = (start..).take(bytes).map(content).collect();
    region.write_from(0, &content).unwrap();
    region
}

fn send(token: u64, region: &Region) -> SendChunk {
    SendChunk {
        token,
        sequence: token,
        transfer: 1,
        offset: 0,
        index: 0,
        total: region.len() as u64,
        window: token,
        tag: 0,
        source: region.all(),
        fence: None,
    }
}

fn receive(token: u64, bytes: usize) -> ReceiveChunk {
    ReceiveChunk {
        token,
        sequence: token,
        transfer: 1,
        offset: 0,
        tag: 0,
        destination: Region::host(bytes).unwrap().all(),
        fence: None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// The peer has `place` bytes when it gives the payload lane up, and has placed some whole
    /// chunks.
    #[test]
    fn what_the_peer_has_not_placed_is_sent_again(
        chunks in prop::collection::vec(1usize..300_000, 1..8),
        place in any::<prop::sample::Index>(),
        placed in any::<prop::sample::Index>(),
        late in any::<bool>(),
    ) {
        let total: usize = chunks.iter().sum();
        let place = place.index(total + 1);
        let mut scene = Scene::new();
        let mut starts = Vec::new();
        let mut start = 0;
        for (token, bytes) in (0u64..).zip(&chunks) {
            starts.push(start);
            let region = region(start, *bytes);
            start += *bytes as u64;
            let posted = scene.channel.post_send(send(token, &region)).unwrap();
            prop_assert!(matches!(posted, PostAnswer::Accepted));
        }
        let mut have = 0;
        scene.until(|scene| {
            if have < place {
                have += Scene::read(&scene.payload, place - have).expect("no end").len();
            }
            have == place
        });
        prop_assert!(scene.sent().is_empty(), "nothing was placed");
        let whole = starts.iter().zip(&chunks);
        let whole = whole.filter(|(start, bytes)| **start as usize + **bytes <= place).count();
        let placed = placed.index(whole + 1) as u64;
        let say_placed = |scene: &mut Scene, sequences: std::ops::Range<u64>| {
            for sequence in sequences {
                scene.channel.placed(sequence).unwrap();
            }
        };
        if !late {
            say_placed(&mut scene, 0..placed);
        }
        scene.announce();
        // Headers and chunks, as they come.
        let mut came: Vec<u8> = Vec::new();
        let mut again: Vec<u64> = Vec::new();
        let count = chunks.len() as u64;
        scene.until(|scene| {
            came.extend(Scene::read(&scene.ordinary, total + 1000).expect("no end"));
            let mut at = 0;
            again.clear();
            while let Some(head) = came[at..].first_chunk() {
                let header = Header::decode(*head);
                at += HEADER_BYTES + header.length as usize;
                if header == NOTHING && at == HEADER_BYTES {
                    continue;
                }
                let number = header.sequence as usize;
                assert_eq!(header.length as usize, chunks[number]);
                if at > came.len() {
                    return false;
                }
                let bytes = &came[at - chunks[number]..at];
                let right = (starts[number]..).take(bytes.len()).map(content);
                assert!(bytes.iter().copied().eq(right));
                again.push(header.sequence);
            }
            at == came.len() && again.last() == Some(&(count - 1)) || placed == count
        });
        if late {
            say_placed(&mut scene, 0..placed);
        }
        let first = if late { 0 } else { placed };
        prop_assert!(placed == count || again == (first..count).collect::<Vec<_>>(), "{:?}", again);
        say_placed(&mut scene, placed..if placed == count { placed } else { count });
        scene.until(|scene| scene.channel.in_flight() == 0);
        let mut sent = scene.sent();
        sent.sort_unstable();
        prop_assert_eq!(sent, (0..count).collect::<Vec<_>>());
        prop_assert_eq!(scene.changes(), 1);
    }

    /// The payload lane ends after `place` bytes; the peer sends whole chunks again, from one on
    /// that it believes to be missing, in stretches.
    #[test]
    fn what_is_here_already_is_skipped_when_it_comes_again(
        chunks in prop::collection::vec(1usize..300_000, 1..8),
        place in any::<prop::sample::Index>(),
        again in any::<prop::sample::Index>(),
        stretch in 1usize..400_000,
    ) {
        let total: usize = chunks.iter().sum();
        let place = place.index(total);
        let stream: Vec<u8> = (0..total as u64).map(content).collect();
        let starts: Vec<usize> = chunks.iter().scan(0, |end, bytes| {
            *end += bytes;
            Some(*end - bytes)
        }).collect();
        let whole = starts.iter().zip(&chunks).filter(|(start, bytes)| **start + **bytes <= place);
        let again = again.index(whole.count() + 1);
        let mut second = NOTHING.encode().to_vec();
        for number in again..chunks.len() {
            let header = Header { sequence: number as u64, length: chunks[number] as u32 };
            second.extend(header.encode());
            second.extend(&stream[starts[number]..starts[number] + chunks[number]]);
        }
        let mut scene = Scene::new();
        for (token, bytes) in (0u64..).zip(&chunks) {
            let posted = scene.channel.post_receive(receive(token, *bytes)).unwrap();
            prop_assert!(matches!(posted, PostAnswer::Accepted));
        }
        let mut came: Vec<u8> = Vec::new();
        let mut ended = Vec::new();
        let (mut written, mut over) = (0, 0);
        scene.until(|scene| {
            // What the channel has: read as the engine unpacks it, and given back.
            for one in scene.out.drain(..) {
                let (token, pool, list, ticket) = match one {
                    Completion::Part { token, pool, list, ticket } => (token, pool, list, ticket),
                    Completion::Received {
                        token,
                        payload: Payload::Scattered { pool, list, ticket, .. },
                    } => {
                        ended.push(token);
                        (token, pool, list, ticket)
                    }
                    Completion::PathChanged { .. } => continue,
                    other => panic!("{other:?}"),
                };
                let before = starts[token as usize] as u64;
                for fragment in list {
                    assert_eq!(before + fragment.destination_offset, came.len() as u64);
                    let from = fragment.source_offset as usize;
                    let part = pool.slice().slice(from..from + fragment.length as usize).unwrap();
                    let mut bytes = vec![0; part.len()];
                    part.read_to(&mut bytes).unwrap();
                    came.extend(bytes);
                }
                assert!(matches!(scene.channel.consume(ticket), Ok(PostAnswer::Accepted)));
            }
            // The peer: payload as far as it gets, and once that has come, the other lane.
            let write = |mut to: &TcpStream, bytes: &[u8]| match to.write(bytes) {
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
                Err(error) => panic!("{error}"),
            };
            if written < place {
                written += write(&scene.payload, &stream[written..place]);
            } else if scene.channel.inflow.stats().bytes_received as usize >= place {
                let end = second.len().min(over + stretch);
                over += write(&scene.ordinary, &second[over..end]);
            }
            ended.len() == chunks.len()
        });
        prop_assert!(came == stream, "the stream differs");
        let tokens: Vec<u64> = (0u64..).take(chunks.len()).collect();
        prop_assert_eq!(ended, tokens);
        let skipped = scene.channel.stats().bytes_discarded as usize;
        prop_assert_eq!(skipped, place - starts[again]);
    }

    /// Any headers, then the end: an error that stays.
    #[test]
    fn any_headers_end_in_an_error_that_stays(
        headers in prop::collection::vec((0u64..4, 0u32..20), 1..20),
    ) {
        let mut scene = Scene::new();
        for token in 0..2 {
            let posted = scene.channel.post_receive(receive(token, 10)).unwrap();
            prop_assert!(matches!(posted, PostAnswer::Accepted));
        }
        for (sequence, length) in headers {
            let header = Header { sequence, length };
            (&scene.ordinary).write_all(&header.encode()).unwrap();
        }
        scene.ordinary.shutdown(std::net::Shutdown::Write).unwrap();
        let started = Instant::now();
        let error = loop {
            match scene.channel.poll(&mut scene.out) {
                Err(error) => break error,
                Ok(()) if scene.channel.in_flight() == 0 => return Ok(()),
                Ok(()) => {}
            }
            prop_assert!(started.elapsed() < LONG, "{:?}", scene.channel);
            scene.wait();
        };
        prop_assert_eq!(scene.channel.poll(&mut Vec::new()), Err(error));
    }
}

#[test]
fn a_chunk_that_was_never_sent_cannot_be_placed() {
    let mut scene = Scene::new();
    let region = region(0, 10);
    let posted = scene.channel.post_send(send(0, &region)).unwrap();
    assert!(matches!(posted, PostAnswer::Accepted));
    let refused = scene.channel.placed(0);
    assert!(
        matches!(refused, Err(ChannelError::Protocol { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_peer_that_closes_after_all_was_sent_is_no_error() {
    let mut scene = Scene::new();
    let region = region(0, 10);
    let posted = scene.channel.post_send(send(0, &region)).unwrap();
    assert!(matches!(posted, PostAnswer::Accepted));
    let mut have = 0;
    scene.until(|scene| {
        have += Scene::read(&scene.payload, 10).unwrap().len();
        have == 10
    });
    scene.ordinary.shutdown(std::net::Shutdown::Both).unwrap();
    scene.payload.shutdown(std::net::Shutdown::Both).unwrap();
    scene.until(|scene| scene.channel.peer_closed);
    scene.channel.placed(0).unwrap();
    scene.until(|scene| scene.sent() == [0]);
    assert_eq!(scene.changes(), 0);
}

#[test]
fn a_reset_payload_lane_is_given_up_and_the_peer_told() {
    let mut scene = Scene::new();
    let region = region(0, 100_000);
    let posted = scene.channel.post_send(send(0, &region)).unwrap();
    assert!(matches!(posted, PostAnswer::Accepted));
    let posted = scene.channel.post_receive(receive(0, 10)).unwrap();
    assert!(matches!(posted, PostAnswer::Accepted));
    rustix::net::sockopt::set_socket_linger(&scene.payload, Some(Duration::ZERO)).unwrap();
    // The last one ends with a reset.
    scene.payload = connected().1;
    let header = Header {
        sequence: 0,
        length: 100_000,
    };
    let mut right = [NOTHING.encode(), header.encode()].concat();
    right.extend((0..100_000).map(content));
    let mut came = Vec::new();
    scene.until(|scene| {
        came.extend(Scene::read(&scene.ordinary, right.len()).expect("no end"));
        came.len() == right.len()
    });
    assert!(came == right, "the chunk is sent again");
    scene.channel.placed(0).unwrap();
    let header = Header {
        sequence: 0,
        length: 10,
    };
    let mut first = [NOTHING.encode(), header.encode()].concat();
    first.extend([7; 10]);
    (&scene.ordinary).write_all(&first).unwrap();
    let is_received = |one: &Completion| matches!(one, Completion::Received { token: 0, .. });
    scene.until(|scene| scene.sent() == [0] && scene.out.iter().any(is_received));
    assert_eq!(scene.changes(), 1);
}

//! A channel against a peer that is played by hand, over real sockets: wherever the payload connection is
//! given up, every byte comes once, and words that cannot be end the channel.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tcpx_memory::Region;

use super::*;
use crate::calls::LinuxSockets;
use crate::companion::{BYTES, Word};
use crate::landing::Landing;
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

/// A channel without a pool, and the peer's ends of its connections.
struct Scene {
    channel: DevmemChannel,
    payload: TcpStream,
    companion: TcpStream,
    out: Vec<Completion>,
    /// What has come of the channel's next word.
    head: Vec<u8>,
}

impl Scene {
    fn new() -> Self {
        let (ours, payload) = connected();
        let (beside, companion) = connected();
        let signal = Arc::new(Waker::new().unwrap());
        let parts = Parts {
            name: "a channel".to_owned(),
            plain_name: "a channel over plain TCP".to_owned(),
            calls: Arc::new(LinuxSockets),
            payload: ours.into(),
            companion: beside.into(),
            rule: None,
            inflow: Inflow::new(None, Landing::new().unwrap()),
            stage: Stage::new(&[], None, Arc::clone(&signal)).unwrap(),
            signal,
            window: 64,
        };
        Self {
            channel: DevmemChannel::new(parts).unwrap(),
            payload,
            companion,
            out: Vec::new(),
            head: Vec::new(),
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
            PollFd::new(&self.companion, PollFlags::IN),
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

    fn say(&self, word: Word) {
        (&self.companion).write_all(&word.encode()).unwrap();
    }

    /// The next word of the channel, if it is there.
    fn hear(&mut self) -> Option<Word> {
        let bytes = Self::read(&self.companion, BYTES - self.head.len())?;
        self.head.extend(bytes);
        let word = Word::decode(*self.head.first_chunk()?);
        self.head.clear();
        Some(word)
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

    /// The peer has `place` bytes when it asks for the rest on the companion.
    #[test]
    fn what_the_peer_lacks_is_sent_again_once_and_nothing_else(
        chunks in prop::collection::vec(1usize..300_000, 1..8),
        place in any::<prop::sample::Index>(),
        told in any::<bool>(),
    ) {
        let total: u64 = chunks.iter().map(|one| *one as u64).sum();
        let place = place.index(total as usize + 1) as u64;
        let mut scene = Scene::new();
        let mut start = 0;
        for (token, bytes) in (0u64..).zip(&chunks) {
            let region = region(start, *bytes);
            start += *bytes as u64;
            let posted = scene.channel.post_send(send(token, &region)).unwrap();
            prop_assert!(matches!(posted, Posted::Accepted));
        }
        let mut have: Vec<u8> = Vec::new();
        scene.until(|scene| {
            let most = place as usize - have.len();
            if most > 0 {
                have.extend(Scene::read(&scene.payload, most).expect("no end"));
            }
            have.len() as u64 == place
        });
        prop_assert!(scene.sent().is_empty(), "nothing was confirmed");
        if told && place > 0 {
            scene.say(Word::Have(place - 1));
        }
        scene.say(Word::Move(place));
        scene.until(|scene| match scene.hear() {
            Some(word) => {
                assert_eq!(word, Word::Move(0), "nothing came to the channel");
                true
            }
            None => false,
        });
        scene.until(|scene| {
            have.extend(Scene::read(&scene.companion, total as usize).expect("no end"));
            have.len() as u64 >= total && scene.sent().len() == chunks.len()
        });
        let right: Vec<u8> = (0..total).map(content).collect();
        prop_assert!(have == right, "the stream differs");
        let tokens: Vec<u64> = (0u64..).take(chunks.len()).collect();
        prop_assert_eq!(scene.sent(), tokens);
        prop_assert_eq!((scene.changes(), scene.channel.in_flight()), (1, 0));
    }

    /// The payload connection ends after `place` bytes; the rest is asked for, and comes in stretches.
    #[test]
    fn the_rest_is_asked_for_from_the_very_byte_on(
        chunks in prop::collection::vec(1usize..300_000, 1..8),
        place in any::<prop::sample::Index>(),
        stretch in 1usize..400_000,
    ) {
        let total: u64 = chunks.iter().map(|one| *one as u64).sum();
        let place = place.index(total as usize) as u64;
        let stream: Vec<u8> = (0..total).map(content).collect();
        let mut scene = Scene::new();
        for (token, bytes) in (0u64..).zip(&chunks) {
            let posted = scene.channel.post_receive(receive(token, *bytes)).unwrap();
            prop_assert!(matches!(posted, Posted::Accepted));
        }
        let mut came: Vec<u8> = Vec::new();
        let mut ended = Vec::new();
        let (mut written, mut asked) = (0, None);
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
                let before: u64 = chunks[..token as usize].iter().map(|one| *one as u64).sum();
                for fragment in list {
                    assert_eq!(before + fragment.destination_offset, came.len() as u64);
                    let from = fragment.source_offset as usize;
                    let part = pool.slice().slice(from..from + fragment.length as usize).unwrap();
                    let mut bytes = vec![0; part.len()];
                    part.read_to(&mut bytes).unwrap();
                    came.extend(bytes);
                }
                assert!(matches!(scene.channel.consume(ticket), Ok(Posted::Accepted)));
            }
            // The peer: payload as far as it gets, then the end, then what was asked for.
            let write = |mut to: &TcpStream, bytes: &[u8]| match to.write(bytes) {
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
                Err(error) => panic!("{error}"),
            };
            if asked.is_none() {
                if (written as u64) < place {
                    written += write(&scene.payload, &stream[written..place as usize]);
                    if written as u64 == place {
                        scene.payload.shutdown(std::net::Shutdown::Write).unwrap();
                    }
                } else if place == 0 && written == 0 {
                    let _ = scene.payload.shutdown(std::net::Shutdown::Write);
                }
            }
            while asked.is_none()
                && let Some(word) = scene.hear()
            {
                match word {
                    Word::Move(at) => {
                        assert_eq!(at, place);
                        asked = Some(at);
                        written = at as usize;
                        scene.say(Word::Move(0));
                    }
                    Word::Have(at) => assert!(at <= total),
                }
            }
            if asked.is_some() {
                let end = stream.len().min(written + stretch);
                written += write(&scene.companion, &stream[written..end]);
            }
            ended.len() == chunks.len()
        });
        prop_assert!(came == stream, "the stream differs");
        let tokens: Vec<u64> = (0u64..).take(chunks.len()).collect();
        prop_assert_eq!(ended, tokens);
    }

    /// Any words, then the end: an error that stays, unless all was sent.
    #[test]
    fn any_words_end_in_an_error_that_stays_or_all_is_sent(
        words in prop::collection::vec(
            (any::<bool>(), prop_oneof![0u64..40, 0..u64::MAX >> 1]), 1..20,
        ),
    ) {
        let mut scene = Scene::new();
        let regions: Vec<_> = (0..2).map(|at| region(10 * at, 10)).collect();
        for (token, region) in (0u64..).zip(&regions) {
            let posted = scene.channel.post_send(send(token, region)).unwrap();
            prop_assert!(matches!(posted, Posted::Accepted));
        }
        let mut stream = Vec::new();
        for (is_last, place) in words {
            let word = if is_last { Word::Move(place) } else { Word::Have(place) };
            stream.extend_from_slice(&word.encode());
        }
        (&scene.companion).write_all(&stream).unwrap();
        scene.companion.shutdown(std::net::Shutdown::Write).unwrap();
        let started = Instant::now();
        let error = loop {
            match scene.channel.poll(&mut scene.out) {
                Err(error) => break error,
                Ok(()) if scene.channel.in_flight() == 0 => break ChannelError::Closed {
                    channel: String::new(),
                },
                Ok(()) => {}
            }
            prop_assert!(started.elapsed() < LONG, "{:?}", scene.channel);
            scene.wait();
        };
        let again = scene.channel.poll(&mut Vec::new());
        let is_closed = matches!(error, ChannelError::Closed { .. });
        prop_assert!(is_closed || again == Err(error));
        let sent: Vec<u64> = scene.out.iter().filter_map(|one| match one {
            Completion::Sent { token } => Some(*token),
            _ => None,
        }).collect();
        prop_assert!(sent == [0, 1] || sent == [0] || sent.is_empty(), "{:?}", sent);
    }
}

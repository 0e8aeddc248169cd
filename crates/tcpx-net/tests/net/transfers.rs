//! Chunks arrive whole, once, and in the right place, however they are posted.

use crate::support::*;
use proptest::prelude::*;
use tcpx_lanes::sealing::Protection;
use tcpx_memory::RegionSlice;
use tcpx_net::{
    Channel, ChannelError, Completion, PostAnswer, ReceiveWindow, SendChunk, TcpOptions,
};
use tcpx_wire::{ChunkPlan, Taper};

/// One direction of traffic between two channels.
struct Flow {
    /// By transfer, which has a window of its own, called like it.
    cuts: Vec<ChunkPlan>,
    salt: u64,
    /// By sequence: the transfer and the index of the chunk.
    chunks: Vec<(usize, u32)>,
    sent: usize,
    posted: usize,
    opened: usize,
    closed: usize,
    /// Of windows that are open, and how much of them was placed.
    destinations: Vec<Option<(RegionSlice, u64)>>,
}

impl Flow {
    /// Of one to three chunks each.
    fn new(sizes: Vec<usize>, salt: u64) -> Self {
        let cut = |(transfer, size): (usize, usize)| {
            let chunk = size.div_ceil(1 + transfer % 3);
            ChunkPlan::even(size as u64, u32::try_from(chunk).unwrap())
        };
        let cuts: Vec<_> = sizes.into_iter().enumerate().map(cut).collect();
        let of_transfer =
            |transfer: usize| (0..cuts[transfer].count()).map(move |index| (transfer, index));
        Self {
            salt,
            chunks: (0..cuts.len()).flat_map(of_transfer).collect(),
            sent: 0,
            posted: 0,
            opened: 0,
            closed: 0,
            destinations: cuts.iter().map(|_| None).collect(),
            cuts,
        }
    }

    fn done(&self) -> bool {
        self.sent == self.chunks.len() && self.closed == self.cuts.len()
    }

    /// Posts the next send; false when there is none, no room, or no window yet.
    fn post_send(&mut self, channel: &mut dyn Channel) -> bool {
        let Some(&(transfer, index)) = self.chunks.get(self.posted) else {
            return false;
        };
        if transfer >= self.opened {
            return false;
        }
        let cut = &self.cuts[transfer];
        let (offset, length) = cut.range(index);
        let start = offset as usize;
        let bytes = filled(transfer as u64 ^ self.salt, cut.bytes() as usize);
        let sequence = self.posted as u64;
        let posted = channel.post_send(SendChunk {
            token: sequence,
            sequence,
            transfer: self.salt,
            offset,
            index,
            total: cut.bytes(),
            window: transfer as u64,
            tag: 5,
            source: bytes.slice(start..start + length as usize).unwrap(),
            fence: None,
        });
        let accepted = matches!(posted.unwrap(), PostAnswer::Accepted);
        self.posted += usize::from(accepted);
        accepted
    }

    fn open_window(&mut self, channel: &mut dyn Channel) -> bool {
        let Some(&cut) = self.cuts.get(self.opened) else {
            return false;
        };
        let destination = guarded(cut.bytes() as usize);
        channel
            .open_window(ReceiveWindow {
                token: 1 << 32 | self.opened as u64,
                window: self.opened as u64,
                cut,
                destination: destination.clone(),
                fence: None,
            })
            .unwrap();
        self.destinations[self.opened] = Some((destination, 0));
        self.opened += 1;
        true
    }

    /// A chunk was placed; its sequence.
    fn placed(&mut self, token: u64, index: u32, range: (u64, u32)) -> u64 {
        let transfer = (token & 0xffff_ffff) as usize;
        assert_eq!(range, self.cuts[transfer].range(index));
        let (_, placed) = self.destinations[transfer].as_mut().unwrap();
        *placed += u64::from(range.1);
        let chunk = (transfer, index);
        self.chunks.binary_search(&chunk).unwrap() as u64
    }

    fn ended(&mut self, token: u64) {
        let transfer = token & 0xffff_ffff;
        let (destination, placed) = self.destinations[transfer as usize].take().unwrap();
        assert_eq!(placed, destination.len() as u64);
        check(&destination, transfer ^ self.salt);
        self.closed += 1;
    }
}

fn drain(
    channel: &mut dyn Channel,
    peer: &mut dyn Channel,
    sends: &mut Flow,
    receives: &mut Flow,
) -> usize {
    let mut out = Vec::new();
    channel.poll(&mut out).unwrap();
    for completion in &out {
        match *completion {
            Completion::Sent { .. } => sends.sent += 1,
            Completion::Placed {
                token,
                index,
                offset,
                bytes,
                ..
            } => {
                let sequence = receives.placed(token, index, (offset, bytes));
                peer.placed(sequence).unwrap();
            }
            Completion::Closed { token, .. } => receives.ended(token),
            // It is dialled again.
            Completion::LaneMissing { .. } | Completion::Begun { .. } => {}
            _ => panic!("{completion:?}"),
        }
    }
    out.len()
}

/// Sends both lists at once, posting in the order that `schedule` gives.
fn exchange(
    lanes: u16,
    options: [TcpOptions; 2],
    protection: Protection,
    sizes: [Vec<usize>; 2],
    schedule: &[u8],
) {
    let [client, server] = options;
    let mut pair = pair_with(lanes, client, server, Vec::new(), protection);
    let totals = sizes
        .clone()
        .map(|sizes| sizes.iter().sum::<usize>() as u64);
    exchange_over(&mut pair, sizes, schedule);
    // The peer may have placed a chunk before the thread that wrote it comes to count it.
    wait_until(|| {
        [
            pair.client.stats().bytes_sent,
            pair.server.stats().bytes_sent,
        ] == totals
    });
    let (client, server) = (pair.client.stats(), pair.server.stats());
    assert_eq!([server.bytes_received, client.bytes_received], totals);
    assert!(close(&mut *pair.client).is_empty());
    assert!(close(&mut *pair.server).is_empty());
}

/// As [`exchange`], between channels that are there; each chunk arrives as it was.
pub(crate) fn exchange_over(pair: &mut Pair, sizes: [Vec<usize>; 2], schedule: &[u8]) {
    let [up, down] = sizes;
    let (mut up, mut down) = (Flow::new(up, 77), Flow::new(down, 88));
    let mut schedule = schedule.iter().cycle();
    while !(up.done() && down.done()) {
        let mut moved = drain(&mut *pair.client, &mut *pair.server, &mut up, &mut down) > 0;
        moved |= drain(&mut *pair.server, &mut *pair.client, &mut down, &mut up) > 0;
        // A few posts by schedule, and only when nothing else goes on any that is possible.
        for _ in 0..3 {
            moved |= match schedule.next().unwrap() % 4 {
                0 => up.post_send(&mut *pair.client),
                1 => up.open_window(&mut *pair.server),
                2 => down.post_send(&mut *pair.server),
                _ => down.open_window(&mut *pair.client),
            };
        }
        if !moved {
            moved = up.post_send(&mut *pair.client)
                | up.open_window(&mut *pair.server)
                | down.post_send(&mut *pair.server)
                | down.open_window(&mut *pair.client);
        }
        let done = up.done() && down.done();
        if !moved && !done {
            wait_any(&[&*pair.client, &*pair.server]);
        }
    }
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    let size = prop_oneof![
        4 => 1usize..200,
        3 => 200usize..70_000,
        1 => (1usize << 20) - 3..=1 << 20,
    ];
    prop::collection::vec(size, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn any_sizes_in_any_order_of_posting(
        lanes in 1u16..=4,
        windows in (1u16..20, 1u16..20),
        staged in (any::<bool>(), any::<bool>()),
        protection in prop::sample::select(vec![Protection::None, Protection::Headers, Protection::All]),
        up in sizes(),
        down in sizes(),
        schedule in prop::collection::vec(any::<u8>(), 1..64),
    ) {
        let make = |window, stage_host| TcpOptions { window, ..options(stage_host) };
        let options = [make(windows.0, staged.0), make(windows.1, staged.1)];
        exchange(lanes, options, protection, [up, down], &schedule);
    }
}

#[test]
fn a_chunk_larger_than_any_socket_buffer_arrives() {
    let mut pair = pair(1, options(false), options(false));
    let length = (48 << 20) + 5;
    let destination = guarded(length);
    open_window(&mut *pair.server, 0, destination.clone());
    post_send(&mut *pair.client, 0, filled(0, length));
    assert_eq!(received(&mut *pair.server, 1), [1000]);
    pair.client.placed(0).unwrap();
    assert_eq!(sent_token(&completions(&mut *pair.client, 1)[0]), 0);
    check(&destination, 0);
}

/// Short chunks are read in pieces to where no other lane's are, and with the last one the next
/// header.
#[test]
fn staged_chunks_lie_one_behind_the_other() {
    const LENGTHS: [u32; 8] = [
        163_839, 163_840, 163_841, 1, 327_680, 163_872, 1_048_575, 17,
    ];
    let mut raw = raw_peer(3, options(true));
    let destinations = LENGTHS.map(|length| guarded(length as usize));
    for (sequence, destination) in (0..).zip(&destinations) {
        open_window(&mut *raw.channel, sequence, destination.clone());
    }
    std::thread::scope(|scope| {
        for (first, lane) in raw.lanes.iter().enumerate() {
            scope.spawn(move || {
                let chunks = (0..).zip(LENGTHS).skip(first).step_by(3);
                chunks.for_each(|(at, length)| write_chunk(lane, at, length, length as usize));
            });
        }
    });
    let ended = completions(&mut *raw.channel, 2 * LENGTHS.len());
    let is_closed = |one: &&Completion| matches!(one, Completion::Closed { .. });
    assert_eq!(ended.iter().filter(is_closed).count(), LENGTHS.len());
    for (sequence, destination) in (0..).zip(&destinations) {
        check(destination, sequence);
    }
}

#[test]
fn a_transfer_may_be_shorter_than_its_window() {
    for stage_host in [false, true] {
        let mut pair = pair(2, options(false), options(stage_host));
        // A window that is cut with a taper, which a shorter transfer has not.
        let taper = Taper::new(2, 1).unwrap();
        let cut = ChunkPlan::new(1 << 20, 256 << 10, Some(taper)).unwrap();
        let destination = guarded(1 << 20);
        pair.server
            .open_window(ReceiveWindow {
                token: 1000,
                window: 0,
                cut,
                destination: destination.clone(),
                fence: None,
            })
            .unwrap();
        let total = (700 << 10) + 1;
        let source = filled(0, total);
        let plan = cut.for_total(total as u64);
        for index in 0..plan.count() {
            let (offset, length) = plan.range(index);
            let start = offset as usize;
            let chunk = SendChunk {
                token: index.into(),
                sequence: index.into(),
                offset,
                index,
                total: total as u64,
                window: 0,
                ..send_chunk(0, source.slice(start..start + length as usize).unwrap())
            };
            assert!(matches!(
                pair.client.post_send(chunk),
                Ok(PostAnswer::Accepted)
            ));
        }
        let mut ended = completions(&mut *pair.server, 4);
        (0..3).for_each(|sequence| pair.client.placed(sequence).unwrap());
        completions(&mut *pair.client, 3);
        assert_eq!(closed_token(&ended.pop().unwrap()), 1000);
        let mut placed: Vec<_> = ended
            .iter()
            .map(|news| match *news {
                Completion::Placed {
                    token: 1000,
                    index,
                    offset,
                    bytes,
                } => (index, offset, bytes),
                _ => panic!("{news:?}"),
            })
            .collect();
        placed.sort_unstable();
        let expected = [
            (0, 0, 262_144),
            (1, 262_144, 262_144),
            (2, 524_288, 192_513),
        ];
        assert_eq!(placed, expected);
        let mut bytes = vec![0; 1 << 20];
        destination.read_to(&mut bytes).unwrap();
        let wrong = (0..total).find(|&at| bytes[at] != pattern(0, at));
        assert_eq!(wrong, None);
        assert!(bytes[total..].iter().all(|byte| *byte == 0xEE));
    }
}

#[test]
fn a_full_table_hands_the_chunk_back_until_a_completion() {
    let small = TcpOptions {
        window: 2,
        ..TcpOptions::default()
    };
    let mut pair = pair(1, small.clone(), small);
    for name in 0..3 {
        open_window(&mut *pair.server, name, guarded(10));
    }
    let client = &mut *pair.client;
    post_send(client, 0, filled(0, 10));
    post_send(client, 1, filled(1, 10));
    let Ok(PostAnswer::Full(third)) = client.post_send(send_chunk(2, filled(2, 10))) else {
        panic!("a table of two took a third send");
    };
    assert_eq!(third.sequence, 2);
    assert_eq!(received(&mut *pair.server, 2), [1000, 1001]);
    client.placed(0).unwrap();
    assert_eq!(sent_token(&completions(client, 1)[0]), 0);
    assert!(matches!(client.post_send(third), Ok(PostAnswer::Accepted)));
    assert_eq!(client.in_flight(), 2);
    assert_eq!(received(&mut *pair.server, 1), [1002]);
}

#[test]
fn requests_that_no_lane_could_carry_are_refused_when_posted() {
    let mut pair = pair(1, options(true), options(false));
    let empty = filled(0, 10).slice(..0).unwrap();
    let error = pair.client.post_send(send_chunk(0, empty)).unwrap_err();
    assert!(
        error.to_string().contains("0 bytes, expected 1 to 1048576"),
        "{error}"
    );
    let error = pair
        .client
        .post_send(send_chunk(0, filled(0, (1 << 20) + 1)))
        .unwrap_err();
    assert!(error.to_string().contains("1048577 bytes"), "{error}");
    assert_eq!(pair.client.in_flight(), 0);
}

#[test]
fn windows_that_cannot_be_written_are_refused() {
    let mut pair = pair(1, options(false), options(true));
    let mut refused = |window, words: &str| {
        let error = pair.server.open_window(window).unwrap_err();
        assert!(
            matches!(error, ChannelError::BadRequest { .. }),
            "{error:?}"
        );
        assert!(error.to_string().contains(words), "{error}");
    };
    let long = (2 << 20) + 2;
    refused(
        whole_window(0, guarded(10).slice(..0).unwrap()),
        "0 bytes, expected 1 to 1048576",
    );
    refused(window(0, long / 2, guarded(long as usize)), "1048577 bytes");
    let planned = ReceiveWindow {
        cut: ChunkPlan::even(11, 11),
        ..whole_window(0, guarded(10))
    };
    refused(planned, "planned for 11 bytes and has 10");
    assert_eq!(pair.server.in_flight(), 0);
}

#[test]
fn windows_are_opened_in_the_order_of_their_names() {
    let mut raw = raw_peer(1, options(false));
    let destination = guarded(10);
    open_window(&mut *raw.channel, 5, destination.clone());
    for name in [0, 4, 5] {
        let again = whole_window(name, guarded(10));
        let error = raw.channel.open_window(again).unwrap_err();
        let words = format!("window {name} was opened after a later one");
        assert!(error.to_string().contains(&words), "{error}");
    }
    // Names may be left out, and nobody waits for what comes to those.
    write_chunk(&raw.lanes[0], 3, 10, 10);
    write_chunk(&raw.lanes[0], 5, 10, 10);
    assert_eq!(received(&mut *raw.channel, 1), [1005]);
    check(&destination, 5);
    assert_eq!(raw.channel.stats().bytes_discarded, 10);
}

#[test]
fn more_staged_bytes_than_slots_flow_both_ways() {
    // 4 channels with 100 chunks of a slot's size each way want more slots than the pool has.
    let window = TcpOptions {
        window: 100,
        stage_host: true,
        ..TcpOptions::default()
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let sizes = [vec![1 << 20; 100], vec![1 << 20; 100]];
                exchange(
                    2,
                    [window.clone(), window.clone()],
                    Protection::All,
                    sizes,
                    &[0, 2, 0, 2, 0, 2, 1, 3],
                );
            });
        }
    });
}

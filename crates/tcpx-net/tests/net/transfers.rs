//! Chunks arrive whole, once, and in the right place, however they are posted.

use crate::support::*;
use proptest::prelude::*;
use tcpx_memory::RegionSlice;
use tcpx_net::{Channel, Completion, Posted, ReceiveChunk, SendChunk, TcpOptions};

/// One direction of traffic between two channels.
struct Flow {
    sizes: Vec<usize>,
    offsets: Vec<u64>,
    salt: u64,
    posted_sends: usize,
    posted_receives: usize,
    sent: usize,
    destinations: Vec<Option<RegionSlice>>,
    received: usize,
}

impl Flow {
    fn new(sizes: Vec<usize>, salt: u64) -> Self {
        let offsets = sizes
            .iter()
            .scan(0, |end, size| {
                let start = *end;
                *end += *size as u64;
                Some(start)
            })
            .collect();
        let destinations = sizes.iter().map(|_| None).collect();
        Self {
            sizes,
            offsets,
            salt,
            posted_sends: 0,
            posted_receives: 0,
            sent: 0,
            destinations,
            received: 0,
        }
    }

    fn done(&self) -> bool {
        self.sent == self.sizes.len() && self.received == self.sizes.len()
    }

    /// Posts the next send; false when there is none or no room.
    fn post_send(&mut self, channel: &mut dyn Channel) -> bool {
        let Some(&size) = self.sizes.get(self.posted_sends) else {
            return false;
        };
        let sequence = self.posted_sends as u64;
        let posted = channel.post_send(SendChunk {
            token: sequence,
            sequence,
            transfer: self.salt,
            offset: self.offsets[self.posted_sends],
            tag: 5,
            source: filled(sequence ^ self.salt, size),
            fence: None,
        });
        let accepted = matches!(posted.unwrap(), Posted::Accepted);
        self.posted_sends += usize::from(accepted);
        accepted
    }

    fn post_receive(&mut self, channel: &mut dyn Channel) -> bool {
        let Some(&size) = self.sizes.get(self.posted_receives) else {
            return false;
        };
        let sequence = self.posted_receives as u64;
        let destination = guarded(size);
        let posted = channel.post_receive(ReceiveChunk {
            token: 1 << 32 | sequence,
            sequence,
            transfer: self.salt,
            offset: self.offsets[self.posted_receives],
            tag: 5,
            destination: destination.clone(),
            fence: None,
        });
        let accepted = matches!(posted.unwrap(), Posted::Accepted);
        if accepted {
            self.destinations[self.posted_receives] = Some(destination);
            self.posted_receives += 1;
        }
        accepted
    }

    fn arrived(&mut self, token: u64) {
        let sequence = token & 0xffff_ffff;
        let destination = self.destinations[sequence as usize].take();
        let destination = destination.expect("each receive ends once");
        check(&destination, sequence ^ self.salt);
        self.received += 1;
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
        match completion {
            Completion::Sent { .. } => sends.sent += 1,
            Completion::Received { .. } => {
                let token = received_token(completion);
                receives.arrived(token);
                peer.placed(token & 0xffff_ffff).unwrap();
            }
            Completion::Failed { .. }
            | Completion::Part { .. }
            | Completion::PathChanged { .. } => panic!("{completion:?}"),
        }
    }
    out.len()
}

/// Sends both lists at once, posting in the order that `schedule` gives.
fn exchange(lanes: u16, options: [TcpOptions; 2], sizes: [Vec<usize>; 2], schedule: &[u8]) {
    let [client, server] = options;
    let mut pair = pair(lanes, client, server);
    let [up, down] = sizes;
    let totals = [
        up.iter().sum::<usize>() as u64,
        down.iter().sum::<usize>() as u64,
    ];
    let (mut up, mut down) = (Flow::new(up, 77), Flow::new(down, 88));
    let mut schedule = schedule.iter().cycle();
    while !(up.done() && down.done()) {
        let mut moved = drain(&mut *pair.client, &mut *pair.server, &mut up, &mut down) > 0;
        moved |= drain(&mut *pair.server, &mut *pair.client, &mut down, &mut up) > 0;
        // A few posts by schedule, and only when nothing else goes on any that is possible.
        for _ in 0..3 {
            moved |= match schedule.next().unwrap() % 4 {
                0 => up.post_send(&mut *pair.client),
                1 => up.post_receive(&mut *pair.server),
                2 => down.post_send(&mut *pair.server),
                _ => down.post_receive(&mut *pair.client),
            };
        }
        if !moved {
            moved = up.post_send(&mut *pair.client)
                | up.post_receive(&mut *pair.server)
                | down.post_send(&mut *pair.server)
                | down.post_receive(&mut *pair.client);
        }
        let done = up.done() && down.done();
        if !moved && !done {
            wait_any(&[&*pair.client, &*pair.server]);
        }
    }
    assert_eq!((pair.client.in_flight(), pair.server.in_flight()), (0, 0));
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
        resend in (any::<bool>(), any::<bool>()),
        up in sizes(),
        down in sizes(),
        schedule in prop::collection::vec(any::<u8>(), 1..64),
    ) {
        let make = |window, stage_host, resend| {
            TcpOptions { window, stage_host, resend, ..TcpOptions::default() }
        };
        let options = [
            make(windows.0, staged.0, resend.0),
            make(windows.1, staged.1, resend.1),
        ];
        exchange(lanes, options, [up, down], &schedule);
    }
}

#[test]
fn a_chunk_larger_than_any_socket_buffer_arrives() {
    let mut pair = pair(1, options(false), options(false));
    let length = (48 << 20) + 5;
    let destination = guarded(length);
    post_receive(&mut *pair.server, 0, destination.clone());
    post_send(&mut *pair.client, 0, filled(0, length));
    assert_eq!(sent_token(&completions(&mut *pair.client, 1)[0]), 0);
    assert_eq!(received_token(&completions(&mut *pair.server, 1)[0]), 1000);
    check(&destination, 0);
}

/// Short chunks are read in pieces to where no other lane's are, and with the last one the next header.
#[test]
fn staged_chunks_of_any_length_lie_one_behind_the_other_on_several_lanes() {
    const LENGTHS: [u32; 8] = [
        163_839, 163_840, 163_841, 1, 327_680, 163_872, 1_048_575, 17,
    ];
    let mut raw = raw_peer(3, options(true));
    let destinations = LENGTHS.map(|length| guarded(length as usize));
    for (sequence, destination) in (0..).zip(&destinations) {
        post_receive(&mut *raw.channel, sequence, destination.clone());
    }
    std::thread::scope(|scope| {
        for (first, lane) in raw.lanes.iter().enumerate() {
            scope.spawn(move || {
                let chunks = (0..).zip(LENGTHS).skip(first).step_by(3);
                chunks.for_each(|(at, length)| write_chunk(lane, at, length, length as usize));
            });
        }
    });
    completions(&mut *raw.channel, LENGTHS.len());
    for (sequence, destination) in (0..).zip(&destinations) {
        check(destination, sequence);
    }
}

#[test]
fn a_chunk_waits_for_its_receive_without_being_lost() {
    let mut pair = pair(2, options(false), options(false));
    for sequence in 0..3 {
        post_send(&mut *pair.client, sequence, filled(sequence, 100_000));
    }
    completions(&mut *pair.client, 3);
    let mut out = Vec::new();
    pair.server.poll(&mut out).unwrap();
    assert!(out.is_empty());
    let destinations: Vec<_> = (0..3).map(|_| guarded(100_000)).collect();
    for (sequence, destination) in (0..).zip(&destinations) {
        post_receive(&mut *pair.server, sequence, destination.clone());
    }
    completions(&mut *pair.server, 3);
    for (sequence, destination) in (0..).zip(&destinations) {
        check(destination, sequence);
    }
}

#[test]
fn a_full_window_hands_the_chunk_back_until_a_completion() {
    let small = TcpOptions {
        window: 2,
        ..TcpOptions::default()
    };
    let mut pair = pair(1, small.clone(), small);
    let server = &mut *pair.server;
    post_receive(server, 0, guarded(10));
    post_receive(server, 1, guarded(10));
    let Ok(Posted::Full(third)) = server.post_receive(receive_chunk(2, guarded(10))) else {
        panic!("a window of two took a third receive");
    };
    assert_eq!(third.sequence, 2);
    post_send(&mut *pair.client, 0, filled(0, 10));
    completions(server, 1);
    assert!(matches!(server.post_receive(third), Ok(Posted::Accepted)));
    assert_eq!(server.in_flight(), 2);
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
    post_receive(&mut *pair.server, 5, guarded(10));
    let error = pair
        .server
        .post_receive(receive_chunk(4, guarded(10)))
        .unwrap_err();
    assert!(
        error.to_string().contains("post in sequence order"),
        "{error}"
    );
    assert_eq!((pair.client.in_flight(), pair.server.in_flight()), (0, 1));
}

#[test]
fn more_staged_bytes_than_slots_flow_in_both_directions_at_once() {
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
                    sizes,
                    &[0, 2, 0, 2, 0, 2, 1, 3],
                );
            });
        }
    });
}

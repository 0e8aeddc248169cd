//! What senders say to follow a chunk at once, where it does and where it does not.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use tcpx_net::TcpOptions;
use tcpx_wire::chunk_header::{ChunkHeader, ChunkPayload};

use crate::support::*;

/// Sends the only chunk of a window's transfer, and says that no end of others follows.
fn write_promising(mut lane: &TcpStream, window: u64, length: u32) {
    let header = ChunkHeader {
        payload: ChunkPayload::Follows { behind: u16::MAX },
        ..whole(window, length)
    };
    lane.write_all(&header.encode()).unwrap();
    write_payload(lane, window, 0..length as usize);
}

/// Of a peer that breaks its promise each chunk is told of, and the end of the lane.
#[test]
fn nothing_waits_long_for_what_was_promised_and_does_not_come() {
    let mut raw = raw_peer(1, TcpOptions::default());
    let length = 70_000;
    // A few naps, and not a limit that ends everything: on a busy machine not each time.
    let mut waits = Vec::new();
    for sequence in 0..20 {
        let destination = guarded(length as usize);
        open_window(&mut *raw.channel, sequence, destination.clone());
        let began = Instant::now();
        write_promising(&raw.lanes[0], sequence, length);
        let told = received(&mut *raw.channel, 1);
        waits.push(began.elapsed());
        assert_eq!(told, [1000 + sequence]);
        check(&destination, sequence);
    }
    let shortest = waits.into_iter().min();
    assert!(shortest < Some(Duration::from_millis(100)), "{shortest:?}");
    open_window(&mut *raw.channel, 20, guarded(length as usize));
    drop(raw.lanes);
    let (error, _) = breakage(&mut *raw.channel);
    assert!(error.to_string().contains("no lane is left"), "{error}");
}

#[test]
fn what_is_kept_is_told_of_in_order_and_to_the_last_chunk() {
    let mut raw = raw_peer(1, TcpOptions::default());
    let (chunks, length) = (40, 300_000);
    let destinations: Vec<_> = (0..chunks).map(|_| guarded(length as usize)).collect();
    for (sequence, destination) in (0..).zip(&destinations) {
        open_window(&mut *raw.channel, sequence, destination.clone());
    }
    let lane = raw.lanes[0].try_clone().unwrap();
    let writer = std::thread::spawn(move || {
        for sequence in 0..chunks - 1 {
            write_promising(&lane, sequence, length);
        }
        write_chunk(&lane, chunks - 1, length, length as usize);
    });
    let tokens = received(&mut *raw.channel, chunks as usize);
    assert_eq!(tokens, (1000..1000 + chunks).collect::<Vec<_>>());
    writer.join().unwrap();
    for (sequence, destination) in (0..).zip(&destinations) {
        check(destination, sequence);
    }
}

#[test]
fn a_channel_that_closes_tells_what_its_lane_held() {
    let mut raw = raw_peer(1, TcpOptions::default());
    let length = 100_000;
    for sequence in 0..4 {
        open_window(&mut *raw.channel, sequence, guarded(length as usize));
    }
    for sequence in 0..3 {
        write_promising(&raw.lanes[0], sequence, length);
    }
    wait_until(|| raw.channel.stats().chunks_received == 3);
    let ended = close(&mut *raw.channel);
    let received: Vec<_> = ended[..6].chunks(2).map(received_token).collect();
    assert_eq!(received, [1000, 1001, 1002]);
    assert_eq!(ended.len(), 7, "{ended:?}");
    assert_eq!(failed(&ended[6]).0, 1003, "the fourth was given up");
}

#[test]
fn chunks_that_share_several_lanes_must_not_say_what_is_behind_them() {
    let mut raw = raw_peer(2, TcpOptions::default());
    open_window(&mut *raw.channel, 0, guarded(1000));
    write_promising(&raw.lanes[1], 0, 1000);
    let (error, _) = breakage(&mut *raw.channel);
    assert!(error.to_string().contains("behind chunk 0"), "{error}");
}

#[test]
fn a_sender_says_how_much_it_has_ready_behind_a_chunk_where_there_is_one_lane() {
    let unit = ChunkHeader::BEHIND_UNIT as usize;
    for lanes in [1, 2] {
        let mut raw = raw_peer(lanes, options(false));
        // More than the sockets take, so that what follows waits; on each lane.
        let long = 32 << 20;
        let blocks = u64::from(lanes);
        for sequence in 0..blocks {
            post_send(&mut *raw.channel, sequence, filled(sequence, long));
            let sent = || raw.channel.stats().wire_calls > sequence;
            wait_until(sent);
        }
        for (sequence, units) in (blocks..).zip([1, 2, 3]) {
            let source = filled(sequence, units * unit + 1);
            post_send(&mut *raw.channel, sequence, source);
        }
        let mut said = Vec::new();
        std::thread::scope(|scope| {
            for lane in &raw.lanes[1..] {
                scope.spawn(move || read_payload(lane, &read_header(lane)));
            }
            let chunks = if lanes == 1 { 4 } else { 1 };
            for _ in 0..chunks {
                let header = read_header(&raw.lanes[0]);
                read_payload(&raw.lanes[0], &header);
                said.push(header.bytes_behind() / ChunkHeader::BEHIND_UNIT);
            }
        });
        let expected: &[u64] = if lanes == 1 { &[0, 5, 3, 0] } else { &[0] };
        assert_eq!(said, expected);
    }
}

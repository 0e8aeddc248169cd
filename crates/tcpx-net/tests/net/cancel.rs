//! Taking requests back, in each state that they can be in.

use std::io::{Read, Write};

use tcpx_net::{Cancel, Channel, ChannelError, Completion, PostAnswer, TcpOptions};
use tcpx_wire::chunk_header::{ChunkHeader, ChunkPayload};

use crate::support::*;

#[test]
fn an_unused_window_is_gone_at_once() {
    for stage_host in [false, true] {
        let mut raw = raw_peer(1, options(stage_host));
        let cancelled = guarded(50_000);
        open_window(&mut *raw.channel, 0, cancelled.clone());
        assert_eq!(raw.channel.cancel(1000), Cancel::Done);
        assert_eq!(raw.channel.in_flight(), 0);
        let wanted = guarded(50_000);
        open_window(&mut *raw.channel, 1, wanted.clone());
        write_chunk(&raw.lanes[0], 0, 50_000, 50_000);
        write_chunk(&raw.lanes[0], 1, 50_000, 50_000);
        assert_eq!(received(&mut *raw.channel, 1), [1001]);
        check(&wanted, 1);
        untouched(&cancelled);
        assert_eq!(raw.channel.stats().bytes_discarded, 50_000);
    }
}

#[test]
fn a_window_in_mid_chunk_releases_its_memory() {
    for stage_host in [false, true] {
        let mut raw = raw_peer(1, options(stage_host));
        let destination = guarded(300_000);
        open_window(&mut *raw.channel, 0, destination.clone());
        write_chunk(&raw.lanes[0], 0, 300_000, 200_000);
        wait_until_received(&*raw.channel, CERTAIN);
        assert_eq!(raw.channel.cancel(1000), Cancel::Pending);
        assert_eq!(
            raw.channel.cancel(1000),
            Cancel::Pending,
            "it was asked for"
        );
        assert_eq!(closed_token(&completions(&mut *raw.channel, 1)[0]), 1000);
        assert_eq!(raw.channel.cancel(1000), Cancel::Done, "it is closed");
        assert_eq!(raw.channel.in_flight(), 0);
        // Ours again: nothing may write to it, whatever comes.
        destination
            .region()
            .write_from(0, &vec![0xEE; 300_000 + 2 * GUARD])
            .unwrap();
        write_payload(&raw.lanes[0], 0, 200_000..300_000);
        let next = guarded(300_000);
        open_window(&mut *raw.channel, 1, next.clone());
        write_chunk(&raw.lanes[0], 1, 300_000, 300_000);
        assert_eq!(received(&mut *raw.channel, 1), [1001]);
        check(&next, 1);
        untouched(&destination);
    }
}

/// Some of its chunks are there, some in the hands of lanes, and some have not come.
#[test]
fn a_window_closed_in_mid_transfer_is_not_written() {
    for stage_host in [false, true] {
        let mut raw = raw_peer(3, options(stage_host));
        let (chunk, total) = (300_000, 1_200_000);
        let destination = guarded(1_200_000);
        let four_chunks = window(0, chunk, destination.clone());
        raw.channel.open_window(four_chunks).unwrap();
        let begin = |index: u32, bytes: usize| {
            let mut lane = &raw.lanes[index as usize];
            let header = part(0, index, (chunk, total));
            lane.write_all(&header.encode()).unwrap();
            let start = header.offset as usize;
            write_payload(lane, 0, start..start + bytes);
        };
        begin(0, 300_000);
        let placed = completions(&mut *raw.channel, 1);
        assert!(
            matches!(placed[..], [Completion::Placed { index: 0, .. }]),
            "{placed:?}"
        );
        begin(1, 290_000);
        begin(2, 290_000);
        // More than one of them brought.
        wait_until_received(&*raw.channel, 300_000 + 290_001);
        assert_eq!(raw.channel.cancel(1000), Cancel::Pending);
        assert_eq!(closed_token(&completions(&mut *raw.channel, 1)[0]), 1000);
        let region = destination.region();
        let bytes = vec![0xEE; destination.len() + 2 * GUARD];
        region.write_from(0, &bytes).unwrap();
        // The rest of them, and the last one.
        write_payload(&raw.lanes[1], 0, 590_000..600_000);
        write_payload(&raw.lanes[2], 0, 890_000..900_000);
        let last = part(0, 3, (chunk, total)).encode();
        (&raw.lanes[0]).write_all(&last).unwrap();
        write_payload(&raw.lanes[0], 0, 900_000..1_200_000);
        // Each byte that was written to no memory.
        let all = || {
            let stats = raw.channel.stats();
            stats.bytes_received + stats.bytes_discarded
        };
        wait_until(|| all() == total);
        untouched(&destination);
        assert!(close(&mut *raw.channel).is_empty());
    }
}

#[test]
fn a_send_that_the_peer_does_not_read_gives_its_source_back() {
    // Far larger than socket buffers grow: the lane cannot finish it while the peer is silent.
    let length = 128 << 20;
    let mut raw = raw_peer(1, options(false));
    let source = filled(0, length);
    post_send(&mut *raw.channel, 0, source.clone());
    post_send(&mut *raw.channel, 1, filled(1, 1000));
    post_send(&mut *raw.channel, 2, filled(2, 1000));
    // It has begun once something of it is there.
    raw.lanes[0].peek(&mut [0]).unwrap();
    assert_eq!(raw.channel.cancel(1), Cancel::Done);
    assert_eq!(raw.channel.in_flight(), 2);
    assert_eq!(
        raw.channel.cancel(1),
        Cancel::Done,
        "it is no longer in flight"
    );
    assert_eq!(raw.channel.cancel(0), Cancel::Pending);
    // In whatever order: it may be asked once more before it is heard.
    assert_ne!(raw.channel.cancel(0), Cancel::Done);
    assert_eq!(sent_token(&completions(&mut *raw.channel, 1)[0]), 0);
    assert_eq!(raw.channel.cancel(0), Cancel::Done);
    // The rest goes out as it was, for the peer may count it.
    source.write_from(&vec![0xEE; length]).unwrap();
    let lane = &mut raw.lanes[0];
    expect_header(lane, header(0, length as u32));
    let mut payload = vec![0; length];
    lane.read_exact(&mut payload).unwrap();
    let wrong = (0..length).find(|&at| payload[at] != pattern(0, at));
    assert_eq!(wrong, None);
    expect_header(lane, header(2, 1000));
    raw.channel.placed(2).unwrap();
    assert_eq!(sent_token(&completions(&mut *raw.channel, 1)[0]), 2);
    assert_eq!(raw.channel.in_flight(), 0);
}

#[test]
fn a_staged_send_can_be_taken_back_while_the_peer_is_silent() {
    let (length, window) = (1 << 20, 60);
    let options = TcpOptions {
        window,
        stage_host: true,
        ..TcpOptions::default()
    };
    let mut raw = raw_peer(1, options);
    // 60 MiB are more than the socket buffers take, so the last chunk is not under way.
    let last = u64::from(window) - 1;
    // First all, and then the sends: nobody reads meanwhile, and a lane counts as dead soon.
    let sources: Vec<_> = (0..=last)
        .map(|sequence| filled(sequence, length))
        .collect();
    for (sequence, source) in (0..).zip(sources) {
        post_send(&mut *raw.channel, sequence, source);
    }
    let mut ended = Vec::new();
    let mut lane = raw.lanes.remove(0);
    match raw.channel.cancel(last) {
        Cancel::Done => {}
        Cancel::Pending => {
            // Its copy was under way.
            let is_failure = |one: &Completion| matches!(one, Completion::Failed { .. });
            while !ended.iter().any(is_failure) {
                wait_any(&[&*raw.channel]);
                polled(&mut *raw.channel, &mut ended).unwrap();
            }
            let index = ended.iter().position(is_failure).unwrap();
            assert_eq!(
                failed(&ended.remove(index)),
                (last, ChannelError::Cancelled)
            );
        }
        Cancel::Unsupported => panic!("this network can cancel"),
    }
    let (tell, read) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut payload = vec![0; length];
        for sequence in 0..last {
            expect_header(&lane, header(sequence, length as u32));
            lane.read_exact(&mut payload).unwrap();
            let wrong = (0..length).find(|&at| payload[at] != pattern(sequence, at));
            assert_eq!(wrong, None);
            tell.send(sequence).unwrap();
        }
        lane
    });
    for sequence in read {
        raw.channel.placed(sequence).unwrap();
    }
    while ended.len() < last as usize {
        wait_any(&[&*raw.channel]);
        polled(&mut *raw.channel, &mut ended).unwrap();
    }
    let mut tokens: Vec<_> = ended.iter().map(sent_token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..last).collect::<Vec<_>>());
    let _lane = reader.join().unwrap();
    // Every slot of the window is free again, that of the cancelled chunk too.
    for sequence in 100..100 + u64::from(window) {
        let mut chunk = Some(send_chunk(sequence, filled(sequence, 1)));
        while let Some(posted) = chunk.take() {
            if let PostAnswer::Full(back) = raw.channel.post_send(posted).unwrap() {
                chunk = Some(back);
                wait_any(&[&*raw.channel]);
                polled(&mut *raw.channel, &mut ended).unwrap();
            }
        }
    }
}

/// The peer may take what it reads of a chunk for good until it has heard that nobody wants it any
/// more.
#[test]
fn a_staged_send_taken_back_late_is_read_as_it_was() {
    let options = TcpOptions {
        stage_host: true,
        window: 16,
        ..TcpOptions::default()
    };
    let mut raw = raw_peer(2, options);
    let length = 128 << 10;
    post_send(&mut *raw.channel, 0, filled(0, length));
    // News of its copy are not polled for.
    wait_until(|| raw.channel.stats().chunks_sent == 1);
    if raw.channel.cancel(0) != Cancel::Done {
        assert_eq!(sent_token(&completions(&mut *raw.channel, 1)[0]), 0);
    }
    raw.channel.forget(0);
    let mut ended = Vec::new();
    for sequence in 1..=16 {
        let mut chunk = Some(send_chunk(sequence, filled(sequence, length)));
        while let Some(posted) = chunk.take() {
            if let PostAnswer::Full(back) = raw.channel.post_send(posted).unwrap() {
                chunk = Some(back);
                wait_any(&[&*raw.channel]);
                polled(&mut *raw.channel, &mut ended).unwrap();
            }
        }
    }
    while ended.len() < 16 {
        wait_any(&[&*raw.channel]);
        polled(&mut *raw.channel, &mut ended).unwrap();
    }
    let lane = raw.lanes.iter_mut().find_map(|lane| {
        let mut arrived = [0; ChunkHeader::BYTES];
        lane.read_exact(&mut arrived).unwrap();
        (arrived == header(0, length as u32)).then_some(lane)
    });
    let mut payload = vec![0; length];
    lane.unwrap().read_exact(&mut payload).unwrap();
    let wrong = (0..length).find(|&at| payload[at] != pattern(0, at));
    assert_eq!(wrong, None);
}

/// Whatever it says to be behind its chunk.
fn expect_header(lane: &std::net::TcpStream, expected: [u8; ChunkHeader::BYTES]) {
    let arrived = ChunkHeader {
        payload: ChunkPayload::Follows,
        ..read_header(lane)
    };
    assert_eq!(arrived.encode(), expected);
}

fn wait_until_received(channel: &dyn Channel, bytes: u64) {
    wait_until(|| channel.stats().bytes_received >= bytes);
}

//! Lanes that die and peers that break the protocol: every request ends, with an error that says
//! where.

use std::io::Write;
use std::net::Shutdown;

use tcpx_net::{Channel, ChannelError, Posted, TcpOptions};
use tcpx_wire::chunk_header::ChunkHeader;

use crate::support::*;

/// Closes the channel and checks that exactly these tokens fail.
fn close_fails(channel: &mut dyn Channel, mut tokens: Vec<u64>) {
    let mut failures: Vec<_> = close(channel).iter().map(|ended| failed(ended).0).collect();
    failures.sort_unstable();
    tokens.sort_unstable();
    assert_eq!(failures, tokens);
    assert!(channel.closed());
    assert_eq!(channel.in_flight(), 0);
}

#[test]
fn a_lane_that_dies_in_mid_chunk_names_lane_chunk_and_progress() {
    for stage_host in [false, true] {
        let mut raw = raw_peer(2, options(stage_host));
        let destination = guarded(200_000);
        post_receive(&mut *raw.channel, 0, guarded(200_000));
        post_receive(&mut *raw.channel, 1, destination.clone());
        write_chunk(&raw.lanes[1], 1, 200_000, 70_000);
        raw.lanes[1].shutdown(Shutdown::Both).unwrap();
        let (error, mut ended) = breakage(&mut *raw.channel);
        let text = error.to_string();
        let ChannelError::LaneLost {
            lane: 1,
            position: Some(position),
            ..
        } = error
        else {
            panic!("{error:?}");
        };
        assert_eq!(
            (position.sequence, position.offset, position.done),
            (1, 200_000, 70_000)
        );
        assert!(
            text.contains("lane 1") && text.contains("70000 of 200000 bytes"),
            "{text}"
        );
        assert!(
            raw.channel
                .post_receive(receive_chunk(2, guarded(10)))
                .is_err()
        );
        ended.extend(close(&mut *raw.channel));
        let mut tokens: Vec<_> = ended.iter().map(|ended| failed(ended).0).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [1000, 1001]);
        assert!(raw.channel.closed());
    }
}

#[test]
fn a_reset_lane_fails_the_send_in_its_hands() {
    let mut raw = raw_peer(1, options(false));
    let length = 48 << 20;
    post_send(&mut *raw.channel, 0, filled(0, length));
    post_send(&mut *raw.channel, 1, filled(1, 10));
    // Closing with unread data resets the connection.
    raw.lanes[0].peek(&mut [0]).unwrap();
    raw.lanes.clear();
    let (error, mut ended) = breakage(&mut *raw.channel);
    // The system tells the reset once: the other half of the lane sees an end.
    assert!(
        matches!(
            error,
            ChannelError::LaneLost { lane: 0, .. } | ChannelError::PeerClosed { .. }
        ),
        "{error:?}"
    );
    ended.extend(close(&mut *raw.channel));
    let mut tokens: Vec<_> = ended.iter().map(|ended| failed(ended).0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1]);
}

#[test]
fn a_peer_that_closes_is_an_error_only_while_something_is_outstanding() {
    let mut raw = raw_peer(1, options(false));
    let destination = guarded(100);
    post_receive(&mut *raw.channel, 0, destination.clone());
    write_chunk(&raw.lanes[0], 0, 100, 100);
    completions(&mut *raw.channel, 1);
    raw.lanes.clear();
    wait_any(&[&*raw.channel]);
    let mut out = Vec::new();
    raw.channel.poll(&mut out).unwrap();
    assert!(out.is_empty());
    let error = raw
        .channel
        .post_receive(receive_chunk(1, guarded(100)))
        .unwrap_err();
    assert!(
        matches!(error, ChannelError::PeerClosed { .. }),
        "{error:?}"
    );
    close_fails(&mut *raw.channel, vec![]);

    let mut raw = raw_peer(1, options(false));
    post_receive(&mut *raw.channel, 0, guarded(100));
    raw.lanes.clear();
    let (error, _) = breakage(&mut *raw.channel);
    assert!(
        matches!(error, ChannelError::PeerClosed { outstanding: 1, .. }),
        "{error:?}"
    );
    close_fails(&mut *raw.channel, vec![1000]);
}

#[test]
fn garbage_instead_of_a_header_is_a_protocol_error() {
    let mut raw = raw_peer(1, options(false));
    post_receive(&mut *raw.channel, 0, guarded(100));
    (&raw.lanes[0]).write_all(&[0x47; 64]).unwrap();
    let (error, _) = breakage(&mut *raw.channel);
    assert!(
        matches!(error, ChannelError::Protocol { lane: 0, .. }),
        "{error:?}"
    );
    assert!(
        error.to_string().contains("expected a chunk header"),
        "{error}"
    );
    close_fails(&mut *raw.channel, vec![1000]);
}

/// Sends one header and expects the channel to refuse it with a text that holds `words`.
fn refused(raw: &mut Raw, header: [u8; ChunkHeader::BYTES], words: &[&str]) {
    (&raw.lanes[0]).write_all(&header).unwrap();
    let (error, _) = breakage(&mut *raw.channel);
    let text = error.to_string();
    assert!(matches!(error, ChannelError::Protocol { .. }), "{error:?}");
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
}

#[test]
fn a_chunk_that_is_not_the_posted_one_is_refused_before_a_byte_is_written() {
    let cases: [([u8; ChunkHeader::BYTES], &[&str]); 3] = [
        (
            header(0, 2, 0, 100),
            &["expected chunk 0 as 100 bytes", "transfer 2"],
        ),
        (header(0, 1, 7, 100), &["at offset 0", "at offset 7"]),
        (header(0, 1, 0, 101), &["100 bytes", "101 bytes"]),
    ];
    for (header, words) in cases {
        let mut raw = raw_peer(1, options(false));
        let destination = guarded(100);
        post_receive(&mut *raw.channel, 0, destination.clone());
        (&raw.lanes[0]).write_all(&[]).unwrap();
        refused(&mut raw, header, words);
        close_fails(&mut *raw.channel, vec![1000]);
        let region = destination.region();
        region
            .with_bytes(.., |bytes| assert!(bytes.iter().all(|byte| *byte == 0xEE)))
            .unwrap();
    }
}

#[test]
fn a_chunk_that_comes_twice_or_far_too_early_is_refused() {
    let mut raw = raw_peer(1, options(false));
    post_receive(&mut *raw.channel, 0, guarded(100));
    post_receive(&mut *raw.channel, 1, guarded(100));
    write_chunk(&raw.lanes[0], 0, 100, 100);
    completions(&mut *raw.channel, 1);
    refused(&mut raw, header(0, 1, 0, 100), &["a second chunk 0"]);
    close_fails(&mut *raw.channel, vec![1001]);

    let mut raw = raw_peer(1, options(false));
    refused(
        &mut raw,
        header(70_000, 1, 0, 100),
        &["chunks from 0 to 65536", "chunk 70000"],
    );
    close_fails(&mut *raw.channel, vec![]);
}

#[test]
fn two_lanes_that_claim_the_same_chunk_do_not_both_write() {
    let mut raw = raw_peer(2, options(false));
    post_receive(&mut *raw.channel, 0, guarded(300_000));
    write_chunk(&raw.lanes[0], 0, 300_000, 200_000);
    wait_until(|| raw.channel.stats().bytes_received >= 100_000);
    (&raw.lanes[1])
        .write_all(&header(0, 1, 0, 300_000))
        .unwrap();
    let (error, _) = breakage(&mut *raw.channel);
    assert!(
        matches!(error, ChannelError::Protocol { lane: 1, .. }),
        "{error:?}"
    );
    close_fails(&mut *raw.channel, vec![1000]);
}

#[test]
fn closing_ends_requests_in_every_state_and_releases_their_memory() {
    for stage_host in [false, true] {
        let window = 40;
        let options = TcpOptions {
            window,
            stage_host,
            ..TcpOptions::default()
        };
        let mut raw = raw_peer(2, options);
        let mut tokens = Vec::new();
        for sequence in 0..u64::from(window) {
            post_send(&mut *raw.channel, sequence, filled(sequence, 1 << 20));
            post_receive(&mut *raw.channel, sequence, guarded(300_000));
            tokens.push(1000 + sequence);
        }
        write_chunk(&raw.lanes[0], 3, 300_000, 200_000);
        wait_until(|| raw.channel.stats().bytes_received >= 100_000);
        let ended = close(&mut *raw.channel);
        let receives: Vec<_> = ended
            .iter()
            .filter(
                |one| matches!(one, tcpx_net::Completion::Failed { token, .. } if *token >= 1000),
            )
            .collect();
        assert_eq!(receives.len(), tokens.len());
        assert_eq!(
            ended.len(),
            2 * usize::from(window),
            "each request ends once"
        );
        assert!(raw.channel.closed());
        assert!(raw.channel.post_send(send_chunk(99, filled(0, 1))).is_err());
    }
}

#[test]
fn a_dropped_channel_releases_the_memory_of_its_requests() {
    let mut pair = pair(2, options(false), options(true));
    let slices: Vec<_> = (0..4).map(|_| guarded(1000)).collect();
    for (sequence, slice) in (0..).zip(&slices) {
        // A lease shows who still holds the bytes.
        let lease = slice
            .region()
            .lease(.., tcpx_memory::Access::Write)
            .unwrap();
        let held = lease.slice(0..1000).unwrap();
        let posted = pair
            .server
            .post_receive(receive_chunk(sequence, held))
            .unwrap();
        assert!(matches!(posted, Posted::Accepted));
    }
    drop(pair.server);
    let deadline = deadline();
    for slice in &slices {
        while slice.region().read_to(0, &mut [0]).is_err() {
            assert!(
                std::time::Instant::now() < deadline,
                "the memory is still held"
            );
            std::thread::yield_now();
        }
    }
    drop(close(&mut *pair.client));
}

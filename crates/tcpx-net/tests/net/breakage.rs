//! Lanes that die and peers that break the protocol: every request ends, with an error that says
//! where.

use std::io::Write;
use std::net::Shutdown;

use tcpx_net::{Channel, ChannelError, Completion, TcpOptions};
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

/// How the last lane was lost, where none is left.
fn last_lane(error: ChannelError) -> ChannelError {
    match error {
        ChannelError::NoLaneLeft { last, .. } => *last,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_lane_that_dies_in_mid_chunk_names_lane_chunk_and_progress() {
    for stage_host in [false, true] {
        let mut raw = raw_peer(1, options(stage_host));
        open_window(&mut *raw.channel, 0, guarded(200_000));
        let two_chunks = window(7, 200_000, guarded(400_000));
        raw.channel.open_window(two_chunks).unwrap();
        let header = part(7, 1, (200_000, 400_000)).encode();
        (&raw.lanes[0]).write_all(&header).unwrap();
        write_payload(&raw.lanes[0], 7, 200_000..270_000);
        raw.lanes[0].shutdown(Shutdown::Both).unwrap();
        let (error, mut ended) = breakage(&mut *raw.channel);
        let text = error.to_string();
        let ChannelError::LaneLost {
            lane: 0,
            position: Some(position),
            ..
        } = last_lane(error)
        else {
            panic!("{text}");
        };
        assert_eq!(
            (position.transfer, position.sequence),
            (7, 1),
            "{position:?}"
        );
        assert_eq!((position.offset, position.done), (200_000, 70_000));
        assert!(
            text.contains("lane 0") && text.contains("70000 of 200000 bytes"),
            "{text}"
        );
        let next = whole_window(8, guarded(10));
        assert!(raw.channel.open_window(next).is_err());
        ended.extend(close(&mut *raw.channel));
        let mut tokens: Vec<_> = ended.iter().map(|ended| failed(ended).0).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [1000, 1007]);
        assert!(raw.channel.closed());
    }
}

#[test]
fn the_last_lanes_reset_fails_the_send_in_its_hands() {
    let mut raw = raw_peer(1, options(false));
    let length = 48 << 20;
    post_send(&mut *raw.channel, 0, filled(0, length));
    post_send(&mut *raw.channel, 1, filled(1, 10));
    // Closing with unread data resets the connection.
    raw.lanes[0].peek(&mut [0]).unwrap();
    raw.lanes.clear();
    let (error, mut ended) = breakage(&mut *raw.channel);
    let last = last_lane(error);
    assert!(
        matches!(last, ChannelError::LaneLost { lane: 0, .. }),
        "{last:?}"
    );
    ended.extend(close(&mut *raw.channel));
    let mut tokens: Vec<_> = ended.iter().map(|ended| failed(ended).0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1]);
}

#[test]
fn garbage_instead_of_a_header_is_a_protocol_error() {
    let mut raw = raw_peer(1, options(false));
    open_window(&mut *raw.channel, 0, guarded(100));
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
fn a_chunk_outside_its_windows_plan_is_refused() {
    let fits = part(0, 1, (100, 250));
    let cases: [(ChunkHeader, &[&str]); 8] = [
        (whole(2, 100), &["windows below 1", "one of window 2"]),
        // A transfer that is longer than the window, and what is behind its end.
        (part(0, 1, (100, 251)), &["at most 250 bytes", "of 251"]),
        (part(0, 3, (100, 400)), &["at most 250 bytes", "chunk 3"]),
        // Chunks that do not lie as they are cut.
        (
            ChunkHeader {
                offset: 107,
                ..fits
            },
            &["100 bytes each", "at offset 107"],
        ),
        (
            ChunkHeader { length: 99, ..fits },
            &["100 bytes each", "99 bytes"],
        ),
        (
            ChunkHeader {
                length: 101,
                ..fits
            },
            &["101 bytes"],
        ),
        (
            ChunkHeader {
                sequence: 3,
                ..fits
            },
            &["chunk 3"],
        ),
        (
            ChunkHeader {
                sequence: 1 << 32 | 1,
                ..fits
            },
            &["chunk 4294967297"],
        ),
    ];
    for (header, words) in cases {
        let mut raw = raw_peer(1, options(false));
        let destination = guarded(250);
        let one = window(0, 100, destination.clone());
        raw.channel.open_window(one).unwrap();
        refused(&mut raw, header.encode(), words);
        close_fails(&mut *raw.channel, vec![1000]);
        untouched(&destination);
    }
}

#[test]
fn a_transfer_has_the_length_that_its_first_chunk_says() {
    let mut raw = raw_peer(2, options(false));
    let destination = guarded(250);
    let one = window(0, 100, destination.clone());
    raw.channel.open_window(one).unwrap();
    // Its last chunk comes first.
    let last = ChunkHeader {
        length: 40,
        ..part(0, 1, (100, 140))
    };
    (&raw.lanes[0]).write_all(&last.encode()).unwrap();
    write_payload(&raw.lanes[0], 0, 100..140);
    let news = completions(&mut *raw.channel, 1);
    assert!(
        matches!(
            news[..],
            [Completion::Placed {
                token: 1000,
                index: 1,
                offset: 100,
                bytes: 40
            }]
        ),
        "{news:?}"
    );
    refused(
        &mut raw,
        part(0, 0, (100, 250)).encode(),
        &["at offset 0 of 250"],
    );
    close_fails(&mut *raw.channel, vec![1000]);
    let region = destination.region();
    region
        .with_bytes(.., |bytes| {
            let before = &bytes[..GUARD + 100];
            assert!(before.iter().all(|byte| *byte == 0xEE));
        })
        .unwrap();
}

#[test]
fn a_chunk_that_comes_twice_is_refused() {
    let mut raw = raw_peer(1, options(false));
    let two_chunks = window(0, 100, guarded(200));
    raw.channel.open_window(two_chunks).unwrap();
    let first = part(0, 0, (100, 200)).encode();
    (&raw.lanes[0]).write_all(&first).unwrap();
    write_payload(&raw.lanes[0], 0, 0..100);
    completions(&mut *raw.channel, 1);
    refused(&mut raw, first, &["a second chunk 0 of window 0"]);
    close_fails(&mut *raw.channel, vec![1000]);
}

#[test]
fn a_chunk_of_a_window_that_was_never_named_is_refused() {
    let mut raw = raw_peer(1, options(false));
    refused(
        &mut raw,
        header(70_000, 100),
        &["windows below 0", "window 70000"],
    );
    close_fails(&mut *raw.channel, vec![]);
}

#[test]
fn two_lanes_that_claim_the_same_chunk_do_not_both_write() {
    let mut raw = raw_peer(2, options(false));
    open_window(&mut *raw.channel, 0, guarded(300_000));
    write_chunk(&raw.lanes[0], 0, 300_000, 200_000);
    wait_until(|| raw.channel.stats().bytes_received >= CERTAIN);
    (&raw.lanes[1]).write_all(&header(0, 300_000)).unwrap();
    let (error, _) = breakage(&mut *raw.channel);
    assert!(
        matches!(error, ChannelError::Protocol { lane: 1, .. }),
        "{error:?}"
    );
    close_fails(&mut *raw.channel, vec![1000]);
}

#[test]
fn closing_ends_requests_and_releases_their_memory() {
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
            open_window(&mut *raw.channel, sequence, guarded(300_000));
            tokens.push(1000 + sequence);
        }
        write_chunk(&raw.lanes[0], 3, 300_000, 200_000);
        wait_until(|| raw.channel.stats().bytes_received >= CERTAIN);
        let ended = close(&mut *raw.channel);
        let receives: Vec<_> = ended
            .iter()
            .filter(|one| matches!(one, Completion::Failed { token, .. } if *token >= 1000))
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
        open_window(&mut *pair.server, sequence, held);
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

//! Lanes that die while others live: every chunk arrives once, and nobody else writes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use rustix::event::PollFd;
use tcpx_lanes::sealing::Protection;
use tcpx_net::{Cancel, ChannelError, Completion, Exchange, Meanwhile, NetworkError, TcpOptions};
use tcpx_wire::chunk_header::ChunkHeader;

use crate::support::*;

/// The header of the only chunk of a window's transfer, which is sent again.
fn again(window: u64, length: u32) -> [u8; ChunkHeader::BYTES] {
    ChunkHeader {
        attempt: 1,
        ..whole(window, length)
    }
    .encode()
}

fn write_again(mut lane: &TcpStream, window: u64, length: u32) {
    lane.write_all(&again(window, length)).unwrap();
    write_payload(lane, window, 0..length as usize);
}

/// Blocks until the other end has closed this lane.
fn wait_closed(mut lane: &TcpStream) {
    let mut rest = Vec::new();
    match lane.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

#[test]
fn a_lane_is_shut_before_its_chunk_is_taken_from_another_one() {
    for stage_host in [false, true] {
        let mut raw = raw_peer(2, options(stage_host));
        let length = 300_000;
        let destination = guarded(length);
        open_window(&mut *raw.channel, 0, destination.clone());
        write_chunk(&raw.lanes[0], 0, length as u32, 200_000);
        wait_until(|| raw.channel.stats().bytes_received >= CERTAIN);
        write_again(&raw.lanes[1], 0, length as u32);
        assert_eq!(received(&mut *raw.channel, 1), [1000]);
        check(&destination, 0);
        // The old lane wakes up late, with other bytes: it is closed, and they go nowhere.
        wait_closed(&raw.lanes[0]);
        let late = (&raw.lanes[0]).write_all(&[0x55; 100_000]);
        open_window(&mut *raw.channel, 1, guarded(10));
        write_chunk(&raw.lanes[1], 1, 10, 0);
        drop(late);
        check(&destination, 0);
        assert_eq!(raw.channel.stats().lanes_lost, 1);
        drop(close(&mut *raw.channel));
    }
}

#[test]
fn a_chunks_marked_copy_is_dropped() {
    let mut raw = raw_peer(2, options(false));
    let (first, second) = (guarded(2000), guarded(1000));
    let two_chunks = window(0, 1000, first.clone());
    raw.channel.open_window(two_chunks).unwrap();
    open_window(&mut *raw.channel, 1, second.clone());
    let header = part(0, 0, (1000, 2000));
    (&raw.lanes[0]).write_all(&header.encode()).unwrap();
    write_payload(&raw.lanes[0], 0, 0..1000);
    completions(&mut *raw.channel, 1);
    // Again, with other bytes that must not be written.
    let mut lane = &raw.lanes[1];
    let copy = ChunkHeader {
        attempt: 1,
        ..header
    };
    lane.write_all(&copy.encode()).unwrap();
    lane.write_all(&[0x55; 1000]).unwrap();
    write_chunk(lane, 1, 1000, 1000);
    assert_eq!(received(&mut *raw.channel, 1), [1001]);
    check(&second, 1);
    assert_eq!(raw.channel.stats().bytes_discarded, 1000);
    let rest = part(0, 1, (1000, 2000)).encode();
    lane.write_all(&rest).unwrap();
    write_payload(lane, 0, 1000..2000);
    let ended = completions(&mut *raw.channel, 2);
    assert_eq!(closed_token(&ended[1]), 1000);
    check(&first, 0);
}

/// Where its window is closed nobody can say any more whether it is a copy.
#[test]
fn a_copy_of_a_chunk_whose_window_is_closed_is_dropped() {
    let mut raw = raw_peer(2, options(false));
    let (first, second) = (guarded(1000), guarded(1000));
    open_window(&mut *raw.channel, 0, first.clone());
    open_window(&mut *raw.channel, 1, second.clone());
    write_chunk(&raw.lanes[0], 0, 1000, 1000);
    assert_eq!(received(&mut *raw.channel, 1), [1000]);
    let mut lane = &raw.lanes[1];
    for header in [again(0, 1000), header(0, 1000)] {
        lane.write_all(&header).unwrap();
        lane.write_all(&[0x55; 1000]).unwrap();
    }
    write_chunk(lane, 1, 1000, 1000);
    assert_eq!(received(&mut *raw.channel, 1), [1001]);
    check(&first, 0);
    check(&second, 1);
    assert_eq!(raw.channel.stats().bytes_discarded, 2000);
}

/// The lane that died had a chunk of a window that is closed while another one waits to take its
/// place.
#[test]
fn a_chunk_sent_again_is_dropped_with_its_window() {
    for stage_host in [false, true] {
        let mut raw = raw_peer(2, options(stage_host));
        let destination = guarded(300_000);
        open_window(&mut *raw.channel, 0, destination.clone());
        write_chunk(&raw.lanes[0], 0, 300_000, 200_000);
        wait_until(|| raw.channel.stats().bytes_received >= CERTAIN);
        assert_eq!(raw.channel.cancel(1000), Cancel::Pending);
        write_again(&raw.lanes[1], 0, 300_000);
        assert_eq!(closed_token(&completions(&mut *raw.channel, 1)[0]), 1000);
        let bytes = vec![0xEE; 300_000 + 2 * GUARD];
        destination.region().write_from(0, &bytes).unwrap();
        open_window(&mut *raw.channel, 1, guarded(10));
        write_chunk(&raw.lanes[1], 1, 10, 10);
        assert_eq!(received(&mut *raw.channel, 1), [1001]);
        untouched(&destination);
        assert_eq!(raw.channel.stats().lanes_lost, 0, "no lane was superseded");
        drop(close(&mut *raw.channel));
    }
}

#[test]
fn late_bytes_are_dropped_once_sent_by_another_lane() {
    let mut raw = raw_peer(2, options(false));
    let (first, second) = (guarded(2000), guarded(1000));
    let two_chunks = window(0, 1000, first.clone());
    raw.channel.open_window(two_chunks).unwrap();
    let header = part(0, 0, (1000, 2000));
    let again = ChunkHeader {
        attempt: 1,
        ..header
    };
    (&raw.lanes[1]).write_all(&again.encode()).unwrap();
    write_payload(&raw.lanes[1], 0, 0..1000);
    completions(&mut *raw.channel, 1);
    let mut old = &raw.lanes[0];
    old.write_all(&header.encode()).unwrap();
    old.write_all(&[0x55; 1000]).unwrap();
    open_window(&mut *raw.channel, 1, second.clone());
    write_chunk(old, 1, 1000, 1000);
    assert_eq!(received(&mut *raw.channel, 1), [1001]);
    check(&second, 1);
    let rest = part(0, 1, (1000, 2000)).encode();
    old.write_all(&rest).unwrap();
    write_payload(old, 0, 1000..2000);
    let ended = completions(&mut *raw.channel, 2);
    assert_eq!(closed_token(&ended[1]), 1000);
    check(&first, 0);
}

#[test]
fn what_a_lane_brought_before_its_orderly_end_is_placed() {
    for stage_host in [false, true] {
        let mut raw = raw_peer(2, options(stage_host));
        let destinations = [0, 1].map(|name| {
            let destination = guarded(1000);
            open_window(&mut *raw.channel, name, destination.clone());
            destination
        });
        write_chunk(&raw.lanes[0], 0, 1000, 1000);
        raw.lanes[0].shutdown(Shutdown::Write).unwrap();
        assert_eq!(received(&mut *raw.channel, 1), [1000]);
        write_chunk(&raw.lanes[1], 1, 1000, 1000);
        assert_eq!(received(&mut *raw.channel, 1), [1001]);
        check(&destinations[0], 0);
        check(&destinations[1], 1);
        assert_eq!(raw.channel.stats().lanes_lost, 0);
    }
}

/// A lane that does not read hears nothing of its end either.
#[test]
fn a_lane_that_waits_for_a_slot_notices_that_it_is_dead() {
    // Four slots.
    let options = TcpOptions {
        window: 4,
        ..options(true)
    };
    let mut raw = raw_peer(6, options);
    let length = 300_000;
    let destinations = [0, 1, 2, 3, 4, 5].map(|name| {
        let destination = guarded(length);
        open_window(&mut *raw.channel, name, destination.clone());
        destination
    });
    for (name, lane) in (0..4).zip(&raw.lanes) {
        let before = raw.channel.stats().bytes_received;
        write_chunk(lane, name, length as u32, 200_000);
        wait_until(|| raw.channel.stats().bytes_received > before);
    }
    // All of one chunk, and a part of another.
    write_chunk(&raw.lanes[4], 4, length as u32, length);
    raw.lanes[4].shutdown(Shutdown::Write).unwrap();
    write_chunk(&raw.lanes[5], 5, length as u32, 200_000);
    raw.lanes[5].shutdown(Shutdown::Write).unwrap();
    wait_until(|| raw.channel.stats().lanes_lost == 1);
    let mut out = Vec::new();
    polled(&mut *raw.channel, &mut out).unwrap();
    assert!(out.is_empty(), "no slot was free: {out:?}");
    for (name, lane) in (0..4).zip(&raw.lanes) {
        write_payload(lane, name, 200_000..length);
    }
    let mut tokens = received(&mut *raw.channel, 5);
    tokens.sort_unstable();
    assert_eq!(tokens, [1000, 1001, 1002, 1003, 1004]);
    // What the dead lane had comes again over another one.
    write_again(&raw.lanes[0], 5, length as u32);
    assert_eq!(received(&mut *raw.channel, 1), [1005]);
    for (name, destination) in (0..).zip(&destinations) {
        check(destination, name);
    }
    assert_eq!(raw.channel.stats().lanes_lost, 1);
}

#[test]
fn a_window_that_was_closed_on_a_dead_lane_ends() {
    let mut raw = raw_peer(2, options(false));
    let destination = guarded(300_000);
    open_window(&mut *raw.channel, 0, destination);
    write_chunk(&raw.lanes[0], 0, 300_000, 200_000);
    wait_until(|| raw.channel.stats().bytes_received >= CERTAIN);
    raw.lanes[0].shutdown(Shutdown::Both).unwrap();
    // Either the lane has let go of it, and the cancel finds it free, or the lane does so when it
    // ends.
    match raw.channel.cancel(1000) {
        Cancel::Done => {}
        Cancel::Pending => {
            let ended = completions(&mut *raw.channel, 1);
            assert_eq!(closed_token(&ended[0]), 1000);
        }
        Cancel::Unsupported => panic!("tcp can cancel"),
    }
    assert!(close(&mut *raw.channel).is_empty());
}

#[test]
fn a_dead_lanes_chunks_go_again_until_placed() {
    for options in [options(false), options(true)] {
        let is_staged = options.stage_host;
        let mut raw = raw_peer(2, options);
        let length = 4 << 20 >> 2;
        for sequence in 0..6 {
            post_send(&mut *raw.channel, sequence, filled(sequence, length));
        }
        let mut sent = Vec::new();
        // One lane carries a chunk, dies, and takes what it had with it.
        let lost = read_header(&raw.lanes[1]);
        assert_eq!(lost.attempt, 0);
        drop(raw.lanes.remove(1));
        let mut arrived = Vec::new();
        while arrived.len() < 6 {
            let header = read_header(&raw.lanes[0]);
            read_payload(&raw.lanes[0], &header);
            let sequence = header.transfer.0;
            assert!(!arrived.contains(&sequence), "{header:?}");
            arrived.push(sequence);
            if header.transfer == lost.transfer {
                assert_eq!(header.attempt, 1);
            }
            if !is_staged {
                polled(&mut *raw.channel, &mut sent).unwrap();
                assert_eq!(sent.len(), arrived.len() - 1, "sent before it was placed");
            }
            raw.channel.placed(sequence).unwrap();
            if !is_staged {
                while sent.len() < arrived.len() {
                    wait_any(&[&*raw.channel]);
                    polled(&mut *raw.channel, &mut sent).unwrap();
                }
            }
        }
        while sent.len() < 6 {
            wait_any(&[&*raw.channel]);
            polled(&mut *raw.channel, &mut sent).unwrap();
        }
        let mut tokens: Vec<_> = sent.iter().map(sent_token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2, 3, 4, 5]);
        let stats = raw.channel.stats();
        assert_eq!(stats.lanes_lost, 1);
        assert!(stats.chunks_resent >= 1, "{stats:?}");
        drop(close(&mut *raw.channel));
    }
}

#[test]
fn acknowledging_an_unsent_chunk_is_a_protocol_error() {
    let mut raw = raw_peer(2, options(false));
    // More than two lanes' buffers hold: the last one waits.
    let last = 40;
    // Nobody reads: lanes count as dead soon.
    let source = filled(0, 4 << 20);
    for sequence in 0..=last {
        post_send(&mut *raw.channel, sequence, source.clone());
    }
    let error = raw.channel.placed(last).unwrap_err();
    assert!(matches!(error, ChannelError::Protocol { .. }), "{error:?}");
    assert!(error.to_string().contains("chunk 40"), "{error}");
    let ended = close(&mut *raw.channel);
    assert_eq!(ended.len() as u64, last + 1);
}

#[test]
fn a_chunk_that_nobody_waits_for_is_not_sent_again() {
    let mut raw = raw_peer(2, options(false));
    post_send(&mut *raw.channel, 0, filled(0, 1000));
    let mut carrier = 0;
    wait_until(|| {
        carrier = 1 - carrier;
        let lane: &TcpStream = &raw.lanes[carrier];
        lane.set_nonblocking(true).unwrap();
        let found = lane.peek(&mut [0]).is_ok();
        lane.set_nonblocking(false).unwrap();
        found
    });
    raw.channel.forget(0);
    assert_eq!(sent_token(&completions(&mut *raw.channel, 1)[0]), 0);
    drop(raw.lanes.remove(carrier));
    wait_until(|| raw.channel.stats().streams == 1);
    // The dying lane may have a hand on the first of these, but none may be the forgotten one.
    for sequence in 1..4 {
        post_send(&mut *raw.channel, sequence, filled(sequence, 1000));
        let header = read_header(&raw.lanes[0]);
        assert_eq!(header.transfer.0, sequence);
        read_payload(&raw.lanes[0], &header);
        raw.channel.placed(sequence).unwrap();
    }
    drop(close(&mut *raw.channel));
}

#[test]
fn when_no_lane_is_left_the_error_says_so() {
    let mut raw = raw_peer(3, options(false));
    open_window(&mut *raw.channel, 0, guarded(1000));
    for lane in raw.lanes.drain(..) {
        write_partial(&lane);
        drop(lane);
    }
    let (error, _) = breakage(&mut *raw.channel);
    assert!(
        matches!(error, ChannelError::NoLaneLeft { lanes: 3, .. }),
        "{error:?}"
    );
    assert!(
        error.to_string().contains("no lane is left of 3"),
        "{error}"
    );
    let ended = close(&mut *raw.channel);
    assert!(matches!(
        &ended[..],
        [Completion::Failed { token: 1000, .. }]
    ));
}

/// The peer gives a lane up that it takes for broken: this side reads an orderly end of its last
/// one.
#[test]
fn broken_lanes_are_the_reason_that_none_is_left() {
    let mut raw = raw_peer(3, options(false));
    open_window(&mut *raw.channel, 0, guarded(1000));
    let last = raw.lanes.pop();
    for lane in raw.lanes.drain(..) {
        write_partial(&lane);
        drop(lane);
    }
    wait_until(|| raw.channel.stats().lanes_lost == 2);
    drop(last);
    let (error, _) = breakage(&mut *raw.channel);
    assert!(
        matches!(error, ChannelError::NoLaneLeft { lanes: 3, .. }),
        "{error:?}"
    );
    drop(close(&mut *raw.channel));
}

/// So that its end is not an orderly one.
fn write_partial(mut lane: &TcpStream) {
    lane.write_all(b"TC").unwrap();
}

/// A control connection whose peer wishes the same as this side, and has gone since.
struct Gone;

impl Exchange for Gone {
    fn exchange(&mut self, payload: &[u8], _: &mut dyn Meanwhile) -> Result<Vec<u8>, NetworkError> {
        Ok(payload.to_vec())
    }

    fn wait(&mut self, _: Vec<PollFd<'_>>, _: Instant) -> Result<(), NetworkError> {
        Err(NetworkError::Control {
            reason: "it has gone".to_owned(),
        })
    }
}

#[test]
fn a_client_whose_peer_has_gone_dials_no_lane_again() {
    let auth = auth(Protection::Headers);
    let listener = listener(auth.clone());
    // As a relay whose target has gone.
    let closing = TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses = (listener.local_addr(), closing.local_addr().unwrap());
    let came = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&came);
    std::thread::spawn(move || {
        for lane in closing.incoming() {
            counted.fetch_add(1, Ordering::Relaxed);
            drop(lane);
        }
    });
    let (options, protection) = (TcpOptions::default(), Protection::Headers);
    let opened = client_side(addresses, &auth, options, 2, &[], protection, &mut Gone);
    let error = opened.map(|_| ()).unwrap_err();
    assert!(matches!(error, NetworkError::Control { .. }), "{error}");
    // Each lane ahead of the peer's wish, and once more.
    assert!(came.load(Ordering::Relaxed) <= 4);
}

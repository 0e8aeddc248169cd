//! Receives that a real kernel answered, replayed: `tests/devmem-recorder` says how they were made.
//!
//! Every fragment's place in the stream is checked against the bytes that lay in the pool, and
//! every batch of tokens against the one that the kernel accepted.

#![cfg(target_endian = "little")]

mod recording;

use tcpx_devmem::cmsg::{Binding, CmsgError, Dialect, Gathered, Piece};
use tcpx_devmem::tokens::{Returned, TokenError, TokenSet};
use tcpx_lanes::control_messages::ControlMessages;
use tcpx_wire::{Descriptors, Limits};

use recording::{Event, MSG_CTRUNC, Receive, Recording, fnv1a, stream};

/// How the recorder gave held tokens back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Ascending,
    EvenThenOdd,
}

/// Replays a recording from its first to its last event and checks every byte; its stream's
/// length.
fn replay(recording: &Recording, order: Order) -> u64 {
    let binding = recording.binding;
    let mut gathered = Gathered::new();
    let mut chunk = TokenSet::new();
    let mut held = Vec::new();
    let mut returning = TokenSet::new();
    for event in &recording.events {
        match event {
            Event::Receive(receive) if receive.answer < 0 => {
                assert!(receive.control.is_empty());
            }
            Event::Receive(receive) => {
                assert_eq!(receive.at, gathered.bytes());
                check_bytes(receive, binding);
                let staged = gathered.host_bytes();
                let added = gathered
                    .add(receive.received(), binding, staged, &mut chunk)
                    .expect("the kernel's word is consistent");
                assert_eq!(added.host, receive.iovec.len() as u64);
                let pieces = receive.pieces(binding).into_iter();
                held.extend(pieces.filter_map(|piece| match piece {
                    Piece::Device(fragment) => Some(fragment.token),
                    _ => None,
                }));
            }
            Event::Return(value, answer) => {
                if returning.is_empty() {
                    let even = order == Order::EvenThenOdd && held.iter().any(|at| at % 2 == 0);
                    held.retain(|token| {
                        let stays = even && token % 2 == 1;
                        if !stays {
                            returning.insert(*token).expect("a token comes once");
                        }
                        stays
                    });
                }
                let batch = returning.batch(Dialect::Mainline).expect("tokens are left");
                assert_eq!(batch.as_bytes(), value);
                assert_eq!(batch.answered(*answer as i32), Ok(Returned::All));
                if returning.is_empty() && held.is_empty() {
                    chunk.clear();
                }
            }
            Event::Again(value, answer) => {
                let mut tokens = TokenSet::new();
                for pair in value.chunks_exact(8) {
                    let word =
                        |at| u32::from_le_bytes(pair[at..at + 4].try_into().expect("4 bytes"));
                    for token in word(0)..word(0) + word(4) {
                        tokens.insert(token).expect("a token comes once");
                    }
                }
                let sent = tokens.fragments() as u32;
                let batch = tokens.batch(Dialect::Mainline).expect("tokens");
                assert_eq!(batch.as_bytes(), value);
                assert_eq!(
                    batch.answered(*answer as i32),
                    Err(TokenError::NotFreed { sent, freed: 0 })
                );
            }
            Event::Unbind => {}
        }
    }
    assert!(held.is_empty() && returning.is_empty());
    let mut descriptors = Descriptors::new();
    let limits = Limits {
        pool_bytes: binding.pool_bytes(),
        destination_bytes: gathered.bytes(),
        received_bytes: gathered.device_bytes(),
    };
    descriptors
        .build(gathered.list(), limits)
        .expect("fragments inside their bounds");
    gathered.bytes()
}

/// Each piece's bytes, where the parser says they are, are those of its place in the stream.
fn check_bytes(receive: &Receive, binding: Binding) {
    let mut at = receive.at;
    let mut hashes = receive.hashes.iter();
    for piece in receive.pieces(binding) {
        let (from, length) = match piece {
            Piece::Device(fragment) => {
                let length = fragment.length.into();
                assert_eq!(hashes.next(), Some(&fnv1a(stream(at, length))));
                at += length;
                continue;
            }
            Piece::Linear {
                iovec_offset,
                length,
            } => (iovec_offset as usize, u64::from(length)),
            Piece::Plain { length } => (0, length),
        };
        assert!(
            receive.iovec[from..from + length as usize]
                .iter()
                .copied()
                .eq(stream(at, length))
        );
        at += length;
    }
    assert_eq!(at - receive.at, receive.answer as u64);
    assert!(hashes.next().is_none());
}

#[test]
fn a_small_stream() {
    let recording = Recording::load("small");
    assert_eq!(replay(&recording, Order::Ascending), 10_000);
}

#[test]
fn many_records_in_one_receive() {
    let recording = Recording::load("many-records");
    assert_eq!(replay(&recording, Order::EvenThenOdd), 500_000);
    let most = recording
        .receives()
        .into_iter()
        .map(|receive| receive.hashes.len());
    assert!(most.max() > Some(300));
    // Every other token at a time: more ranges than the kernel takes at once.
    assert!(
        recording
            .events
            .iter()
            .any(|event| matches!(event, Event::Return(value, 128) if value.len() == 128 * 8))
    );
}

#[test]
fn more_fragments_than_one_call_gives_back() {
    let recording = Recording::load("many-fragments");
    assert_eq!(replay(&recording, Order::Ascending), 1_600_000);
    assert!(
        recording
            .events
            .iter()
            .any(|event| matches!(event, Event::Return(_, 1024)))
    );
}

#[test]
fn a_token_given_back_is_used_again() {
    let recording = Recording::load("reused-tokens");
    assert_eq!(replay(&recording, Order::Ascending), 100_000);
    let fragments = recording.fragments();
    let first: Vec<_> = fragments.iter().filter(|at| at.token == 1).collect();
    assert!(first.len() > 1);
    assert!(
        first
            .windows(2)
            .any(|pair| pair[0].pool_offset != pair[1].pool_offset)
    );
}

#[test]
fn a_fragment_that_the_iovec_cuts_has_a_token_for_each_part() {
    let recording = Recording::load("cut-by-iovec");
    assert_eq!(replay(&recording, Order::Ascending), 20_000);
    let continued = recording
        .receives()
        .windows(2)
        .filter(|pair| {
            let before = pair[0].pieces(recording.binding);
            let after = pair[1].pieces(recording.binding);
            match (before.last(), after.first()) {
                (Some(Piece::Device(before)), Some(Piece::Device(after))) => {
                    before.pool_offset + u64::from(before.length) == after.pool_offset
                }
                _ => false,
            }
        })
        .count();
    assert!(continued >= 10, "{continued}");
}

#[test]
fn a_control_buffer_for_one_record_gets_one_fragment_a_receive() {
    let recording = Recording::load("one-record-of-room");
    assert_eq!(replay(&recording, Order::Ascending), 20_000);
    let room = Dialect::Mainline.control_bytes(1);
    for receive in recording.receives() {
        assert_eq!((receive.room, receive.control.len()), (room as u64, room));
        assert_eq!(receive.pieces(recording.binding).len(), 1);
        assert_eq!(receive.flags & MSG_CTRUNC, 0);
    }
}

#[test]
fn a_control_buffer_without_room_loses_nothing() {
    let recording = Recording::load("no-room");
    assert!(matches!(
        recording.events.first(),
        Some(Event::Receive(Receive { answer: -525, .. }))
    ));
    assert_eq!(replay(&recording, Order::Ascending), 5_000);
}

#[test]
fn after_an_unbind_the_stream_goes_on_as_plain_data() {
    let recording = Recording::load("plain-after-unbind");
    assert_eq!(replay(&recording, Order::Ascending), 30_000);
    let unbind = recording
        .events
        .iter()
        .position(|event| matches!(event, Event::Unbind))
        .expect("an unbind");
    for (at, event) in recording.events.iter().enumerate() {
        if let Event::Receive(receive) = event {
            let plain = matches!(receive.pieces(recording.binding)[..], [Piece::Plain { .. }]);
            assert_eq!(plain, at > unbind);
        }
    }
}

#[test]
fn packed_pages_give_offsets_at_any_place() {
    let recording = Recording::load("packed-pages");
    assert_eq!(replay(&recording, Order::Ascending), 60_000);
    let offsets: Vec<u64> = recording
        .fragments()
        .iter()
        .map(|fragment| fragment.pool_offset)
        .collect();
    assert!(offsets.iter().any(|offset| offset % 16 != 0));
    assert!(
        offsets
            .windows(2)
            .any(|pair| pair[0] / 4096 == pair[1] / 4096)
    );
}

#[test]
fn linear_pieces_stand_between_fragments() {
    for (name, bytes) in [
        ("linear-in-between", 60_000),
        ("linear-cut-by-iovec", 15_000),
    ] {
        let recording = Recording::load(name);
        assert_eq!(replay(&recording, Order::Ascending), bytes);
        let between = recording.receives().into_iter().any(|receive| {
            receive.pieces(recording.binding).windows(3).any(|three| {
                matches!(
                    three,
                    [Piece::Device(_), Piece::Linear { .. }, Piece::Device(_)]
                )
            })
        });
        assert!(between, "{name}");
    }
}

#[test]
fn messages_of_other_options_are_skipped() {
    let recording = Recording::load("foreign-timestamp");
    assert_eq!(replay(&recording, Order::Ascending), 20_000);
    let foreign = recording.receives().into_iter().any(|receive| {
        ControlMessages::new(&receive.control)
            .any(|message| message.is_ok_and(|message| message.kind == libc::SCM_TIMESTAMPNS))
    });
    assert!(foreign);
}

#[test]
fn a_timestamp_without_room_truncates_the_control_buffer() {
    let recording = Recording::load("truncated-by-timestamp");
    for receive in recording.receives() {
        assert_eq!(
            receive.received().pieces(recording.binding).next(),
            Some(Err(CmsgError::Truncated {
                control_bytes: 40,
                received: receive.answer as usize
            }))
        );
    }
}

#[test]
fn jumbo_frames_fill_pages() {
    let recording = Recording::load("jumbo-frames");
    assert_eq!(replay(&recording, Order::Ascending), 60_000);
    assert!(
        recording
            .fragments()
            .iter()
            .any(|fragment| fragment.length == 4096)
    );
}

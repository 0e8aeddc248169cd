//! What the obvious reader of `tests/cmsg.rs` and the recordings leave out.

use super::*;
use crate::tokens::TokenSet;

const MAINLINE: Binding = Binding::Mainline {
    pool_bytes: 1 << 20,
    dmabuf_id: 7,
};
const GOOGLE: Binding = Binding::Google {
    pool_bytes: 1 << 20,
};

/// A message with padding behind it.
fn message(level: i32, kind: i32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (16 + payload.len() as u64).to_ne_bytes().to_vec();
    bytes.extend(level.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(8), 0xA5);
    bytes
}

fn mainline(kind: i32, offset: u64, words: [u32; 4]) -> Vec<u8> {
    let mut payload = offset.to_ne_bytes().to_vec();
    payload.extend(words.map(u32::to_ne_bytes).as_flattened());
    message(1, kind, &payload)
}

fn device(offset: u64, size: u32, token: u32) -> Vec<u8> {
    mainline(79, offset, [size, token, 7, 0])
}

fn linear(size: u32) -> Vec<u8> {
    mainline(78, 0, [size, 0, 0, 0])
}

fn google(kind: i32, words: [u32; 3]) -> Vec<u8> {
    message(1, kind, words.map(u32::to_ne_bytes).as_flattened())
}

fn received(bytes: usize, control: &[u8]) -> Received<'_> {
    Received {
        bytes,
        iovec_bytes: 1 << 20,
        control,
        truncated: false,
    }
}

fn read(bytes: usize, control: &[u8], binding: Binding) -> Result<Vec<Piece>, CmsgError> {
    received(bytes, control).pieces(binding).collect()
}

fn fragment(pool_offset: u64, length: u32, token: u32) -> Piece {
    Piece::Device(DeviceFragment {
        pool_offset,
        length,
        token,
        dmabuf_id: Some(7),
    })
}

#[test]
fn the_last_message_needs_no_padding() {
    let mut control = google(99, [0, 4, 1]);
    control.truncate(28);
    assert_eq!(read(4, &control, GOOGLE).map(|pieces| pieces.len()), Ok(1));
}

#[test]
fn nothing_is_assumed_of_the_buffers_alignment() {
    let control = [device(0, 4, 1), device(8, 4, 2)].concat();
    for shift in 0..8 {
        let moved = [vec![0xFF; shift], control.clone()].concat();
        assert_eq!(
            read(8, &moved[shift..], MAINLINE),
            Ok(vec![fragment(0, 4, 1), fragment(8, 4, 2)])
        );
    }
}

#[test]
fn control_buffers_have_room_for_their_records() {
    assert_eq!(Dialect::Mainline.control_bytes(1), 40);
    assert_eq!(Dialect::Google.control_bytes(2048), 65_536);
    assert_eq!(
        Dialect::Mainline.control_bytes(3),
        [device(0, 1, 1), linear(1), device(1, 1, 2)].concat().len()
    );
    use tcpx_lanes::control_messages::{cmsg_align, cmsg_space};
    assert_eq!(cmsg_space(usize::MAX), cmsg_align(usize::MAX));
}

#[test]
fn offsets_never_pass_sixty_four_bits() {
    let mut gathered = Gathered::new();
    let mut tokens = TokenSet::new();
    let huge = Received {
        bytes: usize::MAX,
        iovec_bytes: usize::MAX,
        control: &[],
        truncated: false,
    };
    gathered.add(huge, MAINLINE, 0, &mut tokens).unwrap();
    assert_eq!(
        gathered.add(received(1, &[]), MAINLINE, 0, &mut tokens),
        Err(GatherError::TooLong {
            gathered: u64::MAX,
            host_offset: 0,
            received: 1
        })
    );
    gathered.clear();
    assert!(matches!(
        gathered.add(huge, MAINLINE, 1, &mut tokens),
        Err(GatherError::TooLong { host_offset: 1, .. })
    ));
}

use super::*;
use crate::tokens::{TokenError, TokenSet};

mod errors;

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
fn mainline_records_come_in_stream_order() {
    let control = [
        device(64, 100, 1),
        linear(5),
        device(8192, 20, 9),
        linear(2),
    ]
    .concat();
    assert_eq!(
        read(127, &control, MAINLINE),
        Ok(vec![
            fragment(64, 100, 1),
            Piece::Linear {
                iovec_offset: 0,
                length: 5
            },
            fragment(8192, 20, 9),
            Piece::Linear {
                iovec_offset: 5,
                length: 2
            },
        ])
    );
}

#[test]
fn google_records_come_in_stream_order() {
    let control = [google(98, [0, 3, 0]), google(99, [4096, 10, 2])].concat();
    assert_eq!(
        read(13, &control, GOOGLE),
        Ok(vec![
            Piece::Linear {
                iovec_offset: 0,
                length: 3
            },
            Piece::Device(DeviceFragment {
                pool_offset: 4096,
                length: 10,
                token: 2,
                dmabuf_id: None
            }),
        ])
    );
}

#[test]
fn without_records_the_bytes_are_plain() {
    assert_eq!(read(9, &[], MAINLINE), Ok(vec![Piece::Plain { length: 9 }]));
    let timestamp = message(1, 35, &[0; 16]);
    assert_eq!(
        read(9, &timestamp, GOOGLE),
        Ok(vec![Piece::Plain { length: 9 }])
    );
    assert_eq!(read(0, &timestamp, MAINLINE), Ok(vec![]));
}

#[test]
fn foreign_messages_are_skipped() {
    let control = [
        message(1, 35, &[1; 16]),
        message(6, 79, &[2; 3]),
        device(0, 4, 1),
        message(41, 99, &[]),
        message(1, 2, &[3; 12]),
    ]
    .concat();
    assert_eq!(read(4, &control, MAINLINE), Ok(vec![fragment(0, 4, 1)]));
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
fn receives_gather_into_one_list_in_stream_order() {
    let mut gathered = Gathered::new();
    let mut tokens = TokenSet::new();
    let mut add = |bytes, control: &[u8], host_offset| {
        gathered
            .add(received(bytes, control), MAINLINE, host_offset, &mut tokens)
            .unwrap()
    };
    let first = add(
        13,
        &[device(64, 4, 1), linear(5), device(0, 4, 3)].concat(),
        100,
    );
    assert_eq!(first, Added { device: 8, host: 5 });
    let second = add(6, &[], 100 + first.host);
    assert_eq!(second, Added { device: 0, host: 6 });
    let third = add(2, &device(4, 2, 2), 100 + first.host + second.host);
    assert_eq!(third, Added { device: 2, host: 0 });

    let list: Vec<_> = gathered
        .list()
        .iter()
        .map(|piece| (piece.source_offset, piece.length, piece.destination_offset))
        .collect();
    assert_eq!(list, [(64, 4, 0), (0, 4, 9), (4, 2, 19)]);
    let host: Vec<_> = gathered
        .host_pieces()
        .iter()
        .map(|piece| (piece.host_offset, piece.length, piece.destination_offset))
        .collect();
    assert_eq!(host, [(100, 5, 4), (105, 6, 13)]);
    assert_eq!(
        (
            gathered.device_bytes(),
            gathered.host_bytes(),
            gathered.bytes()
        ),
        (10, 11, 21)
    );
    assert_eq!(tokens.fragments(), 3);
    assert_eq!(tokens.ranges().count(), 1);
}

#[test]
fn a_receive_that_fails_adds_nothing_but_its_tokens() {
    let mut gathered = Gathered::new();
    let mut tokens = TokenSet::new();
    let control = [device(0, 4, 1), linear(3)].concat();
    gathered
        .add(received(7, &control), MAINLINE, 0, &mut tokens)
        .unwrap();
    let before = gathered.clone();
    let control = [device(0, 4, 5), linear(3), device(1 << 40, 1, 6)].concat();
    let result = gathered.add(received(8, &control), MAINLINE, 0, &mut tokens);
    assert!(matches!(
        result,
        Err(GatherError::Control(CmsgError::OutsidePool {
            record: 2,
            ..
        }))
    ));
    assert_eq!(gathered, before);
    assert_eq!(tokens.fragments(), 2);

    let again = gathered.add(received(4, &device(0, 4, 1)), MAINLINE, 0, &mut tokens);
    assert_eq!(
        again,
        Err(GatherError::Token(TokenError::Twice { token: 1 }))
    );
    assert_eq!(gathered, before);
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

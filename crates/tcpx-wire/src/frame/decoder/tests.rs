use super::*;
use crate::frame::{
    Destination, Level, Limits, MAX_EAGER_BYTES, MAX_SETUP_BYTES, PlacedChunks, Settings, Tag,
    TransferId, encode,
};
use crate::plan::Taper;

mod any_frame;
mod refused;

fn bytes_of(frame: &Frame, sequence: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(frame, sequence, &mut bytes).unwrap();
    bytes
}

fn decode_one(mut bytes: &[u8]) -> Result<Option<Frame>, FrameError> {
    FrameDecoder::new().next(&mut bytes)
}

/// Changes the bytes of a frame and makes its checksum fit again.
fn tampered(frame: &Frame, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = bytes_of(frame, 0);
    change(&mut bytes);
    let body_bytes = (bytes.len() - HEADER_BYTES) as u32;
    bytes[4..8].copy_from_slice(&body_bytes.to_le_bytes());
    bytes[12..16].fill(0);
    let crc = crc32c_of_parts(&[&bytes]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn settings() -> Settings {
    Settings {
        network: "tcp".into(),
        channels: 8,
        chunk_bytes: 1 << 20,
        send_window: 12,
        receive_window: 16,
        eager_limit: 16 * 1024,
        eager_credit: 256 * 1024,
        heartbeat_ms: 500,
        dead_after_ms: 5000,
        limits: Limits::default(),
        memory: "host".into(),
        software: "tcpx 0.1.0".into(),
    }
}

#[test]
fn a_repeated_or_missing_frame_is_an_error_that_stays() {
    let mut decoder = FrameDecoder::new();
    let first = bytes_of(&Frame::Ready, 0);
    let second = bytes_of(&Frame::Ready, 1);
    assert_eq!(decoder.next(&mut &first[..]), Ok(Some(Frame::Ready)));
    let error = FrameError::Sequence {
        expected: 1,
        arrived: 0,
    };
    assert_eq!(decoder.next(&mut &first[..]), Err(error.clone()));
    assert_eq!(decoder.next(&mut &second[..]), Err(error));
}

#[test]
fn the_longest_frames_fit() {
    let longest = [
        Frame::Setup {
            payload: vec![7; MAX_SETUP_BYTES],
        },
        Frame::Eager {
            transfer: TransferId(u64::MAX),
            level: Level::Verified,
            to: Destination::next_receive(Tag(u64::MAX)),
            payload: vec![7; MAX_EAGER_BYTES].into(),
        },
    ];
    for frame in longest {
        let bytes = bytes_of(&frame, 0);
        assert!(bytes.len() - HEADER_BYTES <= MAX_BODY_BYTES);
        assert_eq!(decode_one(&bytes), Ok(Some(frame)));
    }
}

#[test]
fn a_payload_reuses_a_returned_buffer() {
    let eager = |payload: &[u8]| Frame::Eager {
        transfer: TransferId(1),
        level: Level::Placed,
        to: Destination::next_receive(Tag(2)),
        payload: payload.to_vec().into(),
    };
    let mut decoder = FrameDecoder::new();
    let buffer = Vec::from([0xff; 64]);
    let at = buffer.as_ptr();
    decoder.use_again(buffer);
    for (sequence, payload) in [&b"short"[..], &[7; 5000], b""].into_iter().enumerate() {
        let frame = eager(payload);
        let arrived = decoder.next(&mut &*bytes_of(&frame, sequence as u32));
        assert_eq!(arrived, Ok(Some(frame)));
        if let (0, Ok(Some(Frame::Eager { payload, .. }))) = (sequence, arrived) {
            assert_eq!(payload.as_ptr(), at);
            decoder.use_again(payload.into_bytes());
        }
    }
}

#[test]
fn a_payload_behind_its_fields_takes_the_same_buffer() {
    let frame = Frame::Eager {
        transfer: TransferId(1),
        level: Level::Placed,
        to: Destination::next_receive(Tag(2)),
        payload: vec![7; LEAST_PLAIN_BYTES].into(),
    };
    let bytes = bytes_of(&frame, 0);
    let (fields, payload) = bytes.split_at(bytes.len() - LEAST_PLAIN_BYTES);
    let mut decoder = FrameDecoder::new();
    let room = 2 * LEAST_PLAIN_BYTES;
    decoder.use_again(Vec::with_capacity(room));
    assert_eq!(decoder.next(&mut &*fields), Ok(None));
    let arrived = decoder.next(&mut &*payload);
    assert_eq!(arrived, Ok(Some(frame)));
    let Ok(Some(Frame::Eager { payload, .. })) = arrived else {
        unreachable!()
    };
    assert_eq!(payload.into_bytes().capacity(), room);
}

/// The header's checksum does not cover it.
#[test]
fn a_changed_payload_comes_again_under_its_number() {
    let eager = |transfer| Frame::Eager {
        transfer: TransferId(transfer),
        level: Level::Placed,
        to: Destination::next_receive(Tag(2)),
        payload: vec![40; 4096].into(),
    };
    let mut decoder = FrameDecoder::new();
    let first = bytes_of(&eager(0), 0);
    assert_eq!(decoder.next(&mut &*first), Ok(Some(eager(0))));
    let mut bytes = bytes_of(&eager(1), 1);
    bytes[1000] ^= 1;
    let refused = decoder.next(&mut &*bytes);
    assert!(matches!(refused, Err(FrameError::Checksum { .. })));
    decoder.restart();
    assert_eq!(decoder.read(), first.len() as u64);
    bytes[1000] ^= 1;
    assert_eq!(decoder.next(&mut &*bytes), Ok(Some(eager(1))));
}

//! The control connection's stream of frames.

use tcpx_wire::frame::{Frame, FrameDecoder, FrameError, encode};

/// Input: one byte that says how, then the stream.
///
/// Even: the bytes as they are. Odd: kind, bytes before a payload, length and body of frame after
/// frame, to which header and checksums are added, so that the bodies are reached.
pub fn run(data: &[u8]) {
    let Some((how, rest)) = data.split_first() else {
        return;
    };
    let stream = if how % 2 == 0 {
        rest.to_vec()
    } else {
        framed(rest)
    };
    let cut = usize::from(how / 2) + 1;
    let whole = decode(&stream, stream.len().max(1));
    assert_eq!(whole, decode(&stream, cut), "slicing changes nothing");

    let mut again = Vec::new();
    for (sequence, frame) in (0..).zip(&whole.0) {
        encode(frame, sequence, &mut again).expect("an accepted frame can be sent");
    }
    assert!(stream.starts_with(&again), "an accepted frame is canonical");
}

fn decode(stream: &[u8], cut: usize) -> (Vec<Frame>, Option<FrameError>) {
    let mut decoder = FrameDecoder::new();
    let mut frames = Vec::new();
    for mut slice in stream.chunks(cut) {
        loop {
            match decoder.next(&mut slice) {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(decoder.next(&mut slice), Err(error.clone()));
                    return (frames, Some(error));
                }
            }
        }
        assert!(slice.is_empty(), "all input is taken");
    }
    (frames, None)
}

/// The stream that an odd input stands for.
pub fn framed(mut rest: &[u8]) -> Vec<u8> {
    let mut stream = Vec::new();
    for sequence in 0u32.. {
        let Some(([kind, fields, low, high], after)) = rest.split_first_chunk() else {
            break;
        };
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(after.len());
        let (body, after) = after.split_at(length);
        rest = after;
        let start = stream.len();
        stream.extend_from_slice(&[0x58, 0x54, *kind, *fields]);
        stream.extend_from_slice(&(length as u32).to_le_bytes());
        stream.extend_from_slice(&sequence.to_le_bytes());
        stream.extend_from_slice(&[0; 4]);
        stream.extend_from_slice(body);
        let mut summed = stream.len();
        // An eager frame's fields end with the checksum of what is behind them.
        let fields = usize::from(*fields);
        if *kind == 7 && (4..=length).contains(&fields) {
            summed = start + 16 + fields;
            let of_payload = super::crc32c(&stream[summed..]);
            stream[summed - 4..summed].copy_from_slice(&of_payload.to_le_bytes());
        }
        let crc = super::crc32c(&stream[start..summed]);
        stream[start + 12..start + 16].copy_from_slice(&crc.to_le_bytes());
    }
    stream
}

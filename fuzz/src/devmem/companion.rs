//! Words on the companion connection, read a second time in the plainest way.

use tcpx_devmem::word::{Word, WordReader};

/// What stood in the stream.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Word(Word),
    /// So much payload in a row.
    Payload(usize),
    /// Nothing can be read from here on.
    Refused,
}

/// Input: a byte that says how the stream is cut, then the stream.
pub fn run(data: &[u8]) {
    let Some((cut, stream)) = data.split_first() else {
        return;
    };
    let plain = plainly(stream);
    assert_eq!(in_pieces(stream, usize::MAX), plain);
    assert_eq!(in_pieces(stream, usize::from(*cut) + 1), plain);
    assert_eq!(in_pieces(stream, 1), plain);
}

/// As the channel reads: what the socket gives, at most `most` bytes at a time.
fn in_pieces(stream: &[u8], most: usize) -> Vec<Seen> {
    let mut reader = WordReader::new();
    let mut seen = Vec::new();
    let mut rest = stream;
    while !rest.is_empty() {
        let most = most.min(rest.len());
        let left = reader.payload_left();
        if left > 0 {
            assert!(reader.room().is_empty(), "payload comes first");
            let bytes = left.min(most);
            reader.took_payload(bytes);
            rest = &rest[bytes..];
            match seen.last_mut() {
                Some(Seen::Payload(before)) => *before += bytes,
                _ => seen.push(Seen::Payload(bytes)),
            }
            continue;
        }
        let room = reader.room();
        assert!(!room.is_empty(), "something can always be read");
        let bytes = room.len().min(most);
        room[..bytes].copy_from_slice(&rest[..bytes]);
        rest = &rest[bytes..];
        match reader.filled(bytes) {
            Ok(None) => {}
            Ok(Some(word)) => {
                seen.push(Seen::Word(word));
            }
            Err(_) => {
                seen.push(Seen::Refused);
                break;
            }
        }
    }
    seen
}

/// By the table of the wire protocol.
fn plainly(stream: &[u8]) -> Vec<Seen> {
    let mut seen = Vec::new();
    let mut at = 0;
    while let Some(message) = stream[at..].first_chunk::<16>() {
        at += 16;
        let kind = u32::from_le_bytes([message[0], message[1], message[2], message[3]]);
        let length = u32::from_le_bytes([message[4], message[5], message[6], message[7]]);
        let place = message[8..].iter().rev();
        let place = place.fold(0, |place: u64, byte| place << 8 | u64::from(*byte));
        let word = match kind {
            1 if length == 0 => Word::Have(place),
            2 if length == 0 => Word::Move(place),
            3 if length > 0 && u128::from(place) + u128::from(length) <= u128::from(u64::MAX) => {
                Word::Data { place, length }
            }
            _ => {
                seen.push(Seen::Refused);
                return seen;
            }
        };
        assert_eq!(word.encode(), *message, "an accepted word is canonical");
        seen.push(Seen::Word(word));
        if let Word::Data { length, .. } = word {
            let bytes = (length as usize).min(stream.len() - at);
            if bytes > 0 {
                seen.push(Seen::Payload(bytes));
            }
            at += bytes;
        }
    }
    seen
}

//! Answers over generic netlink, read a second time in the plainest way.

use tcpx_devmem::netlink::{Answer, attributes, messages};

/// Attributes in attributes that anybody reads.
const DEPTH: u32 = 3;

/// Input: what one receive returned.
pub fn run(data: &[u8]) {
    let mut at = 0;
    let mut ended = false;
    let mut all = messages(data);
    for message in all.by_ref() {
        assert!(!ended, "something came after an error");
        // A message of type 1 says nothing and is passed over.
        while let Some(1) = kind(data, at) {
            at += length(data, at);
        }
        let end = at + declared(data, at);
        match message {
            Ok(message) => {
                assert!(end <= data.len());
                let body = &data[at + 16..end];
                assert_eq!(message.sequence, word(data, at + 8));
                match message.answer {
                    Answer::Object {
                        family,
                        command,
                        attributes: inside,
                    } => {
                        assert_eq!(Some(family), kind(data, at));
                        assert_eq!(command, body[0]);
                        assert_eq!(inside, &body[4..]);
                        walk(inside, DEPTH);
                    }
                    Answer::End { errno, .. } if body.len() >= 4 => {
                        let sent = word(body, 0).cast_signed();
                        assert!(errno == sent.wrapping_neg() || sent == i32::MIN);
                    }
                    Answer::End { errno, words } => assert_eq!((errno, words), (0, None)),
                }
                at += length(data, at);
            }
            Err(_) => ended = true,
        }
    }
    assert!(all.next().is_none());
    while let Some(1) = kind(data, at) {
        at += length(data, at);
    }
    assert!(
        ended || at >= data.len(),
        "{at} of {} bytes read",
        data.len()
    );
}

/// Every attribute lies where the one before it ends.
fn walk(bytes: &[u8], depth: u32) {
    let mut at = 0;
    let mut ended = false;
    for attribute in attributes(bytes) {
        assert!(!ended, "something came after an error");
        match attribute {
            Ok(attribute) => {
                let length = usize::from(u16::from_ne_bytes([bytes[at], bytes[at + 1]]));
                let kind = u16::from_ne_bytes([bytes[at + 2], bytes[at + 3]]);
                assert_eq!(attribute.kind, kind & 0x3fff);
                assert_eq!(attribute.bytes, &bytes[at + 4..at + length]);
                assert_eq!(attribute.u8().is_ok(), length == 5);
                assert_eq!(attribute.u16().is_ok(), length == 6);
                assert_eq!(attribute.u32().is_ok(), length == 8);
                if let Some(text) = attribute.text() {
                    assert!(attribute.bytes.starts_with(text.as_bytes()));
                    assert!(!text.contains('\0'));
                }
                if depth > 0 {
                    walk(attribute.bytes, depth - 1);
                }
                at += length.next_multiple_of(4);
            }
            Err(_) => ended = true,
        }
    }
    assert!(ended || at >= bytes.len());
}

/// A message's type, where a whole message lies.
fn kind(data: &[u8], at: usize) -> Option<u16> {
    let rest = data.get(at..).filter(|rest| rest.len() >= 16)?;
    let length = word(rest, 0) as usize;
    (16..=rest.len())
        .contains(&length)
        .then(|| u16::from_ne_bytes([rest[4], rest[5]]))
}

/// What the message says its length is.
fn declared(data: &[u8], at: usize) -> usize {
    if data.len() - at < 16 {
        return 0;
    }
    word(data, at) as usize
}

/// Its length with padding.
fn length(data: &[u8], at: usize) -> usize {
    declared(data, at).next_multiple_of(4)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

//! Single records and the handle.

use nccl_net::export::PeerHandle;
use tcpx_lanes::idle::MAX_LANES;

use super::number;
use crate::handle::Handle;
use crate::header::{FROM_RECEIVER, FROM_SENDER, HEADER_BYTES, Header, Record};
use crate::lanes::chunk::{
    CHUNK_HEADER_BYTES, ChunkHeader, GROUP_BYTES, MAX_CHUNK_BYTES, decode_group, encode_group,
};

/// Input: which record, then its bytes; missing ones are 0.
pub fn records(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else {
        return;
    };
    match kind % 4 {
        0 => header(&padded(data)),
        1 => group(&padded(data)),
        2 => chunk(&padded(data)),
        _ => handle(&PeerHandle(padded(data))),
    }
}

fn padded<const N: usize>(data: &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    for (to, from) in bytes.iter_mut().zip(data) {
        *to = *from;
    }
    bytes
}

fn header(bytes: &[u8; HEADER_BYTES]) {
    let all = [
        (Record::Message, b"TxMs", false),
        (Record::Join, b"TxJn", false),
        (Record::End, b"TxEn", false),
        (Record::Refusal, b"TxRf", true),
        (Record::Grant, b"TxGr", true),
    ];
    for (expected, back) in [(&FROM_SENDER[..], false), (&FROM_RECEIVER[..], true)] {
        let plain = all
            .iter()
            .find(|(_, magic, receiver)| bytes[..4] == magic[..] && *receiver == back)
            .filter(|_| bytes[4..8] == [0; 4])
            .map(|(record, ..)| *record);
        match Header::decode(expected, bytes) {
            Ok((record, header)) => {
                assert_eq!(Some(record), plain);
                assert_eq!(header.encode(record), *bytes);
                assert_eq!(Header::of_group(&header.group()), header);
            }
            Err(_) => assert_eq!(plain, None),
        }
    }
}

fn group(bytes: &[u8; GROUP_BYTES]) {
    let lanes = number(&bytes[4..8]);
    let good = bytes[..4] == *b"TxLn" && (1..=MAX_LANES as u64).contains(&lanes);
    match decode_group(bytes) {
        Ok((group, found)) => {
            assert!(good && u64::from(found) == lanes);
            assert_eq!(encode_group(&group, found), *bytes);
        }
        Err(_) => assert!(!good),
    }
}

fn chunk(bytes: &[u8; CHUNK_HEADER_BYTES]) {
    let word = |at: usize| u128::from(number(&bytes[at..at + 8]));
    let len = u128::from(number(&bytes[4..8]));
    let good = (bytes[..4] == *b"TxCk" || bytes[..4] == *b"TxCa")
        && (1..=MAX_CHUNK_BYTES as u128).contains(&len)
        && word(24) + len <= word(32);
    match ChunkHeader::decode(bytes) {
        Ok(header) => {
            assert!(good, "{header:?}");
            assert_eq!(header.encode(), *bytes);
        }
        Err(_) => assert!(!good),
    }
}

fn handle(bytes: &PeerHandle) {
    let Ok(handle) = Handle::decode(bytes) else {
        return;
    };
    assert!(handle.address.port() > 0 && handle.door.is_none_or(|door| door.port > 0));
    // What it leaves out means nothing.
    let again = Handle::decode(&handle.encode());
    assert!(again.is_ok_and(|again| again == handle));
}

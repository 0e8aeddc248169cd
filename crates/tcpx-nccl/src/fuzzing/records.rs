//! Single records and the handle.

use nccl_net::export::PeerHandle;
use tcpx_lanes::idle::MAX_LANES;
use tcpx_lanes::protocols::Build;
use tcpx_wire::crc::crc32c;

use super::number;
use crate::handle::{Handle, write_build};
use crate::header::{FROM_RECEIVER, FROM_SENDER, HEADER_BYTES, Header, Record};
use crate::lanes::hello::Greeting;

/// Input: which record, then its bytes; missing ones are 0.
pub fn records(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else {
        return;
    };
    match kind % 3 {
        0 => header(&padded(data)),
        1 => {
            let mut bytes = padded(data);
            hello(&bytes);
            // With a checksum that fits, so that the fields behind it are reached.
            let crc = crc32c(&bytes[..28]);
            bytes[28..].copy_from_slice(&crc.to_le_bytes());
            hello(&bytes);
        }
        _ => {
            let mut bytes = padded(data);
            handle(&PeerHandle(bytes));
            // Of this version, so that inputs of older ones reach the fields behind it.
            write_build(&mut bytes, &Build::OURS);
            handle(&PeerHandle(bytes));
        }
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
        (Record::Door, b"TxDr", false),
        (Record::Join, b"TxJn", false),
        (Record::End, b"TxEn", false),
        (Record::Refusal, b"TxRf", true),
        (Record::Grant, b"TxGr", true),
        (Record::Read, b"TxRd", true),
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

fn hello(bytes: &[u8; Greeting::BYTES]) {
    let (lanes, lane) = (number(&bytes[4..6]), number(&bytes[6..8]));
    let fits = number(&bytes[28..]) == u64::from(crc32c(&bytes[..28]));
    let is_one_of = |magics: [&[u8]; 2]| magics.iter().any(|magic| bytes.starts_with(magic));
    let is_lane = is_one_of([b"TxLn", b"TxLa"]);
    let good = is_lane && fits && lane < lanes && lanes <= MAX_LANES as u64;
    let goes_on = is_one_of([b"TxCo\0\0\0\0", b"TxCa\0\0\0\0"]) && fits;
    match Greeting::decode(bytes) {
        Ok((greeting, part)) => {
            assert_eq!(matches!(greeting, Greeting::Lane(_)), good, "{greeting:?}");
            assert!(good || goes_on, "{greeting:?}");
            assert_eq!(greeting.encode(part), *bytes);
        }
        Err(_) => assert!(!good && !goes_on),
    }
}

fn handle(bytes: &PeerHandle) {
    let Ok(handle) = Handle::decode(bytes) else {
        return;
    };
    assert!(handle.address.port() > 0 && handle.door.port > 0);
    // What it leaves out means nothing.
    let again = Handle::decode(&handle.encode());
    assert!(again.is_ok_and(|again| again == handle));
}

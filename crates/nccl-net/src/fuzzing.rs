//! What the fuzz target `private_request` asserts, for any bytes that a plugin keeps as a request.
//!
//! Here and not in `fuzz/`, because what it looks at is private. The test replays the corpus.

use crate::constants::{UNPACK_QUEUE_DEPTH, UNPACK_SLOT_ENTRIES};
use crate::memory::MemoryType;
use crate::private_request::{BYTES, Posted, parse};
use crate::queue::QueueSlot;

const LEN: usize = 65_536;
const COMM: u64 = 0x7000_1000;
const DATA: u64 = 0x7000_2000;

/// Input: whether it is a receive, whether it names what was posted, then the request; missing bytes are 0.
pub fn private_request(data: &[u8]) {
    let Some((how, data)) = data.split_first() else {
        return;
    };
    let mut bytes = [0; BYTES];
    for (to, from) in bytes.iter_mut().zip(data) {
        *to = *from;
    }
    if how & 2 == 2 {
        bytes[..8].copy_from_slice(&COMM.to_ne_bytes());
        bytes[8..16].copy_from_slice(&DATA.to_ne_bytes());
        bytes[20..24].copy_from_slice(&2_i32.to_ne_bytes());
    }
    let is_receive = how & 1 == 1;
    let posted = Posted {
        comm: COMM,
        data: DATA,
        len: LEN,
        kind: MemoryType::Cuda,
        slot: is_receive.then(|| QueueSlot::of_receive(19)),
    };
    let plain = plainly(&bytes, is_receive);
    let found = parse(&bytes, &posted).ok();
    assert_eq!(
        found.map(|found| (found.size, found.pending, found.fragments)),
        plain
    );
}

/// By the offsets of the layout: size, bytes that are missing, fragments.
fn plainly(bytes: &[u8; BYTES], is_receive: bool) -> Option<(usize, usize, Option<usize>)> {
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_ne_bytes(word)
    };
    let int = |at: usize| {
        let mut int = [0; 4];
        int.copy_from_slice(&bytes[at..at + 4]);
        i32::from_ne_bytes(int)
    };
    let (size, pending) = (int(36), int(40));
    let fits = 0 <= pending && pending <= size && size <= LEN as i32;
    if word(0) != COMM || word(8) != DATA || int(20) != 2 || !fits {
        return None;
    }
    let fragments = match bytes[56] {
        0 => None,
        1 if is_receive
            && word(64) % UNPACK_QUEUE_DEPTH as u64 == 19 % UNPACK_QUEUE_DEPTH as u64
            && word(88) <= UNPACK_SLOT_ENTRIES as u64 =>
        {
            Some(word(88) as usize)
        }
        _ => return None,
    };
    Some((size as usize, pending as usize, fragments))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    #[test]
    fn kept_inputs_hold() {
        let folder =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/private_request");
        let mut inputs = 0;
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            // Shown only when an assertion fails.
            println!("{}", path.display());
            super::private_request(&fs::read(&path).unwrap());
            inputs += 1;
        }
        assert!(inputs > 0, "{} is empty", folder.display());
    }
}

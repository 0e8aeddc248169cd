//! A lane's whole stream, read into posted receives.

use std::collections::HashMap;
use std::io::Read;
use std::sync::Arc;

use nccl_net::export::HostLogger;
use tcpx_lanes::event_loop::{Source, Turn};
use tcpx_lanes::idle::MAX_LANES;

use super::{CAPACITIES, Memory, connection, feed, number};
use crate::lanes::chunk::{ANSWER_BYTES, CHUNK_HEADER_BYTES, GROUP_BYTES, MAX_CHUNK_BYTES};
use crate::lanes::group::Registry;
use crate::lanes::inlet::Inlet;
use crate::lanes::receive_lane::ReceiveLane;
use crate::log::Log;

/// The comm, and the lanes that it belongs to.
const STREAM: u64 = 1;
const GROUP: [u8; 16] = [7; 16];

/// Input: a byte that says how the stream is cut, then what the peer sends on its lane.
pub fn lane(data: &[u8]) {
    let Some((cut, stream)) = data.split_first() else {
        return;
    };
    let mut memory = Memory::new();
    let plain = plainly(stream, &mut memory);

    let registry = Arc::new(Registry::default());
    let inlet = Arc::new(Inlet::new(STREAM));
    registry.open(&inlet);
    assert!(inlet.join(registry.group(GROUP)));
    for sequence in 0..CAPACITIES.len() {
        inlet.post(sequence as u64, memory.buffer(sequence), None);
    }
    let (near, far) = connection();
    let log = Arc::new(Log::new(HostLogger::default()));
    let mut lane = Some(ReceiveLane::new(near, registry, log));
    let mut far = feed(far, stream, usize::from(*cut) + 1, || {
        while let Some(reading) = &mut lane {
            match reading.turn() {
                Turn::Again => {}
                Turn::Rest | Turn::Nap => break,
                Turn::End => lane = None,
            }
        }
    });
    assert!(lane.is_none(), "the stream has ended");

    memory.check();
    for (sequence, known) in plain.progress.iter().enumerate() {
        assert_eq!(
            inlet.progress(sequence as u64),
            *known,
            "message {sequence}"
        );
    }
    assert_eq!(inlet.refusal().is_some(), plain.refused);
    let mut answers = Vec::new();
    // An end that was not read to its end is a reset, before which the answers are lost.
    if far.read_to_end(&mut answers).is_ok() {
        assert_eq!(answers.len(), plain.answered * ANSWER_BYTES);
        for (count, answer) in (1..).zip(answers.chunks(ANSWER_BYTES)) {
            assert_eq!(number(answer), count);
        }
    }
}

#[derive(Default)]
struct Plain {
    /// Bytes written and bytes of the message, for each receive.
    progress: [Option<(u64, u64)>; CAPACITIES.len()],
    /// Chunks read to their end whose sender waits for the answer.
    answered: usize,
    refused: bool,
}

/// By the description of the lane's records, with the same limits.
fn plainly(stream: &[u8], memory: &mut Memory) -> Plain {
    let mut plain = Plain::default();
    let Some((first, mut rest)) = stream.split_at_checked(GROUP_BYTES) else {
        return plain;
    };
    let lanes = number(&first[4..8]);
    if first[..4] != *b"TxLn" || lanes == 0 || lanes > MAX_LANES as u64 {
        return plain;
    }
    let ours = first[8..] == GROUP;
    let mut claimed = HashMap::new();
    let mut covered: HashMap<usize, Vec<(u64, u64)>> = HashMap::new();
    while let Some((head, after)) = rest.split_at_checked(CHUNK_HEADER_BYTES) {
        let word = |at: usize| number(&head[at..at + 8]);
        let (len, offset, total) = (number(&head[4..8]), word(24), word(32));
        let is_answered = head[..4] == *b"TxCa";
        let is_chunk = is_answered || head[..4] == *b"TxCk";
        let fits = offset.checked_add(len).is_some_and(|end| end <= total);
        if !is_chunk || !(1..=MAX_CHUNK_BYTES as u64).contains(&len) || !fits {
            break;
        }
        let (payload, end) = after.split_at(after.len().min(len as usize));
        let sequence = receive(word(16)).filter(|_| word(8) == STREAM);
        if word(8) == STREAM {
            let taken = sequence.filter(|sequence| {
                let claimed = claimed.entry(*sequence).or_insert(0);
                let takes =
                    ours && total <= CAPACITIES[*sequence] as u64 && *claimed + len <= total;
                *claimed += if takes { len } else { 0 };
                let known = plain.progress[*sequence];
                let pieces = covered.entry(*sequence).or_default();
                let is_new = pieces
                    .iter()
                    .all(|(from, to)| offset + len <= *from || *to <= offset);
                let taken = takes && known.is_none_or(|(_, known)| known == total) && is_new;
                if taken {
                    pieces.push((offset, offset + len));
                }
                taken
            });
            plain.refused |= taken.is_none();
            if let Some(sequence) = taken {
                let written = plain.progress[sequence].map_or(0, |(written, _)| written);
                plain.progress[sequence] = Some((written + payload.len() as u64, total));
                memory.expect(sequence, offset as usize, payload);
            }
        }
        plain.answered += usize::from(is_answered && payload.len() as u64 == len);
        rest = end;
    }
    plain
}

/// The receive that a message's number means: 2^28 numbers on, the marks begin again.
fn receive(sequence: u64) -> Option<usize> {
    let sequence = (sequence % (1 << 28)) as usize;
    (sequence < CAPACITIES.len()).then_some(sequence)
}

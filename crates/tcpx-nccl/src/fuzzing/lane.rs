//! A lane's whole stream, read into posted receives.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use nccl_net::export::{HostLogger, Log};
use tcpx_lanes::event_loop::{EventLoops, Source, Turn};
use tcpx_lanes::receive_lane::ACKNOWLEDGEMENT_BYTES;
use tcpx_wire::ChunkHeader;
use tcpx_wire::crc::crc32c;

use super::{CAPACITIES, Memory, number};
use crate::lanes::group::Registry;
use crate::lanes::hello::{Greeting, Part};
use crate::lanes::receive_lane::receive_lane;
use crate::lanes::recv_stream::{MAX_CHUNK_BYTES, RecvStream};
use crate::link::Link;

/// The comm, and the lanes that it belongs to.
const STREAM: u64 = 1;
const GROUP: [u8; 16] = [7; 16];
/// A lane that does not come to its end, although its peer has.
const TOO_LONG: Duration = Duration::from_secs(20);

/// A place for the lane, which this test drives itself.
static LOOPS: LazyLock<EventLoops> =
    LazyLock::new(|| EventLoops::start("tcpx-nccl", 1).expect("a thread"));

/// Input: a byte that says how the stream is cut, then what the peer sends on its lane, whose
/// checksums are made to fit.
pub fn lane(data: &[u8]) {
    let Some((cut, stream)) = data.split_first() else {
        return;
    };
    let stream = &sealed(stream);
    let Some((hello, chunks)) = stream.split_first_chunk() else {
        return;
    };
    let Ok((Greeting::Lane(hello), Part::Payload)) = Greeting::decode(hello) else {
        return;
    };
    let mut memory = Memory::new();
    let plain = plainly(stream, &mut memory);

    let registry = Arc::new(Registry::default());
    let recv_stream = Arc::new(RecvStream::new(STREAM));
    registry.open(&recv_stream);
    assert!(recv_stream.join(registry.group(GROUP)));
    for sequence in 0..CAPACITIES.len() {
        recv_stream.post(sequence as u64, memory.buffer(sequence), None);
    }
    let ((near, mut far), (back, mut answers)) = (connection(), connection());
    let log = Arc::new(Log::new(HostLogger::default(), c"TCPX"));
    let lane = receive_lane(
        [near, back],
        &hello,
        registry,
        LOOPS.spread(1)[0].place(),
        log,
    );
    let mut lane = lane.expect("the first one of its group");
    let mut has_ended = false;
    let mut read = || {
        while !has_ended {
            match lane.turn() {
                Turn::Again => {}
                Turn::Rest => break,
                Turn::End => has_ended = true,
            }
        }
        has_ended
    };
    for piece in chunks.chunks(usize::from(*cut) + 1) {
        // It may have ended already; what arrived before counts.
        if read() || far.write_all(piece).is_err() {
            break;
        }
    }
    far.shutdown(Shutdown::Write).expect("it is open");
    let start = Instant::now();
    while !read() {
        assert!(start.elapsed() < TOO_LONG, "the stream has ended");
    }
    lane.finish();

    memory.check();
    for (sequence, known) in plain.progress.iter().enumerate() {
        assert_eq!(
            recv_stream.progress(sequence as u64),
            *known,
            "message {sequence}"
        );
    }
    assert_eq!(recv_stream.refusal().is_some(), plain.refused);
    // Of several chunks together, each time of more, and in the end of all.
    let mut acknowledged = 0;
    while acknowledged < plain.read.last().copied().unwrap_or_default() {
        let mut bytes = [0; ACKNOWLEDGEMENT_BYTES];
        answers.read_exact(&mut bytes).expect("an acknowledgement");
        assert!(number(&bytes) > acknowledged && plain.read.contains(&number(&bytes)));
        acknowledged = number(&bytes);
    }
    answers.set_nonblocking(true).expect("a socket");
    let more = answers.read(&mut [0]);
    let more = more.expect_err("an acknowledgement too many");
    assert_eq!(more.kind(), ErrorKind::WouldBlock);
    // A reset, so that no port stays taken for a minute.
    let far = socket2::Socket::from(far);
    far.set_linger(Some(Duration::ZERO)).expect("a socket");
}

/// The lane's end and its peer's: of TCP, for the lane drops bytes as TCP allows.
fn connection() -> (Link, TcpStream) {
    let (link, far) = Link::bare();
    far.set_read_timeout(Some(TOO_LONG)).expect("a socket");
    (link, far)
}

/// The stream with checksums that fit.
fn sealed(stream: &[u8]) -> Vec<u8> {
    let mut bytes = stream.to_vec();
    let seal = |record: &mut [u8]| {
        let at = record.len() - 4;
        let crc = crc32c(&record[..at]);
        record[at..].copy_from_slice(&crc.to_le_bytes());
    };
    let Some((hello, mut rest)) = bytes.split_at_mut_checked(Greeting::BYTES) else {
        return bytes;
    };
    seal(hello);
    while let Some((head, after)) = rest.split_at_mut_checked(ChunkHeader::BYTES) {
        seal(head);
        let payload = after.len().min(number(&head[40..44]) as usize);
        rest = &mut after[payload..];
    }
    bytes
}

#[derive(Default)]
struct Plain {
    /// Bytes of chunks that are whole, and bytes of the message, for each receive.
    progress: [Option<(u64, u64)>; CAPACITIES.len()],
    /// How far the lane has read, at the end of each chunk.
    read: Vec<u64>,
    refused: bool,
}

/// By the description of the lane's records, with the same limits.
fn plainly(stream: &[u8], memory: &mut Memory) -> Plain {
    let mut plain = Plain::default();
    let Some((first, mut rest)) = stream.split_at_checked(Greeting::BYTES) else {
        return plain;
    };
    let ours = first[8..24] == GROUP;
    let mut covered: HashMap<usize, Vec<(u64, u64)>> = HashMap::new();
    // Messages before this one may have chunks of which a later attempt was taken.
    let (mut resent, mut read) = (0, 0);
    while let Some((head, after)) = rest.split_at_checked(ChunkHeader::BYTES) {
        let word = |at: usize| number(&head[at..at + 8]);
        let (len, offset, total) = (number(&head[40..44]), word(24), word(32));
        let end = offset.checked_add(len);
        let fits = end.is_some_and(|end| total == 0 || end <= total);
        let is_known = head[..4] == *b"TCPC" && head[4] == 2 && head[6..8] == [0; 2];
        if !is_known || !(1..=1 << 30).contains(&len) || !fits {
            break;
        }
        let (payload, next) = after.split_at(after.len().min(len as usize));
        rest = next;
        let is_whole = payload.len() as u64 == len;
        if is_whole {
            read += head.len() as u64 + len;
            plain.read.push(read);
        }
        if word(16) != STREAM {
            continue;
        }
        let sequence = usize::try_from(word(8)).unwrap_or(usize::MAX);
        let Some(capacity) = CAPACITIES.get(sequence).filter(|_| ours) else {
            plain.refused = true;
            continue;
        };
        if head[5] > 0 {
            resent = resent.max(sequence + 1);
        }
        let known = plain.progress[sequence];
        let belongs = (1..=*capacity as u64).contains(&total)
            && len <= MAX_CHUNK_BYTES as u64
            && known.is_none_or(|(_, known)| known == total);
        let pieces = covered.entry(sequence).or_default();
        let overlaps = pieces
            .iter()
            .any(|(from, to)| offset < *to && *from < offset + len);
        if !belongs || overlaps {
            plain.refused |= !belongs || sequence >= resent;
            continue;
        }
        pieces.push((offset, offset + len));
        memory.expect(sequence, offset as usize, payload);
        let written = known.map_or(0, |(written, _)| written);
        let whole = if is_whole { len } else { 0 };
        plain.progress[sequence] = Some((written + whole, total));
    }
    plain
}

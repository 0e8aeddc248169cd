//! The stream of a comm's own connection, read into posted receives.

use std::sync::{Arc, LazyLock};

use nccl_net::export::{HostLogger, Log};
use tcpx_lanes::sealing::Protection;
use tcpx_wire::lane_seal::LaneKeys;
use tcpx_wire::record::Records;

use super::{CAPACITIES, Memory, connection, feed, number};
use crate::config::Config;
use crate::header::HEADER_BYTES;
use crate::inbound::{Inbound, Phase, Request, Target};
use crate::landing::Landing;
use crate::lanes::runtime::Runtime;
use crate::plugin::TcpxPlugin;

/// Loops without a lane, for comms that have a place for them.
static RUNTIME: LazyLock<Arc<Runtime>> = LazyLock::new(|| {
    let config = Config {
        interfaces: "lo".to_owned(),
        lanes: Some(1),
        threads: Some(1),
        ..Config::default()
    };
    let plugin = TcpxPlugin::with_config(config, HostLogger::default()).expect("loopback");
    plugin.shared().runtime().expect("two threads")
});

/// Input: whether there may be lanes, how the stream is cut, whether it is sealed and every other
/// piece bare, then what the peer sends.
pub fn comm(data: &[u8]) {
    let Some((how, stream)) = data.split_first() else {
        return;
    };
    let (with_lanes, most) = (how & 1 == 1, usize::from(how >> 1 & 0x1F) + 1);
    let mut memory = Memory::new();
    let plain = plainly(stream, with_lanes, &mut memory);

    let records = || Records::new(LaneKeys::new([7; 32], [7; 32]));
    let protection = match how >> 6 {
        0 | 1 => Protection::None,
        2 => Protection::All,
        _ => Protection::Headers,
    };
    let (near, far) = connection(records(), protection);
    let mut wire = Vec::new();
    let mut ours = records();
    let mut pieces = stream.chunks(most);
    while let Some(piece) = pieces.next() {
        let bare = match protection {
            Protection::Headers => pieces.next().unwrap_or_default(),
            _ => &[],
        };
        match protection {
            Protection::None => wire.extend_from_slice(piece),
            _ => {
                let text = [&(bare.len() as u32).to_le_bytes(), piece].concat();
                ours.seal(&text, &mut wire);
            }
        }
        wire.extend_from_slice(bare);
    }
    let lanes = with_lanes.then(|| Landing::new(Arc::clone(&RUNTIME), 0, 64 << 10));
    let mut inbound = Inbound::new(Arc::new(near), String::new(), lanes, None);
    for (sequence, capacity) in CAPACITIES.into_iter().enumerate() {
        let buffer = memory.buffer(sequence);
        if let Some(lanes) = &mut inbound.lanes {
            lanes.post(sequence as u64, buffer, None);
        }
        inbound
            .ring
            .post(Request::new(Target::Host(buffer), capacity, 0))
            .expect("room for four");
    }
    let log = Log::new(HostLogger::default(), c"TCPX");
    let peer = feed(far, &wire, most, || {
        // What fails is told again below.
        let _ = inbound.progress(&log);
    });
    let failed = inbound.progress(&log).is_err();
    drop(peer);

    memory.check();
    for (sequence, size) in plain.done.into_iter().enumerate() {
        let request = inbound.ring.by_sequence(sequence as u64).expect("posted");
        let done = (request.phase == Phase::Done).then_some(request.size);
        assert_eq!(done, size, "message {sequence}");
    }
    assert_eq!(failed, plain.failed);
}

#[derive(Default)]
struct Plain {
    /// Size of each message that is complete.
    done: [Option<usize>; CAPACITIES.len()],
    failed: bool,
}

/// By the table of records: nothing is read beyond the last posted receive, and an end before it
/// fails.
fn plainly(stream: &[u8], with_lanes: bool, memory: &mut Memory) -> Plain {
    let mut plain = Plain::default();
    let (mut rest, mut next, mut joined) = (stream, 0, false);
    while next < CAPACITIES.len() {
        // Unless all is well, it ends here.
        plain.failed = true;
        let Some((head, after)) = rest.split_at_checked(HEADER_BYTES) else {
            break;
        };
        let (sequence, size) = (number(&head[8..16]), number(&head[16..]));
        if head[4..8] != [0; 4] {
            break;
        }
        rest = after;
        match &head[..4] {
            b"TxEn" => {}
            b"TxDr" if sequence <= u64::from(u16::MAX) && size == 0 => {}
            b"TxJn" if with_lanes && !joined => joined = true,
            b"TxMs" => {
                let number = usize::try_from(sequence).unwrap_or(usize::MAX);
                if with_lanes && number >= CAPACITIES.len() {
                    // It waits for its receive.
                    plain.failed = false;
                    break;
                }
                let is_in_turn = number == next || (number > next && joined);
                let Some(capacity) = CAPACITIES.get(number).filter(|_| is_in_turn) else {
                    break;
                };
                next = number;
                if size > *capacity as u64 {
                    break;
                }
                let bytes = rest.len().min(size as usize);
                let (payload, after) = rest.split_at(bytes);
                memory.expect(number, 0, payload);
                if (bytes as u64) < size {
                    break;
                }
                plain.done[number] = Some(bytes);
                next += 1;
                rest = after;
            }
            _ => break,
        }
        plain.failed = false;
    }
    plain
}

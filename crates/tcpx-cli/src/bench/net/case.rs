//! What is measured, and who takes part.

use super::engine::depth;
use super::orders::{Drive, Mode, Op, Pieces, Run};
use crate::args::bench::{NetArgs, PeerName};

/// What is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Case {
    /// For files.
    pub(super) name: String,
    pub(super) mode: Mode,
    pub(super) bytes: u64,
    pub(super) depth: u16,
}

impl Case {
    pub(super) fn new(mode: Mode, bytes: u64, asked: u16) -> Self {
        let depth = depth(bytes, asked);
        let name = match mode {
            Mode::Latency => format!("{mode}-{bytes}"),
            _ => format!("{mode}-{bytes}-{depth}"),
        };
        Self {
            name,
            mode,
            bytes,
            depth,
        }
    }

    pub(super) fn run(&self, op: Op, count: u32, args: &NetArgs) -> Run {
        let mut run = Run::new(self.mode, op, self.bytes, count, self.depth);
        run.at_once = args.at_once;
        let size = args.piece_bytes.filter(|_| op.is_batch());
        run.pieces = size.map(|size| Pieces {
            bytes: size.0.min(self.bytes),
            layout: args.layout,
        });
        run
    }
}

/// Who is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    Ours(Op),
    Raw(Drive),
    Iperf3,
}

impl Contender {
    /// How messages are moved where tcpx moves them.
    pub(super) fn op(self) -> Option<Op> {
        match self {
            Self::Ours(op) => Some(op),
            Self::Raw(_) | Self::Iperf3 => None,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ours(Op::Send) => "tcpx",
            Self::Ours(Op::Put) => "tcpx, put",
            Self::Ours(Op::Get) => "tcpx, get",
            Self::Ours(Op::Batch) => "tcpx, batch",
            Self::Ours(Op::BatchGet) => "tcpx, batch of gets",
            Self::Raw(Drive::Blocking) => "raw",
            Self::Raw(Drive::Spinning) => "raw, spinning",
            Self::Iperf3 => "iperf3",
        }
    }
}

/// The cases that the arguments ask for, small messages first.
pub(super) fn cases(args: &NetArgs) -> Vec<Case> {
    if !args.cases.is_empty() {
        let given = args.cases.iter().map(|case| {
            let mut made = Case::new(case.mode, case.size.0, case.in_flight);
            if let Some(name) = &case.name {
                made.name.clone_from(name);
            }
            made
        });
        return given.collect();
    }
    let mut cases: Vec<Case> = Vec::new();
    let whole = args
        .pieces
        .zip(args.piece_bytes)
        .map(|(pieces, size)| u64::from(pieces) * size.0);
    let sizes = args.sizes.iter().map(|size| size.0);
    let sizes: Vec<u64> = whole.map_or_else(|| sizes.collect(), |whole| vec![whole]);
    for size in sizes {
        for &mode in &args.modes {
            let depths = match mode {
                Mode::Latency => &[1][..],
                _ => &args.in_flight[..],
            };
            for &asked in depths {
                let case = Case::new(mode, size, asked);
                if !cases.contains(&case) {
                    cases.push(case);
                }
            }
        }
    }
    cases
}

/// Who takes part in a case. iperf3 knows no messages, so it stands beside the deepest streaming alone.
pub(super) fn contenders(case: &Case, cases: &[Case], args: &NetArgs) -> Vec<Contender> {
    let mut all = vec![Contender::Ours(Op::Send)];
    let is_measured = |op: &&Op| !op.is_batch() || case.mode != Mode::Latency;
    all.extend(
        args.ops
            .iter()
            .filter(is_measured)
            .copied()
            .map(Contender::Ours),
    );
    let wanted = |peer| args.peers.contains(&peer);
    if wanted(PeerName::Raw) {
        all.push(Contender::Raw(Drive::Blocking));
        if case.mode == Mode::Latency {
            all.push(Contender::Raw(Drive::Spinning));
        }
    }
    let streams = |other: &&Case| other.mode == Mode::One && other.bytes == case.bytes;
    let deepest = cases.iter().filter(streams).map(|other| other.depth).max();
    if wanted(PeerName::Iperf3) && case.mode == Mode::One && Some(case.depth) == deepest {
        all.push(Contender::Iperf3);
    }
    all
}

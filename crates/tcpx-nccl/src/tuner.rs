//! How many of its channels NCCL should use for a collective over this network.
//!
//! Each channel costs NCCL's one proxy thread some microseconds for each message, so a small
//! collective is quicker over few; bandwidth needs many.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};

use nccl_net::constants::{level, subsystem};
use nccl_net::export::HostLogger;
use nccl_net::tuner::{Choice, Tuner};

/// Collectives up to so many bytes, and their channels.
const CHANNELS: [(usize, u32); 3] = [(16 << 10, 1), (1 << 20, 2), (8 << 20, 4)];
/// Channels of larger ones, or all that NCCL has: with twice as many an all-reduce of 256 MiB takes
/// a quarter longer on 16 cores. Every rank must say the same, so nothing here looks at what
/// differs between hosts.
const MOST_CHANNELS: u32 = 8;
/// Up to here NCCL may choose LL, whose messages are small and many.
const LOW_LATENCY_BYTES: usize = 128 << 10;

static NETWORK_IN_USE: AtomicBool = AtomicBool::new(false);
static CUDA_POINTERS: AtomicBool = AtomicBool::new(false);

/// The network was started, with or without CUDA pointers: its tuner may speak.
pub(crate) fn enable(cuda_pointers: bool) {
    CUDA_POINTERS.store(cuda_pointers, Ordering::Relaxed);
    NETWORK_IN_USE.store(true, Ordering::Relaxed);
}

/// The tuner of a communicator.
#[derive(Debug)]
pub struct TcpxTuner;

impl Tuner for TcpxTuner {
    const NAME: &'static CStr = c"TCPX";

    fn start(logger: HostLogger, _ranks: usize, nodes: usize) -> Option<Self> {
        // NCCL may have this file and another network, and within a host it has better ways.
        if nodes < 2 || !NETWORK_IN_USE.load(Ordering::Relaxed) {
            return None;
        }
        let steps: Vec<String> = CHANNELS
            .iter()
            .map(|(bytes, channels)| format!("{channels} up to {} KiB", bytes >> 10))
            .collect();
        let low_latency = LOW_LATENCY_BYTES >> 10;
        logger.log(
            level::INFO,
            subsystem::INIT | subsystem::TUNING,
            c"tcpx",
            0,
            &format!(
                "NET/TCPX : channels of a collective: {}, then {MOST_CHANNELS}; LL up to {low_latency} \
                 KiB; NCCL_TUNER_PLUGIN=none leaves NCCL its own choice",
                steps.join(", ")
            ),
        );
        Some(Self)
    }

    fn choose(&self, bytes: usize) -> Choice {
        choice(bytes, CUDA_POINTERS.load(Ordering::Relaxed))
    }
}

fn choice(bytes: usize, cuda_pointers: bool) -> Choice {
    Choice {
        channels: CHANNELS
            .iter()
            .find(|(limit, _)| bytes <= *limit)
            .map_or(MOST_CHANNELS, |(_, channels)| *channels),
        low_latency: bytes <= LOW_LATENCY_BYTES,
        // Its flags lie within each line of 128 bytes, and a copy may write a line in two parts.
        low_latency_128: !cuda_pointers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_grow_with_the_bytes() {
        let of = |bytes| TcpxTuner.choose(bytes);
        let channels = [8, (16 << 10) + 1, 1 << 20, 8 << 20].map(|bytes| of(bytes).channels);
        assert_eq!(channels, [1, 2, 2, 4]);
        assert_eq!(of((8 << 20) + 1).channels, 8);
        assert_eq!(of(1 << 40).channels, 8);
        assert!(of(128 << 10).low_latency && !of(1 << 20).low_latency);
    }

    #[test]
    fn lines_with_flags_are_not_for_memory_that_copies_fill() {
        assert!(!choice(1 << 20, true).low_latency_128);
        assert!(choice(1 << 20, false).low_latency_128);
    }

    #[test]
    fn a_communicator_within_a_host_is_left_alone() {
        enable(false);
        assert!(TcpxTuner::start(HostLogger::default(), 8, 1).is_none());
        assert!(TcpxTuner::start(HostLogger::default(), 8, 2).is_some());
    }
}

//! Two processes, every network: sizes, channels, directions, orders.

use std::path::Path;
use std::time::Duration;

use tcpx_tests::instructions::{Carrier, Instructions, Summary};
use tcpx_tests::process::{Ended, run_pair};
use tcpx_tests::scenario::{Scenario, sizes_up_to};

const PEER: &str = env!("CARGO_BIN_EXE_peer");
/// Far beyond what any of these takes.
const LIMIT: Duration = Duration::from_secs(240);

fn sizes() -> [u64; 10] {
    sizes_up_to(64 << 20).map(|bytes| bytes as u64)
}

fn good(instructions: &Instructions) -> [Summary; 2] {
    let (server, client) = run_pair(Path::new(PEER), instructions, LIMIT);
    [server, client].map(|end: Ended| end.good().clone())
}

/// Bytes came in fragments exactly if the network scatters.
fn check_queue(carrier: &Carrier, summary: &Summary) {
    if carrier.scatters() {
        // A page holds 4 KiB at most, so fewer fragments could not carry the bytes.
        assert!(summary.fragments * 4096 >= summary.received, "{summary:?}");
        assert_eq!(summary.arrivals, summary.chunks, "{summary:?}");
        assert!(summary.arrivals > 0, "the queue was not used");
    } else {
        assert_eq!((summary.fragments, summary.arrivals), (0, 0), "{summary:?}");
    }
}

fn every_size(carrier: &Carrier) {
    for channels in 1..=4 {
        let scenario = Scenario::each(0x517e + u64::from(channels), &sizes());
        let mut instructions = Instructions::new(carrier.clone(), scenario);
        instructions.channels = channels;
        // Without eager messages the smallest take the lanes too.
        let eager = channels % 2 == 0;
        instructions.eager_limit = if eager { 16 << 10 } else { 0 };
        for summary in good(&instructions) {
            assert_eq!(summary.succeeded, 2 * sizes().len() as u64);
            assert_eq!(summary.received, sizes().iter().sum::<u64>());
            let many = channels > 1 && *carrier != Carrier::Tcp;
            let expected = if many {
                format!("{channels} channels, ")
            } else if *carrier == Carrier::Tcp {
                format!("tcp, {channels} lane")
            } else {
                "channel 0".to_owned()
            };
            assert!(summary.path.contains(&expected), "{}", summary.path);
            check_queue(carrier, &summary);
            if *carrier != Carrier::Tcp {
                // A plugin carries every byte, small messages too.
                let chunks = sizes().map(|bytes| bytes.div_ceil(512 << 10));
                assert_eq!(summary.chunks, chunks.iter().sum::<u64>());
            }
        }
    }
}

fn a_thousand(carrier: &Carrier) {
    let scenario = Scenario::shuffled(0x1000, 1000, 1 << 20);
    let mut instructions = Instructions::new(carrier.clone(), scenario);
    instructions.channels = 3;
    instructions.eager_limit = 4096;
    for summary in good(&instructions) {
        assert_eq!(summary.succeeded, 2000);
        check_queue(carrier, &summary);
    }
}

fn too_small(carrier: &Carrier) {
    let sizes = [1, 1, 23, 23, 4097, 4097, 20_000, 20_000, 3 << 20, 3 << 20];
    let mut scenario = Scenario::each(0x70_05a1, &sizes);
    scenario.short = true;
    for eager_limit in [0, 16 << 10] {
        let mut instructions = Instructions::new(carrier.clone(), scenario.clone());
        instructions.eager_limit = eager_limit;
        let (server, client) = run_pair(PEER, &instructions, LIMIT);
        for end in [server, client] {
            let summary = end.summary();
            // Guards and destinations of refused messages are untouched; the others are whole.
            assert_eq!(summary.defects, [""; 0]);
            assert_eq!((&summary.set_up, &summary.close), (&None, &None));
            // Every other one, once as a send and once as a receive.
            assert_eq!(summary.failures.len(), sizes.len(), "{summary:#?}");
            assert_eq!(summary.succeeded, sizes.len() as u64);
            for failure in &summary.failures {
                assert_eq!(failure.kind, "Operation", "{failure:?}");
                assert_eq!(failure.bytes_done, 0, "{failure:?}");
                let bytes = sizes[(failure.tag - Scenario::FIRST_TAG) as usize];
                let words = format!(
                    "tag {}: nothing was delivered: the send has {bytes} bytes, the receive room for {}",
                    failure.tag,
                    bytes - 1
                );
                assert!(failure.error.contains(&words), "{failure:?}");
            }
        }
    }
}

macro_rules! over {
    ($network:ident, $carrier:expr) => {
        mod $network {
            use super::*;

            #[test]
            fn every_size_on_one_to_four_channels_in_both_directions() {
                every_size(&$carrier);
            }

            #[test]
            fn a_thousand_messages_whose_receives_come_in_another_order() {
                a_thousand(&$carrier);
            }

            #[test]
            fn a_receive_smaller_than_its_send_writes_nothing() {
                too_small(&$carrier);
            }
        }
    };
}

over!(tcp, Carrier::Tcp);
over!(plugin_host, Carrier::plugin_host());
over!(double_of_google, Carrier::double());

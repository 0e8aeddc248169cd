//! Beyond 4 GiB, between processes. Two processes hold 5 GiB each, so one test at a time.

use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tcpx_tests::instructions::{Carrier, Instructions};
use tcpx_tests::process::run_pair;
use tcpx_tests::scenario::Scenario;

const BYTES: u64 = (5 << 30) + 3;
/// What both processes need, and some more.
const NEEDED: u64 = 2 * BYTES + (1 << 30);
const LIMIT: Duration = Duration::from_secs(300);

fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").expect("the system tells");
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .expect("the system tells");
    let kib = line.trim().trim_end_matches(" kB");
    kib.parse::<u64>().expect("a number") * 1024
}

fn five_gib(name: &str, carrier: &Carrier) {
    static SERIAL: Mutex<()> = Mutex::new(());
    let _serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    let available = available_memory();
    if available < NEEDED {
        let why = format!("{NEEDED} bytes of memory are needed, {available} are available");
        let _ = writeln!(std::io::stderr(), "skipped: {name}: {why}");
        return;
    }
    // The receiver compares every byte with what its offset demands, beyond 4 GiB too.
    let scenario = Scenario::to_server(0x5_0000_0003, &[BYTES]);
    let mut instructions = Instructions::new(carrier.clone(), scenario);
    instructions.channels = 2;
    let (server, client) = run_pair(env!("CARGO_BIN_EXE_peer"), &instructions, LIMIT);
    assert_eq!(client.good().succeeded, 1);
    let summary = server.good();
    assert_eq!(summary.received, BYTES);
    assert_eq!(summary.fragments > 0, carrier.scatters(), "{summary:?}");
}

macro_rules! over {
    ($name:ident, $carrier:expr) => {
        #[test]
        #[ignore = "large: run with --ignored"]
        fn $name() {
            five_gib(stringify!($name), &$carrier);
        }
    };
}

over!(five_gib_and_three_bytes_over_tcp, Carrier::Tcp);
over!(
    five_gib_and_three_bytes_over_our_plugin,
    Carrier::plugin_host()
);
over!(five_gib_and_three_bytes_over_the_double, Carrier::double());

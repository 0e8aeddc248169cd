//! The engine over plugins in this process: Google's double, ones with odd habits, and ones that
//! fail. One program: each of its own would link everything again. Tests of the double take turns
//! ([`tcpx_tests::double::serial`]).
#![expect(clippy::unwrap_used, reason = "helpers fail the test that calls them")]

mod cancels;
mod contract;
mod gpu_memory;
mod habits;
mod hangs;
mod host_memory;
mod misbehaves;
mod stalls;
mod starts;
mod transfers;

//! Comms of the plugin within this process: what arrives, in which order, over which connections,
//! and how they end. One program: each of its own would link everything again.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

mod closing;
#[path = "../common/mod.rs"]
mod common;
mod host;
mod lanes;
mod quiet;

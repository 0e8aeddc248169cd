//! What every fuzz target asserts, for any bytes.
//!
//! The same functions replay the corpus in `crates/{tcpx-wire,tcpx-devmem}/tests/corpus.rs`.

pub mod devmem;
pub mod wire;

//! Support for the tests across crates.

pub mod double;
pub mod support;

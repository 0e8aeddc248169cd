//! Support for the tests across crates.

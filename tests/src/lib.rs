//! Support for the tests across crates.

pub mod child;
pub mod double;
pub mod plugin_file;
pub mod support;

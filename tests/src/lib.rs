//! Support for the tests across crates.

pub mod accident;
pub mod bad_plugin;
pub mod buffers;
pub mod c_api;
pub mod child;
pub mod content;
pub mod counting;
pub mod double;
pub mod fake_kernel;
pub mod faults;
pub mod habits;
pub mod instructions;
pub mod namespaces;
pub mod nccl_link;
pub mod nccl_messages;
pub mod nccl_part;
pub mod pair;
pub mod panicking;
pub mod part;
pub mod plugin_file;
pub mod process;
pub mod proxy;
pub mod scenario;
pub mod support;
pub mod tampered;
pub mod withholding;

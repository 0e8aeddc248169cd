//! Our plugin file as NCCL uses it. One program: each of its own would link everything again. Each
//! test runs in a process of its own ([`tcpx_tests::child`]), as the plugin's variables and threads
//! are the process's.

mod comms;
mod exits;
mod forks;
mod interfaces;
mod lanes;
mod late;
mod log;
mod plugin_file;
mod plugin_table;
mod tables;
mod versions;

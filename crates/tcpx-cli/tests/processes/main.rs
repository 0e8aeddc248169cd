//! The program as a person runs it: real processes, real sockets on loopback, exit codes and what
//! is printed.

mod support;

mod basics;
mod bench;
mod demo;
mod doctor;
mod environment;
mod errors;
mod files;
mod flips;
mod greeting;
mod matrix;
mod networks;
mod output;
mod perf;
mod plugin;
mod sharing;
mod status;
mod tampering;
mod versions;

//! The tcpx program: demo, transfer, connection, perf, devices.
fn main() {}

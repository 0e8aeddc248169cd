//! Tasks of the tcpx repository.
fn main() {}

//! Networks of tcpx: the embedded TCP network and the ncclNet plugin host.

//! Host, pinned and CUDA memory for tcpx: regions, copy workers, unpackers.

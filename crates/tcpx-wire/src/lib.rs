//! The tcpx protocol without I/O: handshake, frames, scatter lists, matching, windows.

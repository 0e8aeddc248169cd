//! What the fuzz targets of `tcpx-devmem` assert.

pub mod cmsg;
pub mod netlink;

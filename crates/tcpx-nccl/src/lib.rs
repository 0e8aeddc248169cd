//! libnccl-net-tcpx.so: tcpx as a network plugin for NCCL, and the historic device-unpack plugin.

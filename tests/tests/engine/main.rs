//! The engine between two ends, most of them processes, and through the C library. One program:
//! each of its own would link everything again. What looks at its whole process runs in one of its
//! own ([`tcpx_tests::child`]).

mod accidents;
mod c_engine;
mod c_plugin;
mod deadlines;
mod devmem;
mod flips;
mod idle;
mod lanes;
mod large_transfers;
mod local;
mod local_gpu;
mod nics;
mod pinned;
mod process_transfers;
mod resources;
mod rests;
mod shortages;
mod strangers;
mod unmapped;
mod windows;

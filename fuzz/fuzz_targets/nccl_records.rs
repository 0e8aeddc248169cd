#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nccl_net_tcpx::fuzzing::records(data));

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tcpx_fuzz::wire::lane_seal::run(data));

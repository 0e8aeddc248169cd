#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tcpx_status::fuzzing::answer(data));

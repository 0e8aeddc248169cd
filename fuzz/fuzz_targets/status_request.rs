#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tcpx_fuzz::status_request::run(data));

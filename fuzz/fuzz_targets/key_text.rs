#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tcpx_fuzz::wire::key_text::run(data));

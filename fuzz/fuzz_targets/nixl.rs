#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| plugin_TCPX::fuzzing::run(data));

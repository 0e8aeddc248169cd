//! Our own plugin file, loaded as a host program loads any plugin.
//!
//! The plugin reads its variables once in a process, so each test has a process of its own.

use std::ffi::{CStr, CString, c_char};
use std::os::unix::ffi::OsStrExt;

use nccl_net::{HostError, LoadOptions, Plugin};
use tcpx_tests::child::{self, LOOPBACK};
use tcpx_tests::plugin_file;

#[test]
fn the_file_carries_the_id_of_the_sources_it_was_built_from() {
    // `path` has compared the file with the sources; the symbol says the same.
    let id = tcpx_build_id::of_file(plugin_file::path()).unwrap();
    assert_eq!(id, Some(plugin_file::build_id_symbol()));
}

#[test]
fn nccl_finds_a_tuner_of_each_version_in_the_file() {
    child::run(&[LOOPBACK], || {
        let path = CString::new(plugin_file::path().as_os_str().as_bytes()).unwrap();
        // SAFETY: our own file, which is never unloaded.
        let file = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!file.is_null());
        let find = |name: &CStr| {
            // SAFETY: a library that is loaded, and a name that ends.
            unsafe { libc::dlsym(file, name.as_ptr()) }.cast::<*const c_char>()
        };
        for name in [
            c"ncclTunerPlugin_v3",
            c"ncclTunerPlugin_v4",
            c"ncclTunerPlugin_v5",
            c"ncclTunerPlugin_v6",
        ] {
            let table = find(name);
            assert!(!table.is_null(), "{name:?}");
            // SAFETY: every version of the table begins with the tuner's name.
            let tuner = unsafe { CStr::from_ptr(*table) };
            assert_eq!(tuner, c"TCPX", "{name:?}");
        }
        assert!(find(c"ncclTunerPlugin_v7").is_null());
    });
}

#[test]
fn a_variable_that_cannot_be_used_stops_init() {
    child::run(&[LOOPBACK, ("TCPX_NET_DEVICE", "gpu")], || {
        let plugin = Plugin::load(LoadOptions::new(plugin_file::path())).unwrap();
        let error = plugin.init().unwrap_err();
        assert!(matches!(error, HostError::Call(call) if call.rc.to_raw() == 4));
    });
}

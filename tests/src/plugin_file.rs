//! Our own plugin file, built from the sources that the tests were built from.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use nccl_net::tables::NetV7;

/// The workspace's folder.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The plugin file, built and verified once in a process: its build id is that of the sources.
///
/// It lies in the target folder of the running test, in the same profile.
pub fn path() -> &'static Path {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(build)
}

fn build() -> PathBuf {
    let file = build_package("tcpx-nccl").join("libnccl_net_tcpx.so");
    let expected = tcpx_build_id::of_sources(&workspace()).expect("the sources can be read");
    if let Err(error) = tcpx_build_id::verify(&file, &expected) {
        panic!("{error}");
    }
    file
}

/// Builds a package of the workspace in the profile of the running test; the folder of its files.
pub(crate) fn build_package(package: &str) -> PathBuf {
    // target/PROFILE/deps/test
    let test = std::env::current_exe().expect("the test has a path");
    let profile_folder = test
        .parent()
        .and_then(Path::parent)
        .expect("tests lie in target/PROFILE/deps");
    let target_folder = profile_folder
        .parent()
        .expect("tests lie in target/PROFILE/deps");
    let profile = match profile_folder.file_name().and_then(|name| name.to_str()) {
        None | Some("debug") => "dev",
        Some(name) => name,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        // Build scripts that ask for it would run again, and everything be built again.
        .env_remove("CARGO_MANIFEST_DIR")
        .args(["build", "--package", package, "--profile", profile])
        .arg("--target-dir")
        .arg(target_folder)
        .current_dir(workspace())
        .output()
        .expect("cargo starts");
    assert!(
        output.status.success(),
        "{package} does not build:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    profile_folder.to_owned()
}

/// Address of a symbol of the plugin file, which stays loaded.
fn symbol(name: &CStr) -> *mut c_void {
    let file = CString::new(path().as_os_str().as_encoded_bytes()).expect("a path has no NUL");
    // SAFETY: our own plugin's constructors do nothing; the library is never unloaded.
    let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "the plugin does not load");
    // SAFETY: an open library and a NUL-terminated name.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "the plugin has no {name:?}");
    address
}

/// The bare v7 table, for calls that the safe API makes impossible.
pub fn raw_table() -> NetV7 {
    // SAFETY: the symbol is a v7 table, for ever.
    unsafe { raw_table_at(c"ncclNetPlugin_v7") }
}

/// The bare table at a symbol.
///
/// # Safety
/// The plugin's symbol is a table of this type.
pub unsafe fn raw_table_at<T: Copy>(name: &CStr) -> T {
    // SAFETY: by the caller's promise; the library stays loaded.
    unsafe { symbol(name).cast::<T>().read() }
}

/// The build id that a loaded plugin file shows in its symbol `tcpx_build_id`.
pub fn build_id_symbol() -> String {
    // SAFETY: the symbol is a pointer to a constant C string.
    let text = unsafe { CStr::from_ptr(symbol(c"tcpx_build_id").cast::<*const c_char>().read()) };
    text.to_string_lossy().into_owned()
}

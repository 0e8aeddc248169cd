//! Our own plugin file, which cargo built before the tests, from the same sources.

use std::ffi::{CStr, CString, c_char, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nccl_net::tables::NetV7;

/// The workspace's folder.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The variable that names another plugin file for a process of a test, of another release.
pub const OTHER: &str = "TCPX_TEST_PLUGIN";

/// Where `cargo xtask last-release` has laid what it built of the last release; a line says that it
/// has not.
pub fn last_release(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("TCPX_LAST_RELEASE").map(PathBuf::from);
    if folder.is_none() {
        let why = "TCPX_LAST_RELEASE names no folder; `cargo xtask last-release` does";
        let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
    }
    folder
}

/// The plugin file, verified once in a process: its build id is that of the sources.
///
/// Cargo builds it before the test, whose package names its package as a dependency.
pub fn path() -> &'static Path {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        if let Some(other) = std::env::var_os(OTHER).filter(|path| !path.is_empty()) {
            return other.into();
        }
        let built = built("libnccl_net_tcpx.so");
        let expected = tcpx_build_id::of_sources(&workspace()).expect("the sources can be read");
        if let Err(error) = tcpx_build_id::verify(&built, &expected) {
            panic!("{error}");
        }
        // Where a build of that package alone puts it, and the program looks for it: beside the
        // program.
        let folder = built.parent().expect("a file lies in a folder");
        if folder.ends_with("deps") {
            let beside = folder.with_file_name("libnccl_net_tcpx.so");
            replace(&beside, |fresh| std::fs::hard_link(&built, fresh));
        }
        built
    })
}

/// The shared library of a package that the tests depend on. It lies in the folder of the test's
/// own file.
pub(crate) fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    test.with_file_name(name)
}

/// Makes a file under another name, then puts it in the place of `file`: other test processes may
/// do the same at the same time.
pub(crate) fn replace(file: &Path, make: impl FnOnce(&Path) -> std::io::Result<()>) {
    let fresh = file.with_added_extension(std::process::id().to_string());
    make(&fresh).expect("the target folder can be written");
    std::fs::rename(&fresh, file).expect("the file can be renamed");
    // Where both are the same file already, a rename leaves both.
    let _ = std::fs::remove_file(&fresh);
}

/// Address of a symbol of the plugin file, which stays loaded.
fn symbol(name: &CStr) -> *mut c_void {
    symbol_of(path(), name)
}

/// The same of another one of our files.
pub(crate) fn symbol_of(file: &Path, name: &CStr) -> *mut c_void {
    let path = CString::new(file.as_os_str().as_encoded_bytes()).expect("a path has no NUL");
    // SAFETY: our files' constructors do nothing; the library is never unloaded.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{} does not load", file.display());
    // SAFETY: an open library and a NUL-terminated name.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "{} has no {name:?}", file.display());
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

//! The C library and programs against it, built from the sources that the tests were built from.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use crate::plugin_file::{build_package, workspace};

/// Flags under which everything in C must compile.
const STRICT: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];

/// Folder of the headers.
pub fn include() -> PathBuf {
    workspace().join("crates/tcpx-capi/include")
}

/// A folder with `libtcpx.so` and the name that programs are linked to; built once in a process.
pub fn library_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let built = build_package("tcpx-capi").join("libtcpx_capi.so");
        let folder = built.with_file_name("libtcpx");
        std::fs::create_dir_all(&folder).expect("the target folder can be written");
        for name in ["libtcpx.so", "libtcpx.so.0"] {
            link(&built, &folder.join(name));
        }
        folder
    })
}

/// Other test processes may do the same at the same time, with the same outcome.
fn link(to: &Path, name: &Path) {
    if std::fs::read_link(name).is_ok_and(|known| known == to) {
        return;
    }
    let fresh = name.with_added_extension(std::process::id().to_string());
    std::os::unix::fs::symlink(to, &fresh).expect("a link can be made");
    std::fs::rename(&fresh, name).expect("the link can be renamed");
}

/// Compiles one file without linking, as C99 or, with `cpp`, as C++. `None`: no such compiler.
pub fn compiles(source: &Path, cpp: bool) -> Option<Output> {
    let (compiler, words) = if cpp {
        ("c++", ["-std=c++11", "-x", "c++"])
    } else {
        ("cc", ["-std=c99", "-x", "c"])
    };
    let output = Command::new(compiler)
        .args(words)
        .args(STRICT)
        .arg("-I")
        .arg(include())
        .arg("-fsyntax-only")
        .arg(source)
        .output();
    match output {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => panic!("{compiler} does not start: {error}"),
    }
}

/// Compiles and links a program against the library, into `program`.
///
/// # Panics
/// It does not compile.
pub fn build_program(source: &Path, program: &Path) {
    let library = library_folder();
    let mut rpath = std::ffi::OsString::from("-Wl,-rpath,");
    rpath.push(library);
    let output = Command::new("cc")
        .arg("-std=c99")
        .args(STRICT)
        .args(["-O1", "-pthread", "-I"])
        .arg(include())
        .arg(source)
        .arg("-L")
        .arg(library)
        .arg(rpath)
        .args(["-ltcpx", "-ldl", "-o"])
        .arg(program)
        .output()
        .expect("the C compiler starts");
    assert!(
        output.status.success(),
        "{} does not compile:\n{}",
        source.display(),
        String::from_utf8_lossy(&output.stderr)
    );
}

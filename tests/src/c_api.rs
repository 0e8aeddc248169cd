//! The C library that cargo built before the tests, and programs against it.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crate::plugin_file::{built, replace, workspace};
use crate::process::Running;
use crate::support::random;

/// Flags under which everything in C must compile.
const STRICT: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];

/// Folder of the headers.
pub fn include() -> PathBuf {
    workspace().join("crates/tcpx-capi/include")
}

/// A folder with `libtcpx.so` and the name that programs are linked to; made once in a process.
pub fn library_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let built = built("libtcpx_capi.so");
        let folder = built.with_file_name("libtcpx");
        std::fs::create_dir_all(&folder).expect("the target folder can be written");
        for name in ["libtcpx.so", "libtcpx.so.0"] {
            replace(&folder.join(name), |fresh| {
                std::os::unix::fs::symlink(&built, fresh)
            });
        }
        folder
    })
}

/// Compiles one file without linking, as C99 or, with `cpp`, as C++. `None`: no such compiler.
pub fn compiles(source: &Path, cpp: bool) -> Option<Output> {
    let (compiler, words) = if cpp {
        ("c++", ["-std=c++17", "-x", "c++"])
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

/// How a program is compiled.
#[derive(Clone, Copy, Debug, Default)]
pub struct Build {
    /// As C++17 rather than C99.
    pub cpp: bool,
    /// With AddressSanitizer, which looks for leaks at the program's end too.
    pub sanitized: bool,
}

impl Build {
    /// Why such programs cannot be built or run here, if they cannot.
    pub fn missing(self) -> Option<&'static str> {
        let compiler = Command::new(self.compiler()).arg("--version").output();
        if compiler.is_err() {
            return Some("no such compiler");
        }
        if !self.sanitized {
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder for a program");
        let (source, program) = (folder.path().join("a.c"), folder.path().join("a"));
        std::fs::write(&source, "int main(void) { return 0; }\n").expect("a file for its source");
        let built = Command::new(self.compiler())
            .arg("-fsanitize=address")
            .arg(&source)
            .arg("-o")
            .arg(&program)
            .output();
        if !built.is_ok_and(|built| built.status.success()) {
            return Some("the compiler has no AddressSanitizer");
        }
        // Where programs may not look at their own memory, a leak check ends with an error.
        match Command::new(&program).output() {
            Ok(ran) if ran.status.success() => None,
            _ => Some("AddressSanitizer cannot look for leaks here"),
        }
    }

    const fn compiler(self) -> &'static str {
        if self.cpp { "c++" } else { "cc" }
    }
}

/// Compiles and links a program against the library, into `program`.
///
/// # Panics
/// It does not compile.
pub fn build_program(source: &Path, program: &Path) {
    build_program_as(Build::default(), source, program);
}

/// As [`build_program`], in another way.
///
/// # Panics
/// It does not compile.
pub fn build_program_as(build: Build, source: &Path, program: &Path) {
    let library = library_folder();
    let mut rpath = std::ffi::OsString::from("-Wl,-rpath,");
    rpath.push(library);
    let mut command = Command::new(build.compiler());
    if build.cpp {
        command.args(["-std=c++17", "-x", "c++"]);
    } else {
        command.arg("-std=c99");
    }
    command
        .args(STRICT)
        .args(["-O1", "-g", "-pthread", "-I"])
        .arg(include())
        .arg(source);
    if build.cpp {
        command.args(["-x", "none"]);
    }
    if build.sanitized {
        command.args(["-fsanitize=address", "-fno-omit-frame-pointer"]);
    }
    let output = command
        .arg("-L")
        .arg(library)
        .arg(rpath)
        .args(["-ltcpx", "-ldl", "-o"])
        .arg(program)
        .output()
        .expect("the compiler starts");
    assert!(
        output.status.success(),
        "{} does not compile:\n{}",
        source.display(),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Far beyond what any of the programs takes.
const LIMIT: Duration = Duration::from_secs(120);

/// How a program ended: its exit code, and all that it said.
pub type Ended = (Option<i32>, String);

/// A running program, and what it says.
#[derive(Debug)]
struct Program {
    running: Running,
    lines: BufReader<ChildStdout>,
    said: String,
}

impl Program {
    fn start(command: &mut Command) -> Self {
        let command = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        Self {
            lines: BufReader::new(child.stdout.take().expect("it is piped")),
            running: Running(child),
            said: String::new(),
        }
    }

    /// What stands behind `words` in a line that it says.
    fn says(&mut self, words: &str) -> String {
        loop {
            let before = self.said.len();
            let read = self.lines.read_line(&mut self.said);
            assert!(
                read.expect("it says text") > 0,
                "no {words:?}: {}",
                self.said
            );
            if let Some(rest) = self.said[before..].trim().strip_prefix(words) {
                return rest.to_owned();
            }
        }
    }

    fn end(mut self) -> Ended {
        let status = self.running.ended(LIMIT).expect("the program ends");
        let complaints = self.running.0.stderr.take().expect("it is piped");
        let read = self.lines.chain(complaints).read_to_string(&mut self.said);
        read.expect("it says text");
        (status.code(), self.said)
    }
}

/// Runs a program to its end.
///
/// # Panics
/// It does not start, or not end.
pub fn run(command: &mut Command) -> Ended {
    Program::start(command).end()
}

/// Runs a server, and a client that is made of what the server says behind `words`; how they ended.
///
/// # Panics
/// One of them does not start, or not end.
pub fn pair(server: &mut Command, words: &str, client: impl FnOnce(&str) -> Command) -> [Ended; 2] {
    let mut server = Program::start(server);
    let mut client = client(&server.says(words));
    let client = run(&mut client);
    [server.end(), client]
}

/// Has `pair` move one message of fresh random bytes from a file to another one; what the server
/// said.
///
/// # Panics
/// They come changed, or either end says something else.
pub fn moves(bytes: usize, pair: impl FnOnce(&Path, &Path) -> [Ended; 2]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    let content = random(bytes);
    std::fs::write(&source, &content).expect("a folder of the test's");
    let [(server_code, shown), (code, said)] = pair(&source, &target);
    let all = format!("{said}{shown}");
    assert_eq!((code, server_code), (Some(0), Some(0)), "{all}");
    let sent = format!("PASSED: sent {bytes} bytes");
    let received = format!("PASSED: received {bytes} bytes");
    assert!(said.contains(&sent) && shown.contains(&received), "{all}");
    let arrived = std::fs::read(&target).expect("it was written");
    assert!(arrived == content, "{bytes} bytes");
    shown
}

//! Tests whose body runs in a process of its own, with variables of its own.

use std::any::type_name;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::Running;

/// The variable that keeps our plugin file on this host.
pub const LOOPBACK: (&str, &str) = ("NCCL_SOCKET_IFNAME", "lo");

/// Lanes on every host: where cores are few there are none by default.
pub const LANES: (&str, &str) = ("TCPX_NET_LANES", "2");

/// As on hosts with few cores.
pub const NO_LANES: (&str, &str) = ("TCPX_NET_LANES", "0");

/// A key of all ranks.
pub const KEY: (&str, &str) = ("TCPX_KEY", "R5LSJ2WB5GXU4M7ZVCPZZ33RKFGXHCBW");

/// The same, and that they encrypt with it.
pub const ENCRYPTED: [(&str, &str); 2] = [KEY, ("TCPX_ENCRYPT", "1")];

/// The variable that names the test or part that a process was started for.
const MARK: &str = "TCPX_TEST_CHILD";
/// The variable that names a file which the process takes away when it has found its test.
const NEWS: &str = "TCPX_TEST_NEWS";
/// Longest life of a child.
const PATIENCE: Duration = Duration::from_secs(300);
/// Longest life of a forked process.
const FORK_PATIENCE: Duration = Duration::from_secs(60);

/// Runs `body`, a closure of the calling test, in a new process with the variables `environment`,
/// and fails when it fails.
///
/// The variables of the surrounding process that choose the plugin's behaviour are removed first.
pub fn run<Body: FnOnce()>(environment: &[(&str, &str)], body: Body) {
    // `program::module::test::{{closure}}`
    let (_, path) = type_name::<Body>().split_once("::").expect("a path");
    let (test, _) = path.split_once("::{{closure}}").expect("a closure");
    run_at(test, test, environment, body);
}

/// As [`run`], of a helper of the test `test`, whose module is named like its file.
#[track_caller]
pub fn run_as(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    run_at(test, &in_this_file(test), environment, body);
}

fn run_at(test: &str, path: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    if is_child(test) {
        body();
        return;
    }
    let news = tempfile::NamedTempFile::new().expect("a file can be made");
    let news = news.into_temp_path();
    let mut command = command(path, test, environment);
    command.env(NEWS, &news);
    let mut child = spawn(&mut command);
    let Some(status) = child.ended(PATIENCE) else {
        panic!("{test}: its process did not end within {PATIENCE:?}");
    };
    assert!(status.success(), "{test}: its process ended with {status}");
    assert!(!news.exists(), "{test}: its process found no such test");
}

/// Whether this process was started for `role`.
pub fn is_child(role: &str) -> bool {
    let is_it = std::env::var(MARK).is_ok_and(|value| value == role);
    if is_it && let Some(news) = std::env::var_os(NEWS) {
        let _ = std::fs::remove_file(news);
    }
    is_it
}

/// Starts this test program again, for the test `test` of the calling file in the part `role`.
#[track_caller]
pub fn start(test: &str, role: &str, environment: &[(&str, &str)]) -> Running {
    spawn(&mut command(&in_this_file(test), role, environment))
}

fn spawn(command: &mut Command) -> Running {
    Running(command.spawn().expect("the test program starts again"))
}

/// Runs `body` in a process forked from this one without exec, which must end well and in time.
///
/// # Panics
/// It did not.
pub fn forked(body: impl FnOnce()) {
    // SAFETY: the child uses its own copy of everything and ends by _exit.
    let child = match unsafe { libc::fork() } {
        0 => {
            let ended = catch_unwind(AssertUnwindSafe(body));
            // SAFETY: ends the child without its parent's exit handlers.
            unsafe { libc::_exit(i32::from(ended.is_err())) };
        }
        child => child,
    };
    assert!(child > 0, "a process forks");
    let deadline = Instant::now() + FORK_PATIENCE;
    let mut status = -1;
    // SAFETY: a child of ours, an out pointer of this frame.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } != child {
        if Instant::now() >= deadline {
            // SAFETY: only the child that was forked here, which nobody has waited for.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, &raw mut status, 0);
            }
            panic!("the forked process did not end within {FORK_PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(status, 0, "the forked process failed");
}

fn command(path: &str, role: &str, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test has a path"));
    prepare(&mut command, path, role, environment);
    command
}

/// The path of a test of the calling file.
#[track_caller]
pub(crate) fn in_this_file(test: &str) -> String {
    // A file without a folder of tests around it is a program of its own.
    let file = Path::new(Location::caller().file());
    match (file.parent(), file.file_stem()) {
        (Some(folder), Some(module)) if !folder.ends_with("tests") => {
            format!("{}::{test}", module.display())
        }
        _ => test.to_owned(),
    }
}

/// Has a command that starts this test program do so for the test at `path` in the part `role`.
pub(crate) fn prepare(command: &mut Command, path: &str, role: &str, environment: &[(&str, &str)]) {
    command
        .args([path, "--exact", "--nocapture", "--test-threads=1"])
        // The test that starts it may have been asked for.
        .arg("--include-ignored")
        .env(MARK, role)
        .stdin(Stdio::null())
        // Its panics go to standard error; its test report must not be counted with ours.
        .stdout(Stdio::null());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let ours = ["TCPX_PORT_RANGE", "TCPX_KEY", "TCPX_ENCRYPT"];
        if text.starts_with("TCPX_NET_") || text.starts_with("NCCL_") || ours.contains(&&*text) {
            command.env_remove(&name);
        }
    }
    command.envs(environment.iter().copied());
}

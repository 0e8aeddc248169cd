//! Tests whose body runs in a process of its own, with variables of its own.

use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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

/// Runs `body` in a new process with the variables `environment`, and fails when it fails.
///
/// `test` is the name of the calling test, whose module is named like its file. The variables of the surrounding process
/// that choose the plugin's behaviour are removed first.
#[track_caller]
pub fn run(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    if is_child(test) {
        body();
        return;
    }
    let news = tempfile::NamedTempFile::new().expect("a file can be made");
    let news = news.into_temp_path();
    let mut command = command(test, test, environment);
    command.env(NEWS, &news);
    finish(
        test,
        command.spawn().expect("the test program starts again"),
    );
    assert!(!news.exists(), "{test}: its process found no such test");
}

/// Waits for the process of a test, which must succeed in time.
fn finish(test: &str, mut child: Child) {
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().expect("the child is ours") {
            break status;
        }
        if Instant::now() >= deadline {
            // Only the child that was started here.
            let _ = child.kill();
            let _ = child.wait();
            panic!("{test}: its process did not end within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.success(), "{test}: its process ended with {status}");
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
pub fn start(test: &str, role: &str, environment: &[(&str, &str)]) -> Child {
    command(test, role, environment)
        .spawn()
        .expect("the test program starts again")
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

#[track_caller]
fn command(test: &str, role: &str, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test has a path"));
    prepare(&mut command, test, role, environment);
    command
}

/// Has a command that starts this test program do so for the test `test` of the calling file in the part `role`.
#[track_caller]
pub(crate) fn prepare(command: &mut Command, test: &str, role: &str, environment: &[(&str, &str)]) {
    // A file without a folder of tests around it is a program of its own.
    let file = Path::new(Location::caller().file());
    let test = match (file.parent(), file.file_stem()) {
        (Some(folder), Some(module)) if !folder.ends_with("tests") => {
            format!("{}::{test}", module.display())
        }
        _ => test.to_owned(),
    };
    command
        .args([&test, "--exact", "--nocapture", "--test-threads=1"])
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

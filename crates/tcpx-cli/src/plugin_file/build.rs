//! Making our own plugin file through cargo, as `cargo run` would have if it were part of the program.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::{PACKAGE, PluginFile, PluginFileError, existing};
use crate::child::Child;
use crate::output::say::aside;

/// A build that takes longer hangs.
const LONGEST_BUILD: Duration = Duration::from_secs(20 * 60);

/// Has cargo bring the file up to date, optimised like this program.
pub(super) fn build(root: &Path) -> Result<PluginFile, PluginFileError> {
    let release = !cfg!(debug_assertions);
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // Of a test that runs this: build scripts that ask for it would run again, and everything be built again.
    command.env_remove("CARGO_MANIFEST_DIR");
    command.current_dir(root).args([
        "build",
        "--package",
        PACKAGE,
        "--message-format=json-render-diagnostics",
    ]);
    if release {
        command.arg("--release");
    }
    aside!(
        "  building our plugin file (cargo build -p {PACKAGE}{}) ...",
        if release { " --release" } else { "" }
    );
    let failed = |what: String| PluginFileError::Build(what);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = Child::start(&mut command)
        .map_err(|error| failed(format!("cargo cannot be started: {error}")))?;
    let (Some(stdout), Some(mut stderr)) = (child.0.stdout.take(), child.0.stderr.take()) else {
        return Err(failed("cargo's output is not connected".into()));
    };
    let (found, answer) = mpsc::channel();
    let artifacts = std::thread::spawn(move || {
        let lines = BufReader::new(stdout).lines().map_while(Result::ok);
        let _ = found.send(lines.filter_map(|line| artifact(&line)).last());
    });
    let messages = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = stderr.read_to_string(&mut text);
        text
    });
    let Ok(path) = answer.recv_timeout(LONGEST_BUILD) else {
        return Err(failed(format!(
            "cargo did not end within {} minutes",
            LONGEST_BUILD.as_secs() / 60
        )));
    };
    let status = child.0.wait().map_err(|error| failed(error.to_string()))?;
    let _ = artifacts.join();
    let messages = messages.join().unwrap_or_default();
    if !status.success() {
        let last = messages
            .lines()
            .rev()
            .find(|line| line.starts_with("error"))
            .unwrap_or("cargo gave no reason");
        aside!("{messages}");
        return Err(failed(last.to_owned()));
    }
    match path {
        Some(path) => existing(&path, "our own, built from this source tree"),
        None => Err(failed("cargo named no shared library".into())),
    }
}

/// The shared library that a line of cargo's JSON output names.
fn artifact(line: &str) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    if message.get("reason")? != "compiler-artifact"
        || message.get("target")?.get("name")? != "nccl_net_tcpx"
    {
        return None;
    }
    let names = message.get("filenames")?.as_array()?;
    names
        .iter()
        .filter_map(|name| name.as_str())
        .find(|name| name.ends_with(".so"))
        .map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_plugins_own_shared_library_counts_as_the_artifact() {
        let line = r#"{"reason":"compiler-artifact","target":{"name":"nccl_net_tcpx"},"filenames":["/t/libnccl_net_tcpx.rlib","/t/libnccl_net_tcpx.so"]}"#;
        assert_eq!(artifact(line), Some("/t/libnccl_net_tcpx.so".into()));
        assert_eq!(
            artifact(&line.replace("nccl_net_tcpx\"}", "other\"}")),
            None
        );
        assert_eq!(artifact("not json"), None);
        assert_eq!(
            artifact(r#"{"reason":"build-finished","success":true}"#),
            None
        );
    }
}

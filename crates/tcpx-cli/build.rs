//! Lets the program know the build id of the plugin file that belongs to it, and what it was itself
//! built from.

use std::io;
use std::path::Path;
use std::process::Command;

fn main() -> io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    tcpx_build_id::for_build_script(folder)?;
    let (target, profile) = (variable("TARGET"), variable("PROFILE"));
    println!("cargo::rustc-env=TCPX_TARGET={target}, {profile}");
    println!("cargo::rustc-env=TCPX_COMMIT={}", commit(folder, &profile));
    Ok(())
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| "unknown".to_owned())
}

/// The commit of the sources: of the package, or of the repository. Debug builds leave it out, as
/// each commit would build them again.
fn commit(folder: &Path, profile: &str) -> String {
    // Cargo writes it into packages.
    let package = folder.join(".cargo_vcs_info.json");
    if let Ok(text) = std::fs::read_to_string(package)
        && let Some((_, rest)) = text.split_once("\"sha1\": \"")
        && let Some((commit, _)) = rest.split_once('"')
    {
        return commit.to_owned();
    }
    if profile != "release" {
        return "unknown (debug build)".to_owned();
    }
    let log = git(folder, &["rev-parse", "--git-path", "logs/HEAD"]);
    if let Some(log) = log.map(|log| folder.join(log)).filter(|log| log.exists()) {
        println!("cargo::rerun-if-changed={}", log.display());
    }
    git(folder, &["rev-parse", "HEAD"]).unwrap_or_else(|| "unknown (no repository)".to_owned())
}

/// What git answers, if there is one and it knows the folder.
fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(folder)
        .args(arguments)
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

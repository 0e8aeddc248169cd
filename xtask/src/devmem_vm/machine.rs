//! Starting the machine and reading what it says.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::console::{Checked, Ending, checked, ending, indented, last_lines};

/// The emulator's life is looked at this often.
const PAUSE: Duration = Duration::from_millis(100);
/// Times that a machine is started whose kernel dies before the script starts: the emulator's own
/// fault.
const STARTS: u32 = 3;
/// Programs of the packages that scripts use, besides busybox.
const TOOLS: [&str; 2] = ["usr/bin/ip", "usr/sbin/ethtool"];
const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";

/// Everything that a machine is started from.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) kernel: PathBuf,
    pub(super) tree: PathBuf,
    pub(super) module: PathBuf,
    pub(super) init: PathBuf,
    pub(super) work: PathBuf,
}

/// Why a script failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) why: String,
    /// The last lines of its console.
    pub(super) end: String,
}

impl Machine {
    /// Runs a script in a fresh machine: what it checked. The inner error says why it failed; its
    /// console was printed.
    pub(super) fn run(
        &self,
        script: &Path,
        programs: &[PathBuf],
        limit: Duration,
    ) -> Result<Result<Checked, Failure>> {
        let name = script.file_stem().unwrap_or_default().to_string_lossy();
        let files = self.work.join(format!("{name}.cpio"));
        self.pack(script, programs, &files)?;
        let console = self.work.join(format!("{name}.log"));
        let mut text = String::new();
        for start in 1..=STARTS {
            let in_time = self.boot(&files, &console, limit)?;
            text = String::from_utf8_lossy(&fs::read(&console)?).into_owned();
            let why = match ending(&text) {
                Ending::Good => {
                    print_indented(&text);
                    return Ok(Ok(checked(&text)));
                }
                Ending::Status(status) => format!("the script ended with {status}"),
                Ending::Crash(line) => format!("the kernel died: {line}"),
                Ending::NoEnd if in_time => "the machine stopped in the middle".to_owned(),
                Ending::NoEnd => format!("no end within {} s", limit.as_secs()),
                Ending::NoStart if start < STARTS => continue,
                Ending::NoStart => format!("the machine did not start, {STARTS} times"),
            };
            print_indented(&text);
            let end = last_lines(&text);
            return Ok(Err(Failure { why, end }));
        }
        print_indented(&text);
        bail!("the machine was never started")
    }

    /// The machine's first files, as an archive that its kernel unpacks into memory. All can be
    /// executed.
    fn pack(&self, script: &Path, programs: &[PathBuf], to: &Path) -> Result<()> {
        let folder = to.with_extension("files");
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        for empty in ["proc", "sys", "dev", "tmp", "run", "etc"] {
            fs::create_dir_all(folder.join(empty))?;
        }
        let place = |name: &str, from: &Path| -> Result<()> {
            let at = folder.join(name);
            fs::create_dir_all(at.parent().unwrap_or(&folder))?;
            fs::copy(from, &at).with_context(|| format!("cannot copy {}", from.display()))?;
            Ok(fs::set_permissions(&at, Permissions::from_mode(0o755))?)
        };
        let busybox = self.tree.join("usr/bin/busybox");
        place("init", &self.init)?;
        place("test.sh", script)?;
        place("dmsim.ko", &self.module)?;
        place("bin/busybox", &busybox)?;
        let mut libraries = BTreeSet::new();
        for tool in TOOLS {
            place(tool, &self.tree.join(tool))?;
            libraries.extend(self.libraries(tool)?);
        }
        place("lib64/ld-linux-x86-64.so.2", &self.tree.join(LOADER))?;
        for library in libraries {
            place(&library, &self.tree.join(&library))?;
        }
        for program in programs {
            let name = program.file_name().unwrap_or_default().to_string_lossy();
            place(&format!("tcpx/{name}"), program)?;
        }
        let file = File::create(to).with_context(|| format!("cannot write {}", to.display()))?;
        let packed = Command::new("sh")
            .args(["-c", "find . | \"$0\" cpio -o -H newc"])
            .arg(&busybox)
            .current_dir(&folder)
            .stdout(file)
            .status()?;
        ensure!(packed.success(), "packing ended with {packed}");
        Ok(fs::remove_dir_all(&folder)?)
    }

    /// What a tool of the packages loads, by the packages' own loader.
    fn libraries(&self, tool: &str) -> Result<Vec<String>> {
        let folder = self.tree.join("usr/lib/x86_64-linux-gnu");
        let output = Command::new(self.tree.join(LOADER))
            .arg("--library-path")
            .arg(&folder)
            .arg("--list")
            .arg(self.tree.join(tool))
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.success(),
            "what {tool} loads cannot be listed: {text}"
        );
        let prefix = format!("{}/", self.tree.display());
        Ok(text
            .split_whitespace()
            .filter_map(|word| word.strip_prefix(&prefix))
            .map(|word| word.trim_start_matches("usr/").to_owned())
            .filter(|word| word.starts_with("lib/"))
            .collect())
    }

    /// One life of a machine; `false` when it had to be ended.
    fn boot(&self, files: &Path, console: &Path, limit: Duration) -> Result<bool> {
        // One thread: several have patched the guest's code under each other.
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args([
                "-accel",
                "tcg,thread=single",
                "-cpu",
                "max",
                "-smp",
                "2",
                "-m",
                "2048",
            ])
            .args(["-nodefaults", "-display", "none", "-no-reboot"])
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(files)
            .args([
                "-append",
                // The kernel measures itself by the host's clock: a stall here is a host that is
                // busy.
                "console=ttyS0 panic=-1 quiet nokaslr mitigations=off nowatchdog \
                 rcupdate.rcu_cpu_stall_suppress=1",
            ])
            .stdin(Stdio::null());
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = child.try_wait()? {
                ensure!(status.success(), "qemu-system-x86_64 ended with {status}");
                return Ok(true);
            }
            if Instant::now() >= deadline {
                end(&mut child)?;
                return Ok(false);
            }
            std::thread::sleep(PAUSE);
        }
    }
}

fn end(child: &mut Child) -> Result<()> {
    child.kill()?;
    child.wait()?;
    Ok(())
}

fn print_indented(console: &str) {
    print!("{}", indented(console.lines()));
}

//! `cargo xtask kernels`: CUDA C to the PTX and the machine code that are checked in.

mod nvrtc;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use nvrtc::Nvrtc;
use sha2::{Digest as _, Sha256};

/// Where the sources lie; the PTX files name them from their crate's folder.
const FOLDER: &str = "crates/tcpx-memory/kernels";

/// A source and what is made of it.
struct Kernel {
    /// The source, in `FOLDER`.
    source: &'static str,
    /// What the source includes, in `FOLDER`.
    headers: &'static [&'static str],
    /// The PTX, from the root of the repository.
    ptx: &'static str,
    /// Machine code, and the architecture that it is for: later ones of the same first digit run it
    /// too.
    code: &'static [(&'static str, &'static str)],
}

const KERNELS: [Kernel; 2] = [
    Kernel {
        source: "tcpx.cu",
        headers: &[
            "unpack.cu",
            "persistent_copy.cu",
            "signal_completion.h",
            "unpack_lane.h",
        ],
        ptx: "crates/tcpx-memory/src/kernels/tcpx.ptx",
        code: &[
            ("sm_80", "crates/tcpx-memory/src/kernels/tcpx.sm_80.cubin"),
            ("sm_90", "crates/tcpx-memory/src/kernels/tcpx.sm_90.cubin"),
        ],
    },
    Kernel {
        source: "gpu_check.cu",
        headers: &[],
        ptx: "crates/tcpx-memory/examples/gpu_check/gpu_check.ptx",
        code: &[],
    },
];

/// The oldest architecture we support, so that every later one can compile the PTX.
const OLDEST: &str = "compute_70";
const STANDARD: &str = "--std=c++03";

/// Makes the files, or with `--check` only compares them.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let check = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--check"] => true,
        _ => bail!("expected nothing or --check, got {arguments:?}"),
    };
    let nvrtc = Nvrtc::obtain(&root().join("target/nvrtc"))?;
    for kernel in &KERNELS {
        for (name, made) in kernel.make(&nvrtc)? {
            let path = root().join(name);
            if fs::read(&path).is_ok_and(|present| present == made) {
                println!("{name} is up to date");
            } else if check {
                bail!("{name} is stale; run `cargo xtask kernels`");
            } else {
                fs::write(&path, made).with_context(|| format!("write {}", path.display()))?;
                println!("{name} written");
            }
        }
    }
    Ok(())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

impl Kernel {
    /// The source and then its headers, by name.
    fn files(&self) -> Result<Vec<(&'static str, String)>> {
        let names = [self.source]
            .into_iter()
            .chain(self.headers.iter().copied());
        names
            .map(|name| {
                let path = root().join(FOLDER).join(name);
                let text = fs::read_to_string(&path);
                Ok((
                    name,
                    text.with_context(|| format!("read {}", path.display()))?,
                ))
            })
            .collect()
    }

    /// The first lines of the PTX file; they change with the sources, the options and the compiler.
    fn banner(&self) -> Result<String> {
        let mut hash = Sha256::new();
        let files = self.files()?;
        for (_, text) in &files {
            hash.update(text);
        }
        let hex: String = hash
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let names: Vec<_> = files
            .iter()
            .map(|(name, _)| format!("kernels/{name}"))
            .collect();
        Ok(format!(
            "// Made by `cargo xtask kernels` from {}\n// with {} {}.\n// sources-sha256: {hex}\n",
            names.join(" "),
            nvrtc::PACKAGE,
            options(OLDEST).join(" "),
        ))
    }

    /// What is made of the source, by path.
    fn make(&self, nvrtc: &Nvrtc) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let files = self.files()?;
        let (source, headers) = files.split_first().context("a kernel has a source")?;
        let compile = |architecture| {
            nvrtc
                .compile(source, headers, &options(architecture))
                .with_context(|| format!("compile kernels/{}", self.source))
        };
        let ptx = [self.banner()?.into_bytes(), compile(OLDEST)?].concat();
        let code = self.code.iter();
        let code = code.map(|(architecture, path)| Ok((*path, compile(architecture)?)));
        std::iter::once(Ok((self.ptx, ptx))).chain(code).collect()
    }
}

fn options(architecture: &str) -> [String; 2] {
    let architecture = format!("--gpu-architecture={architecture}");
    [architecture, STANDARD.to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checked_in_ptx_is_of_these_sources() {
        for kernel in &KERNELS {
            let ptx = fs::read_to_string(root().join(kernel.ptx)).unwrap();
            let banner = kernel.banner().unwrap();
            assert!(
                ptx.starts_with(&banner),
                "{} is stale; run `cargo xtask kernels`",
                kernel.ptx
            );
        }
    }

    #[test]
    fn what_is_checked_in_is_what_the_compiler_makes() {
        let nvrtc = match Nvrtc::obtain(&root().join("target/nvrtc")) {
            Ok(nvrtc) => nvrtc,
            Err(why) => {
                eprintln!("skipped: what_is_checked_in_is_what_the_compiler_makes: {why:#}");
                return;
            }
        };
        for kernel in &KERNELS {
            for (name, made) in kernel.make(&nvrtc).unwrap() {
                assert!(
                    fs::read(root().join(name)).unwrap() == made,
                    "{name} is stale"
                );
            }
        }
    }

    #[test]
    fn a_mistake_in_the_source_is_reported_with_its_line() {
        let Ok(nvrtc) = Nvrtc::obtain(&root().join("target/nvrtc")) else {
            eprintln!("skipped: a_mistake_in_the_source_is_reported_with_its_line: no NVRTC");
            return;
        };
        let source = (
            "wrong.cu",
            "__global__ void kernel() {\n  nothing();\n}\n".to_owned(),
        );
        let error = nvrtc.compile(&source, &[], &options(OLDEST)).unwrap_err();
        assert!(format!("{error:#}").contains("wrong.cu(2)"), "{error:#}");
    }
}

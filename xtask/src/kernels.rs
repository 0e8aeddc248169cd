//! `cargo xtask kernels`: CUDA C to the PTX that is checked in.

mod nvrtc;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use nvrtc::Nvrtc;
use sha2::{Digest as _, Sha256};

/// Where the sources lie; the PTX files name them from their crate's folder.
const FOLDER: &str = "crates/tcpx-memory/kernels";

/// One PTX file and what it is made of.
struct Kernel {
    /// The source, in `FOLDER`.
    source: &'static str,
    /// What the source includes, in `FOLDER`.
    headers: &'static [&'static str],
    /// The result, from the root of the repository.
    ptx: &'static str,
}

const KERNELS: [Kernel; 4] = [
    Kernel {
        source: "unpack.cu",
        headers: &["signal_completion.h", "unpack_lane.h"],
        ptx: "crates/tcpx-memory/src/ptx/unpack.ptx",
    },
    Kernel {
        source: "crc32c.cu",
        headers: &["crc32c_lane.h", "signal_completion.h", "unpack_lane.h"],
        ptx: "crates/tcpx-memory/src/ptx/crc32c.ptx",
    },
    Kernel {
        source: "persistent_copy.cu",
        headers: &["unpack_lane.h"],
        ptx: "crates/tcpx-memory/src/ptx/persistent_copy.ptx",
    },
    Kernel {
        source: "gpu_check.cu",
        headers: &[],
        ptx: "crates/tcpx-memory/examples/gpu_check/gpu_check.ptx",
    },
];

/// The oldest architecture we support, so that every later one can compile the PTX.
const OPTIONS: [&str; 2] = ["--gpu-architecture=compute_70", "--std=c++03"];

/// Makes the PTX files, or with `--check` only compares them.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let check = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--check"] => true,
        _ => bail!("expected nothing or --check, got {arguments:?}"),
    };
    let nvrtc = Nvrtc::obtain(&root().join("target/nvrtc"))?;
    for kernel in &KERNELS {
        let (path, made) = (root().join(kernel.ptx), kernel.make(&nvrtc)?);
        if fs::read_to_string(&path).is_ok_and(|present| present == made) {
            println!("{} is up to date", kernel.ptx);
        } else if check {
            bail!("{} is stale; run `cargo xtask kernels`", kernel.ptx);
        } else {
            fs::write(&path, made).with_context(|| format!("write {}", path.display()))?;
            println!("{} written", kernel.ptx);
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
            OPTIONS.join(" "),
        ))
    }

    fn make(&self, nvrtc: &Nvrtc) -> Result<String> {
        let files = self.files()?;
        let (source, headers) = files.split_first().context("a kernel has a source")?;
        let ptx = nvrtc
            .compile(source, headers, &OPTIONS)
            .with_context(|| format!("compile kernels/{}", self.source))?;
        Ok(self.banner()? + &ptx)
    }
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
    fn the_checked_in_ptx_is_what_the_compiler_makes() {
        let nvrtc = match Nvrtc::obtain(&root().join("target/nvrtc")) {
            Ok(nvrtc) => nvrtc,
            Err(why) => {
                eprintln!("skipped: the_checked_in_ptx_is_what_the_compiler_makes: {why:#}");
                return;
            }
        };
        for kernel in &KERNELS {
            let ptx = fs::read_to_string(root().join(kernel.ptx)).unwrap();
            assert!(
                ptx == kernel.make(&nvrtc).unwrap(),
                "{} is stale",
                kernel.ptx
            );
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
        let error = nvrtc.compile(&source, &[], &OPTIONS).unwrap_err();
        assert!(format!("{error:#}").contains("wrong.cu(2)"), "{error:#}");
    }
}

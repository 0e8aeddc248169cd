//! Which packages the machine is made of.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::workspace::read;

/// The pinned packages.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pins {
    /// Addresses with `{path}` or `{sha1}` in them, in the order to try.
    pub(super) from: Vec<String>,
    /// The kernel's version, as it calls itself.
    pub(super) kernel: String,
    pub(super) packages: Vec<Package>,
    /// Changes with the file.
    pub(super) fingerprint: String,
}

/// One package.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Package {
    pub(super) sha256: String,
    pub(super) sha1: String,
    pub(super) bytes: u64,
    pub(super) path: String,
}

impl Pins {
    pub(super) fn read(path: &Path) -> Result<Self> {
        Self::parse(&read(path)?).with_context(|| format!("{}", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let mut pins = Self {
            from: Vec::new(),
            kernel: String::new(),
            packages: Vec::new(),
            fingerprint: hex(&Sha256::digest(text))[..16].to_owned(),
        };
        for (number, line) in text.lines().enumerate() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                [] => {}
                [first, ..] if first.starts_with('#') => {}
                ["from", address] => pins.from.push(address.to_owned()),
                ["kernel", version] => version.clone_into(&mut pins.kernel),
                [sha256, sha1, bytes, path] if sha256.len() == 64 && sha1.len() == 40 => {
                    pins.packages.push(Package {
                        sha256: sha256.to_owned(),
                        sha1: sha1.to_owned(),
                        bytes: bytes
                            .parse()
                            .with_context(|| format!("line {}", number + 1))?,
                        path: path.to_owned(),
                    });
                }
                _ => bail!("line {} is none: {line}", number + 1),
            }
        }
        ensure!(!pins.from.is_empty(), "no line says where to look");
        ensure!(!pins.kernel.is_empty(), "no line names the kernel");
        ensure!(!pins.packages.is_empty(), "no package is pinned");
        Ok(pins)
    }
}

impl Package {
    /// The file's name.
    pub(super) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or(&self.path)
    }

    /// Where to look, in order.
    pub(super) fn addresses(&self, from: &[String]) -> Vec<String> {
        from.iter()
            .map(|address| {
                address
                    .replace("{path}", &self.path)
                    .replace("{sha1}", &self.sha1)
            })
            .collect()
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pins_of_this_repository_are_whole() {
        let root = crate::workspace::root().unwrap();
        let pins = Pins::read(&root.join("tests/devmem-vm/packages.txt")).unwrap();
        let kernel = format!("linux-binary-{}", pins.kernel.replace('+', "%2b"));
        assert!(
            pins.packages
                .iter()
                .any(|one| one.name().starts_with(&kernel))
        );
        for package in &pins.packages {
            assert!(
                package.path.ends_with(".deb") && package.bytes > 0,
                "{package:?}"
            );
            let addresses = package.addresses(&pins.from);
            assert!(
                addresses.iter().all(|one| !one.contains('{')),
                "{addresses:?}"
            );
        }
    }

    #[test]
    fn a_line_that_is_none_is_named() {
        let error = Pins::parse("from x\nkernel y\nabc 1 2 3\n").unwrap_err();
        assert!(error.to_string().contains("line 3"), "{error}");
        assert!(Pins::parse("kernel y\n").is_err());
    }
}

//! What files need of a host: nothing but glibc, and no newer one than packages name.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use object::elf::{DT_NEEDED, FileHeader64};
use object::read::elf::{Dyn, FileHeader};
use object::{Endianness, elf};

use super::GLIBC;

/// Fails if a file below `folder` needs another library, or a newer version of a symbol.
pub(super) fn check(folder: &Path) -> Result<()> {
    for entry in
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?
    {
        let entry = entry?;
        let (kind, path) = (entry.file_type()?, entry.path());
        if kind.is_dir() {
            check(&path)?;
        } else if kind.is_file() {
            let bytes = fs::read(&path)?;
            if bytes.starts_with(&elf::ELFMAG) {
                let needs =
                    needs(&bytes).with_context(|| format!("cannot read {}", path.display()))?;
                let missing: Vec<_> = needs.iter().filter(|one| !is_there(one)).collect();
                ensure!(
                    missing.is_empty(),
                    "{} needs {missing:?}, which hosts with glibc {GLIBC} do not have",
                    path.display()
                );
            }
        }
    }
    Ok(())
}

/// The libraries of an ELF file, and the versions of their symbols.
fn needs(bytes: &[u8]) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut add = |name: &[u8]| found.insert(String::from_utf8_lossy(name).into_owned());
    let header = FileHeader64::<Endianness>::parse(bytes)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, bytes)?;
    if let Some((entries, link)) = sections.dynamic(endian, bytes)? {
        let strings = sections.strings(endian, bytes, link)?;
        for entry in entries.iter().filter(|one| one.tag(endian) == DT_NEEDED) {
            add(entry.string(endian, strings)?);
        }
    }
    if let Some((mut libraries, link)) = sections.gnu_verneed(endian, bytes)? {
        let strings = sections.strings(endian, bytes, link)?;
        while let Some((_, mut versions)) = libraries.next()? {
            while let Some(version) = versions.next()? {
                add(version.name(endian, strings)?);
            }
        }
    }
    Ok(found)
}

/// Whether every host has that library or version of a symbol.
fn is_there(need: &str) -> bool {
    let numbers = |text: &str| -> Option<Vec<u32>> {
        text.split('.').map(|part| part.parse().ok()).collect()
    };
    match need.strip_prefix("GLIBC_") {
        Some(version) => numbers(version).is_some_and(|one| Some(one) <= numbers(GLIBC)),
        None => {
            let (name, _) = need.split_once(".so").unwrap_or((need, ""));
            let glibc = ["libc", "libm", "libdl", "libpthread", "librt"];
            glibc.contains(&name) || name.starts_with("ld-linux-")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_older_versions_and_glibc_alone() {
        for there in ["GLIBC_2.2.5", "GLIBC_2.28", "libc.so.6", "libpthread.so.0"] {
            assert!(is_there(there), "{there}");
        }
        for missing in [
            "GLIBC_2.29",
            "GLIBC_2.28.1",
            "GLIBC_PRIVATE",
            "GCC_3.0",
            "libgcc_s.so.1",
        ] {
            assert!(!is_there(missing), "{missing}");
        }
    }

    #[test]
    fn this_program_needs_a_version_of_the_c_library() {
        let bytes = fs::read(std::env::current_exe().unwrap()).unwrap();
        let needs = needs(&bytes).unwrap();
        assert!(needs.contains("libc.so.6"), "{needs:?}");
        assert!(
            needs.iter().any(|one| one.starts_with("GLIBC_2.")),
            "{needs:?}"
        );
    }
}

//! Whether the NIXL that loads this file is one whose interface is known.
//!
//! NIXL's plugin number stayed 1 while the functions of a backend changed, so the interface itself
//! is looked at: the functions of `nixlBackendEngine` that libnixl.so exports, the size of that
//! class's table in a plugin of the same build, and the release that the files were installed by.

use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use object::read::elf::{ElfFile64, FileHeader as _};
use object::{Object as _, ObjectSymbol as _};

/// Set to 1, the plugin answers to releases that were never tested too, if their interface looks
/// the same.
pub(crate) const OVERRIDE: &str = "TCPX_NIXL_UNCHECKED";

/// The newest release that was tested, without its patch number.
const NEWEST: (u32, u32) = (1, 5);
/// The oldest one.
const OLDEST: (u32, u32) = (1, 0);

/// Functions in a backend's table.
pub(crate) const SLOTS: usize = 27;

/// The virtual functions that libnixl.so defines itself, by the beginnings of their mangled names.
const KNOWN: [&str; 9] = [
    "_ZNK17nixlBackendEngine11prepMemViewERK12nixlDescListI12nixlMetaDescE",
    "_ZNK17nixlBackendEngine11prepMemViewERK12nixlDescListI18nixlRemoteMetaDescE",
    "_ZNK17nixlBackendEngine14releaseMemViewEPv",
    "_ZNK17nixlBackendEngine11getConnInfoE",
    "_ZN17nixlBackendEngine18loadRemoteConnInfoE",
    "_ZN17nixlBackendEngine9getNotifsE",
    "_ZNK17nixlBackendEngine8genNotifE",
    "_ZNK17nixlBackendEngine8queryMemE",
    "_ZNK17nixlBackendEngine16estimateXferCostE",
];

/// Why a NIXL is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unknown {
    #[error("no libnixl.so is loaded in this process; let NIXL load this file")]
    NoLibrary,
    #[error("no libstdc++.so.6 is loaded in this process; let NIXL load this file")]
    NoRuntime,
    #[error("{path}: {why}; this file works with NIXL 1.0 to 1.5")]
    Unreadable { path: String, why: String },
    #[error(
        "NIXL {found} was never tested with this file, {tested} were; take one of those or a newer tcpx, or set {OVERRIDE}=1 to try"
    )]
    Version { found: String, tested: String },
    #[error(
        "this NIXL's backends have functions that this file does not know ({difference}); take a tcpx that fits, NIXL 1.0 to 1.5 fit this one"
    )]
    Interface { difference: String },
}

/// Looks at the NIXL of this process.
pub(crate) fn check() -> Result<(), Unknown> {
    if !crate::abi::find_runtime() {
        return Err(Unknown::NoRuntime);
    }
    let library = loaded_library("libnixl.so").ok_or(Unknown::NoLibrary)?;
    let unchecked = std::env::var(OVERRIDE).is_ok_and(|text| text == "1");
    if !unchecked
        && let Some((major, minor, text)) = installed_version(&library)
        && ((major, minor) < OLDEST || (major, minor) > NEWEST)
    {
        return Err(Unknown::Version {
            found: text,
            tested: format!("{}.{} to {}.{}", OLDEST.0, OLDEST.1, NEWEST.0, NEWEST.1),
        });
    }
    let symbols = backend_symbols(&library)?;
    let mut missing: BTreeSet<&str> = KNOWN.into_iter().collect();
    for symbol in &symbols.functions {
        match KNOWN.into_iter().find(|known| symbol.starts_with(known)) {
            Some(known) => missing.remove(known),
            None => {
                let difference = format!("{symbol} is new");
                return Err(Unknown::Interface { difference });
            }
        };
    }
    if let Some(missing) = missing.first() {
        let difference = format!("{missing} is missing");
        return Err(Unknown::Interface { difference });
    }
    // Plugins of the same build carry the table itself.
    let plugins = library.with_file_name("plugins");
    for name in ["libplugin_POSIX.so", "libplugin_UCX.so"] {
        let path = plugins.join(name);
        if !path.is_file() {
            continue;
        }
        if let Some(bytes) = backend_symbols(&path)?.table_bytes
            && bytes != (2 + SLOTS as u64) * 8
        {
            let slots = (bytes / 8).saturating_sub(2);
            let difference = format!("{slots} functions instead of {SLOTS}");
            return Err(Unknown::Interface { difference });
        }
    }
    Ok(())
}

/// Where a library of this process lies.
fn loaded_library(name: &str) -> Option<PathBuf> {
    struct Search<'a> {
        name: &'a str,
        found: Option<PathBuf>,
    }
    unsafe extern "C" fn compare_name(
        info: *mut libc::dl_phdr_info,
        _: libc::size_t,
        search: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes a valid description, and the pointer that it was given.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<'_>>()) };
        if info.dlpi_name.is_null() {
            return 0;
        }
        // SAFETY: the name is a string of the loader.
        let path = unsafe { CStr::from_ptr(info.dlpi_name) };
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        let is_it = path
            .file_name()
            .and_then(OsStr::to_str)
            .is_some_and(|file| file.starts_with(search.name));
        if is_it {
            search.found = Some(path.to_owned());
        }
        c_int::from(is_it)
    }
    let mut search = Search { name, found: None };
    // SAFETY: the callback gets the search that lives on this stack, while this call runs.
    unsafe { libc::dl_iterate_phdr(Some(compare_name), (&raw mut search).cast()) };
    search.found
}

/// The release that a wheel's files belong to; `None` where NIXL was installed in another way.
fn installed_version(library: &Path) -> Option<(u32, u32, String)> {
    // SITE/.nixl_cu12.mesonpy.libs/libnixl.so and SITE/nixl_cu12-1.4.1.dist-info.
    let libraries = library.canonicalize().ok()?;
    let libraries = libraries.parent()?;
    let package = libraries.file_name()?.to_str()?;
    let package = package.strip_prefix('.')?.split('.').next()?.to_owned();
    for entry in libraries.parent()?.read_dir().ok()? {
        let name = entry.ok()?.file_name();
        let Some(version) = name
            .to_str()
            .and_then(|name| name.strip_prefix(package.as_str())?.strip_prefix('-'))
            .and_then(|rest| rest.strip_suffix(".dist-info"))
        else {
            continue;
        };
        let mut numbers = version.split('.').map(str::parse::<u32>);
        if let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) {
            return Some((major, minor, version.to_owned()));
        }
    }
    None
}

#[derive(Debug, Default)]
struct Symbols {
    /// Functions of the class that the file defines.
    functions: Vec<String>,
    /// The size of the class's table, two words in front of it included.
    table_bytes: Option<u64>,
}

fn backend_symbols(path: &Path) -> Result<Symbols, Unknown> {
    let unreadable = |why: String| Unknown::Unreadable {
        path: path.display().to_string(),
        why,
    };
    let bytes = std::fs::read(path).map_err(|error| unreadable(error.to_string()))?;
    let file = ElfFile64::<object::Endianness>::parse(&*bytes)
        .map_err(|error| unreadable(error.to_string()))?;
    let endian = file.endian();
    if file.elf_header().e_machine(endian) != object::elf::EM_X86_64 {
        return Err(unreadable("not a file for x86-64".to_owned()));
    }
    let mut symbols = Symbols::default();
    for symbol in file.dynamic_symbols() {
        let Ok(name) = symbol.name() else { continue };
        if !symbol.is_definition() {
            continue;
        }
        if name == "_ZTV17nixlBackendEngine" {
            symbols.table_bytes = Some(symbol.size());
        } else if name.starts_with("_ZN17nixlBackendEngine")
            || name.starts_with("_ZNK17nixlBackendEngine")
        {
            symbols.functions.push(name.to_owned());
        }
    }
    Ok(symbols)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_nixl_is_refused() {
        // SAFETY: loads the system's library, so that the check comes as far as NIXL.
        unsafe { libc::dlopen(c"libstdc++.so.6".as_ptr(), libc::RTLD_NOW) };
        let refused = check().unwrap_err();
        assert!(matches!(refused, Unknown::NoLibrary | Unknown::NoRuntime));
    }

    #[test]
    fn a_release_is_read_from_the_folder_beside() {
        let site = std::env::temp_dir().join(format!("tcpx-nixl-guard-{}", std::process::id()));
        let libraries = site.join(".nixl_cu12.mesonpy.libs");
        std::fs::create_dir_all(&libraries).unwrap();
        std::fs::create_dir_all(site.join("nixl_cu12-1.4.1.dist-info")).unwrap();
        let library = libraries.join("libnixl.so");
        std::fs::write(&library, b"").unwrap();
        let version = installed_version(&library);
        let unreadable = backend_symbols(&library);
        std::fs::remove_dir_all(&site).unwrap();
        assert_eq!(version, Some((1, 4, "1.4.1".to_owned())));
        assert!(matches!(unreadable, Err(Unknown::Unreadable { .. })));
    }
}

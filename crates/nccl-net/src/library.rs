//! Finding a plugin's tables in a shared library.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::adapt::Start;
use crate::error::LoadError;
use crate::result::ResultCode;
use crate::tables::AbiVersion;

/// One plugin call and what it returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallReport {
    /// Name of the call in the table.
    pub call: &'static str,
    /// What it returned.
    pub rc: ResultCode,
}

/// Called for every plugin call, except for tests that found nothing done. Must be quick.
pub type CallObserver = Arc<dyn Fn(&CallReport) + Send + Sync>;

/// What to load.
#[derive(Clone)]
pub struct LoadOptions {
    /// Path of the shared object, or a bare name for the dynamic linker's search.
    pub path: PathBuf,
    /// Exactly this version; `None` takes the newest there is.
    pub abi: Option<AbiVersion>,
    /// Called for every call.
    pub observer: Option<CallObserver>,
}

impl LoadOptions {
    /// The newest table of the plugin at `path`, unobserved.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            abi: None,
            observer: None,
        }
    }

    /// Asks for one version.
    #[must_use]
    pub fn with_abi(mut self, abi: AbiVersion) -> Self {
        self.abi = Some(abi);
        self
    }

    /// Registers an observer of every call.
    #[must_use]
    pub fn with_observer(mut self, observer: impl Fn(&CallReport) + Send + Sync + 'static) -> Self {
        self.observer = Some(Arc::new(observer));
        self
    }
}

impl fmt::Debug for LoadOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadOptions")
            .field("path", &self.path)
            .field("abi", &self.abi)
            .field("observer", &self.observer.is_some())
            .finish()
    }
}

/// A table that was found.
pub(crate) struct Found {
    pub(crate) version: AbiVersion,
    pub(crate) start: Start,
    /// Where the table lies, for ever: it is read again after `init`, and names the plugin within
    /// the process.
    pub(crate) address: usize,
}

/// Loads the library and reads of its table what there is before `init`.
pub(crate) fn find(options: &LoadOptions) -> Result<Found, LoadError> {
    let path = &options.path;
    // Without a slash the dynamic linker searches; with one, a missing file deserves its own words.
    if path.components().count() > 1 && !path.exists() {
        return Err(LoadError::NoFile { path: path.clone() });
    }
    // SAFETY: loading runs the library's constructors; the user named this file as a plugin.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        LoadError::NotALibrary {
            path: path.clone(),
            reason: dynamic_linker_words(&error),
        }
    })?;
    let present: Vec<(AbiVersion, usize)> = AbiVersion::ALL
        .into_iter()
        .filter_map(|version| Some((version, address_of(&library, version.symbol())?)))
        .collect();
    // Plugins start threads, some from their constructors: the code is never unmapped.
    std::mem::forget(library);

    let chosen = match options.abi {
        Some(asked) => present.iter().find(|(version, _)| *version == asked),
        None => present.first(),
    };
    let Some(&(version, address)) = chosen else {
        return Err(match options.abi {
            Some(asked) if !present.is_empty() => LoadError::VersionMissing {
                path: path.clone(),
                asked,
                present: present.iter().map(|(version, _)| *version).collect(),
            },
            _ => LoadError::NoTable {
                path: path.clone(),
                looked_for: AbiVersion::ALL.map(AbiVersion::symbol).to_vec(),
            },
        });
    };
    // SAFETY: the symbol of a version is a table of that version, in memory that stays mapped.
    let start = unsafe { Start::read(version, address) }.map_err(|function| {
        LoadError::MissingFunction {
            path: path.clone(),
            version,
            function,
        }
    })?;
    Ok(Found {
        version,
        start,
        address,
    })
}

fn address_of(library: &Library, symbol: &str) -> Option<usize> {
    // SAFETY: only the address is taken; it is read as the table that the name promises.
    let symbol = unsafe { library.get::<*const u8>(symbol.as_bytes()) }.ok()?;
    let address = symbol.as_raw_ptr().expose_provenance();
    (address != 0).then_some(address)
}

/// The text of `dlerror`, which the error of the loader keeps as its source.
fn dynamic_linker_words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_missing_file_is_named() {
        let path = Path::new("/nonexistent/libnccl-net-tcpx.so");
        let error = find(&LoadOptions::new(path)).err().unwrap();
        assert!(matches!(&error, LoadError::NoFile { path: p } if p == path));
        assert!(error.to_string().contains("UCCL_TCPX_PLUGIN_PATH"));
    }

    #[test]
    fn a_file_that_is_no_library_is_reported_in_the_linkers_words() {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let error = find(&LoadOptions::new(manifest)).err().unwrap();
        let LoadError::NotALibrary { reason, .. } = &error else {
            panic!("{error}");
        };
        assert!(
            reason.contains("ELF") || reason.contains("header"),
            "{reason}"
        );
    }

    #[test]
    fn a_missing_table_lists_the_symbols_sought() {
        let error = find(&LoadOptions::new("libc.so.6")).err().unwrap();
        let LoadError::NoTable { looked_for, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(looked_for.len(), 8);
        assert!(error.to_string().contains("ncclNetPlugin_v12"));
    }
}

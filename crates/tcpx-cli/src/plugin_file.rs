//! The plugin file: the one asked for, the vendor's, or our own.

pub(crate) mod contents;

use std::path::{Path, PathBuf};

use tcpx_build_id::BuildIdError;

use crate::args::link::VENDOR_PLUGIN;

/// The plugin's file name once installed, and as cargo writes it.
const OWN_NAMES: [&str; 2] = ["libnccl-net-tcpx.so", "libnccl_net_tcpx.so"];

/// Why there is no plugin file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PluginFileError {
    #[error("the plugin file {} is not there", .0.display())]
    Missing(PathBuf),
    #[error("no plugin file was found; looked at {}", list(.0))]
    NotFound(Vec<PathBuf>),
    #[error(transparent)]
    BuildId(#[from] BuildIdError),
}

/// A plugin file that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PluginFile {
    pub(crate) path: PathBuf,
    /// How it was found, for a person.
    pub(crate) why: String,
}

impl PluginFile {
    /// The file at `path`.
    pub(crate) fn given(path: &Path) -> Result<Self, PluginFileError> {
        existing(path, "given")
    }

    /// The file, if it was made from the sources that `expected` was computed from.
    fn of_build(self, expected: &str) -> Result<Self, PluginFileError> {
        tcpx_build_id::verify(&self.path, expected)?;
        Ok(self)
    }
}

/// Where to look, so that tests can look elsewhere.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) vendor: PathBuf,
    pub(crate) executable: Option<PathBuf>,
    /// Build id of the file that belongs to this program.
    pub(crate) build_id: &'static str,
}

impl Places {
    /// The places of this process.
    pub(crate) fn of_process() -> Self {
        Self {
            vendor: VENDOR_PLUGIN.into(),
            executable: std::env::current_exe().ok(),
            build_id: env!("TCPX_BUILD_ID"),
        }
    }

    /// The file for `--network plugin`: the one given, else the vendor's, else our own.
    pub(crate) fn find(&self, given: Option<&Path>) -> Result<PluginFile, PluginFileError> {
        if let Some(path) = given {
            return PluginFile::given(path);
        }
        if self.vendor.is_file() {
            return existing(&self.vendor, "the vendor's");
        }
        self.own().map_err(|error| match error {
            PluginFileError::NotFound(mut looked) => {
                looked.insert(0, self.vendor.clone());
                PluginFileError::NotFound(looked)
            }
            other => other,
        })
    }

    /// Our own file, beside the program; in a target folder that is where cargo writes it.
    pub(crate) fn own(&self) -> Result<PluginFile, PluginFileError> {
        let mut looked = Vec::new();
        let directory = self.executable.as_deref().and_then(Path::parent);
        for directory in directory
            .into_iter()
            .flat_map(|own| [own.to_owned(), own.join("../lib")])
        {
            for name in OWN_NAMES {
                let path = directory.join(name);
                if path.is_file() {
                    return existing(&path, "our own, beside the program")?.of_build(self.build_id);
                }
                looked.push(path);
            }
        }
        Err(PluginFileError::NotFound(looked))
    }
}

fn existing(path: &Path, why: &str) -> Result<PluginFile, PluginFileError> {
    match path.canonicalize() {
        Ok(path) if path.is_file() => Ok(PluginFile {
            path,
            why: why.to_owned(),
        }),
        _ => Err(PluginFileError::Missing(path.to_owned())),
    }
}

fn list(paths: &[PathBuf]) -> String {
    paths
        .iter()
        .map(|path| path.display().to_string())
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "tcpx-nccl 0.1.0 sources aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

    fn places(directory: &Path) -> Places {
        Places {
            vendor: directory.join("vendor.so"),
            executable: Some(directory.join("bin").join("tcpx")),
            build_id: ID,
        }
    }

    /// A file that holds our id and nothing else of a plugin.
    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("created");
        std::fs::write(path, format!("\x7fELF{ID}\0")).expect("written");
    }

    #[test]
    fn a_given_file_wins_then_the_vendors_then_ours() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path().canonicalize().expect("a path");
        let places = places(&root);
        let (given, lib) = (root.join("given.so"), root.join("lib/libnccl-net-tcpx.so"));
        std::fs::create_dir(root.join("bin")).expect("created");
        touch(&lib);
        assert_eq!(places.find(None).expect("found").path, lib);
        let beside = root.join("bin/libnccl_net_tcpx.so");
        touch(&beside);
        assert_eq!(places.find(None).expect("found").path, beside);
        let named = root.join("bin/libnccl-net-tcpx.so");
        touch(&named);
        assert_eq!(places.find(None).expect("found").path, named);
        touch(&places.vendor);
        assert_eq!(places.find(None).expect("found").path, places.vendor);
        touch(&given);
        assert_eq!(places.find(Some(&given)).expect("found").path, given);
    }

    #[test]
    fn a_given_file_that_is_missing_is_not_replaced_by_another() {
        let directory = tempfile::tempdir().expect("a directory");
        let places = places(directory.path());
        touch(&places.vendor);
        let given = directory.path().join("given.so");
        assert!(
            matches!(places.find(Some(&given)), Err(PluginFileError::Missing(path)) if path == given)
        );
        assert!(matches!(
            places.find(Some(directory.path())),
            Err(PluginFileError::Missing(_))
        ));
    }

    #[test]
    fn every_place_that_was_looked_at_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let error = places(directory.path())
            .find(None)
            .expect_err("nothing there")
            .to_string();
        for place in [
            "vendor.so",
            "bin/libnccl-net-tcpx.so",
            "bin/libnccl_net_tcpx.so",
            "lib/libnccl-net-tcpx.so",
        ] {
            assert!(error.contains(place), "{error}");
        }
    }

    #[test]
    fn only_a_given_file_may_be_of_other_sources() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path().canonicalize().expect("a path");
        let mut places = places(&root);
        let beside = root.join("bin/libnccl-net-tcpx.so");
        touch(&beside);
        assert_eq!(places.own().expect("ours").path, beside);
        places.build_id = "tcpx-nccl 0.1.0 sources bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";
        let error = places.own().expect_err("other sources");
        assert!(matches!(error, PluginFileError::BuildId(_)), "{error}");
        assert!(
            error.to_string().contains(ID) && error.to_string().contains(places.build_id),
            "{error}"
        );
        assert!(places.find(Some(&beside)).is_ok());
        std::fs::write(&beside, b"foreign").expect("written");
        assert!(matches!(places.own(), Err(PluginFileError::BuildId(_))));
        assert_eq!(places.find(Some(&beside)).expect("given").path, beside);
    }
}

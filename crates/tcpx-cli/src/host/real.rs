//! The host that this process runs on.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{AtFlags, CWD, StatVfsMountFlags, StatxAttributes, StatxFlags, statvfs, statx};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit};
use tcpx_memory::driver;
use tcpx_net::interfaces::{Interface, interfaces};

use super::{Driver, FileKind, Host, Mount};
use crate::environment::set_by_us;
use crate::plugin_file::contents::{self, Contents, ContentsError};

/// Most of a text file that is read.
const MAX_TEXT_BYTES: u64 = 1 << 20;
/// Most names of a folder that are read.
const MAX_NAMES: usize = 4096;

/// This host, with the variables that the person set: those that this program set for itself are
/// left out.
#[derive(Clone, Debug)]
pub(crate) struct RealHost {
    set_by_us: Vec<String>,
    /// Asked once: opening the driver takes seconds on some hosts.
    driver: OnceLock<Driver>,
}

impl Default for RealHost {
    fn default() -> Self {
        Self {
            set_by_us: set_by_us(),
            driver: OnceLock::new(),
        }
    }
}

impl Host for RealHost {
    fn variable(&self, name: &str) -> Option<String> {
        if self.set_by_us.iter().any(|ours| ours == name) {
            return None;
        }
        let value = std::env::var_os(name)?.to_string_lossy().into_owned();
        (!value.is_empty()).then_some(value)
    }

    fn text(&self, path: &Path) -> io::Result<String> {
        let mut bytes = Vec::new();
        fs::File::open(path)?
            .take(MAX_TEXT_BYTES)
            .read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(folder)?.take(MAX_NAMES) {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    fn kind(&self, path: &Path) -> io::Result<FileKind> {
        let kind = fs::metadata(path)?.file_type();
        Ok(if kind.is_file() {
            FileKind::File
        } else if kind.is_dir() {
            FileKind::Folder
        } else if kind.is_socket() {
            FileKind::Socket
        } else {
            FileKind::Other
        })
    }

    fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        path.canonicalize()
    }

    fn mount(&self, path: &Path) -> io::Result<Mount> {
        let flags = statvfs(path)?.f_flag;
        let is_root = |path: &&Path| {
            let found = statx(CWD, *path, AtFlags::empty(), StatxFlags::empty());
            found.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
        };
        let point = path.ancestors().find(is_root);
        Ok(Mount {
            point: point.unwrap_or_else(|| Path::new("/")).to_owned(),
            allows_programs: !flags.contains(StatVfsMountFlags::NOEXEC),
        })
    }

    fn interfaces(&self) -> Result<Vec<Interface>, String> {
        interfaces().map_err(|error| error.to_string())
    }

    fn open_files(&self) -> Rlimit {
        getrlimit(Resource::Nofile)
    }

    fn contents(&self, plugin: &Path) -> Result<Contents, ContentsError> {
        contents::read(plugin)
    }

    fn driver(&self) -> Driver {
        self.driver.get_or_init(driver::probe).clone()
    }

    fn listens(&self, socket: &Path) -> io::Result<()> {
        let address = SocketAddrUnix::new(socket)?;
        // The queue of a listener that accepts nobody may be full: that is not waited for.
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let socket = rustix::net::socket_with(family, kind, flags, None)?;
        Ok(rustix::net::connect(&socket, &address)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_mount_is_the_deepest_above_it() {
        let mount = |path: &str| RealHost::default().mount(Path::new(path));
        let (proc, root) = (mount("/proc/self/stat"), mount("/"));
        assert_eq!(proc.expect("mounted").point, Path::new("/proc"));
        assert_eq!(root.expect("mounted").point, Path::new("/"));
        assert!(mount("/no/such/file").is_err());
        // This program runs.
        let own = std::env::current_exe().expect("a path");
        let own = RealHost::default().mount(&own).expect("mounted");
        assert!(own.allows_programs);
    }
}

//! What a plugin file is and exports, read from the file: nothing of it runs.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use nccl_net::AbiVersion;
use object::read::{Object, ObjectSegment, ObjectSymbol, RelocationTarget};
use object::{Architecture, Endianness, ObjectKind};

/// Plugin files are some megabytes; what is larger than this is something else.
const MAX_FILE_BYTES: u64 = 512 << 20;
/// Longest name of a table that is read.
const MAX_NAME_BYTES: usize = 256;
/// How the names in the tables of Google's plugin begin.
const GOOGLE: &str = "GPUDirectTCPX";

/// Whose plugin a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PluginKind {
    /// Google's GPUDirectTCPX: it wants its variables set before it is loaded.
    Google,
    /// Ours: it carries a build id.
    Ours,
    /// Somebody else's.
    Other,
}

impl fmt::Display for PluginKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Google => "Google's GPUDirectTCPX",
            Self::Ours => "our own",
            Self::Other => "another maker's",
        })
    }
}

/// A table that a file exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExportedTable {
    pub(crate) version: AbiVersion,
    /// The network's name in the table, where it can be read from the file.
    pub(crate) name: Option<String>,
}

/// What a plugin file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) kind: PluginKind,
    /// Newest first; never empty.
    pub(crate) tables: Vec<ExportedTable>,
    /// The build id of our own file.
    pub(crate) build_id: Option<String>,
}

impl Contents {
    /// The versions, newest first, for a person.
    pub(crate) fn versions(&self) -> String {
        let versions: Vec<String> = self
            .tables
            .iter()
            .map(|table| table.version.to_string())
            .collect();
        versions.join(", ")
    }
}

/// Why a file is no plugin for this host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ContentsError {
    #[error("{} cannot be read: {error}", .path.display())]
    Unreadable {
        path: PathBuf,
        error: std::io::Error,
    },
    #[error("{} is not a file", .0.display())]
    NotAFile(PathBuf),
    #[error("{} has {bytes} bytes, more than any plugin file", .path.display())]
    TooLarge { path: PathBuf, bytes: u64 },
    #[error("{} is not an ELF file: it begins with {begins}", .path.display())]
    NotElf { path: PathBuf, begins: String },
    #[error("{} is a damaged ELF file: {why}", .path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("{} is an ELF file but no shared library: it is {found}", .path.display())]
    NotShared { path: PathBuf, found: &'static str },
    #[error("{} is made for {found}, this host is {host}", .path.display())]
    Machine {
        path: PathBuf,
        found: String,
        host: String,
    },
    #[error("{} is a shared library but exports no table ncclNetPlugin_v5 to _v12{}", .path.display(), other_tables(.others))]
    NoTable { path: PathBuf, others: Vec<String> },
}

fn other_tables(others: &[String]) -> String {
    if others.is_empty() {
        return String::new();
    }
    format!("; it exports {}", others.join(", "))
}

/// Reads what the plugin file at `path` is and exports.
pub(crate) fn read(path: &Path) -> Result<Contents, ContentsError> {
    let tables = tables(path, &bytes(path)?)?;
    let build_id = tcpx_build_id::of_file(path).ok().flatten();
    let named_by_google = tables.iter().any(|table| {
        let name = table.name.as_deref();
        name.is_some_and(|name| name.starts_with(GOOGLE))
    });
    let kind = match (&build_id, named_by_google) {
        (Some(_), _) => PluginKind::Ours,
        (None, true) => PluginKind::Google,
        (None, false) => PluginKind::Other,
    };
    Ok(Contents {
        kind,
        tables,
        build_id,
    })
}

/// The tables that a file with these bytes exports, newest first: at least one.
pub(crate) fn tables(path: &Path, data: &[u8]) -> Result<Vec<ExportedTable>, ContentsError> {
    let file = parse(path, data)?;
    check_machine(path, &file)?;
    let symbols: Vec<(&str, u64)> = file
        .dynamic_symbols()
        .filter(|symbol| symbol.is_definition())
        .filter_map(|symbol| Some((symbol.name().ok()?, symbol.address())))
        .filter(|(name, _)| name.starts_with("nccl"))
        .collect();
    let tables: Vec<ExportedTable> = AbiVersion::ALL
        .into_iter()
        .filter_map(|version| {
            let &(_, address) = symbols.iter().find(|(name, _)| *name == version.symbol())?;
            Some(ExportedTable {
                version,
                name: table_name(&file, address),
            })
        })
        .collect();
    if tables.is_empty() {
        let others = symbols.iter().map(|(name, _)| (*name).to_owned());
        return Err(ContentsError::NoTable {
            path: path.to_owned(),
            others: others.take(8).collect(),
        });
    }
    Ok(tables)
}

fn bytes(path: &Path) -> Result<Vec<u8>, ContentsError> {
    let unreadable = |error| ContentsError::Unreadable {
        path: path.to_owned(),
        error,
    };
    // Looked at before it is opened: opening a pipe would wait for its other end.
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(ContentsError::NotAFile(path.to_owned()));
    }
    if metadata.len() > MAX_FILE_BYTES {
        return Err(ContentsError::TooLarge {
            path: path.to_owned(),
            bytes: metadata.len(),
        });
    }
    let mut data = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    file.take(MAX_FILE_BYTES)
        .read_to_end(&mut data)
        .map_err(unreadable)?;
    Ok(data)
}

fn parse<'data>(path: &Path, data: &'data [u8]) -> Result<object::File<'data>, ContentsError> {
    if !data.starts_with(b"\x7fELF") {
        let begin = &data[..data.len().min(8)];
        return Err(ContentsError::NotElf {
            path: path.to_owned(),
            begins: if begin.is_empty() {
                "nothing, it is empty".to_owned()
            } else {
                format!("\"{}\"", begin.escape_ascii())
            },
        });
    }
    object::File::parse(data).map_err(|error| ContentsError::Damaged {
        path: path.to_owned(),
        why: error.to_string(),
    })
}

fn check_machine(path: &Path, file: &object::File<'_>) -> Result<(), ContentsError> {
    let here = match std::env::consts::ARCH {
        "x86_64" => Architecture::X86_64,
        "aarch64" => Architecture::Aarch64,
        _ => Architecture::Unknown,
    };
    let order = if cfg!(target_endian = "little") {
        Endianness::Little
    } else {
        Endianness::Big
    };
    let fits = file.architecture() == here && file.is_64() && file.endianness() == order;
    if here != Architecture::Unknown && !fits {
        return Err(ContentsError::Machine {
            path: path.to_owned(),
            found: format!(
                "{:?} ({} bits, {:?} endian)",
                file.architecture(),
                if file.is_64() { 64 } else { 32 },
                file.endianness()
            ),
            host: std::env::consts::ARCH.to_owned(),
        });
    }
    let found = match file.kind() {
        ObjectKind::Dynamic => return Ok(()),
        ObjectKind::Executable => "a program",
        ObjectKind::Relocatable => "an object file",
        ObjectKind::Core => "a core dump",
        _ => "of an unknown kind",
    };
    Err(ContentsError::NotShared {
        path: path.to_owned(),
        found,
    })
}

/// The string that the first word of a table points to.
fn table_name(file: &object::File<'_>, table: u64) -> Option<String> {
    let address = pointer(file, table)?;
    let bytes = at(file, address)?;
    let bytes = &bytes[..bytes.len().min(MAX_NAME_BYTES)];
    let end = bytes.iter().position(|byte| *byte == 0)?;
    let name = std::str::from_utf8(&bytes[..end]).ok()?;
    (!name.is_empty() && !name.contains(char::is_control)).then(|| name.to_owned())
}

/// The pointer at `address` once the linker has done its work, as an address within the file.
fn pointer(file: &object::File<'_>, address: u64) -> Option<u64> {
    let relocation = file
        .dynamic_relocations()
        .and_then(|mut all| all.find(|(place, _)| *place == address));
    let Some((_, relocation)) = relocation else {
        // Compact relocations keep the address in place.
        let word = at(file, address)?.first_chunk::<8>()?;
        return Some(u64::from_ne_bytes(*word));
    };
    let base = match relocation.target() {
        RelocationTarget::Absolute => 0,
        RelocationTarget::Symbol(index) => file
            .dynamic_symbols()
            .find(|symbol| symbol.index() == index)?
            .address(),
        _ => return None,
    };
    base.checked_add_signed(relocation.addend())
}

/// What the file holds from `address` to the end of its segment.
fn at<'data>(file: &object::File<'data>, address: u64) -> Option<&'data [u8]> {
    file.segments().find_map(|segment| {
        let offset = usize::try_from(address.checked_sub(segment.address())?).ok()?;
        segment.data().ok()?.get(offset..)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(contents: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), contents).expect("written");
        file
    }

    #[test]
    fn googles_double_is_known_by_its_tables_name() {
        let contents = read(tcpx_tests::double::path()).expect("a plugin");
        assert_eq!(contents.kind, PluginKind::Google);
        let table = ExportedTable {
            version: AbiVersion::V7,
            name: Some("GPUDirectTCPX_v7".to_owned()),
        };
        assert_eq!(contents.tables, [table]);
    }

    #[test]
    fn what_is_no_elf_file_is_said_to_be_none() {
        for (contents, begins) in [(&b""[..], "empty"), (b"#!/bin/sh\n", "#!/bin/s")] {
            let file = written(contents);
            let error = read(file.path()).expect_err("no plugin");
            assert!(matches!(error, ContentsError::NotElf { .. }), "{error}");
            assert!(error.to_string().contains(begins), "{error}");
        }
    }

    #[test]
    fn a_file_for_another_processor_and_a_program_are_told_apart() {
        let whole = std::fs::read(tcpx_tests::double::path()).expect("read");
        let mut other = whole.clone();
        // e_machine: RISC-V.
        other[18..20].copy_from_slice(&243_u16.to_le_bytes());
        let error = read(written(&other).path()).expect_err("another processor");
        assert!(matches!(error, ContentsError::Machine { .. }), "{error}");
        let mut object = whole;
        // e_type: relocatable.
        object[16..18].copy_from_slice(&1_u16.to_le_bytes());
        let error = read(written(&object).path()).expect_err("an object file");
        assert!(matches!(error, ContentsError::NotShared { .. }), "{error}");
    }

    #[test]
    fn folders_missing_files_and_other_libraries_differ() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(matches!(
            read(folder.path()),
            Err(ContentsError::NotAFile(_))
        ));
        assert!(matches!(
            read(&folder.path().join("x.so")),
            Err(ContentsError::Unreadable { .. })
        ));
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let libc = maps
            .lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .find(|path| path.contains("libc.so"));
        let Some(libc) = libc else {
            eprintln!(
                "skipped: folders_missing_files_and_other_libraries_differ: no C library is mapped"
            );
            return;
        };
        assert!(matches!(
            read(Path::new(libc)),
            Err(ContentsError::NoTable { .. })
        ));
    }
}

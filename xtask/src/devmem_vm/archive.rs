//! The machine's first files, as a cpio archive ("newc") that its kernel unpacks into memory.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};

const FOLDER: u32 = 0o040_755;
const FILE: u32 = 0o100_755;

/// An archive being written.
pub(super) struct Archive<W: Write> {
    to: W,
    next: u32,
    folders: Vec<String>,
}

impl<W: Write> Archive<W> {
    pub(super) fn new(to: W) -> Self {
        Self {
            to,
            next: 1,
            folders: Vec::new(),
        }
    }

    /// An empty folder, with those above it.
    pub(super) fn folder(&mut self, name: &str) -> Result<()> {
        if let Some((above, _)) = name.rsplit_once('/') {
            self.folder(above)?;
        }
        if !self.folders.iter().any(|known| known == name) {
            self.folders.push(name.to_owned());
            self.entry(name, FOLDER, &[])?;
        }
        Ok(())
    }

    /// A file as it lies on this host; every one can be executed.
    pub(super) fn file(&mut self, name: &str, from: &Path) -> Result<()> {
        let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        if let Some((above, _)) = name.rsplit_once('/') {
            self.folder(above)?;
        }
        self.entry(name, FILE, &bytes)?;
        Ok(())
    }

    fn entry(&mut self, name: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        let fields = [
            self.next,
            mode,
            0,
            0,
            1,
            0,
            length,
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            0,
        ];
        self.next += 1;
        let mut head = String::from("070701");
        for field in fields {
            head.push_str(&format!("{field:08x}"));
        }
        head.push_str(name);
        self.padded(&[head.as_bytes(), &[0]].concat())?;
        self.padded(bytes)
    }

    fn padded(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.to.write_all(bytes)?;
        let padding = bytes.len().next_multiple_of(4) - bytes.len();
        self.to.write_all(&[0; 3][..padding])
    }

    /// Ends the archive.
    pub(super) fn finish(mut self) -> Result<()> {
        self.entry("TRAILER!!!", 0, &[])?;
        self.to.flush()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_padded_to_words_and_folders_come_first() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "hello").unwrap();
        let mut bytes = Vec::new();
        let mut archive = Archive::new(&mut bytes);
        archive.file("a/b/c", file.path()).unwrap();
        archive.file("a/b/d", file.path()).unwrap();
        archive.finish().unwrap();
        let mut names = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let field = |index: usize| {
                let from = at + 6 + index * 8;
                let text = std::str::from_utf8(&bytes[from..from + 8]).unwrap();
                usize::from_str_radix(text, 16).unwrap()
            };
            assert_eq!(&bytes[at..at + 6], b"070701");
            let (length, name) = (field(6), field(11));
            let name_at = at + 110;
            names.push(String::from_utf8(bytes[name_at..name_at + name - 1].to_vec()).unwrap());
            let data = (name_at + name).next_multiple_of(4);
            if length > 0 {
                assert_eq!(&bytes[data..data + length], b"hello");
            }
            at = (data + length).next_multiple_of(4);
        }
        assert_eq!(names, ["a", "a/b", "a/b/c", "a/b/d", "TRAILER!!!"]);
    }
}

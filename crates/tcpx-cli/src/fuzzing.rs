//! What the fuzz targets of the program assert, for any bytes.

use std::path::{Component, Path};

use crate::files::digest::DigestKey;
use crate::files::manifest::{self, Entry, Kind, Manifest};
use crate::files::receiver;
use crate::plugin_file::contents;

/// Input: the list of files of a peer.
pub fn files(data: &[u8]) {
    let Ok(list) = serde_json::from_slice::<Manifest>(data) else {
        return;
    };
    let lines = list.left_out.lines();
    assert!(lines.iter().all(|line| !line.contains(char::is_control)));
    if let Err(error) = manifest::check(&list.entries) {
        assert!(!error.to_string().contains(char::is_control), "{error}");
        return;
    }
    let _ = manifest::describe(&list.entries);
    for (place, entry) in list.entries.iter().enumerate() {
        let path = Path::new(&entry.path);
        let plain = |part| matches!(part, Component::Normal(_));
        assert!(path.components().all(plain), "{path:?} leaves its folder");
        assert!(!entry.path.contains(char::is_control), "{path:?}");
        // What a file lies in was made before it, and by this list: no link leads elsewhere.
        let parent = path.parent().filter(|parent| *parent != Path::new(""));
        let is_made = |parent: &Path| {
            let mut before = list.entries[..place].iter();
            before.any(|other| Path::new(&other.path) == parent && other.kind == Kind::Directory)
        };
        assert!(parent.is_none_or(is_made), "{path:?} has no folder");
        if let Kind::Link { target } = &entry.kind {
            let mut depth = path.components().count() - 1;
            for part in Path::new(target).components() {
                match part {
                    Component::Normal(_) => depth += 1,
                    Component::CurDir => {}
                    Component::ParentDir => depth -= 1,
                    _ => panic!("{path:?} leads to {target:?}"),
                }
                assert!(depth > 0, "{path:?} leads to {target:?}");
            }
        }
    }
}

/// Input: where to cut, then what a peer sends for three files. `0xee` and a number: the digest
/// that fits so many of the bytes before it, which nobody could guess.
pub fn contents(data: &[u8]) {
    let [cut, data @ ..] = data else { return };
    let entry = |path: &str, kind| Entry {
        path: path.to_owned(),
        mode: 0o644,
        seconds: 0,
        nanoseconds: 0,
        kind,
    };
    let file = |bytes| Kind::File {
        bytes,
        on_disk: bytes,
    };
    let entries = [
        entry("a", file(3)),
        entry("b", file(2)),
        entry("c", file(0)),
    ];
    let key = DigestKey::from([7; 32]);
    let (mut stream, mut rest, mut index) = (Vec::new(), data, 0);
    while let Some((&byte, behind)) = rest.split_first() {
        rest = behind;
        if byte == 0xee && !rest.is_empty() {
            let contents = stream.len().saturating_sub(4 + usize::from(rest[0]));
            let contents = &stream[contents..stream.len().saturating_sub(4)];
            let digest = key.file(index, &blake3::hash(contents));
            stream.extend_from_slice(digest.as_bytes());
            (rest, index) = (&rest[1..], index + 1);
        } else {
            stream.push(byte);
        }
    }
    let whole = receiver::follow(&entries, &key, &[&stream]);
    let parts: Vec<_> = stream.chunks(usize::from(*cut).max(1)).collect();
    let cut = receiver::follow(&entries, &key, &parts);
    assert_eq!(cut.1, whole.1);
    // A part with an error in it ends nothing, also not what is whole before that.
    let known = cut.0.len().min(whole.0.len());
    assert_eq!(cut.0[..known], whole.0[..known]);
    assert!(!whole.1 || cut == whole, "{cut:?}, {whole:?}");
    let came_with_digest = |contents: &Vec<u8>| {
        let hash = blake3::hash(contents);
        let digests = (0..entries.len()).map(|index| key.file(index, &hash));
        let mut stands = digests.map(|digest| {
            let mut windows = stream.windows(blake3::OUT_LEN);
            windows.any(|window| window == digest.as_bytes())
        });
        stands.any(|stands| stands)
    };
    let mut all = cut.0.iter().chain(&whole.0);
    assert!(all.all(came_with_digest), "{cut:?}, {whole:?}");
}

/// Input: a file that may be a plugin.
pub fn plugin_file(data: &[u8]) {
    match contents::tables(Path::new("plugin.so"), data) {
        Ok(tables) => {
            assert!(tables.is_sorted_by(|one, next| one.version > next.version));
            let mut names = tables.iter().filter_map(|table| table.name.as_deref());
            assert!(names.all(|name| !name.contains(char::is_control)));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[cfg(test)]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn the_corpus_breaks_nothing() {
        replay("files", super::files);
        replay("file_contents", super::contents);
        replay("plugin_file", super::plugin_file);
    }
}

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

pub(super) fn file(path: &str, bytes: u64) -> Entry {
    Entry {
        path: path.into(),
        mode: 0o640,
        seconds: 1_000_000_000,
        nanoseconds: 5,
        kind: Kind::File {
            bytes,
            on_disk: bytes,
        },
    }
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("readable");
    let name = |entry: io::Result<std::fs::DirEntry>| {
        let name = entry.expect("an entry").file_name();
        name.into_string().expect("utf-8")
    };
    entries.map(name).collect()
}

fn publish(store: &Store, entry: &Entry, contents: &[u8]) -> Result<(), StoreError> {
    let mut partial = store.begin(entry, None, 0)?;
    partial.write(contents)?;
    let mut ready = [(partial, entry.clone())];
    store.flush(&mut ready)?;
    let [(partial, _)] = ready;
    store.publish(partial, entry)
}

#[test]
fn the_final_name_appears_only_when_published() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut store = Store::open(directory.path(), false).expect("opened");
    store.umask = 0o022;
    let entry = file("a", 5);
    let mut partial = store.begin(&entry, None, 0).expect("created");
    partial.write(b"hello").expect("written");
    assert!(!directory.path().join("a").exists());
    let mut ready = [(partial, entry.clone())];
    store.flush(&mut ready).expect("flushed");
    let [(partial, _)] = ready;
    store.publish(partial, &entry).expect("published");
    assert_eq!(names_in(directory.path()), ["a"]);
    let path = directory.path().join("a");
    let metadata = path.metadata().expect("there");
    assert_eq!(metadata.permissions().mode() & 0o7777, 0o640);
    let time = metadata.modified().expect("a time");
    let since = time
        .duration_since(std::time::UNIX_EPOCH)
        .expect("after 1970");
    assert_eq!(since, std::time::Duration::new(1_000_000_000, 5));
    assert_eq!(std::fs::read(path).expect("readable"), b"hello");
}

#[test]
fn two_transfers_never_write_one_partial_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = Store::open(directory.path(), false).expect("opened");
    let first = store.begin(&file("a", 5), None, 0).expect("created");
    let second = store.begin(&file("a", 5), None, 0);
    assert!(matches!(second, Err(StoreError::Busy(_))), "{second:?}");
    // As a process that was forked meanwhile has it.
    let _open = first.claim.file.try_clone().expect("a descriptor");
    drop(first);
    store.begin(&file("a", 5), None, 0).expect("free again");
}

#[test]
fn an_existing_file_is_kept_even_if_it_appears_late() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = Store::open(directory.path(), false).expect("opened");
    let entry = file("a", 5);
    let partial = store.begin(&entry, None, 0).expect("created");
    std::fs::write(directory.path().join("a"), b"old").expect("written");
    let published = store.publish(partial, &entry);
    assert!(matches!(published, Err(StoreError::Exists(_))));
    assert!(matches!(store.check(&entry), Err(StoreError::Exists(_))));
    assert_eq!(names_in(directory.path()), ["a"]);
    let replacing = Store::open(directory.path(), true).expect("opened");
    publish(&replacing, &entry, b"hello").expect("replaced");
    let contents = std::fs::read(directory.path().join("a")).expect("readable");
    assert_eq!(contents, b"hello");
}

#[test]
fn no_symbolic_link_is_followed_out_of_the_directory() {
    let directory = tempfile::tempdir().expect("a directory");
    let inside = directory.path().join("in");
    std::fs::create_dir(&inside).expect("created");
    symlink(directory.path(), inside.join("up")).expect("linked");
    symlink(directory.path().join("outside"), inside.join("a")).expect("linked");
    let store = Store::open(&inside, true).expect("opened");
    let through = store.begin(&file("up/x", 0), None, 0);
    assert!(
        matches!(through, Err(StoreError::OtherKind { .. })),
        "{through:?}"
    );
    publish(&store, &file("a", 1), b"x").expect("replaced");
    assert!(!directory.path().join("outside").exists());
    // A partial file that is a link is not written through either.
    let target = directory.path().join("target");
    symlink(&target, inside.join(temporary("b"))).expect("linked");
    assert!(store.begin(&file("b", 1), None, 0).is_err());
    assert!(!target.exists());
}

#[test]
fn more_than_the_disk_holds_is_refused_before_the_start() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = Store::open(directory.path(), false).expect("opened");
    let error = store.check_space(u64::MAX).expect_err("too much");
    assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
}

#[test]
fn a_missing_directory_is_named() {
    let error = Store::open(Path::new("/nonexistent/out"), false).expect_err("missing");
    assert!(error.to_string().contains("/nonexistent/out"), "{error}");
    let hint = crate::error::Error::from(error).hint();
    assert_eq!(hint, "create the --out directory first");
}

fn mode(path: &Path) -> u32 {
    path.metadata().expect("there").permissions().mode() & 0o777
}

#[test]
fn modes_of_what_was_there_change_only_by_overwriting() {
    let directory = tempfile::tempdir().expect("a directory");
    let (folder, path) = (directory.path().join("d"), directory.path().join("d/a"));
    std::fs::create_dir(&folder).expect("created");
    std::fs::write(&path, b"secret").expect("written");
    for (path, mode) in [(&folder, 0o700), (&path, 0o600)] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("set");
    }
    let time = |path: &Path| {
        path.metadata()
            .and_then(|there| there.modified())
            .expect("a time")
    };
    let before = [time(&folder), time(&path)];
    let entries = [
        Entry {
            mode: 0o777,
            kind: Kind::Directory,
            ..file("d", 0)
        },
        Entry {
            mode: 0o666,
            ..file("d/a", 6)
        },
    ];
    for overwrite in [false, true] {
        let mut store = Store::open(directory.path(), overwrite).expect("opened");
        store.umask = 0;
        assert!(!store.make_directory(&entries[0]).expect("there"));
        let mut present = store.present(&entries[1]).expect("read").expect("there");
        let hashed = store.hash(&entries[1], &mut present).expect("readable");
        store.refresh(&entries[1], hashed.identity).expect("done");
        store.finish(&entries, |_| false).expect("finished");
        let modes = [mode(&folder), mode(&path)];
        match overwrite {
            false => {
                assert_eq!(modes, [0o700, 0o600]);
                assert_eq!([time(&folder), time(&path)], before);
            }
            true => assert_eq!(modes, [0o777, 0o666]),
        }
    }
}

#[test]
fn a_link_takes_no_partial_file_of_another_transfer() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = Store::open(directory.path(), true).expect("opened");
    let mut partial = store.begin(&file("a", 5), None, 0).expect("created");
    partial.write(b"hello").expect("written");
    let link = |target: &str| Entry {
        kind: Kind::Link {
            target: target.into(),
        },
        ..file("a", 0)
    };
    assert!(store.link(&link("x")).expect("linked"));
    assert!(store.link(&link("y")).expect("replaced"));
    store.publish(partial, &file("a", 5)).expect("published");
    let contents = std::fs::read(directory.path().join("a")).expect("readable");
    assert_eq!(contents, b"hello");
    assert_eq!(names_in(directory.path()), ["a"]);
}

#[test]
fn a_partial_file_that_somebody_removed_gives_no_name_away() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = Store::open(directory.path(), true).expect("opened");
    let partial = store.begin(&file("a", 5), None, 0).expect("created");
    std::fs::remove_file(directory.path().join(temporary("a"))).expect("removed");
    let other = store.begin(&file("a", 5), None, 0).expect("created");
    let published = store.publish(partial, &file("a", 5));
    assert!(
        matches!(published, Err(StoreError::Lost(_))),
        "{published:?}"
    );
    other.remove();
    assert!(names_in(directory.path()).is_empty());
}

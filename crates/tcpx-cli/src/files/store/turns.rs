//! Two transfers of one name in every order of their system calls.

use std::cell::RefCell;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use super::tests::file;
use super::*;

thread_local! {
    static TURN: RefCell<Option<Turn>> = const { RefCell::new(None) };
}

/// Waits until the test lets this transfer go on.
pub(super) fn before_call() {
    TURN.with_borrow(|turn| {
        if let Some(turn) = turn {
            turn.wait();
        }
    });
}

/// A transfer's side of a test.
struct Turn {
    stopped: Sender<()>,
    go_on: Receiver<()>,
}

impl Turn {
    fn wait(&self) {
        let _ = self.stopped.send(());
        let _ = self.go_on.recv();
    }
}

/// A transfer that goes on by one system call at a time.
struct Transfer {
    go_on: Sender<()>,
    stopped: Receiver<()>,
    has_ended: bool,
}

impl Transfer {
    /// A transfer that has not made its first call.
    fn start<'scope, T: Send + 'scope>(
        scope: &'scope thread::Scope<'scope, '_>,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> (Self, thread::ScopedJoinHandle<'scope, T>) {
        let (told, stopped) = mpsc::channel();
        let (go_on, permits) = mpsc::channel();
        let thread = scope.spawn(move || {
            let turn = Turn {
                stopped: told,
                go_on: permits,
            };
            turn.wait();
            TURN.set(Some(turn));
            let result = work();
            TURN.set(None);
            result
        });
        let mut transfer = Self {
            go_on,
            stopped,
            has_ended: false,
        };
        transfer.wait();
        (transfer, thread)
    }

    fn wait(&mut self) {
        self.has_ended = self.stopped.recv().is_err();
    }

    /// One call more.
    fn step(&mut self) {
        if !self.has_ended {
            let _ = self.go_on.send(());
            self.wait();
        }
    }
}

/// What becomes of a transfer once it has written everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Published,
    /// Its contents were not those that were sent.
    Removed,
    /// Its peer went away.
    Kept,
}

const BYTES: usize = 5;

/// Transfers the file `a` that holds the letter only; whether it was given its name.
fn transfer(store: &Store, letter: u8, end: End) -> Result<bool, StoreError> {
    let contents = [letter; BYTES];
    let entry = file("a", BYTES as u64);
    store.check(&entry)?;
    let (mut claim, mut from) = (None, 0);
    if let Some(mut present) = store.present(&entry)? {
        let bytes = present.bytes() as usize;
        let is_equal = store
            .hash(&entry, &mut present)
            .is_some_and(|hashed| hashed.hasher.finalize() == blake3::hash(&contents[..bytes]));
        match present {
            Present::Final { .. } if is_equal => return Ok(false),
            Present::Final { .. } => {}
            Present::Partial { claim: held, .. } => {
                claim = Some(held);
                from = if is_equal { bytes } else { 0 };
            }
        }
    }
    let mut partial = store.begin(&entry, claim, from as u64)?;
    for part in contents[from..].chunks(3) {
        partial.write(part)?;
    }
    match end {
        End::Published => store.publish(partial, &entry).map(|()| true),
        End::Removed => {
            partial.remove();
            Ok(false)
        }
        End::Kept => Ok(false),
    }
}

/// What lies in the folder before.
#[derive(Clone, Copy, Debug)]
enum Before {
    Nothing,
    /// What a transfer of the first one's file left.
    Partial,
    /// A file that was given its name by a link, by a process that ended before it took the other
    /// name away.
    BothNames,
}

/// The file, if it is there: never but one of the whole ones.
fn read_published(folder: &Path, schedule: &impl std::fmt::Debug) -> Option<Vec<u8>> {
    let there = std::fs::read(folder.join("a")).ok()?;
    let is_whole = [b'a', b'b', b'c', b'd']
        .iter()
        .any(|&letter| there == [letter; BYTES]);
    let shown = there.escape_ascii().to_string();
    assert!(is_whole, "the file holds {shown}: {schedule:?}");
    Some(there)
}

/// Both transfers: the first one makes `first` calls, the second one `second`, then each goes on to
/// its end.
fn together(before: Before, overwrite: bool, ends: [End; 2], first: usize, second: usize) -> bool {
    let schedule = (before, overwrite, ends, first, second);
    let directory = tempfile::tempdir().expect("a directory");
    let folder = directory.path();
    let partial = folder.join(temporary("a"));
    match before {
        Before::Nothing => {}
        Before::Partial => std::fs::write(&partial, b"aa").expect("written"),
        Before::BothNames => {
            std::fs::write(&partial, b"ccccc").expect("written");
            std::fs::hard_link(&partial, folder.join("a")).expect("linked");
        }
    }
    let stores = [(); 2].map(|()| Store::open(folder, overwrite).expect("opened"));
    let mut reached = false;
    let ended = thread::scope(|scope| {
        let [a, b] = &stores;
        let (mut one, one_ends) = Transfer::start(scope, || transfer(a, b'a', ends[0]));
        let (mut other, other_ends) = Transfer::start(scope, || transfer(b, b'b', ends[1]));
        for _ in 0..first {
            one.step();
            read_published(folder, &schedule);
        }
        for _ in 0..second {
            other.step();
            read_published(folder, &schedule);
        }
        reached |= one.has_ended || other.has_ended;
        while !one.has_ended {
            one.step();
            read_published(folder, &schedule);
        }
        while !other.has_ended {
            other.step();
            read_published(folder, &schedule);
        }
        drop((one, other));
        [one_ends, other_ends].map(|end| end.join().expect("no panic"))
    });
    let there = read_published(folder, &schedule);
    let published = [b'a', b'b']
        .into_iter()
        .zip(&ended)
        .filter(|(_, end)| matches!(end, Ok(true)))
        .map(|(letter, _)| vec![letter; BYTES]);
    let published: Vec<_> = published.collect();
    assert!(overwrite || published.len() < 2, "{schedule:?}: {ended:?}");
    if !published.is_empty() {
        let is_one = there.is_some_and(|there| published.contains(&there));
        assert!(is_one, "{schedule:?}: {ended:?}");
    }
    // Nothing that they left is in the way of the next one.
    let next = Store::open(folder, true).expect("opened");
    transfer(&next, b'd', End::Published).expect("published");
    assert_eq!(
        read_published(folder, &schedule),
        Some(b"ddddd".to_vec()),
        "{schedule:?}"
    );
    assert!(!partial.exists(), "{schedule:?}");
    reached
}

#[test]
fn two_transfers_of_a_name_never_spoil_a_file() {
    for before in [Before::Nothing, Before::Partial, Before::BothNames] {
        for overwrite in [false, true] {
            for one in [End::Published, End::Kept] {
                for other in [End::Published, End::Removed, End::Kept] {
                    let mut first = 0;
                    while !together(before, overwrite, [one, other], first, 0) {
                        let mut second = 1;
                        while !together(before, overwrite, [one, other], first, second) {
                            second += 1;
                        }
                        first += 1;
                    }
                }
            }
        }
    }
}

//! What to do about each error, and the check of the doctor that explains it: one table.

use std::borrow::Cow;
use std::io;

use tcpx::{ErrorKind, NetworkError};
use tcpx_net::{IoError, SocketError};

use crate::doctor::catalogue::find;
use crate::doctor::check::Check;
use crate::error::{Error, went_away};
use crate::files::store::StoreError;
use crate::key::KeyError;
use crate::messages::Reason;
use crate::plugin_file::PluginFileError;
use crate::plugin_file::contents::ContentsError;

/// What a person can do about an error.
#[derive(Debug)]
pub(crate) struct Advice {
    pub(crate) hint: Cow<'static, str>,
    /// The check that explains it, where the error's text names none.
    check: Option<&'static str>,
}

impl Advice {
    /// With the check that explains the error.
    fn with_check(mut self, check: &'static str) -> Self {
        self.check = Some(check);
        self
    }
}

impl<T: Into<Cow<'static, str>>> From<T> for Advice {
    fn from(hint: T) -> Self {
        Self {
            hint: hint.into(),
            check: None,
        }
    }
}

/// The row of an error.
pub(crate) fn of(error: &Error) -> Advice {
    match error {
        Error::Usage { hint, .. } | Error::Peer(Reason { hint, .. }) => hint.clone().into(),
        Error::Failed { hint, .. } => without_marks(hint).into(),
        Error::At { source, .. } => of(source),
        Error::Engine(error) => Advice {
            check: error.check(),
            ..of_engine(error)
        },
        Error::Memory { source, .. } => split(&source.to_string()).1.to_owned().into(),
        Error::Key(KeyError::Missing) => {
            "give the key that the server printed: where the client asks for it, in TCPX_KEY, or by --key-file FILE (--insecure at both sides uses none)".into()
        }
        Error::Key(KeyError::Client { .. }) => {
            "leave that key out and the server makes one, or name the server's own with --key-file (`tcpx key FILE` makes it)".into()
        }
        // A file that can be read says itself what to do about it.
        Error::Key(KeyError::File(error)) if error.to_string().contains("; ") => {
            split(&error.to_string()).1.to_owned().into()
        }
        Error::Key(KeyError::Write { .. }) => {
            "name a file in a folder that this user may write".into()
        }
        Error::Key(_) => "copy the key that the server printed, or make one at the server with `tcpx key FILE`".into(),
        Error::Plugin(error) => of_file(error),
        Error::PluginContents(error) => of_contents(error),
        Error::Manifest(_) => "rename the file at the sender, then send it again".into(),
        Error::Store(error) => of_store(error).into(),
        Error::LeftOut { .. } => "nothing else is affected: rename what has a bad name, send again what can be read by now and nobody writes to, or leave it out with --exclude".into(),
        Error::Interrupted { .. } => RESUME.into(),
        Error::Io { .. } => "look at the path and its permissions, then try again".into(),
        Error::Process { .. } => "look at the limits of this user (processes, open files), then try again".into(),
        Error::Output(_) => "make room where the output goes, then run it again".into(),
        Error::NoClient { refusals, .. } if refusals.count > 0 => {
            "run the line that this server prints at the client: it has this start's key".into()
        }
        Error::NoClient { .. } => {
            "run the line that this server prints at the client, see that a firewall lets the port through, or allow more with --wait".into()
        }
        Error::NothingMoved { .. } => Advice::from(STALLED).with_check("TCPX-D034"),
        Error::Address { .. } => "give HOST or HOST:PORT, a port up to 65535; see why a name is not found with `getent hosts NAME`".into(),
        Error::Contents(_) | Error::Digest { .. } => {
            Advice::from("do not use what arrived; run `tcpx demo` on both hosts to see whether one of them is at fault").with_check("TCPX-D035")
        }
        Error::Unexpected { .. } => "run the same version and the same command on both sides".into(),
    }
}

/// The check that explains `error`, if there is one.
pub(crate) fn check_for(error: &Error) -> Option<&'static Check> {
    // A mark comes from the place that knows most.
    marked(&error.full_text()).or_else(|| find(of(error).check?))
}

/// True whether the server has ended or stays, and whatever key it has then.
const RESUME: &str = "run the same line again if the server stays (--keep, --serve), else start the server again and run the line that it prints then: the transfer goes on with what is there";

const STALLED: &str = "look at the other side and at the path between the hosts (a smaller MTU on the way drops large packets: `tcpx doctor --explain D007`), or allow more with --timeout";

/// Where the library's own advice is none or is for a programmer, what to do in this program.
fn of_engine(error: &tcpx::Error) -> Advice {
    let by_cause = |cause: &IoError| match cause.kind {
        io::ErrorKind::AddrInUse => {
            Some("end the process that listens there, or choose another --port")
        }
        io::ErrorKind::AddrNotAvailable => {
            Some("give --bind an address that this host has (`tcpx devices` lists them)")
        }
        io::ErrorKind::PermissionDenied => Some("choose a --port of 1024 or more"),
        _ => None,
    };
    let own = match error {
        error if went_away(error).is_some() => {
            Some("look at the other side: its last lines say why it ended, if it could")
        }
        tcpx::Error::Setting {
            what: "chunk size", ..
        } => Some("give --chunk-bytes a multiple of 4KiB, or leave it out"),
        tcpx::Error::Setting { .. } => {
            Some("correct that setting (`--help` says what each one takes)")
        }
        tcpx::Error::Operation { .. } if error.kind() == ErrorKind::TimedOut => Some(STALLED),
        tcpx::Error::Network(error) => match (error, error.socket()) {
            (NetworkError::TimedOut { .. }, _) | (_, Some(SocketError::Unanswered { .. })) => Some(
                "see that the peer is alive and not overloaded and that no smaller MTU on the way drops large packets (`tcpx doctor --explain D007`), or allow more with --timeout",
            ),
            (_, Some(SocketError::Io { cause, .. })) => by_cause(cause),
            _ => None,
        },
        _ => None,
    };
    match own {
        Some(hint) => hint.into(),
        None => split(&without_marks(&error.to_string()))
            .1
            .to_owned()
            .into(),
    }
}

pub(crate) fn of_file(error: &PluginFileError) -> Advice {
    let missing = |hint: &'static str| Advice::from(hint).with_check("TCPX-D010");
    match error {
        PluginFileError::Missing(_) => {
            missing("give the path of an NCCL network plugin with --plugin PATH")
        }
        PluginFileError::NotFound(_) => missing(
            "give its path with --plugin PATH, or put libnccl-net-tcpx.so beside the tcpx program or into ../lib from there (a package brings both; in a source tree `cargo build --package tcpx-nccl` makes it, with the program's --release or --profile)",
        ),
        PluginFileError::BuildId(error) => {
            Advice::from(split(&error.to_string()).1.to_owned()).with_check("TCPX-D013")
        }
    }
}

pub(crate) fn of_contents(error: &ContentsError) -> Advice {
    let (hint, check) = match error {
        ContentsError::Unreadable { error, .. } if error.kind() == io::ErrorKind::NotFound => (
            "give the path of an NCCL network plugin, a .so file that is there",
            "TCPX-D010",
        ),
        ContentsError::Unreadable { .. } => (
            "give this user the right to read the file and to enter its folders",
            "TCPX-D010",
        ),
        ContentsError::NotAFile(_) => (
            "give the path of the .so file itself, not of its folder",
            "TCPX-D010",
        ),
        ContentsError::TooLarge { .. } | ContentsError::NotElf { .. } => (
            "give the path of an NCCL network plugin, a .so file for Linux",
            "TCPX-D011",
        ),
        ContentsError::Damaged { .. } => (
            "copy the file again: its copy was cut short or damaged",
            "TCPX-D011",
        ),
        ContentsError::NotShared { .. } => (
            "give the .so file, not a program or an object file",
            "TCPX-D011",
        ),
        ContentsError::Machine { .. } => (
            "install the build of the plugin for this host's processor",
            "TCPX-D011",
        ),
        ContentsError::NoTable { .. } => (
            "give the network plugin itself (its file is often called libnccl-net*.so), of a version that exports v5 to v12",
            "TCPX-D013",
        ),
    };
    Advice::from(hint).with_check(check)
}

fn of_store(error: &StoreError) -> &'static str {
    match error {
        StoreError::Exists(_) => {
            "receive with --overwrite to replace it, or choose another --out directory"
        }
        StoreError::OtherKind { .. } => "move it away, or choose another --out directory",
        StoreError::Busy(_) => "wait for the other transfer, or choose another --out directory",
        StoreError::Lost(_) => "leave files named .tcpx-*.partial alone, then send it again",
        StoreError::NoSpace { .. } => "free some space there, or choose another --out directory",
        StoreError::Io { source, .. } => match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "free some space there, then send it again: the transfer goes on with what is there"
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "choose an --out directory that this user may write"
            }
            io::ErrorKind::NotFound => "create the --out directory first",
            io::ErrorKind::FileTooLarge => {
                "raise the file size limit (ulimit -f), then send it again: the transfer goes on with what is there"
            }
            _ => "look at the --out directory and its file system, then try again",
        },
    }
}

/// Splits an error of the libraries, which ends with what to do after its last semicolon.
pub(crate) fn split(text: &str) -> (&str, &str) {
    text.rsplit_once("; ").unwrap_or((
        text,
        "run it again with --debug on both sides, which shows each step",
    ))
}

/// How an error of the libraries names the check that explains it.
const MARK: &str = " [TCPX-D";

/// `text` without the marks that name checks.
pub(crate) fn without_marks(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(MARK) {
        let Some(length) = rest[start..].find(']') else {
            break;
        };
        out.push_str(&rest[..start]);
        rest = &rest[start + length + 1..];
    }
    out + rest
}

/// The check that an error's text names.
fn marked(text: &str) -> Option<&'static Check> {
    let start = text.find(MARK)? + " [".len();
    let length = text[start..].find(']')?;
    find(&text[start..start + length])
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nccl_net::{CallError, LoadError, ResultCode};

    use super::*;

    const CALLS: [&str; 18] = [
        "init",
        "devices",
        "getProperties",
        "listen",
        "connect",
        "accept",
        "regMr",
        "regMrDmaBuf",
        "deregMr",
        "isend",
        "irecv",
        "iflush",
        "test",
        "irecvConsumed",
        "closeSend",
        "closeRecv",
        "closeListen",
        "finalize",
    ];

    #[test]
    fn every_check_that_a_plugin_call_names_is_in_the_catalogue() {
        let mut named = 0;
        for call in CALLS {
            for rc in 1..8 {
                let error = CallError::new(call, ResultCode::from_raw(rc));
                let Some(id) = error.check() else { continue };
                assert!(find(id).is_some(), "{call} {rc}: {id}");
                let text = error.to_string();
                assert_eq!(marked(&text).map(|check| check.id), Some(id), "{text}");
                assert!(!without_marks(&text).contains("TCPX-D"), "{text}");
                named += 1;
            }
        }
        assert!(named > 5);
    }

    #[test]
    fn the_historic_codes_lead_to_their_checks() {
        let check = |call, rc| CallError::new(call, ResultCode::from_raw(rc)).check();
        assert_eq!(check("regMr", 3), Some("TCPX-D030"));
        assert_eq!(check("test", 2), Some("TCPX-D031"));
        assert_eq!(check("accept", 3), Some("TCPX-D032"));
        assert_eq!(check("init", 3), Some("TCPX-D033"));
        assert_eq!(check("isend", 3), Some("TCPX-D036"));
    }

    #[test]
    fn every_error_of_the_engine_leads_to_a_check_of_the_catalogue() {
        let peer = std::net::SocketAddr::from(([10, 0, 0, 2], 12_345));
        let refused = NetworkError::Socket(SocketError::Refused { peer });
        let late = NetworkError::TimedOut {
            peer,
            operation: "connecting the plugin's comms",
        };
        let stuck = tcpx::Error::EngineStuck {
            peer,
            stuck: Duration::from_secs(9),
        };
        let held = tcpx::Error::MemoryHeld {
            error: Box::new(stuck.clone()),
        };
        for (error, id) in [
            (tcpx::Error::from(refused), "TCPX-D037"),
            (tcpx::Error::from(late), "TCPX-D032"),
            (stuck, "TCPX-D034"),
            (held, "TCPX-D034"),
        ] {
            let check = check_for(&Error::from(error)).expect("a check");
            assert_eq!(check.id, id);
        }
        assert!(check_for(&tcpx::Error::Closed { peer }.into()).is_none());
    }

    #[test]
    fn a_plugin_errors_mark_survives_the_engine() {
        let call = CallError::new("accept", ResultCode::InternalError);
        let error = tcpx::Error::from(NetworkError::Plugin {
            network: "plugin:x".into(),
            call: "accept",
            cause: call.to_string(),
        });
        let error = Error::from(error);
        assert_eq!(check_for(&error).map(|check| check.id), Some("TCPX-D032"));
        assert!(!error.what().contains("TCPX-D") && !error.hint().contains("TCPX-D"));
    }

    #[test]
    fn a_file_that_does_not_load_leads_to_its_check() {
        let id = |error: LoadError| marked(&error.to_string()).map(|check| check.id);
        let path = || "/x.so".into();
        assert_eq!(id(LoadError::NoFile { path: path() }), Some("TCPX-D010"));
        let not_a_library = |reason: &str| LoadError::NotALibrary {
            path: path(),
            reason: reason.into(),
        };
        assert_eq!(id(not_a_library("invalid ELF header")), Some("TCPX-D011"));
        assert_eq!(
            id(not_a_library(
                "/x.so: failed to map segment from shared object"
            )),
            Some("TCPX-D012")
        );
        let looked_for = Vec::new();
        assert_eq!(
            id(LoadError::NoTable {
                path: path(),
                looked_for
            }),
            Some("TCPX-D013")
        );
    }

    #[test]
    fn marks_are_taken_out_wherever_they_stand() {
        assert_eq!(without_marks("a [TCPX-D001]; b [TCPX-D003]"), "a; b");
        assert_eq!(without_marks("a [TCPX-D001"), "a [TCPX-D001");
        assert_eq!(without_marks(""), "");
    }
}

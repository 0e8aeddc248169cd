//! Which check explains an error.

use super::catalogue::find;
use super::check::Check;
use crate::error::Error;
use crate::plugin_file::PluginFileError;
use crate::plugin_file::contents::ContentsError;

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

/// The check that explains `error`, if there is one.
pub(crate) fn check_for(error: &Error) -> Option<&'static Check> {
    // A mark comes from the place that knows most.
    if let Some(check) = marked(&error.full_text()) {
        return Some(check);
    }
    find(match error {
        Error::At { source, .. } => return check_for(source),
        Error::NothingMoved { .. } => "TCPX-D034",
        Error::Engine(error) => error.check()?,
        Error::Plugin(PluginFileError::Missing(_) | PluginFileError::NotFound(_)) => "TCPX-D010",
        Error::Plugin(PluginFileError::BuildId(_)) => "TCPX-D013",
        Error::PluginContents(error) => match error {
            ContentsError::Unreadable { .. } | ContentsError::NotAFile(_) => "TCPX-D010",
            ContentsError::NoTable { .. } => "TCPX-D013",
            _ => "TCPX-D011",
        },
        Error::Contents(_) | Error::Digest { .. } => "TCPX-D035",
        _ => return None,
    })
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
        let refused = tcpx_net::NetworkError::Socket(tcpx_net::SocketError::Refused { peer });
        let late = tcpx_net::NetworkError::TimedOut {
            peer,
            operation: "connecting the plugin's comms",
        };
        let peer = peer.into();
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
    fn the_mark_of_a_plugin_s_error_survives_the_way_through_the_engine() {
        let call = CallError::new("accept", ResultCode::InternalError);
        let error = tcpx::Error::from(tcpx_net::NetworkError::Plugin {
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
        assert_eq!(without_marks("a [TCPX-D001]; b [TCPX-D002]"), "a; b");
        assert_eq!(without_marks("a [TCPX-D001"), "a [TCPX-D001");
        assert_eq!(without_marks(""), "");
    }
}

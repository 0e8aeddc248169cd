//! Settings of C as settings of the engine.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tcpx::{
    After, Auth, Deadlines, Gpu, Level, Local, Options, ProgressMode, TcpNetwork, TcpOptions,
};

use super::failure::setting;
use super::text::{bytes, duration, text};
use super::types::*;
use crate::error::{Failure, Outcome};

/// Settings of an endpoint or connection.
///
/// # Safety
/// `options` is NULL or points to a filled structure whose key and key_file are NULL or strings.
pub(super) unsafe fn connection_options(
    options: *const tcpx_options,
    auth: impl FnOnce() -> Outcome<Auth>,
) -> Outcome<Options> {
    // SAFETY: the caller's promise.
    let Some(given) = (unsafe { options.as_ref() }) else {
        return Ok(Options::tcp(auth()?));
    };
    if given.reserved != [0; 3] {
        return Err(not_zero("tcpx_options"));
    }
    let auth = match (
        given.key.is_null(),
        given.key_file.is_null(),
        given.insecure != 0,
    ) {
        (true, true, true) => Auth::Insecure,
        (true, true, false) => auth()?,
        (false, true, false) => {
            // SAFETY: the caller's promise.
            let text = unsafe { text("key", given.key) }?;
            Auth::parse(text).map_err(|error| setting(error.to_string()))?
        }
        (true, false, false) => {
            // SAFETY: the caller's promise.
            let path = unsafe { text("key_file", given.key_file) }?;
            Auth::of_file(Path::new(path)).map_err(|error| setting(error.to_string()))?
        }
        (_, _, true) => {
            return Err(setting("insecure takes no key: set one of the two alone"));
        }
        (false, false, false) => {
            return Err(setting("key and key_file: set one of the two alone"));
        }
    };
    let local = match given.local {
        TCPX_LOCAL_DEFAULT => TcpOptions::default().local,
        TCPX_LOCAL_OFF => Local::Off,
        TCPX_LOCAL_ON => Local::On,
        other => return Err(no_such("local", other)),
    };
    let network = TcpNetwork::new(TcpOptions {
        local,
        ..TcpOptions::default()
    });
    let mut made = Options::new(Arc::new(network), auth);
    made.gpu = match given.memory {
        TCPX_MEMORY_HOST => None,
        TCPX_MEMORY_CUDA => Some(gpu(given.device)?),
        other => return Err(no_such("memory", other)),
    };
    made.encrypt = given.encrypt != 0;
    made.progress = match given.progress {
        TCPX_PROGRESS_BACKGROUND => ProgressMode::Background,
        TCPX_PROGRESS_MANUAL => ProgressMode::Manual,
        other => return Err(no_such("progress", other)),
    };
    made.channels = u16::try_from(given.lanes)
        .map_err(|_| setting(format!("{} lanes: at most 65535", given.lanes)))?;
    let or = |ms: u32, default: Duration| match ms {
        0 => default,
        ms => duration(ms),
    };
    made.connect_timeout = or(given.connect_timeout_ms, made.connect_timeout);
    made.dead_after = or(given.dead_after_ms, made.dead_after);
    made.deadlines = deadlines(given.timeout_ms, given.stall_ms).unwrap_or(made.deadlines);
    made.one_time = given.one_time != 0;
    let (limits, given) = (&mut made.limits, &given.limits);
    for (limit, given) in [
        (&mut limits.puts, given.puts),
        (&mut limits.notifications, given.notifications),
        (&mut limits.gets, given.gets),
        (&mut limits.asks, given.asks),
        (&mut limits.windows, given.windows),
        (&mut limits.tags, given.tags),
        (&mut limits.pieces, given.pieces),
        (&mut limits.list_windows, given.list_windows),
    ] {
        if given != 0 {
            *limit = given;
        }
    }
    Ok(made)
}

/// `None`: neither is set.
fn deadlines(timeout_ms: u32, stall_ms: u32) -> Option<Deadlines> {
    match (timeout_ms, stall_ms) {
        (0, 0) => None,
        (total, 0) => Some(Deadlines {
            // The time in all is what the caller has set; a shorter limit of ours must not end it
            // before.
            stall: duration(total),
            total: Some(duration(total)),
        }),
        (total, stall) => Some(Deadlines {
            stall: duration(stall),
            total: (total != 0).then(|| duration(total)),
        }),
    }
}

pub(super) fn gpu(device: u32) -> Outcome<Gpu> {
    Ok(Gpu::open(device).map_err(tcpx::Error::from)?)
}

fn no_such(what: &str, number: i32) -> Failure {
    Failure::argument(format!(
        "{what} is {number}: pass one of the header's numbers"
    ))
}

fn not_zero(what: &str) -> Failure {
    Failure::argument(format!(
        "a reserved field of {what} is not 0: fill the structure with zeros before you set fields; \
         a field of a newer header needs a newer libtcpx"
    ))
}

/// Settings of one transfer.
#[derive(Debug)]
pub(super) struct TransferOptions<'a> {
    pub(super) level: Level,
    pub(super) after: After,
    pub(super) deadlines: Option<Deadlines>,
    pub(super) notification: Option<&'a [u8]>,
}

impl TransferOptions<'_> {
    /// # Safety
    /// `options` is NULL or points to a filled structure whose notification can be read, and whose
    /// stream or event is one, as [`After::stream`] and [`After::event`] say.
    pub(super) unsafe fn new(options: *const tcpx_transfer_options) -> Outcome<Self> {
        // SAFETY: the caller's promise.
        let Some(given) = (unsafe { options.as_ref() }) else {
            return Ok(Self {
                level: Level::Placed,
                after: After::DefaultStreams,
                deadlines: None,
                notification: None,
            });
        };
        if given.reserved != [0; 4] {
            return Err(not_zero("tcpx_transfer_options"));
        }
        let stream = given.stream.expose_provenance() as u64;
        Ok(Self {
            level: match given.level {
                TCPX_LEVEL_PLACED => Level::Placed,
                TCPX_LEVEL_SENT => Level::Sent,
                TCPX_LEVEL_VERIFIED => Level::Verified,
                other => return Err(no_such("level", other)),
            },
            after: match given.after {
                TCPX_AFTER_DEFAULT_STREAMS => After::DefaultStreams,
                TCPX_AFTER_NOTHING => After::Nothing,
                // SAFETY: the caller's promise.
                TCPX_AFTER_STREAM => unsafe { After::stream(stream) },
                // SAFETY: the caller's promise.
                TCPX_AFTER_EVENT => unsafe { After::event(stream) },
                other => return Err(no_such("after", other)),
            },
            deadlines: deadlines(given.timeout_ms, given.stall_ms),
            notification: if given.notification.is_null() {
                None
            } else {
                // SAFETY: the caller's promise.
                Some(unsafe {
                    bytes("notification", given.notification, given.notification_bytes)
                }?)
            },
        })
    }

    /// For what carries no notification.
    pub(super) fn without_notification(self) -> Outcome<Self> {
        match self.notification {
            None => Ok(self),
            Some(_) => Err(Failure::argument(
                "notification is not NULL: puts, gets and batches carry one; send it as a message, \
                 or call tcpx_notify",
            )),
        }
    }
}

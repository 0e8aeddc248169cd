//! What the two programs tell each other besides the payload: small JSON messages over the same
//! connection.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tcpx::{Connection, Deadlines, Level, Region, Transfer};
pub(crate) use tcpx_bench::orders::{Reason, brief};

use crate::error::Error;
use crate::files::digest::DigestKey;
use crate::interrupt::{self, LOOK};

/// Tag of the payload, as the historic programs used it.
pub(crate) const PAYLOAD: u64 = 42;
/// Tag of the client's request.
pub(crate) const REQUEST: u64 = 1;
/// Tag of the server's answer to the request.
pub(crate) const ANSWER: u64 = 2;
/// Tag of the client's last word.
pub(crate) const END: u64 = 3;
/// Tag of the server's last word.
pub(crate) const VERDICT: u64 = 4;
/// Tag of the client's list of what it sends.
pub(crate) const MANIFEST: u64 = 5;
/// Tag of the server's list of what it has of that already.
pub(crate) const PRESENT: u64 = 6;
/// Tag of the client's answer: digests of what it has of these.
pub(crate) const DIGESTS: u64 = 7;
/// Tag of the server's answer to that: which of them it keeps.
pub(crate) const KEPT: u64 = 8;

/// Tag of a server's answer to a client that fetches: what it sends.
pub(crate) const OFFER: u64 = 9;

/// A bound for what waits during a whole transfer, whose pieces have limits of their own.
pub(crate) const LONGEST_TRANSFER: Duration = Duration::from_secs(7 * 24 * 3600);

/// The longest message, in bytes.
const LONGEST: usize = 64 << 10;

/// What a client wants to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "want", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// Nothing but the connection itself.
    Nothing,
    /// One payload with tag 42: the greeting, then the pattern of `seed`.
    Greeting { bytes: u64, seed: u64 },
    /// The client sends files and directories.
    Push(Offer),
    /// The client fetches files and directories of a folder that the server shares.
    Pull(Wanted),
    /// Measurements: orders follow.
    Measure,
}

/// What the sender of files offers: a manifest of `bytes` with this BLAKE3 digest follows. `key` is
/// that of the digests behind it: the first message of a connection travels sealed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Offer {
    pub(crate) bytes: u64,
    pub(crate) digest: String,
    pub(crate) key: DigestKey,
    /// Both ends compare what they have, and nothing is moved.
    pub(crate) dry_run: bool,
}

/// What a client fetches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Wanted {
    /// Below the folder that the server shares; `.` is all of it.
    pub(crate) paths: Vec<String>,
    pub(crate) follow: bool,
    pub(crate) include: Vec<String>,
    pub(crate) exclude: Vec<String>,
    pub(crate) dry_run: bool,
}

impl Request {
    /// For a person: what it is, and the server that it is for.
    fn words(&self) -> (&'static str, &'static str) {
        match self {
            Self::Nothing => ("a request to connect", "tcpx connection server"),
            Self::Greeting { .. } => ("a request to send a greeting", "tcpx transfer server"),
            Self::Push(_) => ("a request to send files", "tcpx receive"),
            Self::Pull(_) => ("a request to fetch files", "tcpx send --serve DIR"),
            Self::Measure => ("a request to measure", "tcpx perf server"),
        }
    }
}

impl From<&Error> for Reason {
    fn from(error: &Error) -> Self {
        Self {
            why: brief(&error.what()),
            hint: brief(&error.hint()),
        }
    }
}

/// The server's answer to a request: it is ready, and a list of so many bytes follows that says
/// what of the files is there already.
pub(crate) type Answer = Result<u64, Reason>;

/// The server's answer to a client that fetches.
pub(crate) type Offered = Result<Offer, Reason>;

/// The last word of either side about files, at any time: the keyed digest of the manifest and all
/// contents, once everything was sent or is in its place.
pub(crate) type LastWord = Result<String, Reason>;

/// A message that is expected: its receive is posted.
#[derive(Debug)]
pub(crate) struct Expected {
    region: Region,
    transfer: Transfer,
}

/// Posts the receive of a message.
///
/// `limit` bounds the whole wait: a message that comes after a payload stalls for as long as that
/// takes.
pub(crate) fn expect(
    connection: &Connection,
    tag: u64,
    limit: Duration,
) -> Result<Expected, Error> {
    let region = Region::host(LONGEST).map_err(Error::memory("make room for a message"))?;
    let deadlines = Deadlines {
        stall: limit,
        total: Some(limit),
    };
    let transfer = connection
        .receive(region.all(), tag)
        .level(Level::Verified)
        .deadlines(deadlines)
        .start()?;
    Ok(Expected { region, transfer })
}

impl Expected {
    /// Waits for the message and reads it.
    pub(crate) fn wait<T: DeserializeOwned>(self, what: &'static str) -> Result<T, Error> {
        loop {
            if let Some(end) = self.transfer.wait_timeout(LOOK) {
                return read(&self.region, end?.bytes, what);
            }
            interrupt::check()?;
        }
    }

    /// Waits for the message, `limit` at most, and reads it.
    pub(crate) fn wait_at_most<T: DeserializeOwned>(
        self,
        limit: Duration,
        what: &'static str,
    ) -> Result<T, Error> {
        match self.transfer.wait_timeout(limit) {
            Some(end) => read(&self.region, end?.bytes, what),
            None => Err(Error::failed(
                format!("{what} did not come within {}", crate::sizes::time(limit)),
                "look at the other side, or allow more with --timeout",
            )),
        }
    }

    /// The message, if it has come; a receive that failed never brings one.
    pub(crate) fn peek<T: DeserializeOwned>(&self, what: &'static str) -> Option<Result<T, Error>> {
        let report = self.transfer.test()?.ok()?;
        Some(read(&self.region, report.bytes, what))
    }

    /// The running receive.
    pub(crate) fn transfer(&self) -> &Transfer {
        &self.transfer
    }
}

/// Sends a message and waits until the peer has it; the connection's own limits bound the wait.
pub(crate) fn send_message<T: Serialize>(
    connection: &Connection,
    tag: u64,
    message: &T,
) -> Result<(), Error> {
    let text = serde_json::to_vec(message)
        .ok()
        .filter(|text| text.len() <= LONGEST)
        .ok_or_else(|| {
            Error::failed(
                format!("a message for the peer is longer than {LONGEST} bytes"),
                "use shorter names",
            )
        })?;
    let region = Region::host(text.len()).map_err(Error::memory("make room for a message"))?;
    region
        .write_from(0, &text)
        .map_err(Error::memory("write a message"))?;
    let send = connection.send(region.all(), tag);
    send.level(Level::Verified).start()?.wait()?;
    Ok(())
}

fn read<T: DeserializeOwned>(region: &Region, bytes: u64, what: &'static str) -> Result<T, Error> {
    let length = usize::try_from(bytes).unwrap_or(LONGEST).min(LONGEST);
    region
        .with_bytes(..length, |text| parse(text, what))
        .map_err(Error::memory("read a message"))?
}

/// Reads a message; what is in it came from the peer.
fn parse<T: DeserializeOwned>(text: &[u8], what: &'static str) -> Result<T, Error> {
    serde_json::from_slice(text).map_err(|error| {
        Error::unexpected(
            what,
            format!(
                "\"{}\" ({error})",
                text[..text.len().min(80)].escape_ascii()
            ),
        )
    })
}

/// Says that this side is ready.
pub(crate) fn tell_ready(connection: &Connection) -> Result<(), Error> {
    send_message(connection, ANSWER, &Answer::Ok(0))
}

/// Waits until the server is ready.
pub(crate) fn ready(answer: Expected) -> Result<(), Error> {
    let expected = "an answer to the request";
    match answer.wait::<Answer>(expected)?? {
        0 => Ok(()),
        _ => Err(Error::unexpected(expected, "a list of files")),
    }
}

/// Tells the client that this side refuses, and gives back why. That is the news here, even where
/// the client did not stay to hear it.
pub(crate) fn refused(connection: &Connection, tag: u64, reason: Reason, why: Error) -> Error {
    if let Err(error) = send_message(connection, tag, &Answer::Err(reason)) {
        tracing::debug!(%error, "the peer did not hear of the refusal");
    }
    why
}

/// Tells a client that this server does something else; returns the server's own error.
pub(crate) fn refuse(connection: &Connection, expected: &'static str, arrived: &Request) -> Error {
    let (words, instead) = arrived.words();
    let reason = Reason {
        why: format!("the server waits for {expected}"),
        hint: format!("start `{instead}` there, or run the line that the server printed"),
    };
    // Where the client listens.
    let tag = match arrived {
        Request::Pull(_) => OFFER,
        _ => ANSWER,
    };
    refused(connection, tag, reason, Error::unexpected(expected, words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_their_encoding() {
        let request = Request::Push(Offer {
            bytes: u64::MAX,
            digest: "a b".into(),
            key: DigestKey::from([7; 32]),
            dry_run: false,
        });
        let text = serde_json::to_vec(&request).expect("encoded");
        assert_eq!(
            parse::<Request>(&text, "a request").expect("decoded"),
            request
        );
    }

    #[test]
    fn strange_messages_are_errors_that_show_them_escaped() {
        for text in [
            &b""[..],
            b"{}",
            b"\xff\x1b[2J",
            br#"{"want":"greeting","bytes":-1,"seed":0}"#,
            br#"{"want":"greeting","bytes":1,"seed":0,"more":1}"#,
            &[b'['; 4096],
        ] {
            let error = parse::<Request>(text, "a request")
                .expect_err("strange")
                .to_string();
            assert!(error.contains("expected a request"), "{error}");
            assert!(!error.contains('\u{1b}'), "{error}");
        }
    }

    #[test]
    fn the_longest_reason_fits_in_a_message() {
        let why = brief(&"\u{1f980}".repeat(10_000));
        let hint = why.clone();
        let refusal = Answer::Err(Reason { why, hint });
        assert!(serde_json::to_vec(&refusal).expect("encoded").len() <= LONGEST);
    }
}

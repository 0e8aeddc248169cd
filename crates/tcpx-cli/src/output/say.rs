//! Lines on standard output. A closed pipe only ends the listening; any other failure is kept for
//! the end.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use crate::advice::check_for;
use crate::error::Error;
use crate::output::OutputArgs;

static JSON: AtomicBool = AtomicBool::new(false);
static DEBUG: AtomicBool = AtomicBool::new(false);
static QUIET: AtomicBool = AtomicBool::new(false);

/// Has all that is printed follow the flags.
pub(crate) fn follow(flags: &OutputArgs) {
    JSON.store(flags.json, Ordering::Relaxed);
    DEBUG.store(flags.debug, Ordering::Relaxed);
    QUIET.store(flags.quiet, Ordering::Relaxed);
}

/// Whether the result is printed as JSON.
pub(crate) fn is_json() -> bool {
    JSON.load(Ordering::Relaxed)
}

/// Whether to show what helps to find a fault.
pub(crate) fn is_debug() -> bool {
    DEBUG.load(Ordering::Relaxed)
}

/// Whether standard error can take colours and what moves: a terminal, and not one that calls
/// itself dumb.
pub(crate) fn is_lively() -> bool {
    let is_dumb = std::env::var_os("TERM").is_some_and(|name| name == "dumb");
    io::stderr().is_terminal() && !is_dumb
}

/// Prints a line that the person needs at the other side, also where they asked for quiet.
pub(crate) fn invitation(text: fmt::Arguments<'_>) {
    match is_quiet() {
        true => aside_line(text),
        false => line(text),
    }
}

/// Whether progress is shown.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Prints a line at once, so that a program reading a pipe sees it too.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    if is_quiet() {
        return;
    }
    if is_json() {
        return aside_line(text);
    }
    let mut out = io::stdout().lock();
    if let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush())
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        LOST.store(error.raw_os_error().unwrap_or(-1), Ordering::Relaxed);
    }
}

/// The system's number of the last error of a write to standard output; 0 without one.
static LOST: AtomicI32 = AtomicI32::new(0);

/// [`Error::Output`] if something that was said did not reach standard output: a script that reads
/// the rest would take it for everything.
pub(crate) fn check_output() -> Result<(), Error> {
    match LOST.load(Ordering::Relaxed) {
        0 => Ok(()),
        number => Err(Error::Output(io::Error::from_raw_os_error(number))),
    }
}

/// Prints a line on standard error.
pub(crate) fn aside_line(text: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints what went wrong, what to do, and which check of the doctor says more, each on one line.
pub(crate) fn failure(error: &Error) {
    aside!("{}", block(error).join("\n"));
}

/// The lines of an error, four at most.
pub(crate) fn block(error: &Error) -> Vec<String> {
    let mut lines = vec![format!("error: {}", one_line(&error.what()))];
    lines.extend(
        error
            .place()
            .map(|place| format!("where: {}", one_line(place))),
    );
    lines.push(format!("hint: {}", one_line(&error.hint())));
    lines.extend(check_for(error).map(|check| {
        let (id, title) = (check.id, check.title);
        format!("check: `tcpx doctor --explain {id}` ({title})")
    }));
    lines
}

/// `text` without line ends or other control characters: parts of it may come from a peer.
pub(crate) fn one_line(text: &str) -> String {
    text.split(|c: char| c.is_control())
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

/// `println!` that survives a closed pipe.
macro_rules! say {
    ($($text:tt)*) => { $crate::output::say::line(format_args!($($text)*)) };
}

/// `eprintln!` that survives a closed pipe.
macro_rules! aside {
    ($($text:tt)*) => { $crate::output::say::aside_line(format_args!($($text)*)) };
}

pub(crate) use {aside, say};

#[cfg(test)]
mod tests {
    use super::one_line;

    #[test]
    fn errors_stay_on_one_line_and_cannot_drive_the_terminal() {
        assert_eq!(one_line("a\nb\r\n\u{1b}[2Jc"), "a b [2Jc");
    }
}

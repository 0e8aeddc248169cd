//! Lines on standard output that never fail the command: a closed pipe only ends the listening.

use std::fmt;
use std::io::{self, Write};

use crate::doctor::explains::check_for;
use crate::error::Error;

/// Prints a line at once, so that a program reading a pipe sees it too.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{text}");
    let _ = out.flush();
}

/// Prints a line on standard error.
pub(crate) fn aside_line(text: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints what went wrong, what to do, and which check of the doctor says more, each on one line.
pub(crate) fn failure(error: &Error) {
    aside!("error: {}", one_line(&error.what()));
    aside!("hint: {}", one_line(&error.hint()));
    if let Some(check) = check_for(error) {
        aside!(
            "check: `tcpx doctor --explain {}` ({})",
            check.id,
            check.title
        );
    }
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

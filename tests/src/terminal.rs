//! A terminal that a program writes to, and what a person sees there.

use std::fs::File;
use std::io::{Read, Result};
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::Command;
use std::ptr;

/// Both ends of a terminal with 100 columns.
fn open() -> Result<(File, OwnedFd)> {
    let (mut ours, mut theirs) = (-1, -1);
    let size = libc::winsize {
        ws_row: 40,
        ws_col: 100,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: out pointers and a size of this frame; a name and settings are not asked for.
    let done = unsafe {
        libc::openpty(
            &raw mut ours,
            &raw mut theirs,
            ptr::null_mut(),
            ptr::null_mut(),
            &raw const size,
        )
    };
    if done != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the call gave both to this process.
    Ok(unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) })
}

/// What a program showed on its terminal.
#[derive(Debug, Default)]
pub struct Shown {
    /// Lines as they stood before they were cleared.
    pub drawn: Vec<String>,
    /// The lines at the end.
    pub left: Vec<String>,
}

/// Runs a program to its end with a terminal for both outputs.
///
/// # Errors
/// There is no terminal, or no such program.
pub fn watch(mut command: Command) -> Result<(std::process::ExitStatus, Shown)> {
    let (mut ours, theirs) = open()?;
    command.env("TERM", "xterm").stderr(theirs.try_clone()?);
    let mut child = command.stdout(theirs).spawn()?;
    // It holds the program's end.
    drop(command);
    let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
    // When the last writer is gone the read fails.
    while let Ok(count @ 1..) = ours.read(&mut part) {
        bytes.extend_from_slice(&part[..count]);
    }
    Ok((child.wait()?, shown(&String::from_utf8_lossy(&bytes))))
}

/// A line ends by a line feed; `ESC [2K` clears it, which comes before it is drawn anew.
fn shown(text: &str) -> Shown {
    let mut shown = Shown::default();
    let lines = text.split('\n').map(|line| {
        let mut states: Vec<_> = line.split("\u{1b}[2K").collect();
        let last = states.pop().unwrap_or_default();
        let text = |state: &str| state.trim_matches('\r').to_owned();
        shown.drawn.extend(states.into_iter().map(text));
        text(last)
    });
    shown.left = lines.filter(|line| !line.is_empty()).collect();
    shown
}

//! What the machine's console says.

/// How a run ended, by its console.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The script succeeded.
    Good,
    /// The script ended so.
    Status(String),
    /// It never came to an end, and the kernel said why.
    Crash(String),
    /// The machine did not even start the script.
    NoStart,
    /// It started and did not end.
    NoEnd,
}

/// Printed by init.sh.
const STARTED: &str = "START";
const ENDED: &str = "END ";

pub(super) fn ending(console: &str) -> Ending {
    let lines = || console.lines().map(|line| line.trim_end_matches('\r'));
    if let Some(status) = lines().rev().find_map(|line| line.strip_prefix(ENDED)) {
        return match status {
            "0" => Ending::Good,
            other => Ending::Status(other.to_owned()),
        };
    }
    let crash = lines().find(|line| line.contains("Kernel panic") || line.contains("Oops"));
    match crash {
        Some(line) => Ending::Crash(line.to_owned()),
        None if lines().any(|line| line == STARTED) => Ending::NoEnd,
        None => Ending::NoStart,
    }
}

/// Bytes whose every one was checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checked {
    /// All of them.
    pub(super) bytes: u64,
    /// Those that came through device memory.
    pub(super) in_device: u64,
}

impl std::ops::AddAssign for Checked {
    fn add_assign(&mut self, more: Self) {
        self.bytes += more.bytes;
        self.in_device += more.in_device;
    }
}

/// The sum of what the transfers of a script say that they checked.
pub(super) fn checked(console: &str) -> Checked {
    let mut sum = Checked::default();
    for line in console.lines() {
        let mut words = line.split_whitespace();
        if words.next() != Some("checked") {
            continue;
        }
        let mut numbers = words.filter_map(|word| word.parse().ok());
        if let (Some(bytes), Some(in_device)) = (numbers.next(), numbers.next()) {
            sum += Checked { bytes, in_device };
        }
    }
    sum
}

/// Lines of a failed script's console that are told again after the other scripts' consoles.
const LAST_LINES: usize = 40;

/// The end of a console.
pub(super) fn last_lines(console: &str) -> String {
    let lines: Vec<_> = console.lines().collect();
    let from = lines.len().saturating_sub(LAST_LINES);
    indented(lines[from..].iter().copied())
}

/// Lines of a console as they are shown among lines of ours.
pub(super) fn indented<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    lines
        .map(|line| format!("   | {}\n", line.trim_end_matches('\r')))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_checked_adds_up() {
        let console = "START\r\nchecked 10 bytes, 7 of them in device memory\r\n\
            [ 1.0] a line of the kernel\n  checked 5 bytes, 0 of them in device memory\n\
            unchecked 9 bytes, 9 of them\nchecked nothing\n";
        let sum = Checked {
            bytes: 15,
            in_device: 7,
        };
        assert_eq!(checked(console), sum);
    }

    #[test]
    fn only_the_last_word_of_the_script_is_success() {
        assert_eq!(ending("START\r\nx\r\nEND 0\r\n"), Ending::Good);
        assert_eq!(ending("START\nEND 1\n"), Ending::Status("1".to_owned()));
        assert_eq!(ending("START\nfine\n"), Ending::NoEnd);
        assert_eq!(ending("booting\n"), Ending::NoStart);
        let crash = "[1.0] Kernel panic - not syncing: x";
        assert_eq!(ending(crash), Ending::Crash(crash.to_owned()));
        assert_eq!(ending(""), Ending::NoStart);
    }
}

//! `cargo xtask command-line`: `docs/command-line.md` is what the program itself says.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::workspace::{program, publish, root};

const DOCUMENT: &str = "docs/command-line.md";

const HEAD: &str = "\
# Command line

<!-- Made by `cargo xtask command-line` from what `tcpx --help-all` prints. Edit the program, not this. -->

The variables beside the flags, and those that have no flag, are explained in [variables.md](variables.md). Groups of flags
that several commands have are shown once.
";

/// Builds the program and writes its help, or with `--check` fails if the document differs.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let program = program(&root()?)?;
    let mut text = HEAD.to_owned();
    describe(&program, &mut Vec::new(), &mut text, &mut HashMap::new())?;
    publish(DOCUMENT, &text, "command-line", arguments)
}

/// The help of one command, then of its subcommands.
fn describe(
    program: &Path,
    command: &mut Vec<String>,
    text: &mut String,
    shown: &mut HashMap<String, String>,
) -> Result<()> {
    let help = help(program, command)?;
    let words = std::iter::once("tcpx").chain(command.iter().map(String::as_str));
    let name = words.collect::<Vec<_>>().join(" ");
    // Writing to a String cannot fail.
    let _ = write!(
        text,
        "\n## {name}\n\n```text\n{}\n```\n",
        once(&tidy(&help), &name, shown)
    );
    for subcommand in subcommands(&help) {
        command.push(subcommand);
        describe(program, command, text, shown)?;
        command.pop();
    }
    Ok(())
}

/// What `tcpx COMMAND --help-all` prints, whatever terminal and variables this process has.
fn help(program: &Path, command: &[String]) -> Result<String> {
    let output = Command::new(program)
        .args(command)
        .arg("--help-all")
        .env_clear()
        .env("COLUMNS", "110")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let help = String::from_utf8(output.stdout).context("the help is not UTF-8")?;
    ensure!(
        output.status.success() && help.contains("Usage:"),
        "`tcpx {} --help-all` printed no usage and ended with {}",
        command.join(" "),
        output.status
    );
    Ok(help)
}

/// Without spaces at line ends, and without blank lines around.
fn tidy(help: &str) -> String {
    let lines: Vec<&str> = help.trim_end().lines().map(str::trim_end).collect();
    lines.join("\n")
}

/// With a line in place of each group of flags that a command before has too; `shown` says which
/// one.
fn once(help: &str, name: &str, shown: &mut HashMap<String, String>) -> String {
    let own = ["Usage", "Commands", "Arguments", "Options", "Examples"];
    let groups = help.split("\n\n").map(|group| {
        let title = group.split_once(":\n").map(|(title, _)| title);
        match title.filter(|title| !title.contains('\n') && !own.contains(title)) {
            None => group.to_owned(),
            Some(title) => match shown.get(group) {
                Some(before) => format!("{title}: as for `{before}`"),
                None => {
                    shown.insert(group.to_owned(), name.to_owned());
                    group.to_owned()
                }
            },
        }
    });
    groups.collect::<Vec<_>>().join("\n\n")
}

/// First words under `Commands:`, but for `help`, which only repeats.
fn subcommands(help: &str) -> Vec<String> {
    help.lines()
        .skip_while(|line| line.trim() != "Commands:")
        .skip(1)
        .take_while(|line| !line.trim().is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|word| *word != "help")
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELP: &str = "Move memory\n\nUsage: tcpx <COMMAND>\n\nCommands:\n  demo   Show it\n         \
                        and more\n  perf   Measure\n  help   Print this\n\nOptions:\n  -h, --help  Print help\n";

    #[test]
    fn subcommands_are_the_first_words_under_commands() {
        assert_eq!(subcommands(HELP), ["demo", "perf"]);
        assert!(subcommands("Usage: tcpx devices\n\nOptions:\n  -h\n").is_empty());
    }

    #[test]
    fn a_group_that_another_command_has_is_shown_once() {
        let mut shown = HashMap::new();
        let help = "About\n\nOptions:\n  -h\n\nOutput:\n  --json\n  -q";
        assert_eq!(once(help, "tcpx", &mut shown), help);
        assert_eq!(
            once(help, "tcpx demo", &mut shown),
            "About\n\nOptions:\n  -h\n\nOutput: as for `tcpx`"
        );
    }

    #[test]
    fn a_program_without_help_is_an_error() {
        let error = help(Path::new("/bin/false"), &[]).unwrap_err();
        assert!(
            format!("{error:#}").contains("printed no usage"),
            "{error:#}"
        );
    }
}

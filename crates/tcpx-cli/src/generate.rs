//! `tcpx generate FOLDER`: manual pages and shell completions, made from the command line's
//! definition.

use std::fs;
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::{Shell, generate_to};

use crate::args::{Cli, with_expert_flags};
use crate::error::Error;

/// The shells that most users have.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Fish, Shell::Zsh];

/// Writes `man/tcpx*.1`, one page per visible command, and `completions/`.
pub(crate) fn run(folder: &Path) -> Result<(), Error> {
    let (man, completions) = (folder.join("man"), folder.join("completions"));
    for made in [&man, &completions] {
        fs::create_dir_all(made).map_err(Error::io("write", made))?;
    }
    // A page is about a version, not about a build.
    let command = with_expert_flags(Cli::command()).long_version(env!("CARGO_PKG_VERSION"));
    clap_mangen::generate_to(command, &man).map_err(Error::io("write", &man))?;
    for shell in SHELLS {
        generate_to(shell, &mut visible(), "tcpx", &completions)
            .map_err(Error::io("write", &completions))?;
    }
    Ok(())
}

/// The command line without its hidden commands, which shells would offer too.
fn visible() -> Command {
    let all = with_expert_flags(Cli::command());
    let commands = all.get_subcommands().filter(|one| !one.is_hide_set());
    Command::new("tcpx")
        .version(env!("CARGO_PKG_VERSION"))
        .disable_help_flag(true)
        .args(all.get_arguments().cloned())
        .subcommands(commands.cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_command_has_a_page() {
        let folder = tempfile::tempdir().unwrap();
        run(folder.path()).unwrap();
        for command in Cli::command().get_subcommands() {
            let page = format!("man/tcpx-{}.1", command.get_name());
            let exists = folder.path().join(&page).is_file();
            assert_eq!(exists, !command.is_hide_set(), "{page}");
        }
        let bash = fs::read_to_string(folder.path().join("completions/tcpx.bash")).unwrap();
        assert!(bash.contains("--interfaces") && !bash.contains("plugin-part"));
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let error = run(Path::new("/proc/none")).unwrap_err().to_string();
        assert!(error.contains("/proc/none/man"), "{error}");
    }
}

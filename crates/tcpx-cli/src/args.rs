//! The command line: commands, flags, and the variable behind each flag.

pub(crate) mod link;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue};
use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};

use self::link::{LinkArgs, MemoryArgs};
use crate::bench::{self, BenchCommand};
#[cfg(feature = "devmem")]
use crate::devmem;
use crate::link::is_plugin;
use crate::output::OutputArgs;
use crate::output::say::{aside, say};
use crate::perf::{self, PerfSide};
use crate::{connection, demo, doctor, env, files, key, plugin_check, status, transfer};

/// Variables that no flag repeats, for the end of `--help`.
const OTHER_VARIABLES: &str = "\
Variables without a flag:
  TCPX_KEY   the key, as the server or `tcpx key` printed it (also: --key-file, or type it at the prompt)
  RUST_LOG   which log lines to show beside those of -v, for example `tcpx_net=debug` (default: warn)
  NO_COLOR   set: no colours; a terminal with TERM=dumb gets neither colours nor progress bars

Each flag with `[env: NAME]` can be given by that variable; the flag wins.
Sizes are written 4096, 512KiB, 4MiB or 1GB; times 30s, 500ms or 10m.
Exit codes: 0 ok, 1 a transfer or a check failed, 2 the command line is wrong, 23 files were left out, 129, 130 or 143 after HUP, Ctrl-C or TERM.";

/// What `--version` prints; `-V` prints the number alone.
const LONG_VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    "\ncommit   ",
    env!("TCPX_COMMIT"),
    "\ntarget   ",
    env!("TCPX_TARGET"),
    "\nplugin   ",
    env!("TCPX_BUILD_ID"),
);

/// Move GPU memory between hosts over plain TCP.
#[derive(Debug, Parser)]
#[command(
    name = "tcpx",
    version,
    long_version = LONG_VERSION,
    after_help = OTHER_VARIABLES,
    max_term_width = 110,
    disable_help_flag = true
)]
pub(crate) struct Cli {
    /// Print help.
    #[arg(short, long, global = true, action = ArgAction::HelpShort)]
    help: Option<bool>,
    /// Print help with every flag, those for experts too.
    #[arg(long, global = true, action = ArgAction::HelpShort)]
    help_all: Option<bool>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
    /// The command's name.
    #[arg(skip)]
    name: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show everything on this host: two processes, both networks, each byte compared.
    #[command(after_help = "Examples:\n  tcpx demo\n  tcpx demo --host --size 64MiB")]
    Demo(demo::DemoArgs),
    /// Send files and directories to a host that runs `tcpx receive`, or share a directory.
    #[command(
        after_help = "Examples:\n  tcpx send weights/ HOST            # while HOST runs `tcpx receive --out DIR`\n  tcpx send --serve /models          # for `tcpx receive HOST:weights`\n\nExit code 23: some things were left out, and are listed; all others have arrived."
    )]
    Send(Box<files::SendArgs>),
    /// Receive files and directories from whoever runs `tcpx send`, or fetch them from a directory
    /// that is shared.
    #[command(
        after_help = "Examples:\n  tcpx receive --out DIR             # prints the line to run at the sender\n  tcpx receive HOST:weights          # while HOST runs `tcpx send --serve /models`\n\nExit code 23: the sender left some things out, and they are listed; all others have arrived."
    )]
    Receive(Box<files::ReceiveArgs>),
    /// Move a greeting from memory to memory and check every byte.
    #[command(
        after_help = "Examples:\n  tcpx transfer server               # prints the line to run at the client\n  tcpx transfer HOST_A"
    )]
    Transfer(transfer::TransferArgs),
    /// Set up a connection and its lanes, and print what was agreed.
    #[command(after_help = "Examples:\n  tcpx connection server\n  tcpx connection HOST_A")]
    Connection(connection::ConnectionArgs),
    /// Measure bandwidth and latency between two hosts.
    #[command(
        after_help = "Examples:\n  tcpx perf server host\n  tcpx perf client HOST_A host -s 1MiB -P 8 -t 10s -i 1s\n  TCPX_KEY=... tcpx perf --hosts FILE     # on every host of FILE\n  srun -N 4 tcpx perf --key-file server.key"
    )]
    Perf(Box<perf::PerfArgs>),
    /// Measure the network beside its peers.
    #[command(after_help = "Examples:\n  tcpx bench net --from host --to host --peer raw")]
    Bench(bench::BenchArgs),
    /// List GPUs, network interfaces and the plugin file, and what is missing.
    Devices,
    /// Show, release and test network cards that receive into device memory.
    #[cfg(feature = "devmem")]
    Devmem(devmem::DevmemArgs),
    /// Find what stops transfers on this host, and how to fix it.
    #[command(after_help = "Examples:\n  tcpx doctor\n  tcpx doctor --explain D007")]
    Doctor(doctor::DoctorArgs),
    /// Show the connections of running processes: lanes, rates, operations and who must act next.
    #[command(
        after_help = "Examples:\n  tcpx status\n  watch tcpx status 4711    # again and again"
    )]
    Status(status::StatusArgs),
    /// Make a server's key file, and print the key for its clients.
    #[command(
        after_help = "Examples:\n  tcpx key server.key\n  tcpx receive --key-file server.key --out DIR --keep"
    )]
    Key(key::KeyArgs),
    /// Print the variables that a plugin or NCCL needs on this host, as lines for a shell.
    #[command(after_help = "Examples:\n  eval \"$(tcpx env nccl)\"")]
    Env(env::EnvArgs),
    /// Show what a plugin file exports, start it, and list its devices.
    #[command(
        after_help = "Examples:\n  tcpx plugin /usr/local/lib/libnccl-net.so\n  tcpx demo --plugin /usr/local/lib/libnccl-net.so    # moves messages through it"
    )]
    Plugin(plugin_check::PluginArgs),
    /// Write manual pages and shell completions to a folder.
    #[command(hide = true)]
    Generate {
        /// The folder, which must exist.
        folder: PathBuf,
    },
    /// The process of `plugin` that loads the file.
    #[command(hide = true)]
    PluginPart(plugin_check::PluginPartArgs),
}

impl Cli {
    /// Reads this process's arguments and variables; ends the process with help, or with 2 when
    /// they are wrong.
    pub(crate) fn read() -> Self {
        let mut command = without_empty_variables(Self::command());
        if std::env::args_os().any(|word| word == "--help-all") {
            command = with_expert_flags(command);
        }
        let matches = command.try_get_matches_from_mut(std::env::args_os());
        let matches = matches.unwrap_or_else(|error| {
            let mut words = std::env::args_os().skip(1);
            let is_command = |word: &OsString| command.find_subcommand(word).is_some();
            if error.use_stderr() && words.find(is_command).is_some_and(|word| word == "env") {
                say!("{}", env::FAILURE);
            }
            let Some(text) = blame_variable(&error, std::env::args_os()) else {
                error.exit()
            };
            aside!("{text}");
            std::process::exit(error.exit_code())
        });
        let mut cli = Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
        cli.name = matches.subcommand_name().unwrap_or_default().to_owned();
        cli
    }

    /// The name that stands before PASSED or FAILED; `None` where nothing is checked, or the output
    /// is for a program.
    pub(crate) fn verdict_name(&self) -> Option<&str> {
        if self.output.json {
            return None;
        }
        let checks = ["demo", "transfer", "connection", "perf", "plugin"];
        Some(self.name.as_str()).filter(|name| checks.contains(name))
    }

    /// What the JSON of the command is called.
    pub(crate) fn schema(&self) -> String {
        format!("tcpx.{}", self.name)
    }

    /// The plugin that the command will drive: `None` if it drives none, `Some(None)` if it names
    /// no file.
    pub(crate) fn plugin(&self) -> Option<Option<&Path>> {
        if let Command::Demo(args) = &self.command {
            return args.plugin.as_deref().map(Some);
        }
        let network = &self.link()?.network;
        is_plugin(network).then_some(network.plugin_file())
    }

    /// How the command is linked, if it has a connection.
    pub(crate) fn link(&self) -> Option<&LinkArgs> {
        match &self.command {
            Command::Send(args) => Some(&args.link),
            Command::Receive(args) => Some(&args.link),
            Command::Transfer(args) => Some(&args.link),
            Command::Connection(args) => Some(&args.link),
            Command::Perf(args) => Some(match &args.side {
                None => &args.matrix.link,
                Some(PerfSide::Server(args)) => &args.link,
                Some(PerfSide::Client(args)) => &args.link,
            }),
            Command::Bench(args) => match &args.what {
                BenchCommand::Net(args) => Some(&args.link),
                BenchCommand::Show(_) => None,
            },
            _ => None,
        }
    }

    /// The memory of the command's own end of a connection; that of the measuring end of a
    /// benchmark if it names none.
    pub(crate) fn memory(&self) -> Option<MemoryArgs> {
        let place = match &self.command {
            Command::Demo(args) => return Some(args.memory.clone()),
            Command::Send(args) => return Some(args.memory.clone()),
            Command::Receive(args) => return Some(args.memory.clone()),
            Command::Transfer(args) => return Some(args.memory.clone()),
            Command::Connection(args) => return Some(args.memory.clone()),
            Command::Perf(args) => match &args.side {
                None => return Some(args.matrix.memory.clone()),
                Some(PerfSide::Server(args)) => args.place,
                Some(PerfSide::Client(args)) => args.place,
            },
            Command::Bench(args) => match &args.what {
                BenchCommand::Net(args) => args.from,
                BenchCommand::Show(_) => return None,
            },
            _ => return None,
        };
        Some(perf::Place::memory_of(place))
    }
}

/// The words of `error` with the variable in the place of the flag, where the wrong value came from
/// it.
fn blame_variable(
    error: &clap::Error,
    arguments: impl Iterator<Item = OsString>,
) -> Option<String> {
    // Such as `--loops <N>`.
    let Some(ContextValue::String(shown)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let flag = shown.split([' ', '=']).next()?;
    let is_given = |word: OsString| {
        let word = word.to_string_lossy();
        word.split('=').next() == Some(flag)
    };
    let variable = variable_of(&Cli::command(), flag.strip_prefix("--")?)?;
    if arguments.skip(1).any(is_given) {
        return None;
    }
    let text = error.render().to_string();
    let blamed = text.replace(
        &format!("for '{shown}'"),
        &format!("of the variable {variable}"),
    );
    Some(blamed.trim_end().to_owned())
}

/// The variable behind a flag.
fn variable_of(command: &clap::Command, flag: &str) -> Option<String> {
    let mut own = command.get_arguments();
    let own =
        own.find(|argument| argument.get_long() == Some(flag) && argument.get_env().is_some());
    match own.and_then(clap::Arg::get_env) {
        Some(name) => Some(name.to_string_lossy().into_owned()),
        None => command
            .get_subcommands()
            .find_map(|inner| variable_of(inner, flag)),
    }
}

/// The definition with the flags that `--help` leaves out.
pub(crate) fn with_expert_flags(command: clap::Command) -> clap::Command {
    command
        .mut_args(|argument| argument.hide(false))
        .mut_subcommands(with_expert_flags)
}

/// An empty variable counts as unset: that is how scripts switch one off.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |name: &OsStr| std::env::var_os(name).is_some_and(|value| value.is_empty());
    command
        .mut_args(|argument| match argument.get_env() {
            Some(name) if is_empty(name) => argument.env(Resettable::Reset),
            // What a variable holds is nobody's business in `--help`.
            _ => argument.hide_env_values(true),
        })
        .mut_subcommands(without_empty_variables)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn read(arguments: &[&str]) -> Result<Cli, clap::Error> {
        let matches = Cli::command().try_get_matches_from(arguments)?;
        Cli::from_arg_matches(&matches)
    }

    fn link(arguments: &[&str]) -> LinkArgs {
        let cli = read(arguments).expect("a right command line");
        cli.link().expect("a command with a connection").clone()
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Every `(variable, flag)` of the command line.
    fn declared(command: &clap::Command) -> BTreeSet<(String, String)> {
        let own = command.get_arguments().filter_map(|argument| {
            let variable = argument.get_env()?.to_str()?.to_owned();
            Some((variable, format!("--{}", argument.get_long()?)))
        });
        own.chain(command.get_subcommands().flat_map(declared))
            .collect()
    }

    /// Every `(variable, flag)` of the document's table for this program.
    fn documented() -> BTreeSet<(String, String)> {
        let text = include_str!("../../../docs/variables.md");
        let cell = |text: &str| text.trim().trim_matches('`').to_owned();
        let rows = text.lines().filter_map(|line| {
            let mut cells = line.strip_prefix('|')?.split('|');
            Some((cell(cells.next()?), cell(cells.next()?)))
        });
        rows.filter(|(name, flag)| !name.starts_with("-") && flag.starts_with("--"))
            .collect()
    }

    #[test]
    fn the_document_lists_each_variable_with_its_flag() {
        assert_eq!(declared(&Cli::command()), documented());
    }

    #[test]
    fn variables_without_a_flag_are_in_help_and_document() {
        let document = include_str!("../../../docs/variables.md");
        for name in [key::KEY_VARIABLE, "RUST_LOG"] {
            assert!(OTHER_VARIABLES.contains(name));
            assert!(document.contains(&format!("`{name}`")), "{name}");
        }
    }

    #[test]
    fn flags_come_in_any_order_around_the_server() {
        for arguments in [
            ["tcpx", "transfer", "server", "--port", "7"],
            ["tcpx", "transfer", "--port", "7", "server"],
        ] {
            assert_eq!(link(&arguments).port, 7);
        }
    }

    #[test]
    fn naming_a_plugin_on_the_command_line_asks_for_it() {
        assert!(!is_plugin(&link(&["tcpx", "connection", "server"]).network));
        assert!(is_plugin(
            &link(&["tcpx", "connection", "server", "--plugin", "/x.so"]).network
        ));
        assert!(is_plugin(
            &link(&[
                "tcpx", "perf", "client", "10.0.0.2", "0", "--plugin", "/x.so"
            ])
            .network
        ));
        let both = [
            "tcpx",
            "connection",
            "server",
            "--plugin",
            "/x.so",
            "--network",
            "tcp",
        ];
        assert!(!is_plugin(&link(&both).network));
    }

    #[test]
    fn the_chunk_size_for_nccl_is_only_a_fallback() {
        let start = ["tcpx", "connection", "server", "--nccl-chunk-bytes", "1MiB"];
        assert_eq!(
            link(&start).network.chunk_bytes().map(|size| size.0),
            Some(1 << 20)
        );
        let both = [&start[..], &["--chunk-bytes", "64KiB"]].concat();
        assert_eq!(
            link(&both).network.chunk_bytes().map(|size| size.0),
            Some(64 << 10)
        );
    }

    #[test]
    fn contradictions_and_unknown_values_are_refused() {
        for arguments in [
            &["tcpx", "transfer"][..],
            &["tcpx", "transfer", "server", "--gpu", "0", "--host"],
            &[
                "tcpx",
                "transfer",
                "server",
                "--insecure",
                "--key-file",
                "k",
            ],
            &["tcpx", "send", "--serve", ".", "--dry-run"],
            &["tcpx", "transfer", "server", "--abi", "v4"],
            &["tcpx", "transfer", "server", "--unpack", "magic"],
            &["tcpx", "transfer", "server", "--channels", "0"],
            &["tcpx", "transfer", "server", "--timeout", "0"],
            &["tcpx", "perf", "client"],
            &["tcpx", "perf", "server", "gpu0"],
            &["tcpx", "demo", "--size", "1.5GiB"],
        ] {
            let error = read(arguments).expect_err(&arguments.join(" "));
            assert_eq!(error.exit_code(), 2, "{arguments:?}");
        }
    }
}

//! `tcpx env`: the variables for this host, as lines for a shell.
//!
//! `eval "$(tcpx env nccl)"` sets them; every value is quoted so that a shell takes it as it
//! stands.

mod nccl;

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::error::Error;
use crate::host::RealHost;
use crate::output::json::Told;
use crate::output::say::{aside, one_line, say};
use crate::plugin_file::{Places, PluginFile};
use crate::vendor_environment::{Origin, Setting, for_google};

/// Which program the variables are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EnvFor {
    /// Google's TCPX plugin.
    Tcpx,
    /// NCCL, and what uses it (PyTorch, ...), with libnccl-net-tcpx.so as its network.
    Nccl,
}

#[derive(Args, Debug)]
pub(crate) struct EnvArgs {
    /// Which variables to print.
    #[arg(value_enum)]
    pub(crate) whose: EnvFor,
    /// Our plugin file for NCCL [default: the one beside this program].
    #[arg(long, value_name = "PATH")]
    pub(crate) plugin: Option<PathBuf>,
}

/// In place of the variables: the shell that takes them does not see this program's exit code.
pub(crate) const FAILURE: &str = "false";

/// Prints the variables.
pub(crate) fn run(args: &EnvArgs) -> Result<Told, Error> {
    let host = RealHost::default();
    let (head, settings) = match args.whose {
        EnvFor::Tcpx => {
            if args.plugin.is_some() {
                return Err(Error::usage(
                    "the variables for Google's plugin do not depend on its file",
                    "leave --plugin out; it is for `tcpx env nccl`",
                ));
            }
            ("Google's TCPX plugin on this host", for_google(&host))
        }
        EnvFor::Nccl => {
            let file = match &args.plugin {
                Some(path) => PluginFile::given(path)?,
                None => Places::of_process().own()?,
            };
            let settings = nccl::settings(&host, &file.path)?;
            (
                "NCCL on this host, with this plugin as its network",
                settings,
            )
        }
    };
    say!("{}", lines(head, &settings).trim_end());
    for setting in &settings {
        if let Some(trouble) = &setting.trouble {
            aside!(
                "warning: {}",
                one_line(&format!("{}={}: {trouble}", setting.name, setting.value))
            );
        }
    }
    Ok(Told::Fields(serde_json::json!({ "variables": settings })))
}

/// Comments and `export` lines.
fn lines(head: &str, settings: &[Setting]) -> String {
    let mut text = format!("# {head}.\n");
    for setting in settings {
        let Setting {
            name,
            value,
            effect,
            why,
            ..
        } = setting;
        // Writing to a String cannot fail.
        let _ = writeln!(text, "\n# {}", one_line(effect));
        let _ = writeln!(text, "# {}: {}", origin(setting.origin), one_line(why));
        if let Some(trouble) = &setting.trouble {
            let _ = writeln!(text, "# warning: {}", one_line(trouble));
        }
        let _ = writeln!(text, "export {name}={}", quoted(value));
    }
    text
}

/// A word for whose value it is.
pub(crate) fn origin(origin: Origin) -> &'static str {
    match origin {
        Origin::Yours => "yours",
        Origin::Detected => "found here",
        Origin::Fixed => "needed",
    }
}

/// `text` as one word of a POSIX shell. Not plain to all of them: zsh looks for a program where a
/// value begins with `=`.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,+@%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn what_some_shell_would_expand_is_quoted() {
        assert_eq!(quoted("eth1,eth2"), "eth1,eth2");
        for text in ["=eth1", "~root", "^lo", "a=~", "{a,b}"] {
            assert_eq!(quoted(text), format!("'{text}'"));
        }
    }

    #[test]
    fn a_shell_takes_every_value_as_it_stands() {
        for value in [
            "eth1,eth2",
            "=eth1",
            "^lo",
            "/opt/a b/lib.so",
            "it's",
            "$(touch /tmp/x) `id` \\ \" ; & | # !",
            "two\nlines",
            "",
            "~root",
        ] {
            let setting = Setting {
                name: "NCCL_SOCKET_IFNAME",
                value: value.into(),
                origin: Origin::Detected,
                effect: "an effect\nexport EVIL=1",
                why: "a reason\nexport EVIL=1".into(),
                trouble: Some("trouble\nexport EVIL=1".into()),
            };
            let script = lines("head", &[setting]);
            let output = Command::new("sh")
                .args([
                    "-ec",
                    "eval \"$1\"; printf %s \"$NCCL_SOCKET_IFNAME${EVIL-}\"",
                    "sh",
                    &script,
                ])
                .env_remove("EVIL")
                .output()
                .expect("a shell");
            assert!(output.status.success(), "{script}");
            assert_eq!(String::from_utf8_lossy(&output.stdout), value, "{script}");
        }
    }
}

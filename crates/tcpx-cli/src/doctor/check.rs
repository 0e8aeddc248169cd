//! What a check is, and what it finds.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::host::{Host, HostFacts};
use crate::plugin_file::contents::{Contents, ContentsError, PluginKind};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// As it should be.
    Fine,
    /// Not needed for what this host can do.
    NotNeeded,
    /// It works, but less well or not for everything.
    Warning,
    /// Transfers cannot work until it is fixed.
    Blocks,
}

/// What a check has found on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) verdict: Verdict,
    /// What was measured.
    pub(crate) measured: String,
    /// The exact fix on this host, where it differs from the check's general one.
    pub(crate) fix: Option<String>,
}

impl Finding {
    pub(crate) fn new(verdict: Verdict, measured: impl Into<String>) -> Self {
        Self {
            verdict,
            measured: measured.into(),
            fix: None,
        }
    }

    pub(crate) fn fine(measured: impl Into<String>) -> Self {
        Self::new(Verdict::Fine, measured)
    }

    pub(crate) fn not_needed(measured: impl Into<String>) -> Self {
        Self::new(Verdict::NotNeeded, measured)
    }

    pub(crate) fn warning(measured: impl Into<String>) -> Self {
        Self::new(Verdict::Warning, measured)
    }

    pub(crate) fn blocks(measured: impl Into<String>) -> Self {
        Self::new(Verdict::Blocks, measured)
    }

    pub(crate) fn with_fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    /// Whether something is wrong.
    pub(crate) fn is_trouble(&self) -> bool {
        matches!(self.verdict, Verdict::Warning | Verdict::Blocks)
    }
}

/// What a check is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Subject {
    /// The host, whatever network is used.
    Host,
    /// The plugin file.
    Plugin,
    /// Google's plugin and its daemon.
    Google,
    /// An error that a transfer ended with; looked at when it is asked for.
    Error,
}

impl Subject {
    pub(crate) const ALL: [Self; 4] = [Self::Host, Self::Plugin, Self::Google, Self::Error];

    pub(crate) fn heading(self) -> &'static str {
        match self {
            Self::Host => "This host",
            Self::Plugin => "The plugin file",
            Self::Google => "Google's plugin and its buffer daemon",
            Self::Error => "Errors of transfers",
        }
    }
}

/// One check of the catalogue.
#[derive(Debug)]
pub(crate) struct Check {
    /// Stays the same for ever: errors, scripts and documents name it.
    pub(crate) id: &'static str,
    pub(crate) subject: Subject,
    /// What is looked at, in a few words.
    pub(crate) title: &'static str,
    /// How it is measured; for errors, what is behind them.
    pub(crate) about: &'static str,
    /// What follows when it is not as it should be.
    pub(crate) consequence: &'static str,
    /// What to do then.
    pub(crate) fix: &'static str,
    /// Measures it; `None` where nothing on this host can show it.
    pub(crate) measure: Option<fn(&Context<'_>) -> Finding>,
}

/// What the checks look at.
pub(crate) struct Context<'host> {
    pub(crate) host: &'host dyn Host,
    pub(crate) facts: HostFacts,
    /// The plugin file in question.
    pub(crate) plugin: Option<PathBuf>,
    /// What it holds; `None` without a file.
    pub(crate) contents: Option<Result<Contents, ContentsError>>,
}

impl<'host> Context<'host> {
    /// Reads the plugin file at `plugin`, if there is one in question.
    pub(crate) fn new(host: &'host dyn Host, plugin: Option<PathBuf>) -> Self {
        let contents = plugin.as_deref().map(|path| host.contents(path));
        Self {
            host,
            facts: HostFacts::of(host),
            plugin,
            contents,
        }
    }

    /// The file and what it holds, if it can be read.
    pub(crate) fn readable(&self) -> Option<(&Path, &Contents)> {
        let contents = self.contents.as_ref()?.as_ref().ok()?;
        Some((self.plugin.as_deref()?, contents))
    }

    /// Whether Google's plugin is in question.
    pub(crate) fn is_google(&self) -> bool {
        self.readable()
            .is_some_and(|(_, contents)| contents.kind == PluginKind::Google)
    }
}

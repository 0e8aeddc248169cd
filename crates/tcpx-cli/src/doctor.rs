//! `tcpx doctor`: what stops transfers on this host, what follows from it, and how to fix it.
//!
//! Every check reads and changes nothing. Its id stays the same for ever: errors name it, and
//! `--explain` tells more.

pub(crate) mod catalogue;
pub(crate) mod check;
mod error_checks;
mod google_checks;
mod host_checks;
mod plugin_checks;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use self::catalogue::CATALOGUE;
use self::check::{Check, Context, Finding, Subject, Verdict};
use crate::error::Error;
use crate::host::{FileKind, Host, RealHost};
use crate::output::json::Told;
use crate::output::say::{one_line, say};
use crate::plugin_file::Places;

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Plugin file to look at [default: UCCL_TCPX_PLUGIN_PATH, else the vendor's if it is there,
    /// else our own].
    #[arg(long, value_name = "PATH")]
    pub(crate) plugin: Option<PathBuf>,
    /// Explain one check, such as TCPX-D012, and measure it here; `all` lists every check.
    #[arg(long, value_name = "ID")]
    pub(crate) explain: Option<String>,
}

/// The variable that names the plugin file.
const PLUGIN_PATH: &str = "UCCL_TCPX_PLUGIN_PATH";

/// Runs the checks, or explains one.
pub(crate) fn run(args: &DoctorArgs) -> Result<Told, Error> {
    let host = RealHost::default();
    let plugin = args.plugin.clone().or_else(|| plugin_in_question(&host));
    match args.explain.as_deref() {
        Some("all") => Ok(list()),
        Some(id) => {
            let check = catalogue::find(id).ok_or_else(|| {
                Error::usage(
                    format!("there is no check {id}"),
                    "`tcpx doctor --explain all` lists every check",
                )
            })?;
            Ok(explain(check, &Context::new(&host, plugin)))
        }
        None => Ok(examine(&Context::new(&host, plugin))),
    }
}

/// The file named by the variable, else the vendor's, else our own, if it is there.
fn plugin_in_question(host: &dyn Host) -> Option<PathBuf> {
    if let Some(path) = host.variable(PLUGIN_PATH) {
        return Some(path.into());
    }
    let places = Places::of_process();
    if matches!(host.kind(&places.vendor), Ok(FileKind::File)) {
        return Some(places.vendor);
    }
    places.own().ok().map(|file| file.path)
}

/// Each check that looks at the host by itself, and what it found.
fn findings(context: &Context<'_>) -> Vec<(&'static Check, Finding)> {
    CATALOGUE
        .iter()
        .filter(|check| check.subject != Subject::Error)
        .filter_map(|check| Some((check, check.measure?(context))))
        .collect()
}

fn examine(context: &Context<'_>) -> Told {
    let found = findings(context);
    let count = |verdict| {
        found
            .iter()
            .filter(|(_, one)| one.verdict == verdict)
            .count()
    };
    let (blocking, warnings) = (count(Verdict::Blocks), count(Verdict::Warning));
    let checks: Vec<Value> = found
        .iter()
        .map(|(check, finding)| object(check, Some(finding)))
        .collect();
    let plugin = context.plugin.as_ref();
    let fields = json!({
        "plugin": plugin.map(|path| path.display().to_string()),
        "blocking": blocking, "warnings": warnings, "checks": checks,
    });
    for group in found.chunk_by(|(_, a), (_, b)| is_same_absence(a, b)) {
        show(group);
    }
    say!("\n{}", summary(blocking, warnings));
    if blocking == 0 {
        return Told::Fields(fields);
    }
    let error = Error::failed(
        format!(
            "{blocking} of {} checks found what blocks transfers",
            found.len()
        ),
        "do what each line after \"fix:\" says, then run `tcpx doctor` again",
    );
    Told::Bad(fields, error)
}

/// Whether both are not needed, for the same reason: one line is enough for them.
fn is_same_absence(a: &Finding, b: &Finding) -> bool {
    a.verdict == Verdict::NotNeeded && a == b
}

/// One line for what is well, three for what is not; a group of several is not needed for one
/// reason.
fn show(group: &[(&'static Check, Finding)]) {
    let (Some((check, finding)), Some((last, _))) = (group.first(), group.last()) else {
        return;
    };
    let measured = one_line(&finding.measured);
    if group.len() > 1 {
        let end = last.id.strip_prefix("TCPX-").unwrap_or(last.id);
        say!("{} to {end}: {measured}", check.id);
        return;
    }
    let word = match finding.verdict {
        Verdict::Fine => "ok     ",
        Verdict::NotNeeded => "-      ",
        Verdict::Warning => "WARNING",
        Verdict::Blocks => "BLOCKS ",
    };
    say!("{} {word} {}: {measured}", check.id, check.title);
    if finding.is_trouble() {
        say!("          then:   {}", check.consequence);
        say!("          fix:    {}", one_line(fix(check, Some(finding))));
    }
}

fn summary(blocking: usize, warnings: usize) -> String {
    let plural = |count: usize, one: &str| match count {
        1 => format!("1 {one}"),
        _ => format!("{count} {one}s"),
    };
    if blocking + warnings == 0 {
        return "nothing stops transfers on this host".into();
    }
    format!(
        "{}, {}; `tcpx doctor --explain ID` tells more",
        plural(blocking, "blocking fault"),
        plural(warnings, "warning")
    )
}

fn fix<'a>(check: &Check, finding: Option<&'a Finding>) -> &'a str {
    finding
        .and_then(|finding| finding.fix.as_deref())
        .unwrap_or(check.fix)
}

/// One check in full, and what it finds here.
fn explain(check: &Check, context: &Context<'_>) -> Told {
    let finding = check.measure.map(|measure| measure(context));
    say!("{} {}", check.id, check.title);
    say!("  about     {}", check.about);
    say!("  then      {}", check.consequence);
    say!("  fix       {}", check.fix);
    match &finding {
        None => say!("  here      nothing on this host can show it"),
        Some(finding) => {
            say!("  here      {}", one_line(&finding.measured));
            if let Some(fix) = finding.fix.as_deref().filter(|_| finding.is_trouble()) {
                say!("  fix here  {}", one_line(fix));
            }
        }
    }
    Told::Fields(object(check, finding.as_ref()))
}

/// Every check, without measuring.
fn list() -> Told {
    for subject in Subject::ALL {
        say!("{}", subject.heading());
        for check in CATALOGUE.iter().filter(|check| check.subject == subject) {
            say!("  {} {}", check.id, check.title);
        }
    }
    let all: Vec<Value> = CATALOGUE.iter().map(|check| object(check, None)).collect();
    Told::Fields(json!({ "checks": all }))
}

fn object(check: &Check, finding: Option<&Finding>) -> Value {
    json!({
        "id": check.id,
        "subject": check.subject.heading(),
        "title": check.title,
        "about": check.about,
        "consequence": check.consequence,
        "fix": fix(check, finding),
        "verdict": finding.map(|finding| finding.verdict),
        "measured": finding.map(|finding| &finding.measured),
    })
}

//! The check of NIXL's backend.

use std::path::{Path, PathBuf};

use super::check::{Context, Finding};
use crate::host::Host;

/// NIXL makes the file's name from the backend's.
const FILE: &str = "libplugin_TCPX.so";
/// The plugin that most programs take by default.
const USUAL: &str = "libplugin_UCX.so";
const WHEELS: [&str; 2] = ["nixl_cu12", "nixl_cu13"];
/// The releases that `libplugin_TCPX.so` starts in, without their patch numbers: those of its own guard.
const TESTED: ((u32, u32), (u32, u32)) = ((1, 0), (1, 5));

/// Whether NIXL finds the plugin, in which folder, and what else it finds there.
pub(super) fn backend(context: &Context<'_>) -> Finding {
    let host = context.host;
    let installed = installed(host);
    if let Some(folder) = host.variable("NIXL_PLUGIN_DIR") {
        return in_named_folder(host, &folder, installed.first());
    }
    let found: Vec<Finding> = installed.iter().map(|nixl| beside(host, nixl)).collect();
    let trouble = found.iter().position(Finding::is_trouble).unwrap_or(0);
    found.into_iter().nth(trouble).unwrap_or_else(|| {
        Finding::not_needed("no wheel of NIXL in the Python of this program or of PATH")
    })
}

/// A wheel of NIXL.
struct Installed {
    site: PathBuf,
    wheel: &'static str,
    version: String,
}

impl Installed {
    fn is_tested(&self) -> bool {
        let mut numbers = self.version.split('.').map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => (TESTED.0..=TESTED.1).contains(&(major, minor)),
            _ => false,
        }
    }

    fn describe(&self) -> String {
        format!("{} {}", self.wheel.replace('_', "-"), self.version)
    }
}

fn beside(host: &dyn Host, nixl: &Installed) -> Finding {
    let folder = nixl
        .site
        .join(format!(".{}.mesonpy.libs/plugins", nixl.wheel));
    let (name, place) = (nixl.describe(), folder.display());
    if host.kind(&folder.join(FILE)).is_err() {
        return Finding::warning(format!("{name} finds no {FILE} in {place}")).with_fix(format!(
            "install the wheel of tcpx into the same environment, or link {FILE} into {place}"
        ));
    }
    if !nixl.is_tested() {
        return untested(&name);
    }
    Finding::fine(format!(
        "{name} finds TCPX in {place}, beside its own plugins"
    ))
}

fn in_named_folder(host: &dyn Host, folder: &str, nixl: Option<&Installed>) -> Finding {
    let names = host.names(Path::new(folder)).unwrap_or_default();
    let has = |file: &str| names.iter().any(|name| name == file);
    let named = format!("NIXL_PLUGIN_DIR names {folder}");
    if !has(FILE) {
        return Finding::warning(format!("{named}, where NIXL finds no {FILE}")).with_fix(format!(
            "unset NIXL_PLUGIN_DIR where tcpx and NIXL were installed by wheels; else name the one folder that \
             holds {FILE}"
        ));
    }
    if let Some(nixl) = nixl.filter(|nixl| !nixl.is_tested()) {
        return untested(&nixl.describe());
    }
    match has(USUAL) {
        true => Finding::fine(format!("{named}, where NIXL finds TCPX beside others")),
        false => Finding::warning(format!("{named}: NIXL finds TCPX there, and none of its own plugins"))
            .with_fix(format!(
                "unset NIXL_PLUGIN_DIR and link {FILE} beside the plugins of NIXL's wheel, unless TCPX is all you use"
            )),
    }
}

fn untested(name: &str) -> Finding {
    let ((major, minor), (newest_major, newest_minor)) = TESTED;
    Finding::warning(format!(
        "{name} was never tested with {FILE}, which refuses it; {major}.{minor} to {newest_major}.{newest_minor} were"
    ))
    .with_fix("install a NIXL that was tested, or a newer tcpx; TCPX_NIXL_UNCHECKED=1 tries it all the same")
}

/// The wheels of NIXL in the first environment that has some.
fn installed(host: &dyn Host) -> Vec<Installed> {
    let in_site = |site: PathBuf| -> Vec<Installed> {
        let names = host.names(&site).unwrap_or_default();
        let version_of = |wheel: &str| {
            let rest = |name: &String| {
                let version = name.strip_prefix(wheel)?.strip_prefix('-')?;
                version.strip_suffix(".dist-info").map(str::to_owned)
            };
            names.iter().find_map(rest)
        };
        let found = WHEELS.iter().filter_map(|wheel| {
            let version = version_of(wheel)?;
            let site = site.clone();
            Some(Installed {
                site,
                wheel,
                version,
            })
        });
        found.collect()
    };
    let found = sites(host).into_iter().map(in_site);
    found
        .into_iter()
        .find(|found| !found.is_empty())
        .unwrap_or_default()
}

/// Where Python's packages lie, this program's own environment first.
fn sites(host: &dyn Host) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> = host
        .variable("VIRTUAL_ENV")
        .map(Into::into)
        .into_iter()
        .collect();
    let path = host.variable("PATH").unwrap_or_default();
    let python = std::env::split_paths(&path).map(|folder| folder.join("python3"));
    if let Some(python) = python.into_iter().find(|python| host.kind(python).is_ok()) {
        // The environment's link, and the Python that it leads to.
        let real = host.real_path(&python).ok();
        let prefix = |python: &PathBuf| python.ancestors().nth(2).map(Path::to_path_buf);
        prefixes.extend([Some(python), real].iter().flatten().filter_map(prefix));
    }
    // The wheel of tcpx puts the program into tcpx/bin, among the packages.
    let program = host.real_path(Path::new("/proc/self/exe")).ok();
    let own = program.and_then(|program| program.ancestors().nth(3).map(Path::to_path_buf));
    let below = prefixes.into_iter().flat_map(|prefix| {
        let folder = prefix.join("lib");
        let versions = host.names(&folder).unwrap_or_default();
        let pythons = versions
            .into_iter()
            .filter(|name| name.starts_with("python3"));
        let packages = pythons.flat_map(move |python| {
            ["site-packages", "dist-packages"].map(|packages| folder.join(&python).join(packages))
        });
        packages.collect::<Vec<_>>()
    });
    own.into_iter().chain(below).collect()
}

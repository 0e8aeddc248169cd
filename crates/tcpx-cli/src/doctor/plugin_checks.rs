//! Checks of the plugin file.

use super::check::{Context, Finding};
use crate::advice::of_contents;
use crate::host::FileKind;
use crate::plugin_file::contents::{ContentsError, PluginKind};

const NONE: &str = "no plugin is in question: the embedded network needs none";

/// Whether the file is there and can be read.
pub(super) fn present(context: &Context<'_>) -> Finding {
    let Some(path) = &context.plugin else {
        return Finding::not_needed(NONE);
    };
    let shown = path.display();
    match (&context.contents, context.host.kind(path)) {
        (_, Err(error)) => Finding::blocks(format!("{shown}: {error}")),
        (_, Ok(FileKind::File)) => match &context.contents {
            Some(Err(error @ ContentsError::Unreadable { .. })) => {
                Finding::blocks(error.to_string()).with_fix(of_contents(error).hint)
            }
            _ => Finding::fine(format!("{shown} is there")),
        },
        (_, Ok(_)) => Finding::blocks(format!("{shown} is not a file")),
    }
}

/// Whether it is a shared library for this processor.
pub(super) fn library(context: &Context<'_>) -> Finding {
    match &context.contents {
        None => Finding::not_needed(NONE),
        Some(Ok(contents)) => Finding::fine(format!("a shared library, {}", contents.kind)),
        Some(Err(ContentsError::NoTable { .. })) => Finding::fine("a shared library"),
        // The check before this one has said so.
        Some(Err(ContentsError::Unreadable { .. } | ContentsError::NotAFile(_))) => {
            Finding::not_needed("the file cannot be read")
        }
        Some(Err(error)) => Finding::blocks(error.to_string()).with_fix(of_contents(error).hint),
    }
}

/// Whether the file system lets it be mapped as code.
pub(super) fn executable_mount(context: &Context<'_>) -> Finding {
    let Some(path) = &context.plugin else {
        return Finding::not_needed(NONE);
    };
    let Ok(path) = context.host.real_path(path) else {
        return Finding::not_needed("the file is not there");
    };
    let Ok(mount) = context.host.mount(&path) else {
        return Finding::not_needed("the mounts cannot be read here");
    };
    let point = mount.point.display();
    if mount.allows_programs {
        return Finding::fine(format!("{point} allows programs"));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Finding::blocks(format!("{point} is mounted noexec")).with_fix(format!(
        "cp '{}' /usr/local/lib/ and give --plugin '/usr/local/lib/{name}', or `mount -o remount,exec '{point}'`",
        path.display()
    ))
}

/// Whether it has tables that this program speaks, and our own file belongs to this program.
pub(super) fn version(context: &Context<'_>) -> Finding {
    match &context.contents {
        None => Finding::not_needed(NONE),
        Some(Err(error @ ContentsError::NoTable { .. })) => {
            Finding::blocks(error.to_string()).with_fix(of_contents(error).hint)
        }
        Some(Err(_)) => {
            Finding::not_needed("the file is not there, or no shared library for this host")
        }
        Some(Ok(contents)) => {
            let tables = format!("tables {}", contents.versions());
            let ours = env!("TCPX_BUILD_ID");
            match &contents.build_id {
                Some(id) if contents.kind == PluginKind::Ours && id != ours => {
                    Finding::warning(format!("{tables}; it is \"{id}\", this program \"{ours}\""))
                        .with_fix(
                            "install both from one build: `cargo xtask dist` makes them together",
                        )
                }
                _ => Finding::fine(tables),
            }
        }
    }
}

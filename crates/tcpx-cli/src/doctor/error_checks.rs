//! What this host can say about an error that a transfer ended with.

use std::path::Path;

use super::check::{Context, Finding};
use super::{google_checks, host_checks};

/// The first of `checks` that finds trouble, else a word of where to look next.
fn first_trouble(
    context: &Context<'_>,
    checks: &[fn(&Context<'_>) -> Finding],
    otherwise: &str,
) -> Finding {
    let found = checks.iter().map(|check| check(context));
    let trouble = found.into_iter().find(Finding::is_trouble);
    trouble.unwrap_or_else(|| Finding::fine(otherwise))
}

/// Registration refused: the daemon, or the address.
pub(super) fn registration(context: &Context<'_>) -> Finding {
    first_trouble(
        context,
        &[google_checks::gpu_sockets],
        "nothing is wrong with the buffer daemon: then the address is no multiple of 4096 (memory from cuMemAlloc itself is one; a tensor in the middle of an allocation may not be)",
    )
}

/// Connections refused inside the plugin.
pub(super) fn connecting(context: &Context<'_>) -> Finding {
    let checks = [google_checks::rule_sockets, google_checks::gpu_sockets];
    first_trouble(
        context,
        &checks,
        "nothing is wrong here: run `tcpx doctor` at the peer",
    )
}

/// A plugin that does not start.
pub(super) fn starting(context: &Context<'_>) -> Finding {
    let checks = [host_checks::driver, host_checks::interfaces];
    first_trouble(
        context,
        &checks,
        "nothing is wrong here: `tcpx plugin PATH` shows the plugin's own log",
    )
}

/// A transfer that stalls.
pub(super) fn standing_still(context: &Context<'_>) -> Finding {
    let checks = [google_checks::rule_sockets, host_checks::large_packets];
    first_trouble(
        context,
        &checks,
        "nothing is wrong here: the error names the side that must act next, look there",
    )
}

/// Contents that are not what was sent.
pub(super) fn zeros(context: &Context<'_>) -> Finding {
    let units = context.host.names(Path::new("/sys/class/iommu"));
    match units {
        Ok(names) if !names.is_empty() && !crate::host::gpu_addresses(context.host).is_empty() => {
            Finding::warning(format!(
                "{} IOMMU units translate addresses: writes of a card to GPU memory may be dropped",
                names.len()
            ))
            .with_fix("boot with iommu=pt, or use --host to see whether GPU memory is what fails")
        }
        _ => Finding::fine(
            "no IOMMU translates between cards and GPUs: `tcpx demo` shows whether an unpacker is at fault",
        ),
    }
}

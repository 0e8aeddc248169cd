//! Checks of the host, whatever network is used.

use rustix::process::Rlimit;
use tcpx_net::interfaces::InterfaceKind;

use super::check::{Context, Finding};
use crate::host::{Driver, gpu_addresses, is_for_others, number};

/// Open files below which a few peers with many lanes run out.
const ENOUGH_FILES: u64 = 1024;
/// Bytes of a packet that every network takes.
const COMMON_MTU: u32 = 1500;
/// The first kernel with receives into device memory.
const DEVICE_MEMORY: (u32, u32) = (6, 12);

/// An interface that other hosts can reach.
pub(super) fn interfaces(context: &Context<'_>) -> Finding {
    let all = match context.host.interfaces() {
        Ok(all) => all,
        Err(error) => return Finding::warning(format!("the interfaces cannot be listed: {error}")),
    };
    let reachable = |kind: InterfaceKind| {
        let of_kind = all.iter().filter(move |one| one.kind == kind && one.up);
        of_kind.filter(|one| one.addresses.iter().any(is_for_others))
    };
    let names = |kinds: &[InterfaceKind]| -> Vec<&str> {
        let found = kinds.iter().flat_map(|kind| reachable(*kind));
        found.map(|one| one.name.as_str()).collect()
    };
    let good = names(&[
        InterfaceKind::Physical,
        InterfaceKind::Veth,
        InterfaceKind::Virtual,
    ]);
    if !good.is_empty() {
        return Finding::fine(format!("{} up with an address", good.join(", ")));
    }
    let on_loopback = names(&[InterfaceKind::Loopback]);
    if !on_loopback.is_empty() {
        let names = on_loopback.join(", ");
        return Finding::fine(format!(
            "{names} has an address that routes may lead to, as no other interface has"
        ));
    }
    let bridges = names(&[InterfaceKind::Bridge]);
    if !bridges.is_empty() {
        let text = format!("only bridges have an address: {}", bridges.join(", "));
        return Finding::warning(text);
    }
    let names: Vec<&str> = all.iter().map(|one| one.name.as_str()).collect();
    Finding::blocks(format!(
        "none of {} is up with an address that other hosts can reach",
        if names.is_empty() {
            "no interfaces".to_owned()
        } else {
            names.join(", ")
        }
    ))
}

/// Files that may be open.
pub(super) fn open_files(context: &Context<'_>) -> Finding {
    let Rlimit {
        current: soft,
        maximum: hard,
    } = context.host.open_files();
    let show =
        |limit: Option<u64>| limit.map_or_else(|| "no limit".to_owned(), |count| count.to_string());
    let measured = format!("limit {}, at most {}", show(soft), show(hard));
    if soft.is_none_or(|count| count >= ENOUGH_FILES) {
        return Finding::fine(measured);
    }
    match hard {
        Some(most) if most < ENOUGH_FILES => Finding::warning(measured),
        _ => Finding::warning(measured).with_fix(format!(
            "run `ulimit -n {}` in the shell that starts the program",
            hard.unwrap_or(65_536).min(65_536)
        )),
    }
}

/// The kernel's version.
pub(super) fn kernel(context: &Context<'_>) -> Finding {
    let release = context.facts.kernel.as_deref().unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next()?.parse::<u32>().ok();
    let (Some(major), Some(minor)) = (next(), next()) else {
        return Finding::warning(format!("its version \"{release}\" is not understood"));
    };
    let device_memory = if (major, minor) < DEVICE_MEMORY {
        "; receives into device memory need 6.12 or newer"
    } else {
        "; new enough for receives into device memory"
    };
    Finding::fine(format!("{release}{device_memory}"))
}

/// GPUs in the machine against GPUs that the driver serves.
pub(super) fn driver(context: &Context<'_>) -> Finding {
    let in_machine = gpu_addresses(context.host);
    let needed = context.is_google();
    match context.host.driver() {
        Driver::Present { version, devices } if devices.is_empty() => {
            let text = format!("the driver for CUDA {version} shows no GPU");
            let finding = if needed {
                Finding::blocks(text)
            } else {
                Finding::warning(text)
            };
            finding.with_fix("look at CUDA_VISIBLE_DEVICES and at `nvidia-smi`")
        }
        Driver::Present { version, devices } if devices.len() < in_machine.len() => {
            Finding::fine(format!(
                "CUDA {version}, {} of the machine's {} GPUs are shown to this process",
                devices.len(),
                in_machine.len()
            ))
        }
        Driver::Present { version, devices } => {
            Finding::fine(format!("CUDA {version}, {} GPUs", devices.len()))
        }
        Driver::Missing { why } if !in_machine.is_empty() => {
            let text = format!(
                "the machine has {} GPUs, but no driver: {why}",
                in_machine.len()
            );
            if needed {
                Finding::blocks(text)
            } else {
                Finding::warning(text)
            }
        }
        Driver::Missing { why } if needed => Finding::blocks(format!(
            "no GPU, and Google's plugin ends the process without one: {why}"
        )),
        Driver::Missing { .. } => {
            Finding::not_needed("no GPU in this machine: host memory takes its place")
        }
    }
}

/// The largest packets of the interfaces that others reach.
pub(super) fn packet_size(context: &Context<'_>) -> Finding {
    match packets(context) {
        None => Finding::not_needed("no interface that others reach has an MTU to read"),
        Some((found, true)) => {
            Finding::fine(format!("{found}: everything on the path must take that"))
        }
        Some((found, false)) => Finding::fine(found),
    }
}

/// Large packets that a part of the path may drop.
pub(super) fn large_packets(context: &Context<'_>) -> Finding {
    match packets(context) {
        Some((found, true)) => Finding::warning(format!(
            "{found}, and TCP does not look for a smaller MTU on the path"
        ))
        .with_fix("fix what TCPX-D007 says, or see that everything on the path takes such packets"),
        Some((found, false)) => Finding::fine(found),
        None => Finding::not_needed("no MTU to read"),
    }
}

/// The interfaces' MTUs, and whether one is larger than common while TCP does not probe the path.
fn packets(context: &Context<'_>) -> Option<(String, bool)> {
    let probing = number(context.host, "/proc/sys/net/ipv4/tcp_mtu_probing").unwrap_or(0);
    let all = context.host.interfaces().ok()?;
    let mut largest = 0;
    let mut list = Vec::new();
    for one in &all {
        if let Some(mtu) = one.mtu
            && one.up
            && one.addresses.iter().any(is_for_others)
        {
            largest = largest.max(mtu);
            list.push(format!("{} {mtu}", one.name));
        }
    }
    let found = format!(
        "MTU: {}; net.ipv4.tcp_mtu_probing = {probing}",
        list.join(", ")
    );
    (!list.is_empty()).then_some((found, largest > COMMON_MTU && probing == 0))
}

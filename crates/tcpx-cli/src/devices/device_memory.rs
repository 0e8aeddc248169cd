//! What the network cards can do for device memory.

use tcpx_devmem::{Capability, Devmem, QueueUse, Why};

use crate::output::say::say;

/// A line for each card, and one for all interfaces without a card.
pub(super) fn show<'a>(interfaces: impl Iterator<Item = &'a str>) {
    say!("");
    let devmem = Devmem::system();
    match devmem.kernel_capability() {
        Ok(kernel) => say!(
            "device-memory TCP: this kernel {}",
            match (kernel.receive, kernel.send) {
                (true, true) => "can receive into device memory and send from it",
                (true, false) => "can receive into device memory; sending from it needs Linux 6.16",
                (false, _) => "cannot; it needs Linux 6.12 with CONFIG_NET_DEVMEM",
            }
        ),
        Err(error) => {
            say!("device-memory TCP: not on this kernel");
            say!("  missing: {error}");
            return;
        }
    }
    let mut software = Vec::new();
    for interface in interfaces {
        match devmem.capability(interface) {
            Ok(card) => card_lines(&card).iter().for_each(|line| say!("  {line}")),
            Err(error) if error.why() == Why::NoDriver => software.push(interface),
            Err(error) => say!("  {interface}: unknown: {error}"),
        }
    }
    if !software.is_empty() {
        say!("  without a card: {}", software.join(", "));
    }
}

/// What the card is, and then what it lacks.
fn card_lines(card: &Capability) -> Vec<String> {
    let missing = card.missing();
    let verdict = match (missing.is_empty(), card.is_known_driver()) {
        (false, _) => "no",
        (true, true) => "yes, as its driver does in the versions that can",
        (true, false) => "perhaps",
    };
    let setting = |value: Option<bool>| match value {
        None => "none",
        Some(true) => "on",
        Some(false) => "off",
    };
    let mut lines = vec![format!(
        "{} ({}): {verdict}; {} receive queues, header split {}, threshold {}, flow rules {}",
        card.interface,
        card.driver,
        card.queues,
        setting(card.header_split),
        card.threshold
            .map_or_else(|| "none".to_owned(), |bytes| bytes.to_string()),
        setting(card.flow_rules),
    )];
    for (queue, by) in &card.used {
        let by = match by {
            QueueUse::DmaBuf(id) => format!("bound to memory {id}"),
            QueueUse::IoUring => "used by an io_uring".to_owned(),
            QueueUse::AfXdp => "used by an AF_XDP socket".to_owned(),
            QueueUse::Free => continue,
        };
        lines.push(format!("  queue {queue}: {by}"));
    }
    lines.extend(
        missing
            .iter()
            .map(|missing| format!("  missing: {missing}")),
    );
    if missing.is_empty() {
        lines.push(format!(
            "  to try it: tcpx transfer server --network devmem --devmem-interface {}",
            card.interface
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> Capability {
        Capability {
            interface: "eth1".into(),
            driver: "gve".into(),
            queues: 8,
            header_split: Some(false),
            threshold: None,
            flow_rules: Some(true),
            has_table: true,
            used: vec![(7, QueueUse::DmaBuf(3))],
        }
    }

    #[test]
    fn a_card_that_can_is_told_from_one_that_cannot() {
        let able = card_lines(&card());
        assert!(able[0].starts_with("eth1 (gve): yes"), "{able:?}");
        assert_eq!(able[1], "  queue 7: bound to memory 3");
        assert!(able[2].ends_with("--devmem-interface eth1"), "{able:?}");
        let unable = card_lines(&Capability {
            driver: "virtio_net".into(),
            header_split: None,
            used: Vec::new(),
            ..card()
        });
        assert!(unable[0].starts_with("eth1 (virtio_net): no"), "{unable:?}");
        assert!(unable[1].contains("tcp-data-split"), "{unable:?}");
    }
}

//! Binding, refusals and restoring, against the kernel in memory.

mod log;
mod refusals;
mod restoring;

use std::fs::File;
use std::sync::Arc;

use tcpx_memory::{DmaBuf, Region};

use super::kernel::fake::{Card, Fake};
use super::*;

/// Host memory whose descriptor only the fake takes for a dma-buf.
fn memory() -> DmaBuf {
    let nothing = File::open("/dev/null").unwrap().into();
    // SAFETY: no device gets it.
    unsafe { DmaBuf::from_fd(nothing, Region::host(8192).unwrap()) }
}

/// A host: its kernel, and the folder of records.
struct Host {
    kernel: Fake,
    folder: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        Self {
            kernel: Fake::new(),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn devmem(&self) -> Devmem {
        self.devmem_of(&self.kernel)
    }

    fn devmem_of(&self, kernel: &Fake) -> Devmem {
        Devmem::new(Arc::new(kernel.clone()), self.folder.path().to_owned())
    }

    /// Nothing is left of anybody: no record, socket, binding or rule.
    fn assert_clean(&self, before: &Card) {
        assert_eq!(self.kernel.card(|_| ()), *before);
        assert_eq!(self.devmem().status(), Ok(Vec::new()));
        let world = self.kernel.world();
        assert!(
            world.sockets.is_empty() && world.sends.is_empty(),
            "{world:?}"
        );
    }
}

fn options(queue: Option<u32>) -> ReceiveOptions {
    ReceiveOptions {
        interface: "dm1".to_owned(),
        queue,
        memory: memory(),
        adjust: Adjust::Settings,
    }
}

fn flow(port: u16) -> Flow {
    Flow {
        local: ([10, 0, 0, 2], port).into(),
        remote: Some(([10, 0, 0, 1], 40_000).into()),
    }
}

#[test]
fn a_bound_queues_card_is_restored_at_the_end() {
    let host = Host::new();
    let before = host.kernel.card(|_| ());
    let bound = host.devmem().bind_receive(&options(Some(1))).unwrap();
    let card = host.kernel.card(|_| ());
    assert_eq!(
        (card.split, card.threshold, card.flow_rules),
        (Some(2), Some(0), Some(true))
    );
    let table = card.table.unwrap();
    assert_eq!(table, [0, 0, 2, 3, 0, 2, 2, 3]);
    assert_eq!(card.bound[&1].1, bound.dmabuf_id);
    assert_eq!((bound.ifindex, bound.queue, bound.pool.len()), (5, 1, 8192));
    drop(bound);
    host.assert_clean(&before);
}

#[test]
fn settings_that_are_right_already_are_left_alone() {
    let host = Host::new();
    let before = host.kernel.card(|card| {
        (card.split, card.threshold, card.flow_rules) = (Some(2), Some(0), Some(true));
        card.table = Some(vec![0; 8]);
    });
    drop(host.devmem().bind_receive(&options(None)).unwrap());
    assert_eq!(host.kernel.world().changes, ["bind"]);
    host.assert_clean(&before);
}

#[test]
fn without_a_wish_the_last_free_queue_is_taken() {
    let host = Host::new();
    let foreign = host.kernel.process(9);
    host.kernel.card(|card| {
        card.bound.insert(3, (1000, 77));
    });
    let first = host.devmem().bind_receive(&options(None)).unwrap();
    let second = host
        .devmem_of(&foreign)
        .bind_receive(&options(None))
        .unwrap();
    assert_eq!((first.queue, second.queue), (2, 1));
}

#[test]
fn flows_are_steered_for_as_long_as_their_rules_live() {
    for driver_places in [false, true] {
        let host = Host::new();
        let before = host.kernel.card(|card| card.driver_places = driver_places);
        let bound = host.devmem().bind_receive(&options(Some(2))).unwrap();
        let (first, second) = (bound.steer(flow(1)).unwrap(), bound.steer(flow(2)).unwrap());
        let rules = host.kernel.card(|_| ()).rules;
        assert_eq!(rules.len(), 2);
        assert!(rules.values().all(|rule| rule.queue == 2));
        let status = host.devmem().status().unwrap().remove(0);
        assert_eq!(status.holds[0].rules.len(), 2);
        drop(first);
        let rules: Vec<_> = host.kernel.card(|_| ()).rules.into_values().collect();
        assert_eq!(
            rules
                .iter()
                .map(|rule| rule.local.port())
                .collect::<Vec<_>>(),
            [2]
        );
        // A rule keeps its queue bound.
        drop(bound);
        assert_eq!(host.kernel.card(|_| ()).bound.len(), 1);
        drop(second);
        host.assert_clean(&before);
    }
}

#[test]
fn two_processes_share_a_card_and_the_last_one_puts_it_back() {
    let host = Host::new();
    let before = host.kernel.card(|_| ());
    let other = host.kernel.process(200);
    let first = host.devmem().bind_receive(&options(Some(1))).unwrap();
    let second = host
        .devmem_of(&other)
        .bind_receive(&options(Some(2)))
        .unwrap();
    let table = host.kernel.card(|_| ()).table.unwrap();
    assert!(
        table.iter().all(|queue| [0, 3].contains(queue)),
        "{table:?}"
    );
    drop(first);
    assert_eq!(host.kernel.card(|_| ()).split, Some(2));
    drop(second);
    host.assert_clean(&before);
}

#[test]
fn sending_binds_without_touching_the_card() {
    let host = Host::new();
    let before = host.kernel.card(|_| ());
    let buffer = memory();
    let path = host.devmem().bind_send("dm1", &buffer).unwrap();
    assert_eq!(host.kernel.world().sends.len(), 1);
    let slice = buffer.region().slice(100..200).unwrap();
    assert_eq!((path.offset_of(&slice), path.ifindex), (Some(100), 5));
    drop(path);
    host.assert_clean(&before);
}

#[test]
fn memory_that_is_in_use_is_no_pool() {
    let host = Host::new();
    let before = host.kernel.card(|_| ());
    let options = options(None);
    let _reader = options
        .memory
        .region()
        .lease(0..1, tcpx_memory::Access::Read)
        .unwrap();
    let refused = host.devmem().bind_receive(&options).unwrap_err();
    assert_eq!(refused.why(), Why::Memory, "{refused}");
    host.assert_clean(&before);
}

#[test]
fn asking_a_card_what_it_can_do_changes_nothing() {
    let host = Host::new();
    let before = host.kernel.card(|card| {
        card.bound.insert(3, (1000, 77));
    });
    let found = host.devmem().capability("dm1").unwrap();
    assert_eq!(
        (found.header_split, found.threshold),
        (Some(false), Some(256))
    );
    assert_eq!(found.used, [(3, QueueUse::DmaBuf(77))]);
    assert!(
        found.missing().is_empty() && !found.is_known_driver(),
        "{found:?}"
    );
    host.kernel.card(|card| {
        (card.split, card.table, card.queues, card.flow_rules) = (None, None, 1, None);
    });
    assert_eq!(host.devmem().capability("dm1").unwrap().missing().len(), 4);
    let can = host.devmem().kernel_capability().unwrap();
    assert!(can.receive && can.send);
    host.kernel.card(|card| *card = before.clone());
    assert!(host.kernel.world().changes.is_empty());
}

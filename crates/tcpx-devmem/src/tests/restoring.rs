//! What is undone, when, and what is left alone.

use super::*;
use crate::Why;

/// Binds queue 1 with a rule in a process that then dies of `kill -9`.
fn die_bound(host: &Host, pid: u32) {
    let process = host.kernel.process(pid);
    let bound = host
        .devmem_of(&process)
        .bind_receive(&options(Some(1)))
        .unwrap();
    let rule = bound.steer(flow(1)).unwrap();
    process.kill();
    // Its destructors never run.
    std::mem::forget((bound, rule));
}

fn status(host: &Host) -> Status {
    host.devmem().status().unwrap().remove(0)
}

#[test]
fn what_a_killed_process_left_is_shown_and_released() {
    let host = Host::new();
    let before = host.kernel.card(|_| ());
    die_bound(&host, 300);
    assert_ne!(host.kernel.card(|_| ()), before);
    let shown = status(&host);
    assert_eq!(shown.holds[0].holder, Holder::Dead);
    assert_eq!(
        (shown.holds[0].pid, shown.holds[0].queue, shown.here),
        (300, 1, true)
    );
    assert_eq!(
        shown.holds[0].rules,
        ["10.0.0.1:40000 to 10.0.0.2:1 to queue 1"]
    );
    assert_eq!(
        shown.changes,
        [
            "ntuple-filters: off, now on",
            "tcp-data-split: auto, now on",
            "hds-thresh: 256, now 0",
            "RSS table: 2 of 8 entries moved to other queues"
        ]
    );
    let released = host.devmem().release(None).unwrap();
    assert_eq!(released.len(), 1);
    assert_eq!(
        (&released[0].left, &released[0].failed[..]),
        (&None, &[][..])
    );
    host.assert_clean(&before);
    assert_eq!(host.devmem().release(None), Ok(Vec::new()));
}

#[test]
fn the_next_start_undoes_what_a_killed_process_left() {
    let host = Host::new();
    let before = host.kernel.card(|_| ());
    die_bound(&host, 300);
    let bound = host.devmem().bind_receive(&options(Some(1))).unwrap();
    assert!(host.kernel.card(|_| ()).rules.is_empty());
    assert_eq!(status(&host).holds.len(), 1);
    drop(bound);
    host.assert_clean(&before);
}

#[test]
fn a_process_with_the_number_of_a_dead_one_is_not_taken_for_it() {
    let host = Host::new();
    die_bound(&host, 300);
    host.kernel.world().processes.insert(300, 1);
    assert_eq!(status(&host).holds[0].holder, Holder::Dead);
}

#[test]
fn a_living_process_is_not_released() {
    let host = Host::new();
    let other = host.kernel.process(200);
    let bound = host
        .devmem_of(&other)
        .bind_receive(&options(Some(1)))
        .unwrap();
    let during = host.kernel.card(|_| ());
    let released = host.devmem().release(None).unwrap();
    let left = released[0].left.as_ref().unwrap();
    assert_eq!(left.holds[0].holder, Holder::Alive);
    assert_eq!(host.kernel.card(|_| ()), during);
    drop(bound);
}

#[test]
fn a_dead_neighbour_leaves_the_card_to_the_living() {
    let host = Host::new();
    let before = host.kernel.card(|_| ());
    let bound = host.devmem().bind_receive(&options(Some(2))).unwrap();
    die_bound(&host, 300);
    assert_eq!(host.kernel.card(|_| ()).rules.len(), 1);
    host.devmem().release(Some("dm1")).unwrap();
    let card = host.kernel.card(|_| ());
    assert!(card.rules.is_empty());
    assert_eq!((card.split, card.bound.len()), (Some(2), 1));
    drop(bound);
    host.assert_clean(&before);
}

#[test]
fn a_death_between_note_and_change_is_undone_too() {
    // Each of the calls that change the card fails, as if it had never been made.
    for call in ["flow rules", "rings", "indirection"] {
        let host = Host::new();
        let before = host.kernel.card(|_| ());
        host.kernel.world().failing.insert(call, libc::EIO);
        let refused = host.devmem().bind_receive(&options(Some(1))).unwrap_err();
        assert_ne!(refused.why(), Why::NoPermission, "{refused}");
        host.kernel.world().failing.clear();
        // What could not be put back at once is left to the next release.
        host.kernel.kill();
        host.devmem_of(&host.kernel.process(1))
            .release(None)
            .unwrap();
        host.assert_clean(&before);
    }
}

#[test]
fn a_rule_of_unknown_place_is_found_by_its_content() {
    let host = Host::new();
    let before = host.kernel.card(|card| card.driver_places = true);
    die_bound(&host, 300);
    let path = host.folder.path().join("cards.json");
    let mut record: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    record["cards"][0]["holds"][0]["rules"][0]["at"] = serde_json::Value::Null;
    std::fs::write(&path, record.to_string()).unwrap();
    host.devmem().release(None).unwrap();
    host.assert_clean(&before);
}

#[test]
fn what_somebody_else_changed_meanwhile_is_left_as_it_is() {
    let host = Host::new();
    die_bound(&host, 300);
    let theirs = host.kernel.card(|card| {
        card.threshold = Some(64);
        card.table = Some(vec![3; 8]);
        let place = *card.rules.keys().next().unwrap();
        card.rules.get_mut(&place).unwrap().queue = 3;
    });
    host.devmem().release(None).unwrap();
    let card = host.kernel.card(|_| ());
    assert_eq!(
        (&card.table, &card.rules, card.threshold),
        (&theirs.table, &theirs.rules, Some(64))
    );
    assert_eq!((card.split, card.flow_rules), (Some(1), Some(false)));
    assert_eq!(host.devmem().status(), Ok(Vec::new()));
}

#[test]
fn a_split_goes_back_to_what_was_set_not_to_what_it_read_as() {
    for (setting, refuses) in [(0, None), (1, None), (0, Some(1))] {
        let host = Host::new();
        let before = host.kernel.card(|card| {
            (card.split_setting, card.refuses_split) = (setting, refuses);
        });
        let bound = host.devmem().bind_receive(&options(Some(1))).unwrap();
        assert_eq!(host.kernel.card(|_| ()).split_setting, 2);
        drop(bound);
        host.assert_clean(&before);
    }
    // A driver that takes the decision back from nobody.
    let host = Host::new();
    host.kernel.card(|card| card.refuses_split = Some(0));
    drop(host.devmem().bind_receive(&options(Some(1))).unwrap());
    assert_eq!(host.kernel.card(|_| ()).split_setting, 1);
    assert_eq!(host.devmem().status(), Ok(Vec::new()));
}

#[test]
fn a_table_set_by_hand_is_put_back_entry_by_entry() {
    let host = Host::new();
    let before = host
        .kernel
        .card(|card| card.table = Some(vec![1, 1, 0, 3, 3, 2, 1, 0]));
    drop(host.devmem().bind_receive(&options(Some(1))).unwrap());
    host.assert_clean(&before);
}

#[test]
fn what_cannot_be_undone_stays_recorded_with_its_reason() {
    let host = Host::new();
    let before = host.kernel.card(|_| ());
    die_bound(&host, 300);
    host.kernel
        .world()
        .failing
        .insert("delete rule", libc::EPERM);
    let released = host.devmem().release(None).unwrap();
    let why: Vec<_> = released[0].failed.iter().map(DevmemError::why).collect();
    assert_eq!(why, [Why::NoPermission], "{released:?}");
    assert!(released[0].left.is_some());
    host.kernel.world().failing.clear();
    host.devmem().release(None).unwrap();
    host.assert_clean(&before);
}

#[test]
fn what_cannot_be_undone_of_the_dead_is_kept() {
    let host = Host::new();
    die_bound(&host, 300);
    host.kernel
        .world()
        .failing
        .insert("delete rule", libc::EPERM);
    let lines = log::logged(|| {
        let bound = host.devmem().bind_receive(&options(Some(2))).unwrap();
        assert_eq!(status(&host).holds.len(), 2, "the dead one's is kept");
        host.kernel.world().failing.clear();
        drop(bound);
    });
    let about = |line: &&String| line.contains("a dead process left");
    let lines: Vec<_> = lines.iter().filter(about).collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0].contains("WARN") && lines[0].contains("removing a flow rule"),
        "{lines:?}"
    );
}

#[test]
fn a_renamed_interface_is_still_the_same_one() {
    let host = Host::new();
    let before = host.kernel.card(|_| ());
    die_bound(&host, 300);
    let rename = |from: &str, to: &str| {
        let mut world = host.kernel.world();
        let card = world.cards.remove(from).unwrap();
        world.cards.insert(to.to_owned(), card);
    };
    rename("dm1", "eth7");
    host.devmem().release(None).unwrap();
    rename("eth7", "dm1");
    host.assert_clean(&before);
}

#[test]
fn an_interface_that_is_gone_is_forgotten() {
    let host = Host::new();
    die_bound(&host, 300);
    host.kernel.world().cards.clear();
    let released = host.devmem().release(None).unwrap();
    assert_eq!(released[0].left, None);
    assert_eq!(host.devmem().status(), Ok(Vec::new()));
}

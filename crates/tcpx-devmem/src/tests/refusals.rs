//! Each refusal of the kernel is an error of its own, with the kernel's words and a command.

use super::*;
use crate::Why;

/// What binding says when the kernel answers so.
fn refused(errno: i32, words: &'static str) -> DevmemError {
    let host = Host::new();
    let before = host.kernel.card(|card| card.refuses = Some((errno, words)));
    let refused = host.devmem().bind_receive(&options(Some(1))).unwrap_err();
    host.assert_clean(&before);
    let text = refused.to_string();
    assert!(text.contains(words), "{text}");
    refused
}

#[test]
fn kernel_refusals_become_errors_that_say_the_fix() {
    let cases: [(i32, &'static str, Why, &str); 9] = [
        (
            libc::EINVAL,
            "tcp-data-split is disabled",
            Why::HeaderSplitOff,
            "ethtool -G dm1 tcp-data-split on",
        ),
        (
            libc::EINVAL,
            "hds-thresh is not zero",
            Why::HeaderThreshold,
            "ethtool -G dm1 hds-thresh 0",
        ),
        (
            libc::EEXIST,
            "unable to custom memory provider to device with XDP program attached",
            Why::Xdp,
            "ip link set dev dm1 xdp off",
        ),
        (
            libc::EBUSY,
            "designated queue already in use by AF_XDP",
            Why::AfXdp,
            "ss --xdp",
        ),
        (
            libc::EEXIST,
            "designated queue already memory provider bound",
            Why::QueueTaken,
            "tcpx devmem status",
        ),
        (
            libc::EBUSY,
            "rx queue leased to a virtual netdev",
            Why::QueueLeased,
            "take another queue",
        ),
        (
            libc::EOPNOTSUPP,
            "Device doesn't support DMA",
            Why::NoDma,
            "tcpx devices",
        ),
        (
            libc::EOPNOTSUPP,
            "",
            Why::NoQueueOperations,
            "(dmsim) has no queue operations",
        ),
        (libc::EPERM, "", Why::NoPermission, "setcap cap_net_admin"),
    ];
    for (errno, words, why, fixes) in cases {
        let error = refused(errno, words);
        assert_eq!(error.why(), why, "{error:?}");
        assert!(error.to_string().contains(fixes), "{error}");
    }
    let other = refused(libc::ENOMEM, "");
    assert_eq!(other.why(), Why::Other, "{other}");
}

#[test]
fn nothing_is_changed_where_nothing_may_be() {
    type Set = fn(&mut Card);
    let cases: [(Set, Why); 3] = [
        (|_| (), Why::HeaderSplitOff),
        (|card| card.split = Some(2), Why::HeaderThreshold),
        (
            |card| (card.split, card.threshold) = (None, None),
            Why::HeaderSplitOff,
        ),
    ];
    for (set, why) in cases {
        let host = Host::new();
        let before = host.kernel.card(set);
        let untouched = ReceiveOptions {
            adjust: Adjust::Nothing,
            ..options(Some(1))
        };
        let refused = host.devmem().bind_receive(&untouched).unwrap_err();
        assert_eq!(refused.why(), why, "{refused}");
        assert_eq!(host.kernel.world().changes, ["bind"]);
        host.assert_clean(&before);
    }
}

#[test]
fn a_queue_beyond_the_last_says_how_many_there_are() {
    let host = Host::new();
    let before = host.kernel.card(|_| ());
    let refused = host.devmem().bind_receive(&options(Some(4))).unwrap_err();
    assert_eq!(refused.why(), Why::QueueOutOfRange, "{refused}");
    let words = "has no queue 4, only 4";
    assert!(refused.to_string().contains(words), "{refused}");
    host.assert_clean(&before);
}

#[test]
fn a_queue_of_our_own_names_the_process_that_has_it() {
    let host = Host::new();
    let _bound = host.devmem().bind_receive(&options(Some(1))).unwrap();
    let refused = host.devmem().bind_receive(&options(Some(1))).unwrap_err();
    assert!(
        refused.to_string().contains("taken by process 100"),
        "{refused}"
    );
    assert_eq!(host.kernel.card(|_| ()).bound.len(), 1);
}

#[test]
fn the_only_queue_is_left_to_other_traffic() {
    let host = Host::new();
    let before = host.kernel.card(|card| {
        card.queues = 1;
        card.table = Some(vec![0; 8]);
    });
    let refused = host.devmem().bind_receive(&options(None)).unwrap_err();
    assert_eq!(refused.why(), Why::SingleQueue, "{refused}");
    host.assert_clean(&before);
}

#[test]
fn a_virtual_interface_has_no_driver() {
    let host = Host::new();
    let before = host.kernel.card(|card| {
        *card = Card {
            driver: None,
            split: None,
            threshold: None,
            table: None,
            flow_rules: None,
            queues: 1,
            refuses: Some((libc::EOPNOTSUPP, "")),
            ..card.clone()
        };
    });
    let refused = host.devmem().bind_receive(&options(None)).unwrap_err();
    assert_eq!(refused.why(), Why::NoDriver, "{refused}");
    host.assert_clean(&before);
    let missing = ReceiveOptions {
        interface: "dm9".to_owned(),
        ..options(None)
    };
    let refused = host.devmem().bind_receive(&missing).unwrap_err();
    assert_eq!(refused.why(), Why::NoInterface, "{refused}");
}

#[test]
fn an_old_kernel_says_which_command_it_lacks() {
    let host = Host::new();
    let before = host.kernel.card(|_| ());
    host.kernel.world().operations = vec![1, 10, 13];
    let refused = host.devmem().bind_send("dm1", &memory()).unwrap_err();
    assert!(
        refused.why() == Why::OldKernel && refused.leaves_staging(),
        "{refused}"
    );
    host.kernel.world().operations = vec![1];
    let refused = host.devmem().bind_receive(&options(None)).unwrap_err();
    assert!(refused.to_string().contains("Linux 6.12"), "{refused}");
    host.assert_clean(&before);
}

#[test]
fn a_card_that_cannot_send_says_so() {
    let host = Host::new();
    host.kernel.card(|card| {
        card.refuses_send = Some((libc::EOPNOTSUPP, "Driver does not support netmem TX"))
    });
    let refused = host.devmem().bind_send("dm1", &memory()).unwrap_err();
    assert_eq!(refused.why(), Why::NoSend, "{refused}");
    assert!(refused.to_string().contains("does not support netmem TX"));
    assert!(refused.leaves_staging());
    host.kernel
        .card(|card| card.refuses_send = Some((libc::EPERM, "")));
    let refused = host.devmem().bind_send("dm1", &memory()).unwrap_err();
    assert!(!refused.leaves_staging(), "{refused}");
    assert!(host.kernel.world().sockets.is_empty());
}

#[test]
fn rules_that_cannot_be_made_are_not_left_in_the_record() {
    let host = Host::new();
    host.kernel.card(|card| card.places = 1);
    let bound = host.devmem().bind_receive(&options(Some(1))).unwrap();
    let first = bound.steer(flow(1)).unwrap();
    let refused = bound.steer(flow(1)).unwrap_err();
    assert_eq!(refused.why(), Why::FlowTaken, "{refused}");
    assert!(
        refused.to_string().contains("to queue 1 (rule"),
        "{refused}"
    );
    let refused = bound.steer(flow(2)).unwrap_err();
    assert_eq!(refused.why(), Why::RulesFull, "{refused}");
    drop(first);
    for (errno, is_permission) in [(libc::EPERM, true), (libc::EINVAL, false)] {
        host.kernel.world().failing.insert("insert rule", errno);
        let refused = bound.steer(flow(2)).unwrap_err();
        let says = refused.why() == Why::NoPermission;
        assert_eq!(says, is_permission, "{refused}");
    }
    let status = host.devmem().status().unwrap().remove(0);
    assert!(status.holds[0].rules.is_empty(), "{status:?}");
}

//! What `tcpx status` is told of a process under NCCL.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

#[expect(dead_code, reason = "not every test needs all of it")]
mod common;

use common::{MIB, Registered, lane_config, pair, plugin, posted, transfer, until};
use nccl_net::export::{NetComm, NetRecv, NetSend};
use tcpx_status::{ConnectionReport, Report, ask_process, processes};

fn look() -> Report {
    let own = std::process::id();
    let sockets = processes().found;
    let (pid, socket) = sockets.iter().find(|(pid, _)| *pid == own).unwrap();
    ask_process(*pid, socket).unwrap()
}

fn of<'a>(report: &'a Report, kind: &str) -> &'a ConnectionReport {
    let found = report
        .connections
        .iter()
        .find(|one| one.path.contains(kind));
    found.unwrap_or_else(|| panic!("no {kind}: {report:?}"))
}

#[test]
fn a_rank_that_waits_says_for_whom_and_which_lanes_it_has() {
    let plugin = plugin(lane_config());
    let pair = pair(&plugin);
    let mut from = Registered::new(&pair.send, vec![3; 2 * MIB], false);
    let mut to = Registered::new(&pair.receive, vec![0; 2 * MIB], false);
    for _ in 0..3 {
        transfer(&pair, &mut from, &mut to, 2 * MIB, 2 * MIB);
    }
    let report = look();
    let (send, receive) = (of(&report, "send comm"), of(&report, "receive comm"));
    assert_eq!(
        (send.counters.bytes_sent, send.operations_running),
        (6 * MIB as u64, 0)
    );
    assert_eq!(receive.counters.bytes_received, 6 * MIB as u64);
    let lanes = of(&report, "lanes that all comms");
    assert_eq!(lanes.lanes.len(), 3);
    assert!(lanes.lanes.iter().map(|lane| lane.bytes_sent).sum::<u64>() > 0);
    assert_eq!(lanes.stuck, None);

    // A receive without a send is early; a send that nobody reads stalls.
    let buffer = to.buffer(0, MIB);
    let receive = posted(pair.receive.irecv(buffer, 0, &to.memory));
    let report = look();
    let waiting = of(&report, "receive comm");
    assert_eq!(
        (waiting.operations_running, waiting.operations_stalled),
        (1, 0)
    );
    assert_eq!(waiting.operations[0].next, "the peer must send");
    let mut sends = Vec::new();
    for _ in 0..3 {
        sends.push(posted(pair.send.isend(
            from.buffer(0, MIB),
            0,
            &from.memory,
        )));
    }
    common::finish(&pair, sends[0], receive);
    until("a stall", || {
        assert_eq!(pair.send.test(sends[1]).unwrap(), None);
        let report = look();
        let send = of(&report, "send comm");
        let stalled = (send.operations_stalled > 0).then_some(send)?;
        let next = &stalled.operations[0].next;
        assert_eq!(next, "the peer must post its receive", "{send:?}");
        Some(())
    });
    drop(pair);
    until("the comms' end", || look_at_none().then_some(()));
}

/// Whether the process tells of nothing any more.
fn look_at_none() -> bool {
    let own = std::process::id();
    !processes().found.iter().any(|(pid, _)| *pid == own) || look().connections.is_empty()
}

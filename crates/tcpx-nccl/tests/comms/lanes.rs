//! Large messages: over lanes that the comms of a process share.

use nccl_net::ResultCode;
use nccl_net::export::{NetComm, NetConnect, NetListen, NetPlugin, NetRecv, NetSend};
use nccl_net_tcpx::{Config, Mode, TcpxPlugin};
use tcpx_wire::Key;

use crate::common::{
    MIB, Pair, Registered, finish, has, lane_config, pair, pair_between, plugin, posted, random,
    stream, until,
};

#[test]
fn messages_of_any_size_stream_in_order() {
    let plugin = plugin(lane_config());
    let pair = pair(&plugin);
    for len in [1, 65_536, 65_537, 100_000, MIB, 3 * MIB + 1] {
        stream(&pair, len, 40);
    }
    // Small ones long enough that grants end, then large ones again.
    stream(&pair, 24, 200);
    stream(&pair, MIB, 20);
}

#[test]
fn a_comm_that_posts_nothing_does_not_hold_up_the_others() {
    let plugin = plugin(lane_config());
    let (idle, busy) = (pair(&plugin), pair(&plugin));
    stream(&idle, MIB, 20);
    let mut from = Registered::new(&idle.send, vec![1; 16 * MIB], false);
    let ids: Vec<_> = (0..16)
        .map(|n| posted(idle.send.isend(from.buffer(n * MIB, MIB), 0, &from.memory)))
        .collect();
    stream(&busy, MIB, 50);
    let mut to = Registered::new(&idle.receive, vec![0; 16 * MIB], false);
    for (n, id) in ids.into_iter().enumerate() {
        let receive = posted(idle.receive.irecv(to.buffer(n * MIB, MIB), 0, &to.memory));
        assert_eq!(finish(&idle, id, receive), MIB);
    }
    assert_eq!(to.bytes, from.bytes);
}

#[test]
fn closing_amid_a_transfer_spares_the_other_comms() {
    let plugin = plugin(lane_config());
    for sender_closes in [true, false] {
        // The transfer may be over before it is looked at.
        let caught = (0..100).any(|_| closes_amid_a_transfer(&plugin, sender_closes));
        assert!(caught, "always too late");
    }
}

/// Whether it closed amid the transfer.
fn closes_amid_a_transfer(plugin: &TcpxPlugin, sender_closes: bool) -> bool {
    let (gone, stays) = (pair(plugin), pair(plugin));
    stream(&gone, MIB, 20);
    let mut from = Registered::new(&gone.send, vec![1; 64 * MIB], false);
    let mut to = Registered::new(&gone.receive, vec![0; 64 * MIB], false);
    let receive = posted(gone.receive.irecv(to.buffer(0, 64 * MIB), 0, &to.memory));
    let send = posted(gone.send.isend(from.buffer(0, 64 * MIB), 0, &from.memory));
    let is_over = until("the first bytes", || {
        let ends = [gone.send.test(send), gone.receive.test(receive)];
        let is_over = ends.into_iter().any(|end| end.unwrap().is_some());
        (is_over || has(&to.bytes, 1000, 1)).then_some(is_over)
    });
    if is_over {
        return false;
    }
    let Pair {
        send: s,
        receive: r,
        ..
    } = gone;
    if sender_closes {
        drop(s);
        // Its memory is its host's again.
        drop(from);
        let end = until("the receive's end", || r.test(receive).transpose());
        let Err(error) = end else {
            // All of it was on its way.
            return false;
        };
        assert_eq!(error.code(), ResultCode::SystemError, "{error}");
    } else {
        drop(r);
        to.bytes.fill(7);
        // What is in sockets counts as sent; the next call hears of the end.
        until("the send's end", || {
            s.test(send).map_or(Some(()), |done| done.map(drop))
        });
        let error = until("the sender's error", || {
            s.isend(from.buffer(0, 1), 0, &from.memory).err()
        });
        assert_eq!(error.code(), ResultCode::SystemError, "{error}");
        assert!(
            to.bytes.iter().all(|byte| *byte == 7),
            "written after the close"
        );
    }
    stream(&stays, MIB, 30);
    true
}

#[test]
fn what_lanes_carry_outlives_its_senders_close() {
    let plugin = plugin(lane_config());
    for _ in 0..20 {
        let pair = pair(&plugin);
        stream(&pair, MIB, 8);
        let mut from = Registered::new(&pair.send, random(MIB, 5), false);
        let mut to = Registered::new(&pair.receive, vec![0; MIB], false);
        let receive = posted(pair.receive.irecv(to.buffer(0, MIB), 0, &to.memory));
        let send = posted(pair.send.isend(from.buffer(0, MIB), 0, &from.memory));
        until("the send", || pair.send.test(send).unwrap());
        drop(pair.send);
        let bytes = until("the receive", || pair.receive.test(receive).unwrap());
        assert_eq!(bytes, MIB);
        assert!(to.bytes == from.bytes);
    }
}

#[test]
fn a_large_message_for_a_small_receive_writes_nothing() {
    for lanes in [lane_config().lanes, Some(0)] {
        large_for_small(Config {
            lanes,
            ..lane_config()
        });
    }
}

fn large_for_small(config: Config) {
    let plugin = plugin(config);
    let (broken, stays) = (pair(&plugin), pair(&plugin));
    stream(&broken, MIB, 20);
    let mut to = Registered::new(&broken.receive, vec![0xee; MIB], false);
    let receive = posted(broken.receive.irecv(to.buffer(0, MIB - 1), 0, &to.memory));
    let mut from = Registered::new(&broken.send, vec![1; MIB], false);
    let send = posted(broken.send.isend(from.buffer(0, MIB), 0, &from.memory));
    let error = until("the receiver's error", || {
        // The sender drives its own part; that it ends is looked at below.
        let _ = broken.send.test(send);
        broken.receive.test(receive).err()
    });
    assert_eq!(error.code(), ResultCode::InternalError, "{error}");
    let error = until("the sender's error", || {
        broken.send.isend(from.buffer(0, 1), 0, &from.memory).err()
    });
    assert_eq!(error.code(), ResultCode::RemoteError, "{error}");
    assert!(to.bytes.iter().all(|byte| *byte == 0xee));
    stream(&stays, MIB, 30);
}

#[test]
fn without_lanes_on_either_side_everything_still_arrives() {
    let without = Config {
        lanes: Some(0),
        ..lane_config()
    };
    let (with, without) = (plugin(lane_config()), plugin(without));
    for (listening, connecting) in [(&with, &without), (&without, &with)] {
        let pair = pair_between(listening, connecting);
        stream(&pair, MIB, 30);
    }
}

#[test]
fn a_handle_lets_nobody_in_who_lacks_the_ranks_key() {
    let keyed = |with| Config {
        key: Some(Key::generate(&mut |bytes| bytes.fill(with))),
        // What comes from there takes lanes, or fails.
        mode: Mode::Cuda,
        standin: true,
        ..lane_config()
    };
    let [rank, other] = [keyed(1), keyed(2)].map(plugin);
    let without = plugin(lane_config());
    let (handle, listener) = rank.listen(0).unwrap();
    for stranger in [&other, &without] {
        let error = stranger.connect(0, &handle).unwrap_err().to_string();
        assert!(error.contains("TCPX_KEY"), "{error}");
    }
    // As if there were no key.
    let mut altered = handle;
    altered.0[88..104].fill(0);
    let mut connect = without.connect(0, &altered).unwrap();
    until("the refusal", || {
        assert!(listener.accept().unwrap().is_none());
        connect.poll().map(|comm| assert!(comm.is_none())).err()
    });
    let pair = pair(&rank);
    let data = random(MIB, 5);
    let mut from = Registered::new(&pair.send, data.clone(), true);
    let mut to = Registered::new(&pair.receive, vec![0; MIB], true);
    let receive = posted(pair.receive.irecv(to.buffer(0, MIB), 0, &to.memory));
    let send = posted(pair.send.isend(from.buffer(0, MIB), 0, &from.memory));
    finish(&pair, send, receive);
    assert!(*to.bytes == data);
}

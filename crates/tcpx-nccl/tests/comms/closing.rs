//! Comms and registrations that end before their requests do, and senders that end before their
//! receivers.

use nccl_net::ResultCode;
use nccl_net::export::{NetComm, NetRecv, NetSend, RequestId};
use nccl_net_tcpx::TcpxPlugin;

use crate::common::{
    MIB, Pair, Registered, finish, has, lane_config, pair, plugin, posted, random, until,
};

/// Moves `messages` of `len` bytes, one after the other; with large ones the receiver grants from
/// then on.
fn moves(pair: &Pair, len: usize, messages: u64) {
    let mut from = Registered::new(&pair.send, random(len, messages), false);
    let mut to = Registered::new(&pair.receive, vec![0; len], false);
    for _ in 0..messages {
        let receive = posted(pair.receive.irecv(to.buffer(0, len), 0, &to.memory));
        let send = posted(pair.send.isend(from.buffer(0, len), 0, &from.memory));
        assert_eq!(finish(pair, send, receive), len);
        assert!(to.bytes == from.bytes);
        to.bytes.fill(0);
    }
}

/// Calls `attempt` until a transfer was caught amid its bytes: one may be over before it is looked
/// at.
fn caught(mut attempt: impl FnMut() -> Option<()>) {
    assert!((0..100).any(|_| attempt().is_some()), "always too late");
}

/// A pair with 64 MiB under way over lanes.
fn under_way(plugin: &TcpxPlugin) -> (Pair, [Registered; 2], [RequestId; 2]) {
    let pair = pair(plugin);
    moves(&pair, MIB, 3);
    let mut from = Registered::new(&pair.send, vec![1; 64 * MIB], false);
    let mut to = Registered::new(&pair.receive, vec![0; 64 * MIB], false);
    let receive = posted(pair.receive.irecv(to.buffer(0, 64 * MIB), 0, &to.memory));
    let send = posted(pair.send.isend(from.buffer(0, 64 * MIB), 0, &from.memory));
    until("the first bytes", || {
        // The receiver's first look grants, the sender's queues.
        let _ = pair.send.test(send).unwrap();
        has(&to.bytes, 1000, 1).then_some(())
    });
    (pair, [from, to], [send, receive])
}

#[test]
fn deregistered_memory_is_not_written_any_more() {
    let plugin = plugin(lane_config());
    let stays = pair(&plugin);
    caught(|| {
        let (torn, [_from, to], [_, receive]) = under_way(&plugin);
        // NCCL gives memory back before it closes the comm, and frees it in between.
        let Registered { mut bytes, memory } = to;
        torn.receive.deregister(memory).unwrap();
        bytes.fill(7);
        let error = match torn.receive.test(receive) {
            Ok(end) => {
                assert_eq!(end, Some(64 * MIB));
                return None;
            }
            Err(error) => error,
        };
        assert_eq!(error.code(), ResultCode::InvalidUsage, "{error}");
        moves(&stays, MIB, 20);
        drop(torn);
        assert!(bytes.iter().all(|byte| *byte == 7), "written after deregMr");
        Some(())
    });
}

#[test]
fn deregistered_memory_is_no_longer_read_and_its_requests_fail() {
    let plugin = plugin(lane_config());
    let stays = pair(&plugin);
    caught(|| {
        let (torn, [from, to], [send, receive]) = under_way(&plugin);
        let Registered { mut bytes, memory } = from;
        torn.send.deregister(memory).unwrap();
        bytes.fill(7);
        let error = match torn.send.test(send) {
            Ok(end) => {
                assert_eq!(end, Some(64 * MIB));
                return None;
            }
            Err(error) => error,
        };
        assert_eq!(error.code(), ResultCode::InvalidUsage, "{error}");
        until("the receiver's error", || torn.receive.test(receive).err());
        moves(&stays, MIB, 20);
        assert!(to.bytes.iter().all(|byte| *byte != 7), "read after deregMr");
        Some(())
    });
}

#[test]
fn unused_memory_is_deregistered_amid_a_transfer() {
    let plugin = plugin(lane_config());
    let pair = pair(&plugin);
    moves(&pair, MIB, 3);
    let mut from = Registered::new(&pair.send, random(32 * MIB, 3), false);
    let mut to = Registered::new(&pair.receive, vec![0; 32 * MIB], false);
    let again = Registered::new(&pair.send, vec![0; 10], false);
    let there = Registered::new(&pair.receive, vec![0; 10], false);
    let receive = posted(pair.receive.irecv(to.buffer(0, 32 * MIB), 0, &to.memory));
    let send = posted(pair.send.isend(from.buffer(0, 32 * MIB), 0, &from.memory));
    pair.send.deregister(again.memory).unwrap();
    pair.receive.deregister(there.memory).unwrap();
    assert_eq!(finish(&pair, send, receive), 32 * MIB);
    assert!(from.bytes == to.bytes);
    pair.send.deregister(from.memory).unwrap();
    pair.receive.deregister(to.memory).unwrap();
    moves(&pair, MIB, 3);
}

/// Sends messages that nobody receives yet until one is not done at once; how many there were.
fn fill(pair: &Pair, from: &mut Registered, len: usize) -> (usize, Option<RequestId>) {
    for number in 0..10_000 {
        let send = posted(pair.send.isend(from.buffer(number, len), 0, &from.memory));
        if (0..1000).all(|_| pair.send.test(send).unwrap().is_none()) {
            return (number + 1, Some(send));
        }
    }
    (10_000, None)
}

#[test]
fn what_was_sent_arrives_though_its_sender_closed_early() {
    let plugin = plugin(lane_config());
    // A handful that fits the receiver's socket, and as many as fit both sockets.
    for (len, some) in [(100, Some(8)), (16 << 10, None)] {
        let pair = pair(&plugin);
        // Large ones first: from now on the receiver answers each receive with a grant.
        moves(&pair, MIB, 8);
        let bytes = random(len + 10_000, 9);
        let mut from = Registered::new(&pair.send, bytes.clone(), false);
        let mut to = Registered::new(&pair.receive, vec![0; len], false);
        let (messages, mut last) = match some {
            Some(some) => {
                for number in 0..some {
                    let buffer = from.buffer(number, len);
                    let send = posted(pair.send.isend(buffer, 0, &from.memory));
                    until("the send", || pair.send.test(send).unwrap());
                }
                (some, None)
            }
            None => fill(&pair, &mut from, len),
        };
        let mut sender = Some(pair.send);
        for number in 0..messages {
            if last.is_none() {
                // Everything was reported as sent.
                drop(sender.take());
            }
            let receive = posted(pair.receive.irecv(to.buffer(0, len), 0, &to.memory));
            let found = until("the receive", || pair.receive.test(receive).unwrap());
            assert_eq!(found, len, "message {number} of {messages}");
            assert!(
                to.bytes[..] == bytes[number..number + len],
                "message {number}"
            );
            if let (Some(send), Some(sender)) = (last, &sender)
                && sender.test(send).unwrap().is_some()
            {
                last = None;
            }
        }
        // And then it is the end, not a wait.
        let receive = pair.receive.irecv(to.buffer(0, len), 0, &to.memory);
        if let Ok(Some(receive)) = receive {
            until("the end", || pair.receive.test(receive).err());
        }
    }
}

#[test]
fn a_receiver_closing_with_its_message_leaves_it_done() {
    let plugin = plugin(lane_config());
    let mut early = 0;
    for round in 0..200 {
        let Pair { send, receive, .. } = {
            let pair = pair(&plugin);
            moves(&pair, MIB, 2);
            pair
        };
        let mut from = Registered::new(&send, random(MIB, round), false);
        let mut to = Registered::new(&receive, vec![0; MIB], false);
        let received = posted(receive.irecv(to.buffer(0, MIB), 0, &to.memory));
        let sent = posted(send.isend(from.buffer(0, MIB), 0, &from.memory));
        let mut done = false;
        until("the receive", || {
            done = done || send.test(sent).unwrap().is_some();
            receive.test(received).unwrap()
        });
        drop(receive);
        if !done {
            early += 1;
            until("the send", || send.test(sent).unwrap());
        }
        assert!(to.bytes == from.bytes);
    }
    assert!(early > 0, "the sends were always done before");
}

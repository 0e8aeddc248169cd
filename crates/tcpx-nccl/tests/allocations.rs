//! Once connected, the host's thread allocates nothing, however its messages travel.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

#[expect(dead_code, reason = "not every test needs all of it")]
mod common;
#[path = "../../../tests/src/counting.rs"]
#[expect(
    dead_code,
    unreachable_pub,
    reason = "the same source is part of the library of the tests"
)]
mod counting;

use common::{Pair, Registered, host_config, pair, plugin, until};
use counting::Counting;
use nccl_net::export::{NetComm, NetRecv, NetSend};
use nccl_net_tcpx::{Config, Mode};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Moves messages one after the other, several in flight.
fn stream(pair: &Pair, from: &mut Registered, to: &mut Registered, len: usize, messages: usize) {
    const FLIGHT: usize = 4;
    let (mut sends, mut receives) = ([None; FLIGHT], [None; FLIGHT]);
    let (mut posted, mut over) = ([0; 2], [0; 2]);
    until("a stream of messages", || {
        for slot in 0..FLIGHT {
            let send = &mut sends[slot];
            match *send {
                None if posted[0] < messages => {
                    let buffer = from.buffer(slot * len, len);
                    *send = pair.send.isend(buffer, 0, &from.memory).unwrap();
                    posted[0] += usize::from(send.is_some());
                }
                Some(id) if pair.send.test(id).unwrap().is_some() => {
                    *send = None;
                    over[0] += 1;
                }
                _ => {}
            }
            let receive = &mut receives[slot];
            match *receive {
                None if posted[1] < messages => {
                    let buffer = to.buffer(slot * len, len);
                    *receive = pair.receive.irecv(buffer, 0, &to.memory).unwrap();
                    posted[1] += usize::from(receive.is_some());
                }
                Some(id) if pair.receive.test(id).unwrap().is_some() => {
                    *receive = None;
                    over[1] += 1;
                }
                _ => {}
            }
        }
        (over == [messages; 2]).then_some(())
    });
}

#[test]
fn messages_do_not_allocate_in_the_hosts_thread() {
    never_allocates(Mode::Host);
}

#[test]
fn cuda_pointers_do_not_allocate_in_the_host_s_thread() {
    never_allocates(Mode::Cuda);
}

fn never_allocates(mode: Mode) {
    let plugin = plugin(Config {
        mode,
        standin: true,
        lanes: Some(3),
        threads: Some(2),
        ..host_config()
    });
    let pair = pair(&plugin);
    let cuda = mode == Mode::Cuda;
    let mut from = Registered::new(&pair.send, vec![1; 4 << 20], cuda);
    let mut to = Registered::new(&pair.receive, vec![0; 4 << 20], cuda);
    for len in [24, 100_000, 1 << 20] {
        stream(&pair, &mut from, &mut to, len, 20);
        let before = Counting::of_thread();
        stream(&pair, &mut from, &mut to, len, 300);
        assert_eq!(Counting::of_thread() - before, 0, "messages of {len} bytes");
    }
}

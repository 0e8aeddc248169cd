//! Host memory: every size, order, limits, failures.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use nccl_net::ResultCode;
use nccl_net::export::{MemoryRegion, NetComm, NetConnect, NetListen, NetPlugin, NetRecv, NetSend};
use nccl_net_tcpx::{Config, Handle};

use crate::common::*;

#[test]
fn every_size_arrives_and_the_size_is_reported() {
    let pair = pair(&plugin(host_config()));
    for (number, size) in SIZES.into_iter().enumerate() {
        let data = random(size, number as u64 + 1);
        let mut from = Registered::new(&pair.send, data.clone(), false);
        // The receive is larger than the send, which is fine.
        let mut to = Registered::new(&pair.receive, vec![0xee; size + 100], false);
        transfer(&pair, &mut from, &mut to, size, size + 100);
        assert_eq!(to.bytes[..size], data, "{size} bytes");
        assert!(
            to.bytes[size..].iter().all(|byte| *byte == 0xee),
            "{size} bytes"
        );
    }
}

#[test]
fn many_messages_of_mixed_sizes_arrive_in_the_order_of_posting() {
    let pair = pair(&plugin(host_config()));
    let size_of = |n: usize| [7, 0, 70_000, 1, 4096, 300_001][n % 6];
    let data = random(300_001 + 1000, 5);
    let mut from = Registered::new(&pair.send, data.clone(), false);
    let mut to = Registered::new(&pair.receive, vec![0; 16 * 300_001], false);
    let total = 400;
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    let (mut sent, mut received, mut next_send, mut next_receive) = (0, 0, 0, 0);
    until("400 messages", || {
        while next_send < total {
            let buffer = from.buffer(next_send, size_of(next_send));
            let Some(id) = pair.send.isend(buffer, 0, &from.memory).unwrap() else {
                break;
            };
            sends.push(id);
            next_send += 1;
        }
        while next_receive < total {
            let buffer = to.buffer(next_receive % 16 * 300_001, 300_001);
            let Some(id) = pair.receive.irecv(buffer, 0, &to.memory).unwrap() else {
                break;
            };
            receives.push(id);
            next_receive += 1;
        }
        while sent < sends.len() && pair.send.test(sends[sent]).unwrap().is_some() {
            sent += 1;
        }
        while received < receives.len() {
            let Some(size) = pair.receive.test(receives[received]).unwrap() else {
                break;
            };
            assert_eq!(size, size_of(received));
            let at = received % 16 * 300_001;
            assert!(to.bytes[at..at + size] == data[received..received + size]);
            received += 1;
        }
        (received == total && sent == total).then_some(())
    });
}

#[test]
fn the_seventeenth_request_waits_on_both_sides() {
    let pair = pair(&plugin(host_config()));
    let mut to = Registered::new(&pair.receive, vec![0; 64], false);
    let ids: Vec<_> = (0..16)
        .map(|_| posted(pair.receive.irecv(to.buffer(0, 64), 0, &to.memory)))
        .collect();
    assert_eq!(
        pair.receive.irecv(to.buffer(0, 64), 0, &to.memory).unwrap(),
        None
    );
    let mut from = Registered::new(&pair.send, vec![1; 64], false);
    let sends: Vec<_> = (0..16)
        .map(|_| posted(pair.send.isend(from.buffer(0, 64), 0, &from.memory)))
        .collect();
    assert_eq!(
        pair.send
            .isend(from.buffer(0, 64), 0, &from.memory)
            .unwrap(),
        None
    );
    assert_eq!(finish(&pair, sends[0], ids[0]), 64);
    posted(pair.receive.irecv(to.buffer(0, 64), 0, &to.memory));
    posted(pair.send.isend(from.buffer(0, 64), 0, &from.memory));
}

#[test]
fn too_small_a_receive_fails_and_writes_nothing() {
    let pair = pair(&plugin(host_config()));
    let mut to = Registered::new(&pair.receive, vec![0xee; 200], false);
    let receive = posted(pair.receive.irecv(to.buffer(0, 99), 0, &to.memory));
    let mut from = Registered::new(&pair.send, vec![1; 100], false);
    let send = posted(pair.send.isend(from.buffer(0, 100), 0, &from.memory));
    let error = until("the receiver's error", || pair.receive.test(receive).err());
    assert_eq!(error.code(), ResultCode::InternalError);
    let text = error.to_string();
    assert!(text.contains("100") && text.contains("99"), "{text}");
    assert!(to.bytes.iter().all(|byte| *byte == 0xee));
    // The send itself may be over; the next call hears of it.
    until("the send's end", || {
        pair.send.test(send).map_or(Some(()), |done| done.map(drop))
    });
    let error = until("the sender's error", || {
        pair.send.isend(from.buffer(0, 1), 0, &from.memory).err()
    });
    assert_eq!(error.code(), ResultCode::RemoteError);
    assert!(error.to_string().contains("99"), "{error}");
    // The answer stays the same.
    assert!(pair.receive.test(receive).is_err());
    assert!(pair.receive.irecv(to.buffer(0, 99), 0, &to.memory).is_err());
}

#[test]
fn a_closed_peer_stays_a_system_error_on_either_side() {
    let plugin = plugin(host_config());
    let first = pair(&plugin);
    let mut to = Registered::new(&first.receive, vec![0; 8 << 20], false);
    let receive = posted(first.receive.irecv(to.buffer(0, 8 << 20), 0, &to.memory));
    drop(first.send);
    for _ in 0..3 {
        let error = until("the receiver's error", || first.receive.test(receive).err());
        assert_eq!(error.code(), ResultCode::SystemError, "{error}");
    }

    let second = pair(&plugin);
    // More than the socket takes, so that the send is under way when the peer goes.
    let mut from = Registered::new(&second.send, vec![1; 64 << 20], false);
    let send = posted(second.send.isend(from.buffer(0, 64 << 20), 0, &from.memory));
    drop(second.receive);
    for _ in 0..3 {
        let error = until("the sender's error", || second.send.test(send).err());
        assert_eq!(error.code(), ResultCode::SystemError, "{error}");
    }
}

#[test]
fn a_sender_that_goes_while_it_connects_is_an_error() {
    let plugin = plugin(host_config());
    let (handle, listener) = plugin.listen(0).unwrap();
    let mut connect = plugin.connect(0, &handle).unwrap();
    let receive = until("the receiver", || {
        assert!(connect.poll().unwrap().is_none());
        listener.accept().unwrap()
    });
    let mut to = Registered::new(&receive, vec![0; 8], false);
    let request = posted(receive.irecv(to.buffer(0, 8), 0, &to.memory));
    assert_eq!(receive.test(request).unwrap(), None);
    // It was introduced, and has dialled nothing yet.
    drop(connect);
    let began = Instant::now();
    let error = until("the error", || receive.test(request).err());
    assert_eq!(error.code(), ResultCode::SystemError, "{error}");
    assert!(began.elapsed() < Duration::from_secs(30), "{error}");
}

#[test]
fn data_sent_before_the_close_still_arrives() {
    let pair = pair(&plugin(host_config()));
    let mut from = Registered::new(&pair.send, random(5000, 3), false);
    let send = posted(pair.send.isend(from.buffer(0, 5000), 0, &from.memory));
    until("the send", || pair.send.test(send).unwrap());
    drop(pair.send);
    let mut to = Registered::new(&pair.receive, vec![0; 5000], false);
    let receive = posted(pair.receive.irecv(to.buffer(0, 5000), 0, &to.memory));
    assert_eq!(
        until("the receive", || pair.receive.test(receive).unwrap()),
        5000
    );
    assert_eq!(to.bytes, from.bytes);
}

#[test]
fn strangers_on_the_port_neither_get_in_nor_delay_the_peer() {
    use std::io::Write;
    let plugin = plugin(host_config());
    let (handle, listener) = plugin.listen(0).unwrap();
    let address = Handle::decode(&handle).unwrap().address;
    // Silent ones, noisy ones, and one that knows the protocol but not the secret.
    let mut strangers = Vec::new();
    for n in 0..40 {
        let mut stream = TcpStream::connect(address).unwrap();
        if n % 2 == 0 {
            stream.write_all(&random(100, n + 1)).unwrap();
        }
        strangers.push(stream);
        assert!(listener.accept().unwrap().is_none());
    }
    let mut wrong = Handle::decode(&handle).unwrap();
    wrong.secret[3] ^= 1;
    let mut thief = plugin.connect(0, &wrong.encode()).unwrap();
    let error = until("the thief's refusal", || {
        assert!(listener.accept().unwrap().is_none());
        thief.poll().err()
    });
    assert_eq!(error.code(), ResultCode::SystemError, "{error}");

    accepted(&listener, plugin.connect(0, &handle).unwrap());
}

#[test]
fn a_listen_comm_accepts_again_without_a_waiting_accept() {
    let plugin = plugin(host_config());
    let (handle, listener) = plugin.listen(0).unwrap();
    let mut connects: Vec<_> = (0..3)
        .map(|_| plugin.connect(0, &handle).unwrap())
        .collect();
    for connect in &mut connects {
        assert!(connect.poll().unwrap().is_none());
    }
    let mut accepted = Vec::new();
    let mut sends = Vec::new();
    until("three connections", || {
        accepted.extend(listener.accept().unwrap());
        connects.retain_mut(|connect| match connect.poll().unwrap() {
            Some(comm) => {
                sends.push(comm);
                false
            }
            None => true,
        });
        (accepted.len() == 3 && sends.len() == 3).then_some(())
    });
}

#[test]
fn connecting_where_nobody_listens_fails_at_once() {
    let plugin = plugin(host_config());
    let (handle, listener) = plugin.listen(0).unwrap();
    drop(listener);
    let mut connect = plugin.connect(0, &handle).unwrap();
    let error = until("the refusal", || connect.poll().err());
    assert_eq!(error.code(), ResultCode::SystemError);
    assert!(
        error.to_string().contains("connect to 127.0.0.1"),
        "{error}"
    );
}

#[test]
fn a_peer_whose_process_cannot_be_reached_is_not_connected_to() {
    let plugin = plugin(host_config());
    let (handle, listener) = plugin.listen(0).unwrap();
    let mut handle = Handle::decode(&handle).unwrap();
    // Nobody listens there: it is bound, and no more.
    let nobody = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    nobody.bind(&any.into()).unwrap();
    let bound = nobody.local_addr().unwrap().as_socket().unwrap();
    handle.door.port = bound.port();
    let mut connect = plugin.connect(0, &handle.encode()).unwrap();
    let mut accepted = None;
    let error = until("the refusal", || {
        accepted = accepted.take().or_else(|| listener.accept().unwrap());
        connect.poll().err()
    });
    assert_eq!(error.code(), ResultCode::SystemError);
    let told = format!("cannot be reached at port {}", bound.port());
    assert!(error.to_string().contains(&told), "{error}");
}

#[test]
fn listening_keeps_to_the_port_range_and_says_when_it_is_full() {
    // For a listener and the process's door. The system found the first a moment ago; others may
    // have the second.
    let (plugin, ports, (handle, _listener)) = until("two free ports", || {
        let (handle, listener) = plugin(host_config()).listen(0).unwrap();
        let port = Handle::decode(&handle).unwrap().address.port();
        drop(listener);
        let ports = port..=port.checked_add(1)?;
        let plugin = plugin(Config {
            ports: Some(ports.clone()),
            ..host_config()
        });
        let listening = plugin.listen(0).ok()?;
        Some((plugin, ports, listening))
    });
    let handle = Handle::decode(&handle).unwrap();
    assert!(ports.contains(&handle.address.port()));
    assert!(ports.contains(&handle.door.port));
    let error = plugin.listen(0).unwrap_err();
    assert_eq!(error.code(), ResultCode::SystemError);
    assert!(error.to_string().contains("TCPX_PORT_RANGE"), "{error}");
}

#[test]
fn cuda_memory_is_refused_without_a_device() {
    let mut bytes = [0u8; 64];
    let region = MemoryRegion {
        data: bytes.as_mut_ptr(),
        len: 64,
        cuda: true,
    };
    let pair = pair(&plugin(host_config()));
    let error = pair.receive.register(region).unwrap_err();
    assert_eq!(error.code(), ResultCode::InvalidArgument);
    assert!(error.to_string().contains("TCPX_NET_DEVICE"), "{error}");
    assert!(pair.send.register(region).is_err());
}

#[test]
fn buffers_outside_their_registration_are_refused() {
    let pair = pair(&plugin(host_config()));
    let mut to = Registered::new(&pair.receive, vec![0; 64], false);
    let mut buffer = to.buffer(0, 64);
    buffer.len = 65;
    let error = pair.receive.irecv(buffer, 0, &to.memory).unwrap_err();
    assert_eq!(error.code(), ResultCode::InvalidArgument);
    let error = pair.send.isend(buffer, 0, &to.memory).unwrap_err();
    assert_eq!(error.code(), ResultCode::InvalidArgument);
}

//! Device receives, with host memory standing in for device memory.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

#[expect(dead_code, reason = "not every test needs all of it")]
mod common;

use std::ptr::NonNull;

use common::*;
use nccl_net::device::{LoadMeta, UnpackNetDeviceHandle};
use nccl_net::export::{
    DeviceQueue, MemoryRegion, NetComm, NetPlugin, NetRecv, NetSend, RequestId,
};
use nccl_net::{QueueSlot, ResultCode, UnpackQueue};
use nccl_net_tcpx::{Config, Mode, PoolKind};

fn unpack_config() -> Config {
    Config {
        mode: Mode::Unpack,
        standin: true,
        ..host_config()
    }
}

/// The consumer's side of the device queue.
struct Gatherer {
    queue: UnpackQueue,
    pool: *const u8,
    pool_bytes: usize,
}

impl Gatherer {
    fn new(queue: DeviceQueue, pool_bytes: usize) -> Self {
        assert_eq!(queue.len, 24);
        assert!(queue.needs_proxy_progress);
        // SAFETY: without a GPU the handle is in host memory that the comm owns.
        let handle = unsafe {
            queue
                .handle
                .cast::<UnpackNetDeviceHandle>()
                .read_unaligned()
        };
        assert_eq!(handle.head, u64::MAX);
        Self {
            // SAFETY: as above; the comm outlives the gatherer in every test.
            queue: unsafe { UnpackQueue::new(NonNull::new(handle.meta).unwrap()) },
            pool: handle.bounce_buf.cast(),
            pool_bytes,
        }
    }

    fn entries(&self, receive: u64) -> Vec<LoadMeta> {
        self.queue.read(QueueSlot::of_receive(receive)).unwrap()
    }

    /// What the device would have after unpacking; every byte must be covered exactly once.
    fn gather(&self, receive: u64, size: usize) -> Vec<u8> {
        let mut out = vec![0; size];
        let mut covered = vec![false; size];
        for entry in self.entries(receive) {
            let (from, len) = (entry.src_off as usize, entry.len as usize);
            let to = usize::try_from(entry.dst_off).unwrap();
            assert!(
                from + len <= self.pool_bytes && to + len <= size,
                "{entry:?}"
            );
            assert!(covered[to..to + len].iter().all(|byte| !byte), "{entry:?}");
            covered[to..to + len].fill(true);
            // SAFETY: inside the pool, whose pages this receive holds until it is consumed.
            let bytes = unsafe { std::slice::from_raw_parts(self.pool.add(from), len) };
            out[to..to + len].copy_from_slice(bytes);
        }
        assert!(covered.iter().all(|byte| *byte));
        out
    }
}

fn every_size_is_gathered(config: Config) {
    let pool_bytes = config.pool_bytes;
    let pair = pair(&plugin(config));
    let gatherer = Gatherer::new(pair.queue.unwrap(), pool_bytes);
    // Twice, so that the 16 slots wrap and pages come back in another order.
    for (number, size) in SIZES.into_iter().chain(SIZES).enumerate() {
        let data = random(size, number as u64 + 7);
        let mut from = Registered::new(&pair.send, data.clone(), true);
        let mut to = Registered::new(&pair.receive, vec![0xee; size], true);
        let request = transfer(&pair, &mut from, &mut to, size, size);
        assert!(gatherer.gather(number as u64, size) == data, "{size} bytes");
        // The payload is in the pool and nowhere else.
        assert!(to.bytes.iter().all(|byte| *byte == 0xee));
        pair.receive.consumed(request).unwrap();
    }
}

#[test]
fn every_size_is_gathered_from_a_pinned_pool() {
    every_size_is_gathered(unpack_config());
}

#[test]
fn every_size_is_gathered_from_a_gpu_pool() {
    every_size_is_gathered(Config {
        pool: PoolKind::Gpu,
        ..unpack_config()
    });
}

#[test]
fn half_a_mebibyte_lies_in_over_100_uneven_fragments_out_of_order() {
    let config = unpack_config();
    let pool_bytes = config.pool_bytes;
    let pair = pair(&plugin(config));
    let gatherer = Gatherer::new(pair.queue.unwrap(), pool_bytes);
    let size = 512 << 10;
    let mut from = Registered::new(&pair.send, random(size, 3), true);
    let mut to = Registered::new(&pair.receive, vec![0; size], true);
    transfer(&pair, &mut from, &mut to, size, size);
    let entries = gatherer.entries(0);
    assert!(
        entries.len() > 100 && entries.len() <= 2048,
        "{}",
        entries.len()
    );
    let backwards = |field: fn(&LoadMeta) -> u64| {
        entries
            .windows(2)
            .filter(|pair| field(&pair[0]) > field(&pair[1]))
            .count()
    };
    assert!(backwards(|entry| entry.dst_off) > 20, "the queue is sorted");
    assert!(
        backwards(|entry| entry.src_off.into()) > 20,
        "the pages are in order"
    );
    assert!(entries.iter().any(|entry| entry.len == 1448));
    assert!(entries.iter().any(|entry| entry.len == 4096));
    assert!(entries.iter().any(|entry| entry.len % 2 == 1));
    assert!(entries.iter().any(|entry| entry.src_off % 4096 != 0));
}

#[test]
fn host_memory_is_received_in_place_and_its_slot_stays_empty() {
    let config = unpack_config();
    let pool_bytes = config.pool_bytes;
    let pair = pair(&plugin(config));
    let gatherer = Gatherer::new(pair.queue.unwrap(), pool_bytes);
    let data = random(100_000, 3);
    let mut from = Registered::new(&pair.send, data.clone(), false);
    let mut to = Registered::new(&pair.receive, vec![0; 100_000], false);
    let request = transfer(&pair, &mut from, &mut to, 100_000, 100_000);
    assert!(*to.bytes == data);
    assert_eq!(gatherer.entries(0), []);
    pair.receive.consumed(request).unwrap();
}

#[test]
fn receives_must_be_done_and_are_consumed_first_in_first_out() {
    let pair = pair(&plugin(unpack_config()));
    let mut to = Registered::new(&pair.receive, vec![0; 3000], true);
    let receives: Vec<_> = (0..3)
        .map(|n| posted(pair.receive.irecv(to.buffer(n * 1000, 1000), 0, &to.memory)))
        .collect();
    let early = pair.receive.consumed(receives[0]).unwrap_err();
    assert_eq!(early.code(), ResultCode::InternalError);
    let mut from = Registered::new(&pair.send, vec![5; 3000], true);
    for (n, receive) in receives.iter().enumerate() {
        let send = posted(
            pair.send
                .isend(from.buffer(n * 1000, 1000), 0, &from.memory),
        );
        finish(&pair, send, *receive);
    }
    let error = pair.receive.consumed(receives[1]).unwrap_err();
    assert_eq!(error.code(), ResultCode::InternalError);
    assert!(error.to_string().contains("order"), "{error}");
    for receive in receives {
        pair.receive.consumed(receive).unwrap();
    }
    assert!(pair.receive.consumed(RequestId(0)).is_err());
}

#[test]
fn finished_receives_keep_their_place_until_they_are_consumed() {
    let pair = pair(&plugin(unpack_config()));
    let mut from = Registered::new(&pair.send, vec![5; 100], true);
    let mut to = Registered::new(&pair.receive, vec![0; 100], true);
    let receives: Vec<_> = (0..16)
        .map(|_| transfer(&pair, &mut from, &mut to, 100, 100))
        .collect();
    let next = pair
        .receive
        .irecv(to.buffer(0, 100), 0, &to.memory)
        .unwrap();
    assert_eq!(next, None);
    pair.receive.consumed(receives[0]).unwrap();
    transfer(&pair, &mut from, &mut to, 100, 100);
}

#[test]
fn an_exhausted_pool_stalls_and_goes_on_when_something_is_consumed() {
    let size = 40 << 10;
    let pair = pair(&plugin(Config {
        // Room for one message and a part of the next.
        pool_bytes: 64 << 10,
        ..unpack_config()
    }));
    let gatherer = Gatherer::new(pair.queue.unwrap(), 64 << 10);
    let data = [random(size, 1), random(size, 2)];
    let mut to = Registered::new(&pair.receive, vec![0; size], true);
    let receives = [(); 2].map(|()| posted(pair.receive.irecv(to.buffer(0, size), 0, &to.memory)));
    let mut from = data
        .clone()
        .map(|data| Registered::new(&pair.send, data, true));
    let sends = from
        .each_mut()
        .map(|from| posted(pair.send.isend(from.buffer(0, size), 0, &from.memory)));
    finish(&pair, sends[0], receives[0]);
    until("the second send", || pair.send.test(sends[1]).unwrap());
    // Everything has been sent; without the pages of the first it never completes.
    for _ in 0..1000 {
        assert_eq!(pair.receive.test(receives[1]).unwrap(), None);
    }
    assert!(gatherer.gather(0, size) == data[0]);
    pair.receive.consumed(receives[0]).unwrap();
    let received = until("the second receive", || {
        pair.receive.test(receives[1]).unwrap()
    });
    assert_eq!(received, size);
    assert!(gatherer.gather(1, size) == data[1]);
}

#[test]
fn a_message_beyond_the_pool_fails_on_both_sides() {
    let pair = pair(&plugin(Config {
        pool_bytes: 8192,
        ..unpack_config()
    }));
    let mut to = Registered::new(&pair.receive, vec![0; 10_000], true);
    let receive = posted(pair.receive.irecv(to.buffer(0, 10_000), 0, &to.memory));
    let mut from = Registered::new(&pair.send, vec![1; 10_000], true);
    let send = posted(pair.send.isend(from.buffer(0, 10_000), 0, &from.memory));
    until("the send", || pair.send.test(send).unwrap());
    let error = until("the receiver's error", || pair.receive.test(receive).err());
    assert_eq!(error.code(), ResultCode::InternalError);
    assert!(error.to_string().contains("TCPX_NET_POOL_BYTES"), "{error}");
    let error = until("the sender's error", || {
        pair.send.isend(from.buffer(0, 1), 0, &from.memory).err()
    });
    assert_eq!(error.code(), ResultCode::RemoteError, "{error}");
}

#[test]
fn a_request_above_4_mib_is_refused_when_it_is_posted() {
    let pair = pair(&plugin(unpack_config()));
    let size = (4 << 20) + 1;
    let mut to = Registered::new(&pair.receive, vec![0; size], true);
    let error = pair
        .receive
        .irecv(to.buffer(0, size), 0, &to.memory)
        .unwrap_err();
    assert_eq!(error.code(), ResultCode::InternalError);
    assert!(error.to_string().contains("2048 fragments"), "{error}");
}

#[test]
fn sixteen_large_receives_in_flight_stream_through_the_pool() {
    let config = unpack_config();
    let pool_bytes = config.pool_bytes;
    let pair = pair(&plugin(config));
    let gatherer = Gatherer::new(pair.queue.unwrap(), pool_bytes);
    let (size, total) = (700_001, 60);
    let data = random(size + total, 9);
    let mut from = Registered::new(&pair.send, data.clone(), true);
    let mut to = Registered::new(&pair.receive, vec![0; size], true);
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    let (mut sent, mut received) = (0, 0);
    until("60 messages", || {
        while sends.len() < total {
            let buffer = from.buffer(sends.len(), size);
            let Some(id) = pair.send.isend(buffer, 0, &from.memory).unwrap() else {
                break;
            };
            sends.push(id);
        }
        while receives.len() < total {
            let Some(id) = pair
                .receive
                .irecv(to.buffer(0, size), 0, &to.memory)
                .unwrap()
            else {
                break;
            };
            receives.push(id);
        }
        if sent < sends.len() && pair.send.test(sends[sent]).unwrap().is_some() {
            sent += 1;
        }
        if received < receives.len()
            && let Some(bytes) = pair.receive.test(receives[received]).unwrap()
        {
            assert_eq!(bytes, size);
            let bytes = gatherer.gather(received as u64, size);
            assert!(
                bytes == data[received..received + size],
                "message {received}"
            );
            pair.receive.consumed(receives[received]).unwrap();
            received += 1;
        }
        (received == total && sent == total).then_some(())
    });
}

#[test]
fn a_device_pointer_without_a_device_is_an_invalid_argument() {
    // A thread without a context has no device either, driver or not.
    let pair = pair(&plugin(Config {
        standin: false,
        ..unpack_config()
    }));
    let mut bytes = [0u8; 64];
    let region = MemoryRegion {
        data: bytes.as_mut_ptr(),
        len: 64,
        cuda: true,
    };
    for error in [pair.receive.register(region), pair.send.register(region)].map(Result::unwrap_err)
    {
        assert_eq!(error.code(), ResultCode::InvalidArgument);
        assert!(error.to_string().contains("TCPX_NET_STANDIN"), "{error}");
    }
    // Host memory still works.
    let mut from = Registered::new(&pair.send, random(5000, 3), false);
    let mut to = Registered::new(&pair.receive, vec![0; 5000], false);
    transfer(&pair, &mut from, &mut to, 5000, 5000);
    assert_eq!(to.bytes, from.bytes);
}

#[test]
fn the_properties_say_what_the_plugin_can_do() {
    let properties = plugin(unpack_config()).properties(0).unwrap();
    assert!(properties.pointer_support.host() && properties.pointer_support.cuda());
    assert_eq!(properties.offload, nccl_net::DeviceOffload::UNPACK_V7);
    let properties = plugin(host_config()).properties(0).unwrap();
    assert!(!properties.pointer_support.cuda());
    assert_eq!(properties.offload, nccl_net::DeviceOffload::None);
    assert_eq!(properties.name, "lo");
}

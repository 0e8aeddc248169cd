//! The safe host API over the double of Google's plugin, call by call. Processes of their own:
//! comms of other tests, which may still be closing, would be counted.

use std::collections::VecDeque;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex};

use nccl_net::device::UnpackNetDeviceHandle;
use nccl_net::{
    AbiVersion, Done, HostError, LoadError, LoadOptions, MemoryType, Plugin, PostOutcome,
    QueueSlot, RecvComm, SendComm, Ticket, UnpackQueue,
};
use tcpx_tests::child;
use tcpx_tests::double::{self, plugin};
use tcpx_tests::support::{PAGE, Pages, until};

fn pair() -> (SendComm, RecvComm) {
    let (handle, listener) = plugin().listen(0).unwrap();
    let mut connecting = plugin().connect(0, handle).unwrap();
    let mut accepting = listener.accept();
    assert!(
        connecting.poll().unwrap().is_none(),
        "the first is never ready"
    );
    assert!(
        accepting.poll().unwrap().is_none(),
        "the first is never ready"
    );
    let sender = until("connect", || connecting.poll().unwrap());
    let receiver = until("accept", || accepting.poll().unwrap());
    (sender, receiver)
}

/// The queue and the bounce pool behind a device handle. Here both lie in host memory.
fn queue_and_pool(receiver: &RecvComm) -> (UnpackQueue, *const u8) {
    let device = receiver.device_handle().expect("the double makes a queue");
    assert_eq!(device.size, size_of::<UnpackNetDeviceHandle>());
    assert!(device.needs_proxy_progress);
    let device: *const UnpackNetDeviceHandle = ptr::with_exposed_provenance(device.address.get());
    // SAFETY: the double's handle lives as long as its comm.
    let device = unsafe { device.read() };
    assert_eq!(device.head, u64::MAX);
    let meta = NonNull::new(device.meta).expect("a queue");
    // SAFETY: the queue lives as long as the comm.
    (unsafe { UnpackQueue::new(meta) }, device.bounce_buf.cast())
}

/// Copies the fragments of a finished receive to where they belong.
fn gather(receiver: &RecvComm, done: Done, into: &mut [u8]) {
    let (queue, pool) = queue_and_pool(receiver);
    let list = queue.read(done.slot.expect("a queue slot")).unwrap();
    let mut covered = vec![false; into.len()];
    for fragment in &list {
        let start = usize::try_from(fragment.dst_off).unwrap();
        let range = start..start + fragment.len as usize;
        assert!((1..=PAGE as u32).contains(&fragment.len));
        let in_page = fragment.src_off as usize % PAGE;
        assert!(in_page + fragment.len as usize <= PAGE, "crosses a page");
        for byte in &mut covered[range.clone()] {
            assert!(!std::mem::replace(byte, true), "two fragments overlap");
        }
        // SAFETY: the double's pool holds the fragment until it is consumed.
        let bytes =
            unsafe { std::slice::from_raw_parts(pool.add(fragment.src_off as usize), range.len()) };
        into[range].copy_from_slice(bytes);
    }
    assert!(covered.into_iter().all(|byte| byte), "a byte is missing");
}

fn posted(outcome: PostOutcome) -> Ticket {
    match outcome {
        PostOutcome::Posted(ticket) => ticket,
        PostOutcome::Full => panic!("no room"),
    }
}

#[test]
fn the_plugin_s_own_record_says_how_far_a_request_is() {
    child::run(&[], || {
        // As it starts, it does what its variable says.
        plugin();
        double::set_pool_bytes(2 * PAGE);
        double::show_requests(true);
        let len = 16 * PAGE;
        let (mut sender, mut receiver) = pair();
        assert_eq!(receiver.look_inside_head(), None, "nothing is in flight");
        let (mut source, mut target) = (Pages::random(len), Pages::new(len));
        // SAFETY: the pages outlive the comms.
        let (from, to) = unsafe {
            (
                sender
                    .register(source.as_mut_ptr(), len, MemoryType::Host)
                    .unwrap(),
                receiver
                    .register(target.as_mut_ptr(), len, MemoryType::Cuda)
                    .unwrap(),
            )
        };
        posted(receiver.irecv(&to, 0, len, 1).unwrap());
        let first = receiver.look_inside_head().unwrap();
        assert_eq!(
            (first.size, first.pending, first.fragments),
            (len, len, None)
        );
        posted(sender.isend(&from, 0, len, 1).unwrap());
        let sending = sender.look_inside_head().unwrap();
        assert_eq!((sending.size, sending.fragments), (len, None));
        // The pool holds two pages, and nobody consumes them.
        let standing = until("the pool to fill", || {
            let _ = sender.test_head().unwrap();
            assert_eq!(receiver.test_head().unwrap(), None);
            let now = receiver.look_inside_head().unwrap();
            (double::stats().pool_low_water == 0 && now.fragments.is_some_and(|n| n > 1))
                .then_some(now)
        });
        assert_eq!(standing.size, len);
        assert!((1..len).contains(&standing.pending), "{standing}");
        let (queue, _) = queue_and_pool(&receiver);
        // The device queue is published at the end; the record knows before.
        let listed = queue.read(QueueSlot::of_receive(0)).unwrap().len();
        assert!(listed <= standing.fragments.unwrap());
    });
}

#[test]
fn a_record_of_another_layout_tells_nothing() {
    child::run(&[], || {
        let len = PAGE;
        let (sender, mut receiver) = pair();
        let mut target = Pages::new(len);
        // SAFETY: the pages outlive the comms.
        let to = unsafe { receiver.register(target.as_mut_ptr(), len, MemoryType::Cuda) }.unwrap();
        posted(receiver.irecv(&to, 0, len, 1).unwrap());
        assert_eq!(receiver.look_inside_head(), None);
        assert_eq!(sender.look_inside_head(), None);
    });
}

#[test]
fn a_missing_version_names_those_that_are_there() {
    let options = LoadOptions::new(double::path()).with_abi(AbiVersion::V12);
    let error = Plugin::load(options).unwrap_err();
    assert!(matches!(
        &error,
        LoadError::VersionMissing { asked: AbiVersion::V12, present, .. }
            if present == &[AbiVersion::V7]
    ));
}

#[test]
fn withheld_consumption_stalls_until_it_resumes() {
    child::run(&[], || {
        const LEN: usize = 64 << 10;
        const MESSAGES: usize = 24;
        // Less than 16 messages of at least 16 pages each.
        double::set_pool_bytes(64 * PAGE);
        let before = double::stats();
        let (mut sender, mut receiver) = pair();
        let mut source = Pages::random(LEN * MESSAGES);
        let mut target = Pages::new(LEN * MESSAGES);
        // SAFETY: both outlive the comms.
        let (from, to) = unsafe {
            (
                sender
                    .register(source.as_mut_ptr(), source.len(), MemoryType::Cuda)
                    .unwrap(),
                receiver
                    .register(target.as_mut_ptr(), target.len(), MemoryType::Cuda)
                    .unwrap(),
            )
        };
        // One whole message fits; then nothing is consumed until the pool is empty.
        let (mut sent, mut asked) = (0, 0);
        let mut held: Vec<Done> = Vec::new();
        until("an empty pool", || {
            while sent < MESSAGES
                && sender.isend(&from, sent * LEN, LEN, 0).unwrap() != PostOutcome::Full
            {
                sent += 1;
            }
            while asked < MESSAGES
                && receiver.irecv(&to, asked * LEN, LEN, 0).unwrap() != PostOutcome::Full
            {
                asked += 1;
            }
            let _ = sender.test_head().unwrap();
            held.extend(receiver.test_head().unwrap());
            (double::stats().pool_waits > before.pool_waits).then_some(())
        });
        assert_eq!(double::stats().pool_low_water, 0);
        assert_eq!(asked, 16, "unconsumed receives keep their places");
        // Messages that were whole when the pool ran dry are still reported, at least 16 pages
        // each.
        for _ in 0..4 {
            held.extend(receiver.test_head().unwrap());
        }
        assert!((1..=4).contains(&held.len()), "{} messages", held.len());
        // After that, an empty pool receives nothing, however often it is tested.
        for _ in 0..100 {
            let _ = sender.test_head().unwrap();
            assert_eq!(receiver.test_head().unwrap(), None);
        }

        // Only the oldest can be consumed.
        if let [first, second, ..] = held[..] {
            assert_eq!(
                receiver.consume_next(second.ticket).unwrap_err(),
                HostError::ConsumeOrder {
                    asked: second.ticket.0,
                    next: Some(first.ticket.0)
                }
            );
        }
        let mut arrived = 0;
        let mut waiting: VecDeque<Done> = held.into();
        until("every message", || {
            if let Some(done) = waiting.pop_front() {
                let at = arrived * LEN;
                assert_eq!(done.ticket.0 as usize, arrived);
                gather(&receiver, done, &mut target.slice_mut()[at..at + LEN]);
                receiver.consume_next(done.ticket).unwrap();
                arrived += 1;
            }
            while sent < MESSAGES
                && sender.isend(&from, sent * LEN, LEN, 0).unwrap() != PostOutcome::Full
            {
                sent += 1;
            }
            while asked < MESSAGES
                && receiver.irecv(&to, asked * LEN, LEN, 0).unwrap() != PostOutcome::Full
            {
                asked += 1;
            }
            if sender.in_flight() > 0 {
                let _ = sender.test_head().unwrap();
            }
            waiting.extend(receiver.test_head().unwrap());
            (arrived == MESSAGES).then_some(())
        });
        assert!(target.slice() == source.slice());
        assert_eq!(double::stats().consumes - before.consumes, MESSAGES as u64);
        assert_eq!(double::stats().max_in_flight, 16);
        assert_eq!(
            receiver.consume_next(Ticket(0)).unwrap_err(),
            HostError::ConsumeOrder {
                asked: 0,
                next: None
            }
        );
    });
}

#[test]
fn comms_and_registrations_end_once_in_any_order() {
    child::run(&[], || {
        let before = double::stats();
        let mut memory = Pages::new(PAGE);
        let data = memory.as_mut_ptr();
        for order in 0..3 {
            let (sender, receiver) = pair();
            // SAFETY: the pages outlive the comms.
            let (from, to) = unsafe {
                (
                    sender.register(data, PAGE, MemoryType::Cuda).unwrap(),
                    receiver.register(data, PAGE, MemoryType::Host).unwrap(),
                )
            };
            assert_eq!(double::stats().registrations, before.registrations + 2);
            assert_eq!(
                double::stats().open_comms,
                before.open_comms + 2,
                "the listener is closed"
            );
            match order {
                0 => {
                    drop((from, to));
                    drop((sender, receiver));
                }
                1 => {
                    drop((sender, receiver));
                    drop((from, to));
                }
                _ => {
                    sender.close().unwrap();
                    receiver.close().unwrap();
                }
            }
            let after = double::stats();
            assert_eq!(after.open_comms, before.open_comms);
            assert_eq!(after.registrations, before.registrations);
        }
        // With a request in flight the comm is closed first, and its owner is let go after that.
        let (_sender, mut receiver) = pair();
        let owner: Arc<Mutex<Pages>> = Arc::new(Mutex::new(Pages::new(PAGE)));
        let data = owner.lock().unwrap().as_mut_ptr();
        // SAFETY: the owner keeps the pages.
        let to = unsafe { receiver.register_owned(data, PAGE, MemoryType::Host, owner.clone()) }
            .unwrap();
        posted(receiver.irecv(&to, 0, PAGE, 0).unwrap());
        drop(to);
        assert_eq!(Arc::strong_count(&owner), 2, "the request holds its memory");
        drop(receiver);
        assert_eq!(Arc::strong_count(&owner), 1);
        assert_eq!(double::stats().open_comms, before.open_comms + 1);
    });
}

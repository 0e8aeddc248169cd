//! Large messages as NCCL posts them: shared lanes, peers that die, forks, secrets, closing early.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

use std::path::{Path, PathBuf};
use std::ptr;

use rustix::process::{Resource, Signal};
use tcpx_tests::child::{self, LANES, LOOPBACK};
use tcpx_tests::nccl_link::{
    self, ANY, CUDA, HOST, Link, MIB, PAIR, accepted, connected, content, good, handle_in,
    leave_handle, listening, relayed, started, until,
};
use tcpx_tests::nccl_part::{self, Calls, Opaque};
use tcpx_tests::proxy::Fault;
use tcpx_tests::support::limit;

/// Connections to a door of a comm with two lanes: each lane is a pair, and so is the comm's own.
const TWO_LANES: u32 = 3 * PAIR;

/// Waits until this process has so many threads of the plugin: one that has begun names itself a
/// moment later, and one that was joined is listed a moment longer.
fn until_threads(count: usize) {
    let listed = || {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .filter(|name| name.starts_with("tcpx-nccl"))
            .count()
    };
    until(&format!("{count} threads of the plugin"), || {
        listed() == count
    });
}

#[test]
fn sixteen_channels_share_threads_that_end_with_the_last_comm() {
    child::run(
        &[LOOPBACK, ("TCPX_NET_THREADS", "2"), ("TCPX_NET_LANES", "4")],
        || {
            let (table, context) = started(12);
            for _ in 0..2 {
                let links: Vec<_> = (0..16).map(|_| Link::new(&*table, context)).collect();
                links.iter().for_each(Link::warm);
                // Two pairs of loops, the door and the monitor, whatever the number of comms.
                until_threads(6);
                links.into_iter().for_each(Link::close);
                until_threads(0);
            }
            assert_eq!(table.finalize(context), 0);
        },
    );
}

#[test]
fn the_file_stays_mapped_after_it_was_closed() {
    child::run(&[LOOPBACK, LANES], || {
        let path = tcpx_tests::plugin_file::path();
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        for version in 6..=12 {
            let (table, context) = started(version);
            let [closed, open] = [(); 2].map(|()| Link::new(&*table, context));
            closed.warm();
            closed.close();
            open.warm();
            // SAFETY: our own file, loaded before; each call takes back one use of it.
            unsafe {
                let library = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
                assert!(!library.is_null());
                for _ in 0..3 {
                    libc::dlclose(library);
                }
            }
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            assert!(maps.contains(path.to_str().unwrap()), "it was unmapped");
            // And it works as before, for comms that are there and as for a communicator made
            // again.
            open.warm();
            let again = Link::new(&*table, context);
            again.warm();
            again.close();
            open.close();
            assert_eq!(table.finalize(context), 0);
        }
    });
}

/// A host that is gone says nothing: the system finds out on each connection, also on one that
/// rests.
#[test]
fn every_connection_of_a_comm_is_kept_alive() {
    child::run(&[LOOPBACK, LANES], || {
        let (table, context) = started(12);
        let link = Link::new(&*table, context);
        link.warm();
        let option = |file: i32, level, name| {
            let (mut value, mut size) = (0_i32, 4);
            let to = (&raw mut value).cast();
            // SAFETY: an int of this frame, and its size.
            let rc = unsafe { libc::getsockopt(file, level, name, to, &raw mut size) };
            (rc == 0).then_some(value)
        };
        let mut connections = 0;
        for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
            let name = entry.unwrap().file_name();
            let file = name.to_str().unwrap().parse().unwrap();
            let of_socket = |name| option(file, libc::SOL_SOCKET, name);
            let is_tcp = of_socket(libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP);
            if is_tcp && of_socket(libc::SO_ACCEPTCONN) == Some(0) {
                connections += 1;
                assert_eq!(of_socket(libc::SO_KEEPALIVE), Some(1), "descriptor {file}");
                let idle = option(file, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE).unwrap();
                assert!(idle <= 60, "first probe after {idle} s");
            }
        }
        // Both ends of each.
        assert!(connections >= 2 * TWO_LANES, "{connections}");
        link.close();
    });
}

#[test]
fn a_forked_process_starts_lanes_of_its_own() {
    child::run(&[LOOPBACK, LANES], || {
        let (table, context) = started(12);
        let link = Link::new(&*table, context);
        link.warm();
        child::forked(|| {
            // The parent's threads are not here.
            let context = good(table.init());
            let own = Link::new(&*table, context);
            own.warm();
            own.transfer(20 * MIB, 20 * MIB);
            own.close();
        });
        // What the child did to its copies is not seen here.
        link.transfer(20 * MIB, 20 * MIB);
        link.close();
    });
}

#[test]
fn only_who_holds_a_secret_gets_in() {
    child::run(&[LOOPBACK, LANES], || {
        let (table, context) = started(12);
        let (listen, handle) = listening(&*table, context);
        // The comm's own secret lies at byte 32, that of the process's door at 72.
        for secret in [32, 72] {
            let mut stranger = handle;
            stranger[secret] ^= 1;
            let mut refused = false;
            until("the stranger's end", || {
                let (rc, comm) = table.connect(context, &mut stranger);
                assert!(comm.is_null(), "a wrong secret got in");
                refused |= rc != 0;
                let (rc, comm) = table.accept(listen);
                assert!(rc == 0 && (comm.is_null() || secret == 72));
                if !comm.is_null() {
                    assert_eq!(table.close_recv(comm), 0);
                }
                refused
            });
        }
        let link = Link::between(&*table, context, listen, handle);
        link.warm();
        link.close();
    });
}

#[test]
fn a_comm_closed_with_requests_frees_its_memory() {
    child::run(&[LOOPBACK, LANES], || {
        let (table, context) = started(12);
        let stays = Link::new(&*table, context);
        for sender_first in [true, false] {
            let link = Link::new(&*table, context);
            link.warm();
            let (mut data, mut target) = (content(64 * MIB), vec![0; 64 * MIB]);
            let (_, from) = table.reg_mr(link.send, &mut data, HOST);
            let (_, to) = table.reg_mr(link.receive, &mut target, HOST);
            let mut requests = Vec::new();
            for part in 0..4 {
                let at = part * 16 * MIB;
                let start = target.as_mut_ptr().wrapping_add(at);
                let (rc, request) = table.irecv(link.receive, start, 16 * MIB, to, ptr::null_mut());
                assert!(rc == 0 && !request.is_null());
                requests.push(request);
                let start = data.as_mut_ptr().wrapping_add(at);
                let (rc, request) = table.isend(link.send, start, 16 * MIB, from);
                assert!(rc == 0 && !request.is_null());
                requests.push(request);
            }
            for request in requests {
                assert_eq!(table.test(request).0, 0);
            }
            if sender_first {
                assert_eq!(table.close_send(link.send), 0);
                drop(data);
                assert_eq!(table.close_recv(link.receive), 0);
            } else {
                assert_eq!(table.close_recv(link.receive), 0);
                target.fill(7);
                assert_eq!(table.close_send(link.send), 0);
                assert!(target.iter().all(|byte| *byte == 7), "written after close");
            }
            stays.warm();
        }
        stays.close();
    });
}

/// The file through which the two processes below meet.
fn meeting(role: &str) -> PathBuf {
    Path::new(&std::env::var(role).unwrap()).to_owned()
}

const COMMS: usize = 4;

/// Connects to each handle in the file, and sends without end.
fn send_until_killed(table: &dyn Calls) {
    let context = good(table.init());
    let handles = std::fs::read(meeting("TCPX_TEST_FILE")).unwrap();
    let mut data = content(16 * MIB);
    let (start, len) = (data.as_mut_ptr(), data.len());
    let mut comms = Vec::new();
    for handle in handles.chunks_exact(128) {
        let send = connected(table, context, handle.try_into().unwrap());
        let (_, memory) = table.reg_mr(send, &mut data, HOST);
        comms.push((send, memory, Vec::new()));
    }
    loop {
        for (send, memory, requests) in &mut comms {
            let request = good(table.isend(*send, start, len, *memory));
            if !request.is_null() {
                requests.push(request);
            }
            requests.retain(|request| {
                let (rc, done, _) = table.test(*request);
                assert_eq!(rc, 0);
                done == 0
            });
        }
    }
}

#[test]
fn a_killed_peer_is_an_error_on_every_comm() {
    const TEST: &str = "a_killed_peer_is_an_error_on_every_comm";
    const PEER: &str = "the peer of a_killed_peer_is_an_error_on_every_comm";
    if child::is_child(PEER) {
        send_until_killed(&*nccl_part::table(12));
        return;
    }
    child::run_as(TEST, &[LOOPBACK, LANES], || {
        let (table, context) = started(12);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("handles");
        let mut handles = Vec::new();
        let listens: Vec<Opaque> = (0..COMMS)
            .map(|_| {
                let (listen, handle) = listening(&*table, context);
                handles.extend_from_slice(&handle);
                listen
            })
            .collect();
        std::fs::write(&file, &handles).unwrap();
        let meeting = ("TCPX_TEST_FILE", file.to_str().unwrap());
        let peer = child::start(TEST, PEER, &[LOOPBACK, LANES, meeting]);
        let mut target = vec![0; 16 * MIB];
        let (start, len) = (target.as_mut_ptr(), target.len());
        let mut comms = Vec::new();
        for listen in listens {
            let receive = accepted(&*table, listen);
            let (_, memory) = table.reg_mr(receive, &mut target, HOST);
            comms.push((receive, memory, ptr::null_mut::<std::ffi::c_void>(), 0));
        }
        // All comms write into the same memory: what arrives does not matter here.
        let step = |comms: &mut Vec<(Opaque, Opaque, Opaque, usize)>| {
            let mut errors = 0;
            for (receive, memory, request, messages) in comms {
                if request.is_null() {
                    let (rc, posted) = table.irecv(*receive, start, len, *memory, ptr::null_mut());
                    *request = posted;
                    errors += usize::from(rc != 0);
                    continue;
                }
                let (rc, done, _) = table.test(*request);
                if rc != 0 {
                    errors += 1;
                } else if done == 1 {
                    *request = ptr::null_mut();
                    *messages += 1;
                }
            }
            errors
        };
        until("messages on every comm", || {
            assert_eq!(step(&mut comms), 0);
            comms.iter().all(|comm| comm.3 >= 5)
        });
        // Only the process that was started above.
        drop(peer);
        until("an error on every comm", || step(&mut comms) == COMMS);
        for (receive, ..) in comms {
            assert_eq!(table.close_recv(receive), 0);
        }
        until_threads(0);
    });
}

/// Processor time of this process so far.
fn processor_time() -> std::time::Duration {
    // SAFETY: plain old data, filled by the call.
    let used = unsafe {
        let mut used: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &raw mut used), 0);
        used
    };
    let time = |value: libc::timeval| {
        std::time::Duration::new(
            u64::try_from(value.tv_sec).unwrap(),
            u32::try_from(value.tv_usec * 1000).unwrap(),
        )
    };
    time(used.ru_utime) + time(used.ru_stime)
}

#[test]
fn a_door_that_can_take_no_connection_does_not_spin() {
    child::run(&[LOOPBACK, LANES], || {
        limit(Resource::Nofile, 200);
        let (table, context) = started(12);
        let (listen, handle) = listening(&*table, context);
        let door = u16::from_le_bytes([handle[56], handle[57]]);
        // A stranger at the door takes the last descriptor; the door finds none.
        let mut files = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            files.push(file);
        }
        files.pop();
        let stranger = std::net::TcpStream::connect(("127.0.0.1", door)).unwrap();
        let before = processor_time();
        std::thread::sleep(std::time::Duration::from_secs(2));
        let used = processor_time() - before;
        assert!(
            used < std::time::Duration::from_millis(200),
            "{used:?} of two seconds"
        );
        // With descriptors there again it serves as before.
        drop((files, stranger));
        assert_eq!(table.close_listen(listen), 0);
        let link = Link::new(&*table, context);
        link.warm();
        link.close();
    });
}

#[test]
fn a_lane_ending_amid_a_message_comes_back() {
    child::run(&[LOOPBACK, LANES], || {
        for version in 6..=12 {
            let (table, context) = started(version);
            for fault in [Fault::Reset, Fault::Close] {
                let (link, proxy) = relayed(&*table, context);
                proxy.break_line(ANY, 5_000_000, fault);
                for _ in 0..8 {
                    link.transfer(8 * MIB, 8 * MIB);
                }
                // The first one ended at some byte of a chunk.
                until("another lane in its place", || {
                    link.transfer(MIB, MIB);
                    proxy.opened(ANY) > TWO_LANES
                });
                link.close();
            }
            assert_eq!(table.finalize(context), 0);
        }
    });
}

/// Moves messages of one kind of memory while every lane is reset whenever some bytes have passed.
fn under_resets(kind: i32) {
    let (table, context) = started(12);
    let (mut link, proxy) = relayed(&*table, context);
    link.kind = kind;
    link.warm();
    nccl_link::under_resets(&proxy, 3_000_000, || {
        for _ in 0..8 {
            link.transfer(4 * MIB, 4 * MIB);
        }
    });
    assert!(proxy.opened(ANY) > 3 * TWO_LANES);
    link.close();
}

#[test]
fn lanes_reset_again_cost_speed_and_not_the_message() {
    child::run(&[LOOPBACK, LANES], || under_resets(HOST));
}

#[test]
fn lanes_reset_again_cost_no_byte_of_device_memory() {
    let device = [("TCPX_NET_DEVICE", "cuda"), ("TCPX_NET_STANDIN", "host")];
    child::run(&[LOOPBACK, LANES, device[0], device[1]], || {
        under_resets(CUDA)
    });
}

/// Sends messages one after the other from one buffer, each overwritten as soon as its send is
/// done, then closes the sender at once; gives what was received.
fn overwritten(
    link: &Link<'_>,
    messages: &[Vec<u8>],
    mut meanwhile: impl FnMut(usize),
) -> Vec<Vec<u8>> {
    let table = link.table;
    let len = messages[0].len();
    let mut targets = vec![vec![0; len]; messages.len()];
    let mut data = vec![0; len];
    let (_, from) = table.reg_mr(link.send, &mut data, HOST);
    let mut receives = Vec::new();
    for target in &mut targets {
        let (_, to) = table.reg_mr(link.receive, target, HOST);
        let at = target.as_mut_ptr();
        let (rc, request) = table.irecv(link.receive, at, len, to, ptr::null_mut());
        assert!(rc == 0 && !request.is_null());
        receives.push(request);
    }
    // The receiver grants in its calls.
    let receive = |receives: &mut Vec<Opaque>| {
        receives.retain(|request| {
            let (rc, done, _) = table.test(*request);
            assert_eq!(rc, 0);
            done == 0
        });
        receives.is_empty()
    };
    for (number, message) in messages.iter().enumerate() {
        data.copy_from_slice(message);
        let (rc, sent) = table.isend(link.send, data.as_mut_ptr(), len, from);
        assert!(rc == 0 && !sent.is_null());
        meanwhile(number);
        until("a send", || {
            receive(&mut receives);
            let (rc, done, _) = table.test(sent);
            assert_eq!(rc, 0);
            done == 1
        });
        data.fill(0xee);
    }
    assert_eq!(table.dereg_mr(link.send, from), 0);
    assert_eq!(table.close_send(link.send), 0);
    until("all receives", || receive(&mut receives));
    targets
}

#[test]
fn what_was_sent_arrives_from_its_copy_despite_resets() {
    child::run(&[LOOPBACK, LANES], || {
        let (table, context) = started(12);
        for round in 0..20 {
            let (link, proxy) = relayed(&*table, context);
            link.warm();
            let messages: Vec<_> = (0..8).map(|_| content(100_000 + round)).collect();
            let received = overwritten(&link, &messages, |number| {
                // Also just before the sender closes, which waits until the peer has all.
                if number % 2 == 1 {
                    proxy.reset(ANY);
                }
            });
            assert!(received == messages, "in round {round}");
            assert_eq!(table.close_recv(link.receive), 0);
        }
    });
}

#[test]
fn what_was_sent_arrives_though_its_host_calls_no_more() {
    child::run(
        &[
            LOOPBACK,
            ("TCPX_NET_LANES", "1"),
            ("TCPX_NET_INLINE_BYTES", "16384"),
        ],
        || {
            let (table, context) = started(12);
            let (link, proxy) = relayed(&*table, context);
            link.warm();
            proxy.break_line(ANY, proxy.carried(ANY) + 20_000, Fault::Stall);
            let wanted = content(60_000);
            let (mut data, mut target) = (wanted.clone(), vec![0; 60_000]);
            let (_, from) = table.reg_mr(link.send, &mut data, HOST);
            let (_, to) = table.reg_mr(link.receive, &mut target, HOST);
            let start = target.as_mut_ptr();
            let (_, received) = table.irecv(link.receive, start, 60_000, to, ptr::null_mut());
            let (_, sent) = table.isend(link.send, data.as_mut_ptr(), 60_000, from);
            until("the send", || {
                let (rc, done, _) = table.test(received);
                assert_eq!((rc, done), (0, 0), "the relay holds it back");
                let (rc, done, _) = table.test(sent);
                assert_eq!(rc, 0);
                done == 1
            });
            assert_eq!(table.dereg_mr(link.send, from), 0);
            data.fill(0xee);
            proxy.reset(ANY);
            assert_eq!(link.finish(received), 60_000);
            assert!(target == wanted);
            link.close();
        },
    );
}

#[test]
fn a_lane_that_brings_nothing_any_more_is_replaced() {
    child::run(&[LOOPBACK, LANES], || {
        let (table, context) = started(12);
        for fault in [Fault::Stall, Fault::Swallow] {
            let (link, proxy) = relayed(&*table, context);
            proxy.break_line(ANY, 5_000_000, fault);
            for _ in 0..8 {
                link.transfer(8 * MIB, 8 * MIB);
            }
            until("another lane in its place", || {
                proxy.opened(ANY) > TWO_LANES
            });
            // What it had comes late.
            proxy.wake(ANY);
            link.warm();
            link.close();
        }
    });
}

#[test]
fn a_comm_closed_amid_a_stalled_lane_spares_the_others() {
    child::run(&[LOOPBACK, ("TCPX_NET_LANES", "1")], || {
        let (table, context) = started(12);
        let (stays, proxy) = relayed(&*table, context);
        let (listen, mut handle) = listening(&*table, context);
        handle[56..58].copy_from_slice(&proxy.address().port().to_le_bytes());
        let goes = Link::between(&*table, context, listen, handle);
        goes.warm();
        // And each comm has a pair of its own.
        assert_eq!(proxy.opened(ANY), 3 * PAIR, "they share it");
        proxy.break_line(ANY, proxy.carried(ANY) + 5_000_000, Fault::Stall);
        let (mut data, mut target) = (content(64 * MIB), vec![0; 64 * MIB]);
        let (_, from) = table.reg_mr(goes.send, &mut data, HOST);
        let (_, to) = table.reg_mr(goes.receive, &mut target, HOST);
        let start = target.as_mut_ptr();
        let (_, received) = table.irecv(goes.receive, start, 64 * MIB, to, ptr::null_mut());
        let (_, sent) = table.isend(goes.send, data.as_mut_ptr(), 64 * MIB, from);
        let before = proxy.carried(ANY);
        until("some of it", || {
            assert_eq!((table.test(sent).0, table.test(received).0), (0, 0));
            proxy.carried(ANY) > before + 4_000_000
        });
        assert_eq!(table.close_send(goes.send), 0);
        drop(data);
        assert_eq!(table.close_recv(goes.receive), 0);
        stays.warm();
        stays.close();
    });
}

#[test]
fn one_lane_is_enough_and_none_is_an_error_on_both_sides() {
    child::run(&[LOOPBACK, LANES], || {
        let (table, context) = started(12);
        let (link, proxy) = relayed(&*table, context);
        proxy.break_line(ANY, 5_000_000, Fault::Reset);
        proxy.refuse(ANY);
        for _ in 0..8 {
            link.transfer(8 * MIB, 8 * MIB);
        }
        assert_eq!(proxy.opened(ANY), TWO_LANES);
        proxy.reset(ANY);
        let (mut data, mut target) = (content(8 * MIB), vec![0; 8 * MIB]);
        let (_, from) = table.reg_mr(link.send, &mut data, HOST);
        let (_, to) = table.reg_mr(link.receive, &mut target, HOST);
        let start = target.as_mut_ptr();
        let (_, received) = table.irecv(link.receive, start, 8 * MIB, to, ptr::null_mut());
        let (_, sent) = table.isend(link.send, data.as_mut_ptr(), 8 * MIB, from);
        let mut failed = [sent.is_null(), received.is_null()];
        until("an error on both sides", || {
            for (request, failed) in [sent, received].into_iter().zip(&mut failed) {
                if !*failed {
                    let (rc, done, _) = table.test(request);
                    assert_eq!(done, 0);
                    *failed = rc != 0;
                }
            }
            failed == [true; 2]
        });
        link.close();
    });
}

/// Sends back what arrives, until the peer has closed.
fn echo(table: &dyn Calls) {
    let context = good(table.init());
    let folder = meeting("TCPX_TEST_FILE");
    let (listen, handle) = listening(table, context);
    leave_handle(&folder.join("echo"), &handle);
    let asks = handle_in(&folder.join("asks"));
    let Link { send, receive, .. } = Link::between(table, context, listen, asks);
    let mut data = vec![0; ECHOED];
    let (start, len) = (data.as_mut_ptr(), data.len());
    let (_, to) = table.reg_mr(receive, &mut data, HOST);
    let (_, from) = table.reg_mr(send, &mut data, HOST);
    loop {
        let (rc, request) = table.irecv(receive, start, len, to, ptr::null_mut());
        if rc != 0 {
            return;
        }
        assert!(!request.is_null());
        loop {
            match table.test(request) {
                (0, 1, _) => break,
                (0, ..) => {}
                _ => return,
            }
        }
        let (rc, request) = table.isend(send, start, len, from);
        assert!(rc == 0 && !request.is_null());
        until("an echo", || {
            let (rc, done, _) = table.test(request);
            assert_eq!(rc, 0);
            done == 1
        });
    }
}

const ECHOED: usize = 32 * MIB;
/// How long the peer is stopped.
const STOPPED: std::time::Duration = std::time::Duration::from_secs(20);
/// Of that, with the lanes that there were.
const WITH_LANES: std::time::Duration = std::time::Duration::from_secs(4);

#[test]
fn a_peer_that_is_stopped_for_20_seconds_goes_on_behind_that() {
    const TEST: &str = "a_peer_that_is_stopped_for_20_seconds_goes_on_behind_that";
    const PEER: &str = "the peer of a_peer_that_is_stopped_for_20_seconds_goes_on_behind_that";
    if child::is_child(PEER) {
        echo(&*nccl_part::table(12));
        return;
    }
    child::run_as(TEST, &[LOOPBACK, LANES], || {
        let (table, context) = started(12);
        let folder = tempfile::tempdir().unwrap();
        let (listen, own) = listening(&*table, context);
        leave_handle(&folder.path().join("asks"), &own);
        let meeting = ("TCPX_TEST_FILE", folder.path().to_str().unwrap());
        let peer = child::start(TEST, PEER, &[LOOPBACK, LANES, meeting]);
        let mut handle = handle_in(&folder.path().join("echo"));
        let proxy = nccl_link::relay(&mut handle);
        let link = Link::between(&*table, context, listen, handle);
        let Link { send, receive, .. } = link;
        let (mut data, mut target) = (content(ECHOED), vec![0; ECHOED]);
        let (_, from) = table.reg_mr(send, &mut data, HOST);
        let (_, to) = table.reg_mr(receive, &mut target, HOST);
        for round in 0..4 {
            target.fill(0);
            let at = target.as_mut_ptr();
            let (rc, received) = table.irecv(receive, at, ECHOED, to, ptr::null_mut());
            assert!(rc == 0 && !received.is_null());
            let (rc, sent) = table.isend(send, data.as_mut_ptr(), ECHOED, from);
            assert!(rc == 0 && !sent.is_null());
            let mut left = vec![sent, received];
            let mut step = || {
                left.retain(|request| {
                    let (rc, done, _) = table.test(*request);
                    assert_eq!(rc, 0, "in round {round}");
                    done == 0
                });
                left.is_empty()
            };
            if round == 2 {
                let before = proxy.carried(ANY);
                until("some of it", || {
                    assert!(!step());
                    proxy.carried(ANY) > before + 4_000_000
                });
                peer.signal(Signal::STOP);
                // The rest is what is tested.
                let start = std::time::Instant::now();
                let mut has_lanes = true;
                while start.elapsed() < STOPPED {
                    step();
                    if has_lanes && start.elapsed() > WITH_LANES {
                        has_lanes = false;
                        proxy.reset(ANY);
                    }
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                peer.signal(Signal::CONT);
            }
            until("the echo", step);
            assert!(target == data, "in round {round}");
        }
        assert!(proxy.opened(ANY) > TWO_LANES, "lanes were dialled again");
        link.close();
        peer.succeeds();
    });
}

//! Our plugin file as NCCL drives it, through each table from v6 to v12.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

use std::os::fd::AsRawFd;
use std::ptr;

use tcpx_tests::child::{self, ENCRYPTED, KEY, LANES, LOOPBACK, NO_LANES};
use tcpx_tests::nccl_link::{CUDA, HOST, Link, content, good, started, until};
use tcpx_tests::nccl_part::Opaque;

const CUDA_POINTERS: (&str, &str) = ("TCPX_NET_DEVICE", "cuda");
const STANDIN: (&str, &str) = ("TCPX_NET_STANDIN", "host");

/// More posts than the plugin holds, both ends full, every message with its own content and size.
fn crowd(link: &Link<'_>) {
    const MESSAGES: usize = 100;
    const SPACE: usize = 70_000;
    let mut data = content(MESSAGES * SPACE);
    let mut target = vec![0xee; MESSAGES * SPACE];
    let table = link.table;
    let from = good(table.reg_mr(link.send, &mut data, link.kind));
    let to = good(table.reg_mr(link.receive, &mut target, link.kind));
    let (source, sink) = (data.as_mut_ptr(), target.as_mut_ptr());
    // Small ones and large ones in turn.
    let len = |n: usize| if n.is_multiple_of(3) { SPACE - n } else { n };
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    let (mut full, mut sent, mut received) = ([false; 2], 0, 0);
    until("a crowd of messages", || {
        while receives.len() < MESSAGES {
            let at = sink.wrapping_add(receives.len() * SPACE);
            let request = good(table.irecv(link.receive, at, SPACE, to, ptr::null_mut()));
            if request.is_null() {
                full[0] = true;
                break;
            }
            receives.push(request);
        }
        while sends.len() < MESSAGES {
            let at = source.wrapping_add(sends.len() * SPACE);
            let request = good(table.isend(link.send, at, len(sends.len()), from));
            if request.is_null() {
                full[1] = true;
                break;
            }
            sends.push(request);
        }
        while sent < sends.len() {
            let (rc, done, size) = table.test(sends[sent]);
            assert_eq!(rc, 0);
            if done == 0 {
                break;
            }
            assert_eq!(usize::try_from(size).unwrap(), len(sent), "send {sent}");
            sent += 1;
        }
        while received < receives.len() {
            let (rc, done, size) = table.test(receives[received]);
            assert_eq!(rc, 0);
            if done == 0 {
                break;
            }
            assert_eq!(
                usize::try_from(size).unwrap(),
                len(received),
                "receive {received}"
            );
            // NCCL may come late with this, when the request is in use again.
            if let Some(earlier) = received.checked_sub(4) {
                assert!(
                    table
                        .consumed(link.receive, receives[earlier])
                        .is_none_or(|rc| rc == 0)
                );
            }
            received += 1;
        }
        sent == MESSAGES && received == MESSAGES
    });
    assert_eq!(full, [true; 2], "the plugin never said that it is full");
    for n in 0..MESSAGES {
        let (start, end) = (n * SPACE, n * SPACE + len(n));
        assert!(target[start..end] == data[start..end], "message {n}");
        assert!(
            target[end..start + SPACE].iter().all(|byte| *byte == 0xee),
            "behind message {n}"
        );
    }
    assert_eq!(table.dereg_mr(link.send, from), 0);
    assert_eq!(table.dereg_mr(link.receive, to), 0);
}

/// Everything NCCL does of a network, through one table.
fn play(version: u32) {
    let (table, context) = started(version);
    let table = table.as_ref();
    // An interface stands for eight devices.
    assert_eq!(table.devices(), (0, 8));
    let facts = good(table.properties(0));
    assert_eq!(facts.pointers, HOST);
    assert_eq!(
        (facts.global, facts.flush, facts.max_recvs, facts.multi),
        (0, 0, 1, 1)
    );
    assert_eq!(
        (facts.device, facts.behind, facts.place),
        ((0, 0), (1, 0), (-1, -1))
    );
    for largest in [facts.largest.0, facts.largest.1] {
        assert!((1..=1 << 40).contains(&largest));
    }
    assert_eq!(table.properties(7).0, 0);
    assert_ne!(table.properties(8).0, 0);

    // A second communicator in the same process, and both directions of the first.
    let second = good(table.init());
    let links = [
        Link::new(table, context),
        Link::new(table, context),
        Link::new(table, second),
    ];
    for (link, len) in links
        .iter()
        .cycle()
        .zip([0, 1, 24, (64 << 10) - 1, 4 << 20, 0, 4 << 20])
    {
        link.transfer(len, len);
        link.transfer(len, len + 4096);
    }
    for link in &links {
        crowd(link);
    }
    both_directions(&links[0], &links[1]);
    no_device_memory(&links[0]);
    if version >= 9 {
        no_size_beyond_an_int(&links[0]);
    }
    links[0].transfer(128 << 20, 128 << 20);

    let [first, back, other] = links;
    other.close();
    assert_eq!(table.finalize(second), 0);
    // What one communicator ends is not the end of the others.
    first.transfer(100_000, 100_000);
    first.close();
    back.close();
    assert_eq!(table.finalize(context), 0);
    // The process starts over.
    let context = good(table.init());
    let again = Link::new(table, context);
    again.transfer(1 << 20, 1 << 20);
    again.close();
    assert_eq!(table.finalize(context), 0);
}

/// Messages larger than what sockets hold cross each other.
fn both_directions(there: &Link<'_>, back: &Link<'_>) {
    const LEN: usize = 32 << 20;
    let mut ends = Vec::new();
    for link in [there, back] {
        let (mut data, mut target) = (content(LEN), vec![0; LEN]);
        let from = good(link.table.reg_mr(link.send, &mut data, link.kind));
        let to = good(link.table.reg_mr(link.receive, &mut target, link.kind));
        let sent = good(link.table.isend(link.send, data.as_mut_ptr(), LEN, from));
        let at = target.as_mut_ptr();
        let received = good(link.table.irecv(link.receive, at, LEN, to, ptr::null_mut()));
        ends.push((link, data, target, [sent, received], [from, to]));
    }
    let mut open: Vec<Opaque> = ends.iter().flat_map(|end| end.3).collect();
    until("both directions", || {
        open.retain(|request| {
            let (rc, done, _) = there.table.test(*request);
            assert_eq!(rc, 0);
            done == 0
        });
        open.is_empty()
    });
    for (link, data, target, _, [from, to]) in ends {
        assert!(data == target);
        assert_eq!(link.table.dereg_mr(link.send, from), 0);
        assert_eq!(link.table.dereg_mr(link.receive, to), 0);
    }
}

/// Device memory is refused with an answer, by address and by dma-buf, and the comm lives on.
fn no_device_memory(link: &Link<'_>) {
    let mut bytes = [0; 64];
    for comm in [link.send, link.receive] {
        let (rc, memory) = link.table.reg_mr(comm, &mut bytes, CUDA);
        assert!(rc == 4 && memory.is_null());
        let file = std::fs::File::open("/dev/null").unwrap();
        let (rc, memory) = link
            .table
            .reg_mr_dma_buf(comm, &mut bytes, file.as_raw_fd());
        assert!(rc == 5 && memory.is_null());
    }
    link.transfer(1000, 1000);
}

/// A size that `test` could not tell is refused before a byte moves, and the comm lives on.
fn no_size_beyond_an_int(link: &Link<'_>) {
    // Pages that nobody touches.
    let mut bytes = vec![0; 1 << 31];
    let start = bytes.as_mut_ptr();
    let from = good(link.table.reg_mr(link.send, &mut bytes, HOST));
    let to = good(link.table.reg_mr(link.receive, &mut bytes, HOST));
    let (rc, request) = link.table.isend(link.send, start, 1 << 31, from);
    assert!(rc == 4 && request.is_null());
    let null = ptr::null_mut();
    let (rc, request) = link.table.irecv(link.receive, start, 1 << 31, to, null);
    assert!(rc == 4 && request.is_null());
    link.transfer(1000, 1000);
}

/// With CUDA pointers: one comm takes both kinds of memory, whose messages keep their order.
fn cuda_pointers(version: u32) {
    let (table, context) = started(version);
    let table = table.as_ref();
    for (name, value) in [
        ("NCCL_P2P_NET_CHUNKSIZE", "524288"),
        ("NCCL_NET_GDR_LEVEL", "SYS"),
    ] {
        assert_eq!(std::env::var(name).as_deref(), Ok(value));
    }
    assert_eq!(table.devices(), (0, 8));
    let facts = good(table.properties(0));
    assert_eq!((facts.pointers, facts.device), (HOST | CUDA, (0, 0)));
    assert_eq!((facts.global, facts.flush), (0, 0));
    let mut links = [Link::new(table, context), Link::new(table, context)];
    for kind in [CUDA, HOST, CUDA] {
        for link in &mut links {
            link.kind = kind;
            for len in [0, 1, 24, 65_536, (1 << 20) - 1, (1 << 20) + 1, 9 << 20, 0] {
                link.transfer(len, len);
                link.transfer(len, len + 4096);
            }
            crowd(link);
        }
        both_directions(&links[0], &links[1]);
    }
    for link in links {
        link.close();
    }
    assert_eq!(table.finalize(context), 0);
}

macro_rules! versions {
    ($($version:literal $host:ident;)*) => {$(
        #[test]
        fn $host() {
            child::run_as(stringify!($host), &[LOOPBACK, LANES], || play($version));
        }
    )*};
}

versions! {
    6 the_v6_table_serves_nccl;
    7 the_v7_table_serves_nccl;
    8 the_v8_table_serves_nccl;
    9 the_v9_table_serves_nccl;
    10 the_v10_table_serves_nccl;
    11 the_v11_table_serves_nccl;
    12 the_v12_table_serves_nccl;
}

#[test]
fn the_oldest_table_takes_cuda_pointers() {
    child::run(&[LOOPBACK, LANES, CUDA_POINTERS, STANDIN], || {
        cuda_pointers(6)
    });
}

#[test]
fn the_newest_table_takes_cuda_pointers() {
    child::run(&[LOOPBACK, LANES, CUDA_POINTERS, STANDIN], || {
        cuda_pointers(12)
    });
}

#[test]
fn the_oldest_table_serves_ranks_that_encrypt_without_lanes() {
    let [key, encrypts] = ENCRYPTED;
    child::run(&[LOOPBACK, NO_LANES, key, encrypts], || play(6));
}

#[test]
fn the_newest_table_serves_ranks_that_encrypt() {
    let [key, encrypts] = ENCRYPTED;
    child::run(&[LOOPBACK, LANES, key, encrypts], || play(12));
}

#[test]
fn the_oldest_table_serves_ranks_with_a_key_without_lanes() {
    child::run(&[LOOPBACK, NO_LANES, KEY], || play(6));
}

#[test]
fn the_newest_table_serves_ranks_with_a_key() {
    child::run(&[LOOPBACK, LANES, KEY], || play(12));
}

#[test]
fn cuda_pointers_of_ranks_with_a_key() {
    child::run(&[LOOPBACK, LANES, CUDA_POINTERS, STANDIN, KEY], || {
        cuda_pointers(12)
    });
}

#[test]
fn cuda_pointers_of_ranks_that_encrypt() {
    let [key, encrypts] = ENCRYPTED;
    child::run(
        &[LOOPBACK, LANES, CUDA_POINTERS, STANDIN, key, encrypts],
        || cuda_pointers(12),
    );
}

#[test]
#[ignore = "large: run with --ignored"]
fn the_largest_message_of_nccl_passes() {
    child::run(&[LOOPBACK, LANES], || {
        let (table, context) = started(12);
        let link = Link::new(&*table, context);
        // The first comes over the comm's own connection, the second over lanes.
        for _ in 0..2 {
            link.transfer(1 << 30, 1 << 30);
        }
        link.close();
    });
}

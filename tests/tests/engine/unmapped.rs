//! Memory that its program takes away while the engine may still use it: what used it fails, and
//! nothing else.

use std::any::Any;
use std::sync::Arc;

use tcpx::{ErrorKind, Network, Region, RegionSlice, Rights, TcpNetwork, Transfer};
use tcpx_lanes::socket_calls::{Part, copy_checked, is_fault};
use tcpx_net::TcpOptions;
use tcpx_tests::pair::{Listening, close};

const BYTES: usize = 8 << 20;
/// Where the memory is gone from on: amid a chunk.
const KEPT: usize = (2 << 20) + (1 << 16);

/// Pages of their own.
#[derive(Debug)]
struct Mapping(*mut u8);

// SAFETY: an address of pages that live as long as this, which nobody here reads or writes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new() -> Arc<Self> {
        // SAFETY: new pages, wherever the system likes.
        let pages = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(pages, libc::MAP_FAILED, "pages");
        Arc::new(Self(pages.cast()))
    }

    fn memory(self: &Arc<Self>) -> RegionSlice {
        let owner: Arc<dyn Any + Send + Sync> = Arc::<Self>::clone(self);
        // SAFETY: the pages live as long as their owner, and only the engine uses them. That some
        // are taken away is what is tried: the system refuses to touch them.
        unsafe { Region::from_host_raw(self.0, BYTES, owner) }.all()
    }

    /// Takes the pages from `KEPT` on away. Nothing else comes to lie there.
    fn hide(&self) {
        // SAFETY: pages of this mapping.
        let hidden = unsafe { libc::mprotect(self.0.add(KEPT).cast(), BYTES - KEPT, 0) };
        assert_eq!(hidden, 0, "hidden");
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the pages of this mapping, which nobody uses any more.
        unsafe { libc::munmap(self.0.cast(), BYTES) };
    }
}

fn fails_and_names(transfer: Transfer, pages: &Mapping) {
    let error = transfer.wait().expect_err("its memory is gone");
    assert_eq!(error.kind(), ErrorKind::Operation, "{error}");
    let text = error.to_string();
    assert!(text.contains(&format!("{:p}", pages.0)), "{text}");
}

#[test]
fn memory_that_is_taken_away_fails_what_uses_it_alone() {
    let network: Arc<dyn Network> = Arc::new(TcpNetwork::new(TcpOptions {
        lanes: 2,
        ..TcpOptions::default()
    }));
    // It stays: lanes that end amid a chunk come back to it.
    let listening = Listening::new(network, |_| {}, |_| {});
    let (server, client) = listening.connect();
    let (here, there, good) = (Mapping::new(), Mapping::new(), Mapping::new());
    let expose = |memory| server.expose(memory, Rights::GetAndPut).expect("connected");
    let (gone, kept) = (expose(there.memory()), expose(good.memory()));
    let local = Region::host(BYTES).expect("memory");
    let works = || {
        let put = client.put(local.all(), &kept.key(), 0).start();
        put.expect("connected").wait().expect("it goes on");
        let get = client.get(local.all(), &kept.key(), 0).start();
        get.expect("connected").wait().expect("it goes on");
    };
    works();
    here.hide();
    there.hide();
    for _ in 0..3 {
        let put = client.put(local.all(), &gone.key(), 0).start();
        fails_and_names(put.expect("connected"), &there);
        works();
        let get = client.get(local.all(), &gone.key(), 0).start();
        fails_and_names(get.expect("connected"), &there);
        works();
        let put = client.put(here.memory(), &kept.key(), 0).start();
        fails_and_names(put.expect("connected"), &here);
        works();
        let get = client.get(here.memory(), &kept.key(), 0).start();
        fails_and_names(get.expect("connected"), &here);
        works();
    }
    let (receive, send) = (
        server.receive(good.memory(), 7).start().expect("connected"),
        client.send(here.memory(), 7).start().expect("connected"),
    );
    fails_and_names(send, &here);
    receive.wait().expect_err("nothing whole came");
    works();
    close(server, client);
}

/// What a lane has begun to send is copied where the program takes its memory back amid it.
#[test]
fn a_copy_of_memory_that_is_taken_away_is_refused() {
    let pages = Mapping::new();
    let memory = pages.memory();
    pages.hide();
    let part = |len| Part {
        slice: &memory,
        from: 0,
        len,
    };
    let mut into = vec![1; BYTES];
    copy_checked(part(KEPT), &mut into[..KEPT]).expect("it is there");
    assert_eq!(into.iter().position(|byte| *byte != 0), Some(KEPT));
    let refused = copy_checked(part(BYTES), &mut into).expect_err("it is gone");
    assert!(is_fault(&refused), "{refused}");
}

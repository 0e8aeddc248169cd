//! A connected pair of comms, as NCCL makes and uses them through a bare table.

#![expect(
    clippy::missing_panics_doc,
    reason = "a test ends at what it does not expect"
)]

use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::nccl_part::{self, Calls, Opaque};
use crate::proxy::{Line, Proxy};
use crate::support::wait;

/// Far more than anything here takes, also on a busy machine; a process of a test has 300 s.
const PATIENCE: Duration = Duration::from_secs(200);
/// Host memory.
pub const HOST: i32 = 1;
/// CUDA memory.
pub const CUDA: i32 = 2;

/// Bytes of a message that is large enough for lanes.
pub const MIB: usize = 1 << 20;

/// The plugin's table of a version, and a context of it.
pub fn started(version: u32) -> (Box<dyn Calls>, Opaque) {
    let table = nccl_part::table(version);
    let context = good(table.init());
    (table, context)
}

/// What a call that succeeds gives.
#[track_caller]
pub fn good<T>((rc, given): (i32, T)) -> T {
    assert_eq!(rc, 0);
    given
}

/// A listen comm, and the handle by which its peer finds it.
pub fn listening(table: &dyn Calls, context: Opaque) -> (Opaque, [u8; 128]) {
    let mut handle = [0; 128];
    let (rc, listen) = table.listen(context, &mut handle);
    assert!(rc == 0 && !listen.is_null());
    (listen, handle)
}

/// Connects to a process that accepts meanwhile.
pub fn connected(table: &dyn Calls, context: Opaque, mut handle: [u8; 128]) -> Opaque {
    let mut send: Opaque = ptr::null_mut();
    until("connecting", || {
        let comm = good(table.connect(context, &mut handle));
        send = comm;
        !send.is_null()
    });
    send
}

/// Accepts from a process that connects meanwhile, and closes the listen comm.
pub fn accepted(table: &dyn Calls, listen: Opaque) -> Opaque {
    let mut receive: Opaque = ptr::null_mut();
    until("accepting", || {
        let comm = good(table.accept(listen));
        receive = comm;
        !receive.is_null()
    });
    assert_eq!(table.close_listen(listen), 0);
    receive
}

/// Leaves a handle in a file for another process.
pub fn leave_handle(file: &Path, handle: &[u8; 128]) {
    let writing = file.with_extension("writing");
    std::fs::write(&writing, handle).expect("a folder of the test's");
    std::fs::rename(&writing, file).expect("a folder of the test's");
}

/// The handle that another process leaves in a file.
pub fn handle_in(file: &Path) -> [u8; 128] {
    let mut handle = [0; 128];
    until("the peer's handle", || {
        let Ok(bytes) = std::fs::read(file) else {
            return false;
        };
        bytes.try_into().map(|bytes| handle = bytes).is_ok()
    });
    handle
}

/// Calls `attempt` until it is content, or fails after some minutes.
#[track_caller]
pub fn until(what: &str, mut attempt: impl FnMut() -> bool) {
    wait(PATIENCE, what, || attempt().then_some(()));
}

/// As [`until`], for one of many threads that wait: they leave the cores to those that have
/// something to do.
#[track_caller]
pub fn until_calmly(what: &str, mut attempt: impl FnMut() -> bool) {
    until(what, || {
        let over = attempt();
        if !over {
            std::thread::sleep(Duration::from_micros(200));
        }
        over
    });
}

/// One direction between two ranks, both of this process.
#[expect(
    missing_debug_implementations,
    reason = "a table of functions has nothing to show"
)]
pub struct Link<'a> {
    /// Through which it was made.
    pub table: &'a dyn Calls,
    /// The send comm.
    pub send: Opaque,
    /// The receive comm.
    pub receive: Opaque,
    /// What its memory is registered as.
    pub kind: i32,
}

impl<'a> Link<'a> {
    /// Connects as NCCL does.
    pub fn new(table: &'a dyn Calls, context: Opaque) -> Self {
        let (listen, mut handle) = listening(table, context);
        // Nobody answers yet: the first polls must come back empty, not wait.
        let (rc, early) = table.connect(context, &mut handle);
        assert!(rc == 0 && early.is_null());
        Self::between(table, context, listen, handle)
    }

    /// Connects to a listen comm by its handle, or one like it, and closes the listen comm.
    pub fn between(
        table: &'a dyn Calls,
        context: Opaque,
        listen: Opaque,
        mut handle: [u8; 128],
    ) -> Self {
        let (mut send, mut receive): (Opaque, Opaque) = (ptr::null_mut(), ptr::null_mut());
        until("connecting", || {
            if send.is_null() {
                let comm = good(table.connect(context, &mut handle));
                send = comm;
            }
            if receive.is_null() {
                let comm = good(table.accept(listen));
                receive = comm;
                if !receive.is_null() {
                    assert_eq!(table.close_listen(listen), 0);
                }
            }
            !send.is_null() && !receive.is_null()
        });
        Self {
            table,
            send,
            receive,
            kind: HOST,
        }
    }

    /// Moves so many large messages that they take lanes: the first one asks for grants.
    pub fn warm(&self) {
        for _ in 0..3 {
            self.transfer(MIB, MIB);
        }
    }

    /// Tests a request until it is done and gives its size.
    pub fn finish(&self, request: Opaque) -> usize {
        let mut found = 0;
        until("a request", || {
            let (rc, done, size) = self.table.test(request);
            assert_eq!(rc, 0);
            assert!(done == 0 || done == 1, "done was set to {done}");
            found = size;
            done == 1
        });
        usize::try_from(found).expect("a size")
    }

    /// Moves `len` bytes into a receive of `capacity`, and looks at both sides of every edge.
    pub fn transfer(&self, len: usize, capacity: usize) {
        let mut data = content(len);
        let mut target = vec![0xee; capacity + 1];
        let from = good(self.table.reg_mr(self.send, &mut data, self.kind));
        let (rc, to) = self
            .table
            .reg_mr(self.receive, &mut target[..capacity], self.kind);
        assert_eq!(rc, 0);
        assert!(
            self.table
                .device_mr(self.receive, to)
                .is_none_or(|rc| rc == 0)
        );
        // NCCL's mark of an optional completion must be overwritten.
        let mark = ptr::without_provenance_mut(1);
        let at = target.as_mut_ptr();
        let (rc, received) = self.table.irecv(self.receive, at, capacity, to, mark);
        assert!(rc == 0 && !received.is_null() && received != mark);
        let (rc, sent) = self.table.isend(self.send, data.as_mut_ptr(), len, from);
        assert!(rc == 0 && !sent.is_null() && sent != mark);
        let mut sizes = [None, None];
        until("a transfer", || {
            for (request, size) in [sent, received].into_iter().zip(&mut sizes) {
                if size.is_none() {
                    let (rc, done, found) = self.table.test(request);
                    assert_eq!(rc, 0);
                    *size = (done == 1).then_some(found);
                }
            }
            sizes.iter().all(Option::is_some)
        });
        let wanted = i32::try_from(len).expect("an int");
        assert_eq!(
            sizes,
            [Some(wanted); 2],
            "sizes of the send and the receive"
        );
        assert!(
            self.table
                .consumed(self.receive, received)
                .is_none_or(|rc| rc == 0)
        );
        assert!(target[..len] == data, "{len} bytes arrived changed");
        assert!(
            target[len..].iter().all(|byte| *byte == 0xee),
            "written beyond {len} bytes"
        );
        assert_eq!(self.table.dereg_mr(self.send, from), 0);
        assert_eq!(self.table.dereg_mr(self.receive, to), 0);
    }

    /// Closes both ends.
    pub fn close(self) {
        assert_eq!(self.table.close_send(self.send), 0);
        assert_eq!(self.table.close_recv(self.receive), 0);
    }
}

/// What the relays take each connection of the plugin's for.
pub const ANY: Line = Line::Control;

/// Puts a relay into the way of who connects to the door that a handle names: for comms' own
/// connections, and lanes.
pub fn relay(handle: &mut [u8; 128]) -> Proxy {
    let port = u16::from_le_bytes([handle[56], handle[57]]);
    let proxy = Proxy::start(([127, 0, 0, 1], port).into());
    handle[56..58].copy_from_slice(&proxy.address().port().to_le_bytes());
    proxy
}

/// A link through a relay.
pub fn relayed(table: &dyn Calls, context: Opaque) -> (Link<'_>, Proxy) {
    let (listen, mut handle) = listening(table, context);
    let proxy = relay(&mut handle);
    (Link::between(table, context, listen, handle), proxy)
}

/// The connections of a comm.
pub const PAIR: u32 = 2;

/// Runs `body` while every connection through a relay is reset whenever so many bytes have passed.
pub fn under_resets(proxy: &Proxy, bytes: u64, body: impl FnOnce()) {
    let done = AtomicBool::new(false);
    let carried = || proxy.carried(ANY);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut before = 0;
            while !done.load(Ordering::SeqCst) {
                if carried() > before + bytes {
                    before = carried();
                    proxy.reset(ANY);
                }
                std::thread::yield_now();
            }
        });
        let _ending = Ending(&done);
        body();
    });
}

/// Ends the other thread whatever becomes of this one.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Random bytes, repeated in blocks that each carry their number.
pub fn content(len: usize) -> Vec<u8> {
    let mut block = vec![0; len.min(1 << 20)];
    getrandom::fill(&mut block).expect("random bytes");
    let mut bytes = Vec::with_capacity(len);
    for number in 0_u64.. {
        if bytes.len() == len {
            break;
        }
        let take = block.len().min(len - bytes.len());
        if take >= 8 {
            block[..8].copy_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(&block[..take]);
    }
    bytes
}

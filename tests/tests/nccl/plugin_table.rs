//! The bare table of our own plugin file: calls that the safe host API never makes.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

use std::ffi::{c_int, c_void};
use std::ptr;

use nccl_net::constants::{
    NET_DEVICE_HOST, NET_DEVICE_UNPACK, NET_DEVICE_UNPACK_VERSION, PTR_HOST,
};
use nccl_net::device::RawDeviceHandle;
use nccl_net::tables::NetV7;
use tcpx_tests::nccl_link::{good, until};
use tcpx_tests::{child, plugin_file};

/// A connected pair with 4096 registered bytes on each side.
struct Bare {
    table: NetV7,
    send: *mut c_void,
    receive: *mut c_void,
    bytes: Box<[u8; 4096]>,
    send_memory: *mut c_void,
    receive_memory: *mut c_void,
    device: Box<RawDeviceHandle>,
}

impl Bare {
    fn new() -> Self {
        let table = plugin_file::raw_table();
        let (kind, version) = (NET_DEVICE_UNPACK, NET_DEVICE_UNPACK_VERSION);
        let mut device = Box::new(RawDeviceHandle::request(kind, version));
        let mut bytes = Box::new([0; 4096]);
        let mut handle = [0u8; 128];
        let mut listen = ptr::null_mut();
        let mut send: *mut c_void = ptr::null_mut();
        let mut receive: *mut c_void = ptr::null_mut();
        let (mut send_memory, mut receive_memory) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the calls of a host program, in order, with out pointers that live long enough.
        unsafe {
            assert_eq!(table.init.unwrap()(None), 0);
            let to = handle.as_mut_ptr().cast();
            assert_eq!(table.listen.unwrap()(0, to, &raw mut listen), 0);
            let mut wanted: *mut RawDeviceHandle = &raw mut *device;
            until("connecting", || {
                if send.is_null() {
                    let none = ptr::null_mut();
                    assert_eq!(table.connect.unwrap()(0, to, &raw mut send, none), 0);
                }
                if receive.is_null() {
                    let wanted = &raw mut wanted;
                    assert_eq!(table.accept.unwrap()(listen, &raw mut receive, wanted), 0);
                }
                !send.is_null() && !receive.is_null()
            });
            assert_eq!(table.close_listen.unwrap()(listen), 0);
            let data = bytes.as_mut_ptr().cast();
            for (comm, memory) in [
                (send, &raw mut send_memory),
                (receive, &raw mut receive_memory),
            ] {
                assert_eq!(table.reg_mr.unwrap()(comm, data, 4096, PTR_HOST, memory), 0);
            }
        }
        Self {
            table,
            send,
            receive,
            bytes,
            send_memory,
            receive_memory,
            device,
        }
    }

    fn irecv(&mut self, mut size: c_int) -> (c_int, *mut c_void) {
        let mut data: *mut c_void = self.bytes.as_mut_ptr().cast();
        let mut tag = 0;
        // What NCCL may leave there; it must be overwritten.
        let mut request = ptr::without_provenance_mut(1);
        // SAFETY: arrays of one element, a comm and a registration that are open.
        let rc = unsafe {
            self.table.irecv.unwrap()(
                self.receive,
                1,
                &raw mut data,
                &raw mut size,
                &raw mut tag,
                &raw mut self.receive_memory,
                &raw mut request,
            )
        };
        (rc, request)
    }

    fn isend(&mut self, size: c_int) -> (c_int, *mut c_void) {
        let mut request = ptr::without_provenance_mut(1);
        let data = self.bytes.as_mut_ptr().cast();
        // SAFETY: as for `irecv`.
        let rc = unsafe {
            self.table.isend.unwrap()(self.send, data, size, 0, self.send_memory, &raw mut request)
        };
        (rc, request)
    }

    /// Result and size of one test; -1 while it runs.
    fn test(&self, request: *mut c_void) -> (c_int, c_int) {
        let (mut done, mut size) = (7, -5);
        // SAFETY: a request of an open comm and two out pointers.
        let rc = unsafe { self.table.test.unwrap()(request, &raw mut done, &raw mut size) };
        (rc, if rc == 0 && done == 1 { size } else { -1 })
    }

    #[track_caller]
    fn finish(&self, send: *mut c_void, receive: *mut c_void, size: c_int) {
        for request in [send, receive] {
            until("a transfer", || {
                let found = good(self.test(request));
                assert!(found == -1 || found == size, "{found} bytes");
                found == size
            });
        }
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        // SAFETY: each is closed once and not used again.
        unsafe {
            self.table.dereg_mr.unwrap()(self.send, self.send_memory);
            self.table.dereg_mr.unwrap()(self.receive, self.receive_memory);
            self.table.close_send.unwrap()(self.send);
            self.table.close_recv.unwrap()(self.receive);
        }
    }
}

const ENVIRONMENT: [(&str, &str); 1] = [child::LOOPBACK];

#[test]
fn the_seventeenth_request_is_null_until_one_has_ended() {
    child::run(&ENVIRONMENT, || {
        let mut bare = Bare::new();
        let receives: Vec<_> = (0..16).map(|_| bare.irecv(100)).collect();
        assert!(
            receives
                .iter()
                .all(|(rc, request)| *rc == 0 && !request.is_null())
        );
        assert_eq!(bare.irecv(100), (0, ptr::null_mut()));
        let sends: Vec<_> = (0..16).map(|_| bare.isend(100)).collect();
        assert!(
            sends
                .iter()
                .all(|(rc, request)| *rc == 0 && !request.is_null())
        );
        assert_eq!(bare.isend(100), (0, ptr::null_mut()));
        for (send, receive) in sends.iter().zip(&receives) {
            bare.finish(send.1, receive.1, 100);
        }
        assert!(!bare.isend(100).1.is_null());
        assert!(!bare.irecv(100).1.is_null());
    });
}

#[test]
fn whatever_device_queue_is_asked_for_none_is_given() {
    child::run(&ENVIRONMENT, || {
        let mut bare = Bare::new();
        assert_eq!(bare.device.net_device_type, NET_DEVICE_HOST);
        assert!(bare.device.handle.is_null() && bare.table.irecv_consumed.is_none());
        let (receive, send) = (bare.irecv(10).1, bare.isend(10).1);
        bare.finish(send, receive, 10);
    });
}

#[test]
fn bad_arguments_are_answers_not_crashes() {
    child::run(&ENVIRONMENT, || {
        let mut bare = Bare::new();
        assert_eq!(bare.isend(4097).0, 4);
        assert_eq!(bare.isend(-1).0, 4);
        assert_eq!(bare.irecv(4097).0, 4);
        assert_eq!(bare.test(ptr::null_mut()).0, 4);
        let memory = std::mem::replace(&mut bare.send_memory, ptr::null_mut());
        assert_eq!(bare.isend(10).0, 4);
        bare.send_memory = memory;
        // A comm of another kind is not closed.
        let close = bare.table.close_recv.unwrap();
        // SAFETY: an open comm.
        assert_eq!(unsafe { close(bare.send) }, 4);
        let close = bare.table.close_send.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { close(bare.receive) }, 4);
        // A second init is no new start: comms live on.
        // SAFETY: as in `new`.
        assert_eq!(unsafe { bare.table.init.unwrap()(None) }, 0);
        let (send, receive) = (bare.isend(10).1, bare.irecv(10).1);
        bare.finish(send, receive, 10);
    });
}

//! Violations of the plugin contract, which the safe host API makes impossible: what the double of
//! Google's plugin answers to them over its bare table.
#![expect(clippy::unwrap_used, reason = "helpers fail the test that calls them")]

use std::ffi::{c_int, c_void};
use std::ptr;

use nccl_net::constants::{PTR_CUDA, PTR_HOST};
use nccl_net::device::RawDeviceHandle;
use nccl_net::raw_properties::RawPropertiesV7;
use nccl_net::tables::NetV7;
use tcpx_tests::double::{self, plugin, serial};
use tcpx_tests::support::{PAGE, Pages, until};

const INTERNAL: c_int = 3;

/// One connection over the bare table.
struct Bare {
    table: NetV7,
    listener: *mut c_void,
    sender: *mut c_void,
    receiver: *mut c_void,
    memory: *mut c_void,
    pages: Pages,
    device: Box<RawDeviceHandle>,
}

impl Bare {
    fn open() -> Self {
        plugin();
        let table = double::raw_table();
        let mut handle = Box::new([0_u64; 16]);
        let mut device = Box::new(RawDeviceHandle::request(1, 7));
        let mut bare = Self {
            table,
            listener: ptr::null_mut(),
            sender: ptr::null_mut(),
            receiver: ptr::null_mut(),
            memory: ptr::null_mut(),
            pages: Pages::new(4 * PAGE),
            device: Box::new(RawDeviceHandle::request(1, 7)),
        };
        // SAFETY: the double is initialised; every pointer is good and outlives its use.
        unsafe {
            let rc = table.listen.unwrap()(0, handle.as_mut_ptr().cast(), &raw mut bare.listener);
            assert_eq!(rc, 0);
            until("connect", || {
                let connect = table.connect.unwrap();
                let rc = connect(
                    0,
                    handle.as_mut_ptr().cast(),
                    &raw mut bare.sender,
                    ptr::null_mut(),
                );
                assert_eq!(rc, 0);
                (!bare.sender.is_null()).then_some(())
            });
            let mut inner: *mut RawDeviceHandle = &raw mut *device;
            until("accept", || {
                let accept = table.accept.unwrap();
                assert_eq!(
                    accept(bare.listener, &raw mut bare.receiver, &raw mut inner),
                    0
                );
                (!bare.receiver.is_null()).then_some(())
            });
            let data = bare.pages.as_mut_ptr().cast();
            let rc = table.reg_mr.unwrap()(
                bare.receiver,
                data,
                4 * PAGE as c_int,
                PTR_HOST,
                &raw mut bare.memory,
            );
            assert_eq!(rc, 0);
        }
        bare.device = device;
        bare
    }

    fn isend(&mut self, len: c_int, request: &mut *mut c_void) -> c_int {
        let data = self.pages.as_mut_ptr().cast();
        // SAFETY: an open comm and registered memory.
        unsafe { self.table.isend.unwrap()(self.sender, data, len, 0, self.memory, request) }
    }

    fn irecv(&mut self, mut len: c_int, n: c_int, request: &mut *mut c_void) -> c_int {
        let mut data = self.pages.as_mut_ptr().cast();
        let mut tag = 0;
        let irecv = self.table.irecv.unwrap();
        // SAFETY: an open comm, registered memory, arrays of one element.
        unsafe {
            irecv(
                self.receiver,
                n,
                &raw mut data,
                &raw mut len,
                &raw mut tag,
                &raw mut self.memory,
                request,
            )
        }
    }

    /// Result, done, size (-9 when it was not written).
    fn test(&self, request: *mut c_void) -> (c_int, c_int, c_int) {
        let (mut done, mut size) = (0, -9);
        // SAFETY: NULL or a request of an open comm.
        let rc = unsafe { self.table.test.unwrap()(request, &raw mut done, &raw mut size) };
        (rc, done, size)
    }

    fn consumed(&self, request: *mut c_void) -> c_int {
        // SAFETY: a request of an open comm.
        unsafe { self.table.irecv_consumed.unwrap()(self.receiver, 1, request) }
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        // SAFETY: each is closed once.
        unsafe {
            self.table.dereg_mr.unwrap()(self.receiver, self.memory);
            self.table.close_send.unwrap()(self.sender);
            self.table.close_recv.unwrap()(self.receiver);
            self.table.close_listen.unwrap()(self.listener);
        }
    }
}

#[test]
fn the_seventeenth_request_is_an_internal_error_with_the_request_untouched() {
    let _serial = serial();
    let mut bare = Bare::open();
    let marker = ptr::without_provenance_mut(0x5EED);
    for post in [Bare::isend, |bare: &mut Bare, len, request: &mut _| {
        bare.irecv(len, 1, request)
    }] {
        for _ in 0..16 {
            let mut request = ptr::null_mut();
            assert_eq!(post(&mut bare, 1, &mut request), 0);
            assert!(!request.is_null());
        }
        let mut request = marker;
        assert_eq!(
            (post(&mut bare, 1, &mut request), request),
            (INTERNAL, marker)
        );
    }
}

#[test]
fn only_the_head_can_be_tested_and_never_twice() {
    let _serial = serial();
    let mut bare = Bare::open();
    let (mut first, mut second) = (ptr::null_mut(), ptr::null_mut());
    assert_eq!(bare.irecv(100, 1, &mut first), 0);
    assert_eq!(bare.irecv(100, 1, &mut second), 0);
    let mut sends = [ptr::null_mut(); 2];
    for request in &mut sends {
        assert_eq!(bare.isend(23, request), 0);
    }
    assert_eq!(bare.test(ptr::null_mut()).0, INTERNAL);
    assert_eq!(bare.test(sends[1]).0, INTERNAL);
    until("both sends", || {
        (bare.test(sends[0]) == (0, 1, -9)).then_some(())
    });
    until("both sends", || {
        (bare.test(sends[1]) == (0, 1, -9)).then_some(())
    });
    assert_eq!(
        bare.test(sends[0]),
        (0, 0, -9),
        "a finished request says nothing"
    );

    assert_eq!(bare.test(second).0, INTERNAL, "not the head");
    assert_eq!(bare.consumed(first), INTERNAL, "not received yet");
    until("the head", || {
        (bare.test(first) == (0, 1, -9)).then_some(())
    });
    assert_eq!(bare.test(first), (0, 0, -9));
    until("the next", || {
        (bare.test(second) == (0, 1, -9)).then_some(())
    });
    assert_eq!(bare.consumed(second), INTERNAL, "not the oldest");
    assert_eq!(bare.consumed(first), 0);
    assert_eq!(bare.consumed(first), INTERNAL, "consumed before");
    assert_eq!(bare.consumed(second), 0);
}

#[test]
fn receives_keep_their_places_until_they_are_consumed() {
    let _serial = serial();
    let mut bare = Bare::open();
    let mut receives = [ptr::null_mut(); 16];
    for request in &mut receives {
        assert_eq!(bare.irecv(8, 1, request), 0);
    }
    for request in receives {
        let mut send = ptr::null_mut();
        assert_eq!(bare.isend(8, &mut send), 0);
        until("a send", || (bare.test(send).1 == 1).then_some(()));
        until("a receive", || (bare.test(request).1 == 1).then_some(()));
    }
    let mut more = ptr::null_mut();
    assert_eq!(bare.irecv(8, 1, &mut more), INTERNAL);
    assert_eq!(bare.consumed(receives[0]), 0);
    assert_eq!(bare.irecv(8, 1, &mut more), 0);
}

#[test]
fn bad_arguments_are_internal_errors() {
    let _serial = serial();
    let mut bare = Bare::open();
    let mut out = ptr::null_mut();
    let table = bare.table;
    let data: *mut c_void = bare.pages.as_mut_ptr().cast();
    // SAFETY: open comms; what is wrong in each call is what the double must answer.
    unsafe {
        let isend = table.isend.unwrap();
        let rc = isend(bare.sender, data, 8, 0, ptr::null_mut(), &raw mut out);
        assert_eq!(rc, INTERNAL, "no memory handle");
        let reg_mr = table.reg_mr.unwrap();
        let odd = data.byte_add(16);
        assert_eq!(
            reg_mr(bare.sender, odd, 8, PTR_CUDA, &raw mut out),
            INTERNAL
        );
        assert_eq!(reg_mr(bare.sender, odd, 8, PTR_HOST, &raw mut out), 0);
        let mut untouched = ptr::without_provenance_mut(0x5EED);
        let rc = table.get_device_mr.unwrap()(bare.sender, out, &raw mut untouched);
        assert_eq!((rc, untouched.addr()), (0, 0x5EED));
        assert_eq!(table.dereg_mr.unwrap()(bare.sender, out), 0);
        assert!(table.reg_mr_dma_buf.is_none());
        let mut properties = std::mem::zeroed::<RawPropertiesV7>();
        let rc = table.get_properties.unwrap()(1, &raw mut properties);
        assert_eq!(rc, INTERNAL, "no such device");
    }
    assert_eq!(bare.irecv(8, 2, &mut out), INTERNAL, "grouped receives");
}

#[test]
fn a_second_accept_is_refused_and_counted() {
    let _serial = serial();
    let mut bare = Bare::open();
    let before = double::stats().second_accepts;
    let mut comm = ptr::null_mut();
    let mut inner: *mut RawDeviceHandle = &raw mut *bare.device;
    // SAFETY: an open listen comm; a second accept is what is tested.
    let rc = unsafe { bare.table.accept.unwrap()(bare.listener, &raw mut comm, &raw mut inner) };
    assert_eq!(rc, INTERNAL);
    assert_eq!(double::stats().second_accepts, before + 1);
}

#[test]
fn accept_needs_a_real_device_handle() {
    let _serial = serial();
    plugin();
    let table = double::raw_table();
    let mut handle = [0_u64; 16];
    let (mut listener, mut comm) = (ptr::null_mut(), ptr::null_mut());
    let mut none: *mut RawDeviceHandle = ptr::null_mut();
    // SAFETY: good pointers, but for the inner one that is tested.
    unsafe {
        let rc = table.listen.unwrap()(0, handle.as_mut_ptr().cast(), &raw mut listener);
        assert_eq!(rc, 0);
        let rc = table.accept.unwrap()(listener, &raw mut comm, &raw mut none);
        assert_eq!(rc, INTERNAL);
        assert_eq!(table.close_listen.unwrap()(listener), 0);
    }
}

#[test]
fn connect_must_be_polled_with_the_same_buffer() {
    let _serial = serial();
    let (handle, _listener) = plugin().listen(0).unwrap();
    let table = double::raw_table();
    let connect = table.connect.unwrap();
    #[repr(align(16))]
    struct Buffer([u8; 128]);
    let mut buffer = Buffer(handle.0);
    let mut comm = ptr::null_mut();
    // SAFETY: good pointers; polling with a copy is what is tested.
    unsafe {
        let rc = connect(
            0,
            buffer.0.as_mut_ptr().cast(),
            &raw mut comm,
            ptr::null_mut(),
        );
        assert_eq!((rc, comm), (0, ptr::null_mut()));
        assert_ne!(buffer.0[80..88], handle.0[80..88], "the state pointer");
        assert_eq!(buffer.0[..80], handle.0[..80]);
        let mut copy = Buffer(buffer.0);
        let rc = connect(
            0,
            copy.0.as_mut_ptr().cast(),
            &raw mut comm,
            ptr::null_mut(),
        );
        assert_eq!(rc, INTERNAL);
        until("connect", || {
            let rc = connect(
                0,
                buffer.0.as_mut_ptr().cast(),
                &raw mut comm,
                ptr::null_mut(),
            );
            assert_eq!(rc, 0);
            (!comm.is_null()).then_some(())
        });
        assert_eq!(table.close_send.unwrap()(comm), 0);
    }
}

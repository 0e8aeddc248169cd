//! Messages of one size through a pair of comms whose ends are in two processes.

#![expect(
    clippy::missing_panics_doc,
    reason = "a test ends at what it does not expect"
)]

use std::ptr;

use crate::nccl_link::{HOST, good, until_calmly};
use crate::nccl_part::{Calls, Opaque};

/// What both processes take the content of messages from.
fn block() -> Vec<u8> {
    const BLOCK: u64 = 1 << 20;
    let bytes = (0..BLOCK).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56);
    bytes.map(|byte| byte as u8).collect()
}

/// The parts of a message of so many bytes, in order.
fn parts(block: &[u8], number: usize, size: usize) -> impl Iterator<Item = &[u8]> {
    let start = number * 4099 % block.len();
    let parts = std::iter::once(&block[start..]).chain(std::iter::repeat(block));
    parts.scan(size, |left, part| {
        let part = &part[..part.len().min(*left)];
        *left -= part.len();
        (!part.is_empty()).then_some(part)
    })
}

/// Sends so many messages of this size, eight at a time; when all sends are done their memory is
/// another's.
pub fn send_all(table: &dyn Calls, send: Opaque, size: usize, messages: usize) {
    const DEPTH: usize = 8;
    let (block, mut data) = (block(), vec![0; size * DEPTH.min(messages)]);
    let (_, memory) = table.reg_mr(send, &mut data, HOST);
    let mut sends: [Opaque; DEPTH] = [ptr::null_mut(); DEPTH];
    let (mut posted, mut done) = (0, 0);
    until_calmly("all sends", || {
        while posted < messages && sends[posted % DEPTH].is_null() {
            let place = posted % DEPTH;
            let mut message = &mut data[place * size..][..size];
            let at = message.as_mut_ptr();
            for part in parts(&block, posted, size) {
                let (to, rest) = message.split_at_mut(part.len());
                to.copy_from_slice(part);
                message = rest;
            }
            let request = good(table.isend(send, at, size, memory));
            sends[place] = request;
            if request.is_null() {
                break;
            }
            posted += 1;
        }
        while !sends[done % DEPTH].is_null() {
            let (rc, is_done, _) = table.test(sends[done % DEPTH]);
            assert_eq!(rc, 0);
            if is_done == 0 {
                break;
            }
            sends[done % DEPTH] = ptr::null_mut();
            done += 1;
        }
        done == messages
    });
    data.fill(0xee);
    // The comm may be left as it is.
    std::mem::forget(data);
}

/// Receives what [`send_all`] sends, and asks in front of each message whether to go on.
pub fn receive_all(
    table: &dyn Calls,
    receive: Opaque,
    (size, messages): (usize, usize),
    mut goes_on: impl FnMut(usize) -> bool,
) {
    let (block, mut target) = (block(), vec![0; size]);
    let memory = good(table.reg_mr(receive, &mut target, HOST));
    for number in 0..messages {
        until_calmly("the receiver's turn", || goes_on(number));
        let at = target.as_mut_ptr();
        let (rc, request) = table.irecv(receive, at, size, memory, ptr::null_mut());
        assert_eq!(rc, 0, "message {number} of {messages} of {size} bytes");
        until_calmly("a message", || {
            let (rc, done, found) = table.test(request);
            assert_eq!(rc, 0, "message {number} of {messages} of {size} bytes");
            assert!(done == 0 || usize::try_from(found) == Ok(size));
            done == 1
        });
        let mut found = &target[..];
        for part in parts(&block, number, size) {
            let (here, rest) = found.split_at(part.len());
            assert!(here == part, "message {number} of {size} bytes");
            found = rest;
        }
    }
    assert_eq!(table.dereg_mr(receive, memory), 0);
    assert_eq!(table.close_recv(receive), 0);
}

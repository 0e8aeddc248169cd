//! The sizes and the walk over control messages are those of libc's macros.

use proptest::collection::vec;
use proptest::prelude::*;
use tcpx_lanes::control_messages::{ControlMessages, HEADER_BYTES, cmsg_len, cmsg_space};

/// libc's walk over the same bytes: level, type and payload of each message.
fn libc_messages(control: &[u8]) -> Vec<(i32, i32, Vec<u8>)> {
    let mut aligned = vec![0u64; control.len().div_ceil(8)];
    for (at, byte) in control.iter().enumerate() {
        let shift = if cfg!(target_endian = "little") {
            at % 8 * 8
        } else {
            56 - at % 8 * 8
        };
        aligned[at / 8] |= u64::from(*byte) << shift;
    }
    let mut found = Vec::new();
    // SAFETY: all fields are integers or pointers, for which zero is a value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_control = aligned.as_mut_ptr().cast();
    header.msg_controllen = control.len();
    // SAFETY: the header names `aligned`, which is aligned, as long as it says, and outlives it.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(&header) };
    while !next.is_null() {
        // SAFETY: libc found room for a message header here, inside `aligned`.
        let message = unsafe { next.read() };
        let payload = message.cmsg_len.checked_sub(HEADER_BYTES);
        let at = next.addr() - aligned.as_ptr().addr() + HEADER_BYTES;
        // libc does not check the message that it names first.
        let Some(payload) = payload.and_then(|bytes| control.get(at..)?.get(..bytes)) else {
            break;
        };
        found.push((message.cmsg_level, message.cmsg_type, payload.to_vec()));
        // SAFETY: as above, and `next` came from libc for the same header.
        next = unsafe { libc::CMSG_NXTHDR(&header, next) };
    }
    found
}

/// Ours, up to the first error.
fn our_messages(control: &[u8]) -> Vec<(i32, i32, Vec<u8>)> {
    ControlMessages::new(control)
        .map_while(Result::ok)
        .map(|message| (message.level, message.kind, message.payload.to_vec()))
        .collect()
}

fn encode(messages: &[(i32, i32, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (level, kind, payload) in messages {
        bytes.extend((16 + payload.len()).to_ne_bytes());
        bytes.extend(level.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(payload);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
    bytes
}

#[test]
fn sizes_are_those_of_libc() {
    for payload in 0..4096u32 {
        // SAFETY: both only compute.
        let (len, space) = unsafe { (libc::CMSG_LEN(payload), libc::CMSG_SPACE(payload)) };
        assert_eq!(cmsg_len(payload as usize), len as usize);
        assert_eq!(cmsg_space(payload as usize), space as usize);
    }
    assert_eq!(HEADER_BYTES, size_of::<libc::cmsghdr>());
}

proptest! {
    #[test]
    fn whole_messages_are_the_same(
        messages in vec((any::<i32>(), any::<i32>(), vec(any::<u8>(), 0..64)), 0..12),
    ) {
        let control = encode(&messages);
        prop_assert_eq!(our_messages(&control), messages.clone());
        prop_assert_eq!(libc_messages(&control), messages);
    }

    /// Where a length is wrong libc stops, and so do we, with an error besides.
    #[test]
    fn damaged_messages_end_at_the_same_place(
        messages in vec((0..3i32, 70..100i32, vec(any::<u8>(), 0..32)), 1..8),
        which in any::<prop::sample::Index>(),
        length in prop_oneof![0u64..80, 0u64..1 << 62],
        cut in 0usize..24,
    ) {
        let mut control = encode(&messages);
        let before = encode(&messages[..which.index(messages.len())]).len();
        control[before..before + 8].copy_from_slice(&length.to_ne_bytes());
        control.truncate(control.len() - cut.min(control.len()));
        let (mut ours, theirs) = (our_messages(&control), libc_messages(&control));
        // A last message without its padding is whole for the kernel, but not for libc.
        if !control.len().is_multiple_of(8) && ours.len() == theirs.len() + 1 {
            ours.pop();
        }
        prop_assert_eq!(ours, theirs);
    }
}

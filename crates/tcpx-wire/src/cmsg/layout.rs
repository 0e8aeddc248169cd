//! Sizes inside a control buffer, as 64-bit Linux lays it out: `CMSG_ALIGN`, `CMSG_LEN` and
//! `CMSG_SPACE` as constant functions.

/// Bytes in front of a message's payload: length u64, level i32, type i32.
pub const HEADER_BYTES: usize = 16;

/// Messages begin at multiples of this.
const ALIGNMENT: usize = 8;

/// Rounds up to the place where the next message begins; the largest value is rounded down.
pub const fn cmsg_align(bytes: usize) -> usize {
    bytes.saturating_add(ALIGNMENT - 1) & !(ALIGNMENT - 1)
}

/// What the length field of a message with so many bytes of payload says.
pub const fn cmsg_len(payload: usize) -> usize {
    HEADER_BYTES.saturating_add(payload)
}

/// Bytes that a message with so many bytes of payload takes in the buffer.
pub const fn cmsg_space(payload: usize) -> usize {
    cmsg_align(cmsg_len(payload))
}

/// `N` bytes at `at`, if the buffer has them.
pub(super) fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

const _: () = assert!(cmsg_space(12) == 32 && cmsg_space(24) == 40 && cmsg_space(0) == 16);

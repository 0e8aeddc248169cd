//! The lane function of the unpack kernel, on the CPU, against a plain copy.

mod random_lists;

use std::ptr;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use super::*;
use random_lists::Random;

/// Memory that ends, on both sides, at pages that nobody may touch.
struct Fenced {
    base: *mut u8,
    len: usize,
}

const PAGE: usize = 4096;

impl Fenced {
    fn new(pages: usize) -> Self {
        let len = pages * PAGE;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: new mappings touch nothing that exists; the outer pages are this mapping's own.
        unsafe {
            let base = mmap_anonymous(ptr::null_mut(), len + 2 * PAGE, protection, flags).unwrap();
            mprotect(base, PAGE, MprotectFlags::empty()).unwrap();
            mprotect(base.byte_add(PAGE + len), PAGE, MprotectFlags::empty()).unwrap();
            Self {
                base: base.cast::<u8>().add(PAGE),
                len,
            }
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: readable, writable and zeroed by the kernel.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }
}

impl Drop for Fenced {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, and nobody uses it any more.
        unsafe { munmap(self.base.sub(PAGE).cast(), self.len + 2 * PAGE).unwrap() };
    }
}

const POISON: u8 = 0xA5;

/// Copies one fragment between two places, by one warp and by two, and compares everything around
/// it, too.
fn check(source: &[u8], destination: &mut [u8], from: usize, to: usize, length: usize) {
    for split in 0..2 {
        check_split(source, destination, (from, to, length), split);
    }
}

fn check_split(
    source: &[u8],
    destination: &mut [u8],
    (from, to, length): (usize, usize, usize),
    split: u32,
) {
    let around = to.saturating_sub(48)..destination.len().min(to + length + 48);
    destination[around.clone()].fill(POISON);
    let list = [Descriptor {
        source_offset: from as u32,
        length: length as u32,
        destination_offset: to as u64,
    }];
    assert!(from + length <= source.len() && to + length <= destination.len());
    // SAFETY: both ranges lie in the slices, as just asserted.
    unsafe { by_lanes(source.as_ptr(), destination.as_mut_ptr(), &list, split) };
    let case = || {
        format!(
            "source at {}, destination at {}, {length} bytes, split {split}",
            from % 16,
            to % 16
        )
    };
    assert!(
        destination[to..to + length] == source[from..from + length],
        "wrong bytes: {}",
        case()
    );
    let guards = destination[around.start..to]
        .iter()
        .chain(&destination[to + length..around.end]);
    assert!(
        guards.copied().all(|byte| byte == POISON),
        "bytes beside it written: {}",
        case()
    );
}

fn fill(bytes: &mut [u8]) {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for byte in bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Never the poison, so that a byte left out shows.
        *byte = match (state >> 56) as u8 {
            POISON => 0,
            other => other,
        };
    }
}

fn memory() -> (Fenced, Fenced) {
    let (mut source, destination) = (Fenced::new(4), Fenced::new(4));
    fill(source.bytes());
    (source, destination)
}

#[test]
fn every_alignment_of_both_ends_at_every_small_length() {
    let (mut source, mut destination) = memory();
    for from in 0..16 {
        for to in 0..16 {
            for length in 1..=320 {
                check(
                    source.bytes(),
                    destination.bytes(),
                    64 + from,
                    64 + to,
                    length,
                );
            }
        }
    }
}

#[test]
fn every_alignment_of_both_ends_at_large_lengths() {
    let (mut source, mut destination) = memory();
    let around = [512, 1024, 1448, 2048, 2896, 4096, 8192];
    let lengths = around
        .into_iter()
        .flat_map(|length| length - 17..=length + 17);
    for length in lengths.chain((321..8192).step_by(613)) {
        for from in 0..16 {
            for to in 0..16 {
                check(source.bytes(), destination.bytes(), from, 48 + to, length);
            }
        }
    }
}

#[test]
fn no_word_beside_a_fragment_is_read_or_written() {
    // A fragment that begins or ends where its memory does: the next aligned word is a fault.
    let (mut source, mut destination) = memory();
    let len = source.len;
    for length in (1..=200).chain([1448, 4096, 8191]) {
        for other in 0..16 {
            check(source.bytes(), destination.bytes(), 0, other, length);
            check(source.bytes(), destination.bytes(), other, 0, length);
            check(
                source.bytes(),
                destination.bytes(),
                len - length,
                other,
                length,
            );
            check(
                source.bytes(),
                destination.bytes(),
                other,
                len - length,
                length,
            );
        }
    }
}

/// Lists of random lengths, alignments, gaps and orders against a plain copy.
fn random_lists(lists: usize, seed: u64) {
    const ROOM: usize = 96 << 10;
    let mut random = Random::new(seed);
    let mut source = vec![0; ROOM];
    fill(&mut source);
    let (mut expected, mut arrived) = (vec![0; ROOM], vec![0; ROOM]);
    for list in 0..lists {
        let descriptors = random.list(ROOM, ROOM);
        let end = descriptors.iter().map(|one| bytes_to(one).end).max();
        let touched = ..(end.unwrap_or(0) + 64).min(ROOM);
        expected[touched].fill(POISON);
        arrived[touched].fill(POISON);
        for one in &descriptors {
            expected[bytes_to(one)].copy_from_slice(&source[bytes(one)]);
        }
        // SAFETY: every source and destination lies in its vector, as made above.
        unsafe {
            by_lanes(
                source.as_ptr(),
                arrived.as_mut_ptr(),
                &descriptors,
                list as u32 % 3,
            )
        };
        assert!(
            arrived[touched] == expected[touched],
            "list {list} of seed {seed}: {descriptors:?}"
        );
    }
}

fn bytes_to(one: &Descriptor) -> Range<usize> {
    let start = one.destination_offset as usize;
    start..start + one.length as usize
}

#[test]
fn random_lists_arrive() {
    random_lists(3000, 0x51_7CC1_B727_220A);
}

#[test]
#[ignore = "large: run with --ignored"]
fn a_million_random_lists_arrive() {
    let now = std::time::SystemTime::now();
    let seed = now
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_nanos() as u64;
    random_lists(1_000_000, seed);
}

#[test]
#[ignore = "large: run with --ignored"]
fn every_length_at_every_alignment() {
    let (mut source, mut destination) = memory();
    for length in 1..=8192 {
        for from in 0..16 {
            for to in 0..16 {
                check(source.bytes(), destination.bytes(), from, 48 + to, length);
            }
        }
    }
}

#[test]
fn lists_of_up_to_16_384_fragments_arrive() {
    for count in [1, 2, 240, 241, 2048, 16_384] {
        for length in [1448, 4096] {
            let mut source = vec![0; count * length + 3];
            fill(&mut source);
            // A step without a common factor visits every fragment once, far from in order.
            let descriptors: Vec<_> = (0..count)
                .map(|index| Descriptor {
                    source_offset: ((index * 7919 % count) * length + 3) as u32,
                    length: length as u32,
                    destination_offset: (index * length) as u64,
                })
                .collect();
            let mut arrived = vec![POISON; count * length];
            // SAFETY: every source and destination lies in its vector, as made above.
            unsafe {
                unpack(
                    UnpackMethod::Kernel,
                    source.as_ptr(),
                    arrived.as_mut_ptr(),
                    &descriptors,
                )
            };
            let wrong = descriptors
                .iter()
                .find(|one| arrived[bytes_to(one)] != source[bytes(one)]);
            assert_eq!(wrong, None);
        }
    }
}

#[test]
fn the_guard_pages_are_there() {
    // The test above rests on them: a read through the kernel, which answers instead of faulting.
    let fenced = Fenced::new(1);
    let (reader, writer) = std::io::pipe().unwrap();
    for outside in [
        fenced.base.wrapping_sub(1),
        fenced.base.wrapping_add(fenced.len),
    ] {
        // SAFETY: the kernel checks the byte and answers EFAULT.
        let answer =
            unsafe { libc::write(std::os::fd::AsRawFd::as_raw_fd(&writer), outside.cast(), 1) };
        assert_eq!(answer, -1);
    }
    drop(reader);
}

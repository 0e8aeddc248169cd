//! Once warmed, receives are parsed, gathered and given back without allocating.

#[path = "../../../tests/src/counting.rs"]
#[expect(
    dead_code,
    unreachable_pub,
    reason = "the same source is part of the library of the tests"
)]
mod counting;

use counting::Counting;
use tcpx_devmem::cmsg::{Binding, Gathered, Received};
use tcpx_devmem::tokens::{Returned, TokenSet};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Records of 1,448 bytes with every other token, linear ones in between.
fn control(records: u32) -> (Vec<u8>, usize) {
    let mut control = Vec::new();
    for record in 0..records {
        let kind: i32 = if record % 7 == 3 { 78 } else { 79 };
        control.extend(40u64.to_ne_bytes());
        control.extend(1i32.to_ne_bytes());
        control.extend(kind.to_ne_bytes());
        control.extend((u64::from(record) * 4096).to_ne_bytes());
        control.extend(
            [1448, record * 2, 1, 0]
                .map(u32::to_ne_bytes)
                .as_flattened(),
        );
    }
    (control, records as usize * 1448)
}

#[test]
fn a_warm_receive_allocates_nothing() {
    let (control, bytes) = control(800);
    let binding = Binding::Mainline {
        pool_bytes: 1 << 30,
        dmabuf_id: 1,
    };
    let mut gathered = Gathered::new();
    let mut chunk = TokenSet::new();
    let mut socket = TokenSet::new();
    let mut round = || {
        gathered.clear();
        let received = Received {
            bytes,
            iovec_bytes: 4 << 20,
            control: &control,
            truncated: false,
        };
        gathered.add(received, binding, 0, &mut chunk).unwrap();
        socket.append(&mut chunk).unwrap();
        let mut batches = 0;
        while let Some(batch) = socket.batch(binding.dialect()) {
            let freed = batch.fragments() as i32;
            assert_eq!(batch.answered(freed), Ok(Returned::All));
            batches += 1;
        }
        batches
    };
    assert!(round() > 4);
    let before = Counting::of_thread();
    for _ in 0..10 {
        round();
    }
    assert_eq!(Counting::of_thread(), before);
}

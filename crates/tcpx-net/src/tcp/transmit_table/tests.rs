//! Which lane takes the next chunk.

use super::*;

#[test]
fn lanes_at_rest_take_short_chunks_in_turn_and_long_ones_as_few_as_can() {
    let table = TransmitTable::new(4, true);
    let woken = |bytes: usize| {
        for lane in [1, 4, 63] {
            table.idle.insert(lane);
        }
        table.take_idle(bytes)
    };
    assert_eq!(
        [1, 1, 1, 1, 1].map(woken),
        [Some(1), Some(4), Some(63), Some(1), Some(4)]
    );
    assert_eq!([LONG, LONG].map(woken), [Some(1), Some(1)]);
    assert_eq!(table.take_idle(1), Some(63), "one that rests is found");
    assert_eq!(table.take_idle(1), Some(4));
    assert_eq!(table.take_idle(1), None);
}

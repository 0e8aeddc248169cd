//! Lists of pieces.

use tcpx_wire::PieceList;
use tcpx_wire::pieces::MAX_PIECES;

/// Input: where the parts are cut, then their bytes.
pub fn run(data: &[u8]) {
    let Some((cut, bytes)) = data.split_first() else {
        return;
    };
    let (first, second) = bytes.split_at(bytes.len().min(usize::from(*cut)));
    let mut list = PieceList::default();
    if list
        .read_part(first)
        .and_then(|()| list.read_part(second))
        .is_err()
    {
        return;
    }
    let (mut pieces, mut total) = (0_u64, 0_u128);
    for run in list.runs() {
        assert!((run.window as usize) < list.windows().len());
        assert!(run.length > 0 && run.count > 0 && run.stride >= run.length);
        let last = u128::from(run.stride) * u128::from(run.count - 1);
        let end = u128::from(run.offset) + last + u128::from(run.length);
        assert!(end <= u128::from(u64::MAX), "it wraps");
        pieces += u64::from(run.count);
        total += u128::from(run.length) * u128::from(run.count);
    }
    assert!(pieces <= u64::from(MAX_PIECES));
    assert_eq!(
        (u64::from(list.pieces()), u128::from(list.bytes())),
        (pieces, total)
    );
    let mut again = PieceList::default();
    for part in list.parts() {
        again.read_part(&part).expect("what is written is read");
    }
    assert_eq!(again, list);
}

//! Sealed records of a connection, between honest ends and from anybody.

use tcpx_wire::lane_seal::LaneKeys;
use tcpx_wire::record::{LENGTH_BYTES, MOST_BYTES, Records};

/// Input: a choice (u8), then bytes. Even: the bytes come from the network as they are. Odd: the
/// first two say where (u8) and how (u8) the record that seals the others is damaged.
pub fn run(data: &[u8]) {
    let Some((choice, bytes)) = data.split_first() else {
        return;
    };
    let mut client = Records::new(LaneKeys::new([1; 32], [2; 32]));
    let mut server = Records::new(LaneKeys::new([2; 32], [1; 32]));
    if choice % 2 == 0 {
        assert!(opened(&mut server, bytes).is_none(), "nobody sealed it");
        return;
    }
    let Some((&[at, by], plain)) = bytes.split_first_chunk() else {
        return;
    };
    let mut whole = Vec::new();
    let taken = client.seal(plain, &mut whole);
    assert_eq!(taken, plain.len().min(MOST_BYTES));
    let at = usize::from(at) % whole.len();
    whole[at] ^= by;
    let opened = opened(&mut server, &whole);
    match by {
        0 => assert_eq!(opened.as_deref(), Some(&plain[..taken])),
        _ => assert_eq!(opened, None, "a damaged record opens"),
    }
}

/// What the record at the beginning of `input` sealed, if it came whole and is good.
fn opened(records: &mut Records, input: &[u8]) -> Option<Vec<u8>> {
    let length = Records::length(input).ok()??;
    let sealed = input[LENGTH_BYTES..].get(..length)?;
    let mut out = vec![0; length];
    let count = records.open(sealed, &mut out).ok()?;
    out.truncate(count);
    Some(out)
}

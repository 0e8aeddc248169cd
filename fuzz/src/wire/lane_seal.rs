//! Sealed records of a lane, between honest ends and from anybody.

use tcpx_wire::lane_seal::{LaneKeys, Opener, Sealer, TAG_BYTES};

/// Input: how many of the bytes behind it each record seals (u8, 0: the bytes come from the network
/// as they are), which record is damaged (u8), where (u8) and how (u8), then bytes.
pub fn run(data: &[u8]) {
    let Some((&[size, which, at, by], bytes)) = data.split_first_chunk() else {
        return;
    };
    let (mut sealer, mut opener) = ends();
    if size == 0 {
        let opened = opener.open(&mut bytes.to_vec()).is_ok();
        assert!(!opened, "nobody sealed it");
        return;
    }
    for (number, text) in bytes.chunks(size.into()).enumerate() {
        let mut record = text.to_vec();
        let tag = sealer.seal(&mut record);
        record.extend_from_slice(&tag);
        assert_eq!(record.len(), text.len() + TAG_BYTES);
        if number == usize::from(which) && by != 0 {
            let at = usize::from(at) % record.len();
            record[at] ^= by;
            assert!(opener.open(&mut record).is_err(), "a damaged record opens");
            return;
        }
        let opened = opener.open(&mut record);
        assert_eq!(opened.as_deref(), Ok(text), "record {number}");
    }
    assert_eq!(sealer.sealed(), bytes.chunks(size.into()).len() as u64);
}

fn ends() -> (Sealer, Opener) {
    let (sealer, _) = LaneKeys::new([1; 32], [2; 32]).start();
    let (_, opener) = LaneKeys::new([2; 32], [1; 32]).start();
    (sealer, opener)
}

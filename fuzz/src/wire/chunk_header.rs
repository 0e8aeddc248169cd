//! The header of a chunk on a lane.

use tcpx_wire::ChunkHeader;

/// Input: 48 bytes of a header; whatever follows is ignored. Tried as they are, and again with a
/// checksum that fits, so that the fields behind it are reached.
pub fn run(data: &[u8]) {
    let Some(bytes) = data.first_chunk::<{ ChunkHeader::BYTES }>() else {
        return;
    };
    check(bytes);
    let mut fitting = *bytes;
    let crc = super::crc32c(&fitting[..44]);
    fitting[44..].copy_from_slice(&crc.to_le_bytes());
    check(&fitting);
}

fn check(bytes: &[u8; ChunkHeader::BYTES]) {
    if let Ok(header) = ChunkHeader::decode(bytes) {
        assert_eq!(&header.encode(), bytes, "an accepted header is canonical");
        assert!(header.length > 0);
        let end = header.offset.checked_add(header.length.into());
        assert!(end.is_some_and(|end| header.total == 0 || end <= header.total));
    }
}

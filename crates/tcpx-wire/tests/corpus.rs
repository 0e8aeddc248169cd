//! Replays the inputs kept for the fuzz targets through the same assertions.

use std::fs;
use std::path::Path;

#[path = "../../../fuzz/src/wire/mod.rs"]
#[expect(
    unreachable_pub,
    reason = "the same sources are a module of the fuzz crate"
)]
mod targets;

#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use replay::replay;

#[test]
fn handshake_inputs_hold() {
    replay("handshake", targets::handshake::run);
}

#[test]
fn record_inputs_hold() {
    replay("records", targets::records::run);
}

#[test]
fn lane_record_inputs_hold() {
    replay("lane_seal", targets::lane_seal::run);
}

#[test]
fn frame_inputs_hold() {
    replay("frames", targets::frames::run);
}

/// An input that has the name of a kind of frame is one: a change of the wire changes the inputs
/// too.
#[test]
fn frame_inputs_are_what_their_names_say() {
    use tcpx_wire::frame::FrameDecoder;
    let bad = [
        "raw-sequence",
        "raw-too-long",
        "not-utf8",
        "trailing",
        "all",
        "raw",
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/frames");
    for entry in fs::read_dir(folder).expect("the corpus is checked in") {
        let path = entry.expect("a readable folder").path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .expect("a name");
        let input = fs::read(&path).expect("a readable input");
        let stream = targets::frames::framed(&input[1..]);
        let frame = FrameDecoder::new().next(&mut &stream[..]);
        match frame {
            Ok(Some(frame)) => assert!(
                name.starts_with(frame.name()) || bad.contains(&name),
                "{name}: {frame:?}"
            ),
            other => assert!(bad.contains(&name), "{name}: {other:?}"),
        }
    }
}

#[test]
fn descriptor_inputs_hold() {
    replay("descriptors", targets::descriptors::run);
}

#[test]
fn chunk_header_inputs_hold() {
    replay("chunk_header", targets::chunk_header::run);
}

#[test]
fn window_key_inputs_hold() {
    replay("window_key", targets::window_key::run);
}

#[test]
fn key_text_inputs_hold() {
    replay("key_text", targets::key_text::run);
}

#[test]
fn piece_list_inputs_hold() {
    replay("pieces", targets::pieces::run);
}

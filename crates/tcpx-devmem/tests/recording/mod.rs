//! Recordings as files: their layout is in `tests/devmem-recorder/README.md`.

use std::fs;
use std::path::Path;

use tcpx_devmem::cmsg::{Binding, DeviceFragment, Piece, Received};

pub(crate) const MSG_CTRUNC: u64 = 8;

pub(crate) struct Recording {
    pub(crate) binding: Binding,
    pub(crate) events: Vec<Event>,
}

pub(crate) enum Event {
    Receive(Receive),
    /// Tokens given back: the option's value and the kernel's answer.
    Return(Vec<u8>, i64),
    /// The same for tokens that were free already.
    Again(Vec<u8>, i64),
    Unbind,
}

pub(crate) struct Receive {
    /// Bytes of the stream before it.
    pub(crate) at: u64,
    /// Bytes, or minus the error number.
    pub(crate) answer: i64,
    pub(crate) flags: u64,
    pub(crate) iovec_bytes: u64,
    /// Bytes of the control buffer before and after.
    pub(crate) room: u64,
    pub(crate) control: Vec<u8>,
    /// What the kernel wrote to the iovec.
    pub(crate) iovec: Vec<u8>,
    /// FNV-1a of the pool's bytes under each device record.
    pub(crate) hashes: Vec<u64>,
}

impl Receive {
    pub(crate) fn received(&self) -> Received<'_> {
        Received {
            bytes: self.answer.try_into().expect("a receive that succeeded"),
            iovec_bytes: self.iovec_bytes as usize,
            control: &self.control,
            truncated: self.flags & MSG_CTRUNC != 0,
        }
    }

    pub(crate) fn pieces(&self, binding: Binding) -> Vec<Piece> {
        self.received()
            .pieces(binding)
            .collect::<Result<_, _>>()
            .expect("the kernel's word is consistent")
    }
}

impl Recording {
    pub(crate) fn load(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/recordings")
            .join(name);
        let file = fs::read(&path).expect("the recordings are checked in");
        let mut file = Reader(&file);
        assert_eq!(file.bytes(8), b"DEVMEM01");
        let binding = Binding::Mainline {
            pool_bytes: file.number(),
            dmabuf_id: file.number() as u32,
        };
        let mut events = Vec::new();
        while !file.0.is_empty() {
            events.push(match file.bytes(1) {
                b"R" => {
                    let at = file.number();
                    let answer = file.number().cast_signed();
                    let (flags, iovec_bytes, room) = (file.number(), file.number(), file.number());
                    Event::Receive(Receive {
                        at,
                        answer,
                        flags,
                        iovec_bytes,
                        room,
                        control: file.block(1),
                        iovec: file.block(1),
                        hashes: file
                            .block(8)
                            .chunks_exact(8)
                            .map(|hash| u64::from_le_bytes(hash.try_into().expect("8 bytes")))
                            .collect(),
                    })
                }
                b"T" => Event::Return(file.block(8), file.number().cast_signed()),
                b"X" => Event::Again(file.block(8), file.number().cast_signed()),
                b"U" => Event::Unbind,
                other => panic!("{other:?} is no event"),
            });
        }
        Self { binding, events }
    }

    pub(crate) fn receives(&self) -> Vec<&Receive> {
        self.events
            .iter()
            .filter_map(|event| match event {
                Event::Receive(receive) if receive.answer >= 0 => Some(receive),
                _ => None,
            })
            .collect()
    }

    pub(crate) fn fragments(&self) -> Vec<DeviceFragment> {
        self.receives()
            .into_iter()
            .flat_map(|receive| receive.pieces(self.binding))
            .filter_map(|piece| match piece {
                Piece::Device(fragment) => Some(fragment),
                _ => None,
            })
            .collect()
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(count);
        self.0 = rest;
        bytes
    }

    fn number(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes(8).try_into().expect("8 bytes"))
    }

    fn block(&mut self, unit: u64) -> Vec<u8> {
        let bytes = self.number() * unit;
        self.bytes(bytes as usize).to_vec()
    }
}

/// The stream's bytes, as the recorder's sender made them.
pub(crate) fn stream(at: u64, length: u64) -> impl Iterator<Item = u8> {
    (at..at + length).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
}

pub(crate) fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
    })
}

//! The pieces of one receive in stream order.

use std::iter::FusedIterator;

use tcpx_lanes::control_messages::ControlMessages;

use super::dialect::{Binding, Dialect, SOL_SOCKET};
use super::error::{CmsgError, RecordKind};

/// What one `recvmsg` gave back.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// Its return value; 0 is the end of the stream.
    pub bytes: usize,
    /// Length of the iovec that was offered, in bytes.
    pub iovec_bytes: usize,
    /// The control messages: the first `msg_controllen` bytes of the buffer, after the call.
    pub control: &'a [u8],
    /// Whether `msg_flags` has `MSG_CTRUNC`.
    pub truncated: bool,
}

impl<'a> Received<'a> {
    /// The pieces in stream order.
    ///
    /// Their lengths add up to [`Self::bytes`], unless the last item is an error. Nothing before
    /// an error may be taken for received.
    pub fn pieces(self, binding: Binding) -> Pieces<'a> {
        Pieces {
            received: self,
            binding,
            messages: ControlMessages::new(self.control),
            stage: Stage::Start,
            records: 0,
            described: 0,
            linear: 0,
        }
    }
}

/// Bytes of the stream, and where they are now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// In the pool, until the token is given back.
    Device(DeviceFragment),
    /// Copied to the iovec, among device fragments: payload that the card did not split off.
    Linear {
        /// Where it begins in the iovec, in bytes.
        iovec_offset: u64,
        /// Its bytes.
        length: u32,
    },
    /// At the start of the iovec, the whole receive: the kernel reported no device memory.
    ///
    /// A socket may switch to this and back between any two receives.
    Plain {
        /// Its bytes.
        length: u64,
    },
}

/// Bytes of the stream in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFragment {
    /// Where it begins in the pool, in bytes; at any alignment.
    pub pool_offset: u64,
    /// Its bytes.
    pub length: u32,
    /// What to give back after the bytes were copied out of the pool.
    ///
    /// A fragment that the iovec's length cut comes in two receives with two tokens; both are to
    /// be given back. A token given back is used again for another fragment at once.
    pub token: u32,
    /// The dma-buf; Google's records do not name it.
    pub dmabuf_id: Option<u32>,
}

/// The pieces of one receive; ends after the first error.
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    received: Received<'a>,
    binding: Binding,
    messages: ControlMessages<'a>,
    stage: Stage,
    /// Records read.
    records: usize,
    /// Their bytes.
    described: u64,
    /// The bytes of the linear ones: the kernel fills the iovec with them from its start.
    linear: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Start,
    Records,
    Ended,
}

/// A record's fields; those that the dialect lacks are absent.
struct Record {
    offset: u64,
    size: u32,
    token: u32,
    dmabuf_id: Option<u32>,
    flags: u32,
}

impl Record {
    fn read(dialect: Dialect, payload: &[u8]) -> Option<Self> {
        if payload.len() != dialect.record_bytes() {
            return None;
        }
        let word = |at| field(payload, at).map(u32::from_ne_bytes);
        Some(match dialect {
            Dialect::Google => Self {
                offset: word(0)?.into(),
                size: word(4)?,
                token: word(8)?,
                dmabuf_id: None,
                flags: 0,
            },
            Dialect::Mainline => Self {
                offset: u64::from_ne_bytes(field(payload, 0)?),
                size: word(8)?,
                token: word(12)?,
                dmabuf_id: Some(word(16)?),
                flags: word(20)?,
            },
        })
    }
}

impl Pieces<'_> {
    fn start(&self) -> Result<(), CmsgError> {
        let Received {
            bytes: received,
            iovec_bytes,
            control,
            truncated,
        } = self.received;
        if truncated {
            return Err(CmsgError::Truncated {
                control_bytes: control.len(),
                received,
            });
        }
        if received > iovec_bytes {
            return Err(CmsgError::MoreThanOffered {
                iovec_bytes,
                received,
            });
        }
        Ok(())
    }

    /// Skips other messages; `None` when no record is left.
    fn next_record(&mut self) -> Result<Option<Piece>, CmsgError> {
        let dialect = self.binding.dialect();
        while let Some(message) = self.messages.next().transpose()? {
            if message.level != SOL_SOCKET {
                continue;
            }
            let kind = match message.kind {
                kind if kind == dialect.device_type() => RecordKind::Device,
                kind if kind == dialect.linear_type() => RecordKind::Linear,
                kind if is_record(dialect.other(), kind) => {
                    // Skipped, it would make device memory look like plain data.
                    return Err(CmsgError::OtherDialect {
                        message: self.messages.seen() - 1,
                        device: dialect.device_type(),
                        linear: dialect.linear_type(),
                        arrived: kind,
                    });
                }
                _ => continue,
            };
            return self.record(kind, message.payload).map(Some);
        }
        Ok(None)
    }

    fn record(&mut self, kind: RecordKind, payload: &[u8]) -> Result<Piece, CmsgError> {
        let record = self.records;
        let dialect = self.binding.dialect();
        let Some(read) = Record::read(dialect, payload) else {
            return Err(CmsgError::RecordBytes {
                record,
                kind,
                expected: dialect.record_bytes(),
                arrived: payload.len(),
            });
        };
        if read.flags != 0 {
            return Err(CmsgError::Flags {
                record,
                kind,
                arrived: read.flags,
            });
        }
        let piece = match kind {
            RecordKind::Device => Piece::Device(self.device(record, &read)?),
            // The other fields of a linear record mean nothing.
            RecordKind::Linear => Piece::Linear {
                iovec_offset: self.linear,
                length: read.size,
            },
        };
        // Sizes of u32 in a slice cannot pass u64.
        let described = self.described + u64::from(read.size);
        if described > self.received.bytes as u64 {
            return Err(CmsgError::MoreThanReceived {
                record,
                kind,
                described,
                received: self.received.bytes,
            });
        }
        if kind == RecordKind::Linear {
            self.linear += u64::from(read.size);
        }
        self.described = described;
        self.records += 1;
        Ok(piece)
    }

    fn device(&self, record: usize, read: &Record) -> Result<DeviceFragment, CmsgError> {
        if let (Binding::Mainline { dmabuf_id, .. }, Some(arrived)) = (self.binding, read.dmabuf_id)
            && arrived != dmabuf_id
        {
            return Err(CmsgError::UnknownDmabuf {
                record,
                expected: dmabuf_id,
                arrived,
            });
        }
        let pool_bytes = self.binding.pool_bytes();
        let end = read.offset.checked_add(read.size.into());
        if end.is_none_or(|end| end > pool_bytes) {
            return Err(CmsgError::OutsidePool {
                record,
                pool_offset: read.offset,
                length: read.size,
                pool_bytes,
            });
        }
        Ok(DeviceFragment {
            pool_offset: read.offset,
            length: read.size,
            token: read.token,
            dmabuf_id: read.dmabuf_id,
        })
    }

    /// The piece that no record describes, or nothing.
    fn rest(&self) -> Result<Option<Piece>, CmsgError> {
        let received = self.received.bytes;
        if self.described == received as u64 {
            Ok(None)
        } else if self.records == 0 {
            Ok(Some(Piece::Plain {
                length: received as u64,
            }))
        } else {
            Err(CmsgError::LessThanReceived {
                records: self.records,
                described: self.described,
                received,
            })
        }
    }

    fn advance(&mut self) -> Result<Option<Piece>, CmsgError> {
        if self.stage == Stage::Start {
            self.start()?;
            self.stage = Stage::Records;
        }
        if let Some(piece) = self.next_record()? {
            return Ok(Some(piece));
        }
        self.stage = Stage::Ended;
        self.rest()
    }
}

/// `N` bytes at `at`, if the record has them.
fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

fn is_record(dialect: Dialect, kind: i32) -> bool {
    kind == dialect.device_type() || kind == dialect.linear_type()
}

impl Iterator for Pieces<'_> {
    type Item = Result<Piece, CmsgError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.stage == Stage::Ended {
            return None;
        }
        let piece = self.advance();
        if piece.is_err() {
            self.stage = Stage::Ended;
        }
        piece.transpose()
    }
}

impl FusedIterator for Pieces<'_> {}

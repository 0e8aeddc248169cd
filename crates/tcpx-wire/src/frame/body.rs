//! Body bytes to frame.

use super::{
    CancelReason, Destination, Detail, EAGER, Frame, FrameError, GoodbyeReason, Grant, Level,
    MAX_EAGER_BYTES, MAX_SETUP_BYTES, Payload, PlacedChunks, RefuseReason, Role, Settings, Tag,
    TransferId, kind_name,
};
use crate::pieces::MAX_PART_BYTES;
use crate::plan::Taper;
use crate::window::{Place, WindowSecret};

/// Reads the body of a frame of the given kind; a payload takes the buffer `spare`, and `of_payload` is the
/// CRC32C of that of an eager frame, where it is known.
pub(super) fn parse(
    kind: u8,
    bytes: &[u8],
    spare: &mut Vec<u8>,
    of_payload: Option<u32>,
) -> Result<Frame, FrameError> {
    let frame = kind_name(kind).ok_or(FrameError::Kind { arrived: kind })?;
    let mut body = Body { frame, rest: bytes };
    let parsed = match kind {
        1 => Frame::Settings(body.settings()?),
        2 => Frame::Setup {
            round: body.u16("round")?,
            last: body.bool("last")?,
            payload: body.payload(MAX_SETUP_BYTES, spare)?,
        },
        3 => Frame::Ready,
        4 => Frame::Waiting {
            transfer: body.transfer()?,
            tag: body.tag()?,
            number: body.u64("number")?,
            bytes: body.u64("bytes")?,
            level: body.level()?,
        },
        5 => Frame::Grant {
            transfer: body.transfer()?,
            grant: body.grant()?,
        },
        6 => Frame::Refuse {
            transfer: body.transfer()?,
            reason: body.refuse_reason()?,
        },
        EAGER => Frame::Eager {
            transfer: body.transfer()?,
            tag: body.tag()?,
            number: body.u64("number")?,
            level: body.level()?,
            payload: Payload::with_sum(body.payload(MAX_EAGER_BYTES, spare)?, of_payload),
        },
        8 => Frame::EagerDone {
            transfer: body.transfer()?,
        },
        9 => Frame::EagerCredit {
            bytes: body.u32("bytes")?,
        },
        10 => Frame::Placed {
            transfer: body.transfer()?,
            chunks: body.placed()?,
        },
        11 => Frame::Digest {
            transfer: body.transfer()?,
            crc32c: body.u32("crc32c")?,
        },
        12 => Frame::Verdict {
            transfer: body.transfer()?,
            crc32c: body.u32("crc32c")?,
            matches: body.bool("matches")?,
        },
        13 => Frame::Cancel {
            transfer: body.transfer()?,
            from: body.role()?,
            reason: body.cancel_reason()?,
            detail: body.detail()?,
        },
        14 => Frame::Cancelled {
            transfer: body.transfer()?,
            from: body.role()?,
        },
        15 => Frame::Heartbeat {
            counter: body.u64("counter")?,
        },
        16 => Frame::Goodbye {
            reason: body.goodbye_reason()?,
            detail: body.detail()?,
        },
        17 => Frame::GoodbyeAck,
        18 => Frame::Received {
            next: body.u32("next")?,
        },
        19 => Frame::Posted {
            tag: body.tag()?,
            number: body.u64("number")?,
            capacity: body.u64("capacity")?,
            grant: body.grant()?,
        },
        20 => Frame::Revoke {
            tag: body.tag()?,
            number: body.u64("number")?,
        },
        21 => Frame::Withdraw {
            tag: body.tag()?,
            number: body.u64("number")?,
        },
        22 => Frame::Destination {
            transfer: body.transfer()?,
            to: body.destination()?,
        },
        23 => Frame::Get {
            request: body.u64("request")?,
            from: body.place()?,
            bytes: body.u64("bytes")?,
            level: body.level()?,
        },
        24 => Frame::RefuseGet {
            request: body.u64("request")?,
            reason: body.refuse_reason()?,
        },
        25 => Frame::Forget {
            tag: body.tag()?,
            number: body.u64("number")?,
        },
        26 => Frame::Forgotten {
            tag: body.tag()?,
            forgotten: body.bool("forgotten")?,
        },
        27 => Frame::Pieces {
            list: body.u64("list")?,
            last: body.bool("last")?,
            part: body.payload(MAX_PART_BYTES, spare)?,
        },
        28 => Frame::DropPieces {
            list: body.u64("list")?,
        },
        29 => Frame::GetPieces {
            request: body.u64("request")?,
            list: body.u64("list")?,
            bytes: body.u64("bytes")?,
            level: body.level()?,
        },
        _ => return Err(FrameError::Kind { arrived: kind }),
    };
    match body.rest.len() {
        0 => Ok(parsed),
        left => Err(FrameError::TrailingBytes { frame, left }),
    }
}

/// What is left of a body.
struct Body<'a> {
    frame: &'static str,
    rest: &'a [u8],
}

impl<'a> Body<'a> {
    fn settings(&mut self) -> Result<Settings, FrameError> {
        let settings = Settings {
            network: self.text("network", Settings::MAX_TEXT_BYTES)?.to_owned(),
            channels: self.u16("channels")?,
            chunk_bytes: self.u32("chunk_bytes")?,
            send_window: self.u16("send_window")?,
            receive_window: self.u16("receive_window")?,
            eager_limit: self.u32("eager_limit")?,
            eager_credit: self.u32("eager_credit")?,
            heartbeat_ms: self.u32("heartbeat_ms")?,
            dead_after_ms: self.u32("dead_after_ms")?,
            memory: self.text("memory", Settings::MAX_TEXT_BYTES)?.to_owned(),
            software: self.text("software", Settings::MAX_TEXT_BYTES)?.to_owned(),
        };
        settings.validate()?;
        Ok(settings)
    }

    fn placed(&mut self) -> Result<PlacedChunks, FrameError> {
        let first = self.u32("first")?;
        let count = self.u16("count")?;
        // Checked before the bitmap's length is derived from it.
        PlacedChunks::new(first, count)?;
        let bitmap = self.take("bitmap", PlacedChunks::bitmap_bytes(count))?;
        Ok(PlacedChunks::from_bitmap(first, count, bitmap)?)
    }

    fn refuse_reason(&mut self) -> Result<RefuseReason, FrameError> {
        let reason = self.u8("reason")?;
        let capacity = self.u64("capacity")?;
        match (reason, capacity) {
            (0, capacity) => Ok(RefuseReason::TooLarge { capacity }),
            (1, 0) => Ok(RefuseReason::Cancelled),
            (2, 0) => Ok(RefuseReason::Shutdown),
            (3, 0) => Ok(RefuseReason::DeadlineExpired),
            (4, 0) => Ok(RefuseReason::UnknownWindow),
            (5, 0) => Ok(RefuseReason::NotPermitted),
            (6, 0) => Ok(RefuseReason::OutOfRange),
            (7, 0) => Ok(RefuseReason::MemoryFailed),
            (8, 0) => Ok(RefuseReason::PutFailed),
            (1..=8, arrived) => Err(self.value("capacity", "0 for this reason", arrived)),
            (arrived, _) => Err(self.value("reason", "0 to 8", arrived.into())),
        }
    }

    fn place(&mut self) -> Result<Place, FrameError> {
        Ok(Place {
            window: self.u64("window")?,
            secret: WindowSecret::from_bytes(self.array("secret")?),
            offset: self.u64("offset")?,
        })
    }

    fn destination(&mut self) -> Result<Destination, FrameError> {
        match self.u8("destination")? {
            0 => Ok(Destination::Window {
                place: self.place()?,
                notified: self.bool("notified")?,
            }),
            1 => Ok(Destination::Reply {
                request: self.u64("request")?,
            }),
            2 => Ok(Destination::Notification {
                first: self.transfer()?,
                count: self.u32("count")?,
            }),
            3 => Ok(Destination::Pieces {
                list: self.u64("list")?,
                notified: self.bool("notified")?,
            }),
            arrived => Err(self.value("destination", "0 to 3", arrived.into())),
        }
    }

    fn cancel_reason(&mut self) -> Result<CancelReason, FrameError> {
        match self.u8("reason")? {
            0 => Ok(CancelReason::Requested),
            1 => Ok(CancelReason::DeadlineExpired),
            2 => Ok(CancelReason::ChannelFailed),
            3 => Ok(CancelReason::MemoryFailed),
            4 => Ok(CancelReason::Shutdown),
            5 => Ok(CancelReason::Protocol),
            arrived => Err(self.value("reason", "0 to 5", arrived.into())),
        }
    }

    fn goodbye_reason(&mut self) -> Result<GoodbyeReason, FrameError> {
        match self.u8("reason")? {
            0 => Ok(GoodbyeReason::Normal),
            1 => Ok(GoodbyeReason::Shutdown),
            2 => Ok(GoodbyeReason::Error),
            arrived => Err(self.value("reason", "0 to 2", arrived.into())),
        }
    }

    fn level(&mut self) -> Result<Level, FrameError> {
        match self.u8("level")? {
            0 => Ok(Level::Sent),
            1 => Ok(Level::Placed),
            2 => Ok(Level::Verified),
            arrived => Err(self.value("level", "0 to 2", arrived.into())),
        }
    }

    fn chunk_bytes(&mut self) -> Result<u32, FrameError> {
        match self.u32("chunk_bytes")? {
            0 => Err(self.value("chunk_bytes", "at least 1", 0)),
            bytes => Ok(bytes),
        }
    }

    fn grant(&mut self) -> Result<Grant, FrameError> {
        Ok(Grant {
            chunk_bytes: self.chunk_bytes()?,
            window: self.u64("window")?,
            level: self.level()?,
            taper: self.taper()?,
        })
    }

    /// Nothing, where the body ends here.
    fn taper(&mut self) -> Result<Option<Taper>, FrameError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let (halvings, each) = (self.u8("halvings")?, self.u16("each")?);
        if !(1..=Taper::MAX_HALVINGS).contains(&halvings) {
            return Err(self.value("halvings", "1 to 8", halvings.into()));
        }
        Taper::new(halvings, each)
            .map(Some)
            .ok_or_else(|| self.value("each", "1 to 1024", each.into()))
    }

    fn role(&mut self) -> Result<Role, FrameError> {
        match self.u8("from")? {
            0 => Ok(Role::Sender),
            1 => Ok(Role::Receiver),
            arrived => Err(self.value("from", "0 or 1", arrived.into())),
        }
    }

    fn transfer(&mut self) -> Result<TransferId, FrameError> {
        Ok(TransferId(self.u64("transfer")?))
    }

    fn tag(&mut self) -> Result<Tag, FrameError> {
        Ok(Tag(self.u64("tag")?))
    }

    fn detail(&mut self) -> Result<Detail, FrameError> {
        Ok(Detail::from(self.text("detail", Detail::MAX_BYTES)?))
    }

    fn text(&mut self, field: &'static str, limit: usize) -> Result<&'a str, FrameError> {
        let length = usize::from(self.u16(field)?);
        if length > limit {
            return Err(self.too_long(field, limit, length));
        }
        let bytes = self.take(field, length)?;
        std::str::from_utf8(bytes).map_err(|error| FrameError::Text {
            frame: self.frame,
            field,
            at: error.valid_up_to(),
        })
    }

    /// The rest of the body.
    fn payload(&mut self, limit: usize, spare: &mut Vec<u8>) -> Result<Vec<u8>, FrameError> {
        let bytes = std::mem::take(&mut self.rest);
        if bytes.len() > limit {
            return Err(self.too_long("payload", limit, bytes.len()));
        }
        let mut payload = std::mem::take(spare);
        payload.clear();
        payload.extend_from_slice(bytes);
        Ok(payload)
    }

    fn bool(&mut self, field: &'static str) -> Result<bool, FrameError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            arrived => Err(self.value(field, "0 or 1", arrived.into())),
        }
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, FrameError> {
        self.array(field).map(u8::from_le_bytes)
    }

    fn u16(&mut self, field: &'static str) -> Result<u16, FrameError> {
        self.array(field).map(u16::from_le_bytes)
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, FrameError> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &'static str) -> Result<u64, FrameError> {
        self.array(field).map(u64::from_le_bytes)
    }

    fn array<const BYTES: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; BYTES], FrameError> {
        let Some((value, rest)) = self.rest.split_first_chunk() else {
            return Err(self.truncated(field, BYTES));
        };
        self.rest = rest;
        Ok(*value)
    }

    fn take(&mut self, field: &'static str, bytes: usize) -> Result<&'a [u8], FrameError> {
        let Some((value, rest)) = self.rest.split_at_checked(bytes) else {
            return Err(self.truncated(field, bytes));
        };
        self.rest = rest;
        Ok(value)
    }

    fn truncated(&self, field: &'static str, needed: usize) -> FrameError {
        FrameError::Truncated {
            frame: self.frame,
            field,
            needed,
            left: self.rest.len(),
        }
    }

    fn too_long(&self, field: &'static str, limit: usize, arrived: usize) -> FrameError {
        FrameError::TooLong {
            frame: self.frame,
            field,
            limit,
            arrived,
        }
    }

    fn value(&self, field: &'static str, expected: &'static str, arrived: u64) -> FrameError {
        FrameError::Value {
            frame: self.frame,
            field,
            expected,
            arrived,
        }
    }
}

//! Fields of frames as bytes, both ways.

use std::ops::Deref;

use super::{
    CancelReason, Destination, Detail, Exposure, Extent, Frame, FrameError, GoodbyeReason, Grant,
    Level, Limits, Notified, NumberUse, Payload, PlacedChunks, RefuseReason, Role, Settings, Tag,
    TimeLeft, TransferId, kind_name, most_payload,
};
use crate::plan::Taper;
use crate::window::{Place, WindowSecret};

/// Bytes of an eager payload.
pub(super) enum PayloadBytes<'a> {
    /// Behind the fields.
    Here(&'a [u8]),
    /// In a buffer of their own, which the frame gets.
    Apart(Vec<u8>),
}

impl Deref for PayloadBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Here(bytes) => bytes,
            Self::Apart(bytes) => bytes,
        }
    }
}

/// Reads the body of a frame of the given kind: its fields, and the payload of an eager frame
/// behind them. A payload takes the buffer `spare`.
pub(super) fn parse(
    kind: u8,
    fields: &[u8],
    payload: PayloadBytes<'_>,
    spare: &mut Vec<u8>,
) -> Result<Frame, FrameError> {
    let frame = kind_name(kind).ok_or_else(|| FrameError::kind(kind))?;
    let mut body = Body {
        frame,
        rest: fields,
        payload,
        spare,
        most_payload: most_payload(kind),
    };
    let parsed = Frame::take(kind, &mut body)?;
    match body.rest.len() {
        0 => Ok(parsed),
        left => Err(body.value("its end", "behind the last field", left as u64)),
    }
}

/// What is left of a body.
pub(super) struct Body<'a> {
    frame: &'static str,
    rest: &'a [u8],
    payload: PayloadBytes<'a>,
    spare: &'a mut Vec<u8>,
    most_payload: usize,
}

/// What a frame consists of. All integers are little endian.
pub(super) trait Field: Sized {
    /// Appends its bytes. Every text and payload in it is already bounded.
    fn put(&self, out: &mut Vec<u8>);

    /// Reads it; `field` is its name, for errors.
    fn take(body: &mut Body<'_>, field: &'static str) -> Result<Self, FrameError>;
}

impl<'a> Body<'a> {
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

    fn bytes(&mut self, field: &'static str, bytes: usize) -> Result<&'a [u8], FrameError> {
        let Some((value, rest)) = self.rest.split_at_checked(bytes) else {
            return Err(self.truncated(field, bytes));
        };
        self.rest = rest;
        Ok(value)
    }

    fn text(&mut self, field: &'static str, limit: usize) -> Result<&'a str, FrameError> {
        let length = usize::from(u16::take(self, field)?);
        if length > limit {
            return Err(self.too_long(field, limit, length));
        }
        let bytes = self.bytes(field, length)?;
        std::str::from_utf8(bytes).map_err(|error| {
            let other = bytes[error.valid_up_to()];
            self.value(field, "in UTF-8", other.into())
        })
    }

    /// One of these, by its number.
    fn one_of<T: Copy>(
        &mut self,
        field: &'static str,
        expected: &'static str,
        all: &[T],
    ) -> Result<T, FrameError> {
        let number = u8::take(self, field)?;
        let found = all.get(usize::from(number)).copied();
        found.ok_or_else(|| self.value(field, expected, number.into()))
    }

    /// These bytes as a payload, if they are not too many.
    fn payload(
        &mut self,
        field: &'static str,
        bytes: PayloadBytes<'_>,
    ) -> Result<Vec<u8>, FrameError> {
        if bytes.len() > self.most_payload {
            return Err(self.too_long(field, self.most_payload, bytes.len()));
        }
        Ok(match bytes {
            PayloadBytes::Apart(payload) => payload,
            PayloadBytes::Here(bytes) => {
                let mut payload = std::mem::take(self.spare);
                payload.clear();
                payload.extend_from_slice(bytes);
                payload
            }
        })
    }

    fn truncated(&self, field: &'static str, needed: usize) -> FrameError {
        let expected = format!("of {needed} bytes");
        self.value(field, expected, self.rest.len() as u64)
    }

    fn too_long(&self, field: &'static str, limit: usize, arrived: usize) -> FrameError {
        let expected = format!("of at most {limit} bytes");
        self.value(field, expected, arrived as u64)
    }

    fn value(&self, field: &'static str, expected: impl Into<String>, arrived: u64) -> FrameError {
        FrameError::field(self.frame, field, expected, arrived)
    }
}

macro_rules! integers {
    ($($type:ty),+) => {$(
        impl Field for $type {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }

            fn take(body: &mut Body<'_>, field: &'static str) -> Result<Self, FrameError> {
                body.array(field).map(Self::from_le_bytes)
            }
        }
    )+};
}
integers!(u8, u16, u32, u64, u128);

/// Enums whose numbers count up from 0.
macro_rules! numbered {
    ($($type:ident $expected:literal [$($variant:ident),+];)+) => {$(
        impl Field for $type {
            fn put(&self, out: &mut Vec<u8>) {
                out.push(*self as u8);
            }

            fn take(body: &mut Body<'_>, field: &'static str) -> Result<Self, FrameError> {
                body.one_of(field, $expected, &[$(Self::$variant),+])
            }
        }
    )+};
}
numbered! {
    Level "0 to 2" [Sent, Placed, Verified];
    Role "0 or 1" [Sender, Receiver];
    Notified "0 to 2" [No, First, Next];
    NumberUse "0 to 3" [Skipped, Used, Ended, Forgotten];
    CancelReason "0 to 4" [Requested, DeadlineExpired, ChannelFailed, MemoryFailed, Shutdown];
    GoodbyeReason "0 to 2" [Normal, Shutdown, Error];
}

impl<T: Field> Field for Box<T> {
    fn put(&self, out: &mut Vec<u8>) {
        T::put(self, out);
    }

    fn take(body: &mut Body<'_>, field: &'static str) -> Result<Self, FrameError> {
        T::take(body, field).map(Self::from)
    }
}

impl Field for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn take(body: &mut Body<'_>, field: &'static str) -> Result<Self, FrameError> {
        body.one_of(field, "0 or 1", &[false, true])
    }
}

/// Names, which are numbers.
macro_rules! names {
    ($($type:ident),+) => {$(
        impl Field for $type {
            fn put(&self, out: &mut Vec<u8>) {
                self.0.put(out);
            }

            fn take(body: &mut Body<'_>, field: &'static str) -> Result<Self, FrameError> {
                Field::take(body, field).map(Self)
            }
        }
    )+};
}
names!(TransferId, Tag);

/// The rest of the body.
impl Field for Vec<u8> {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }

    fn take(body: &mut Body<'_>, field: &'static str) -> Result<Self, FrameError> {
        let bytes = std::mem::take(&mut body.rest);
        body.payload(field, PayloadBytes::Here(bytes))
    }
}

/// Its checksum; its bytes follow behind all fields.
impl Field for Payload {
    fn put(&self, out: &mut Vec<u8>) {
        self.crc32c().put(out);
    }

    fn take(body: &mut Body<'_>, field: &'static str) -> Result<Self, FrameError> {
        let arrived = u32::take(body, "crc32c")?;
        let bytes = std::mem::replace(&mut body.payload, PayloadBytes::Here(&[]));
        let payload = Self::from(body.payload(field, bytes)?);
        match payload.crc32c() {
            expected if expected == arrived => Ok(payload),
            expected => Err(FrameError::Checksum { expected, arrived }),
        }
    }
}

/// Length as u16, then the bytes.
fn put_text(text: &str, out: &mut Vec<u8>) {
    (text.len() as u16).put(out);
    out.extend_from_slice(text.as_bytes());
}

impl Field for Detail {
    fn put(&self, out: &mut Vec<u8>) {
        const { assert!(Self::MAX_BYTES <= u16::MAX as usize) };
        put_text(self, out);
    }

    fn take(body: &mut Body<'_>, field: &'static str) -> Result<Self, FrameError> {
        body.text(field, Self::MAX_BYTES).map(Self::from)
    }
}

impl Field for String {
    fn put(&self, out: &mut Vec<u8>) {
        put_text(self, out);
    }

    fn take(body: &mut Body<'_>, field: &'static str) -> Result<Self, FrameError> {
        let text = body.text(field, Settings::MAX_TEXT_BYTES)?;
        Ok(text.to_owned())
    }
}

impl Field for WindowSecret {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.as_bytes());
    }

    fn take(body: &mut Body<'_>, field: &'static str) -> Result<Self, FrameError> {
        body.array(field).map(Self::from_bytes)
    }
}

/// Structures: fields in their order on the wire, and what checks them together.
macro_rules! structures {
    ($($type:ident { $($field:ident: $kind:ty),+ } $(=> $check:ident)?)+) => {$(
        impl Field for $type {
            fn put(&self, out: &mut Vec<u8>) {
                $( self.$field.put(out); )+
            }

            fn take(body: &mut Body<'_>, _field: &'static str) -> Result<Self, FrameError> {
                let all = Self { $( $field: <$kind>::take(body, stringify!($field))?, )+ };
                $( all.$check()?; )?
                Ok(all)
            }
        }
    )+};
}
structures! {
    Settings {
        network: String, channels: u16, chunk_bytes: u32, send_window: u16, receive_window: u16,
        eager_limit: u32, eager_credit: u32, heartbeat_ms: u32, dead_after_ms: u32,
        limits: Limits, memory: String, software: String
    } => validate
    Limits {
        puts: u32, notifications: u32, gets: u32, asks: u32, windows: u32, tags: u32, pieces: u32,
        list_windows: u32
    }
    Place { window: u64, secret: WindowSecret, offset: u64 }
    PlacedChunks { first: u32, bits: u64 }
    Exposure { entry: u16, mark: u64, bytes: u32 }
    TimeLeft { stall_ms: u32, total_ms: u32 }
}

/// Enums whose variants have fields: their number, then those.
macro_rules! choices {
    ($($type:ident $name:literal $expected:literal {
        $($number:literal $variant:ident { $($field:ident: $kind:ty),+ })+
    })+) => {$(
        impl Field for $type {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $( Self::$variant { $($field),+ } => {
                        out.push($number);
                        $( $field.put(out); )+
                    } )+
                }
            }

            fn take(body: &mut Body<'_>, _field: &'static str) -> Result<Self, FrameError> {
                Ok(match u8::take(body, $name)? {
                    $( $number => Self::$variant {
                        $( $field: <$kind>::take(body, stringify!($field))?, )+
                    }, )+
                    arrived => return Err(body.value($name, $expected, arrived.into())),
                })
            }
        }
    )+};
}
choices! {
    Destination "destination" "0 to 3" {
        0 Receive { tag: Tag, number: u64 }
        1 Put { to: Extent, notified: Notified, left: TimeLeft }
        2 Reply { request: u64 }
        3 Notification { first: TransferId, count: u32 }
    }
}

impl Field for RefuseReason {
    fn put(&self, out: &mut Vec<u8>) {
        let capacity = match *self {
            Self::TooLarge { capacity } => capacity,
            _ => 0,
        };
        let is_it = |reason: &Self| std::mem::discriminant(reason) == std::mem::discriminant(self);
        // Every reason is listed.
        let number = Self::ALL.iter().position(is_it).unwrap_or_default();
        out.push(number as u8);
        capacity.put(out);
    }

    fn take(body: &mut Body<'_>, field: &'static str) -> Result<Self, FrameError> {
        let reason = body.one_of(field, "0 to 7", &Self::ALL)?;
        match (reason, u64::take(body, "capacity")?) {
            (Self::TooLarge { .. }, capacity) => Ok(Self::TooLarge { capacity }),
            (reason, 0) => Ok(reason),
            (_, arrived) => Err(body.value("capacity", "0 for this reason", arrived)),
        }
    }
}

impl Field for Grant {
    fn put(&self, out: &mut Vec<u8>) {
        let Self {
            chunk_bytes,
            window,
            level,
            taper,
        } = self;
        chunk_bytes.put(out);
        window.put(out);
        level.put(out);
        if let Some(taper) = taper {
            taper.halvings().put(out);
            taper.each().put(out);
        }
    }

    fn take(body: &mut Body<'_>, _field: &'static str) -> Result<Self, FrameError> {
        let chunk_bytes = match u32::take(body, "chunk_bytes")? {
            0 => return Err(body.value("chunk_bytes", "at least 1", 0)),
            bytes => bytes,
        };
        let window = u64::take(body, "window")?;
        let level = Level::take(body, "level")?;
        // Nothing, where the body ends here.
        let taper = match body.rest.is_empty() {
            true => None,
            false => Some(take_taper(body)?),
        };
        Ok(Self {
            chunk_bytes,
            window,
            level,
            taper,
        })
    }
}

fn take_taper(body: &mut Body<'_>) -> Result<Taper, FrameError> {
    let (halvings, each) = (u8::take(body, "halvings")?, u16::take(body, "each")?);
    if !(1..=Taper::MAX_HALVINGS).contains(&halvings) {
        return Err(body.value("halvings", "1 to 8", halvings.into()));
    }
    let taper = Taper::new(halvings, each);
    taper.ok_or_else(|| body.value("each", "1 to 1024", each.into()))
}

impl Field for Extent {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Place(place) => {
                out.push(0);
                place.put(out);
            }
            Self::Pieces(list) => {
                out.push(1);
                list.put(out);
            }
        }
    }

    fn take(body: &mut Body<'_>, _field: &'static str) -> Result<Self, FrameError> {
        match u8::take(body, "extent")? {
            0 => Place::take(body, "place").map(Self::Place),
            1 => u64::take(body, "list").map(Self::Pieces),
            arrived => Err(body.value("extent", "0 or 1", arrived.into())),
        }
    }
}

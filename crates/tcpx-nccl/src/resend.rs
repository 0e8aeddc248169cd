//! The sender's half of a comm's own connection as a numbered stream: which of its bytes the receiver may lack, and
//! where they lie, so that another connection can go on where one broke.
//!
//! Nothing here touches a socket. Bytes are numbered from the first record on, message after message. Of a short
//! message a copy is retained, so that its send is done at once; of a long one its own memory is what is sent again,
//! or nothing is ([`What::Lost`]).

use std::collections::VecDeque;

/// Largest message of which a copy is retained; as of a chunk on a lane.
const COPIED_BYTES: usize = 64 << 10;
/// The same without lanes, where the copy of 64 KiB cost a tenth of the rate.
const COPIED_WITHOUT_LANES: usize = 16 << 10;

/// Largest message of which a copy is retained.
pub(crate) const fn copied_bytes(with_lanes: bool) -> usize {
    if with_lanes {
        COPIED_BYTES
    } else {
        COPIED_WITHOUT_LANES
    }
}

/// Copies of one comm. Pages that were never used cost nothing.
const ROOM: usize = 1 << 20;
/// After so many bytes of short messages the receiver says how far it has read: copies have room for more until then.
pub(crate) const ACKNOWLEDGED_TOGETHER: u64 = 512 << 10;
/// After so many bytes of any: nobody waits for those.
pub(crate) const ACKNOWLEDGED_AT_LAST: u64 = 8 << 20;

/// The numbered stream.
#[derive(Debug)]
pub(crate) struct Resend {
    /// A ring. What was copied as number n of all copied bytes lies at n modulo its length.
    copies: Box<[u8]>,
    /// Copied bytes, and those of them that are needed no more.
    copied: u64,
    freed: u64,
    /// Without gaps, from `read` on.
    parts: VecDeque<Part>,
    /// The receiver has read up to here.
    read: u64,
    /// The connection has taken up to here.
    written: u64,
    /// Some connection has taken up to here.
    most: u64,
}

#[derive(Clone, Copy, Debug)]
struct Part {
    start: u64,
    end: u64,
    what: What,
}

/// Where bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// In the ring, from this number of copied bytes on.
    Copied(u64),
    /// In the memory of the message of this number.
    Message(u64),
    /// Nowhere, once they were written.
    Lost(u64),
}

/// What the connection is to take next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next<'a> {
    /// These bytes.
    Bytes(&'a [u8]),
    /// The message of this number, from this byte of it on.
    Message(u64, usize),
    /// A message that did not begin.
    New,
}

/// The receiver says what cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Impossible {
    /// It has read what was not written, or less than it said before.
    Position {
        /// What it can have read.
        possible: (u64, u64),
    },
    /// Bytes that it lacks are retained nowhere.
    Lost {
        /// Of this message.
        sequence: u64,
    },
}

impl Resend {
    pub(crate) fn new() -> Self {
        Self::with_room(ROOM)
    }

    fn with_room(room: usize) -> Self {
        Self {
            copies: vec![0; room].into_boxed_slice(),
            copied: 0,
            freed: 0,
            parts: VecDeque::with_capacity(256),
            read: 0,
            written: 0,
            most: 0,
        }
    }

    /// The receiver has read up to here.
    pub(crate) const fn read(&self) -> u64 {
        self.read
    }

    /// Whether the receiver may lack what was begun.
    pub(crate) fn is_unread(&self) -> bool {
        self.read < self.end()
    }

    /// What was begun ends here.
    pub(crate) fn end(&self) -> u64 {
        self.parts.back().map_or(self.read, |part| part.end)
    }

    /// Whether a copy of so many bytes has room.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        let used = (self.copied - self.freed) as usize;
        bytes <= self.copies.len() - used
    }

    /// What the connection is to take next.
    pub(crate) fn next(&self) -> Next<'_> {
        let at = self.written;
        // The last one mostly.
        let Some(part) = self
            .parts
            .iter()
            .rev()
            .take_while(|part| part.end > at)
            .last()
        else {
            return Next::New;
        };
        match part.what {
            What::Copied(number) => {
                let start = self.place(number + (at - part.start));
                let bytes = &self.copies[start..];
                let left = usize::try_from(part.end - at).unwrap_or(usize::MAX);
                Next::Bytes(&bytes[..bytes.len().min(left)])
            }
            What::Message(sequence) | What::Lost(sequence) => Next::Message(
                sequence,
                usize::try_from(at - part.start).unwrap_or(usize::MAX),
            ),
        }
    }

    /// The message of a number follows all others, with so many bytes; gives where it ends. Its memory is what is sent
    /// again unless it `is_lost`.
    pub(crate) fn begin(&mut self, sequence: u64, bytes: usize, is_lost: bool) -> u64 {
        let start = self.end();
        let end = start + bytes as u64;
        let what = if is_lost {
            What::Lost(sequence)
        } else {
            What::Message(sequence)
        };
        self.parts.push_back(Part { start, end, what });
        end
    }

    /// The connection has taken so many of the bytes that are [next](Self::next).
    pub(crate) fn wrote(&mut self, bytes: usize) {
        self.written = (self.written + bytes as u64).min(self.end());
        self.most = self.most.max(self.written);
    }

    /// The message that was begun last is written: its bytes, in order, are copied, for which there [is
    /// room](Self::has_room). The caller may reuse its memory then.
    pub(crate) fn copy_last(&mut self, pieces: [&[u8]; 2]) {
        let Some(part) = self.parts.pop_back() else {
            return;
        };
        self.append(part.start, pieces);
    }

    /// The message that was begun last is written, and its caller has its memory back: it cannot be sent again.
    pub(crate) fn lose_last(&mut self) {
        if let Some(Part { what, .. }) = self.parts.back_mut()
            && let What::Message(sequence) = *what
        {
            *what = What::Lost(sequence);
        }
    }

    /// A record of the comm's own follows all that was begun; there is room.
    pub(crate) fn push(&mut self, record: &[u8]) {
        self.append(self.end(), [record, &[]]);
    }

    fn append(&mut self, start: u64, pieces: [&[u8]; 2]) {
        let number = self.copied;
        for piece in pieces {
            let at = self.place(self.copied);
            let first = piece.len().min(self.copies.len() - at);
            self.copies[at..at + first].copy_from_slice(&piece[..first]);
            self.copies[..piece.len() - first].copy_from_slice(&piece[first..]);
            self.copied += piece.len() as u64;
        }
        let end = start + (self.copied - number);
        match self.parts.back_mut() {
            Some(
                before @ Part {
                    what: What::Copied(_),
                    ..
                },
            ) => before.end = end,
            _ => self.parts.push_back(Part {
                start,
                end,
                what: What::Copied(number),
            }),
        }
    }

    fn place(&self, number: u64) -> usize {
        (number % self.copies.len() as u64) as usize
    }

    /// The receiver says that it has read up to here. Less than it said before is no news.
    pub(crate) fn acknowledged(&mut self, read: u64) -> Result<(), Impossible> {
        self.reach(read, self.written)
    }

    /// Nothing is sent again.
    pub(crate) fn forget(&mut self) {
        if self.written == self.end() {
            self.parts.clear();
            self.read = self.written;
            (self.copied, self.freed) = (0, 0);
        }
    }

    fn reach(&mut self, read: u64, most: u64) -> Result<(), Impossible> {
        if read > most {
            return Err(Impossible::Position {
                possible: (self.read, most),
            });
        }
        self.read = self.read.max(read);
        while let Some(part) = self.parts.front_mut().filter(|part| part.start < read) {
            if let What::Copied(number) = &mut part.what {
                let end = part.end.min(read);
                *number += end - part.start;
                (part.start, self.freed) = (end, *number);
            }
            if part.end > read {
                break;
            }
            self.parts.pop_front();
        }
        if self.copied == self.freed {
            // The beginning of the ring is in the cache.
            (self.copied, self.freed) = (0, 0);
        }
        Ok(())
    }

    /// Another connection goes on, and the receiver has read up to here: the rest is to be written again.
    pub(crate) fn rewind(&mut self, read: u64) -> Result<(), Impossible> {
        if read < self.read {
            return Err(Impossible::Position {
                possible: (self.read, self.most),
            });
        }
        self.reach(read, self.most)?;
        let lost = self.parts.iter().find_map(|part| match part.what {
            What::Lost(sequence) if part.start.max(read) < part.end.min(self.most) => {
                Some(sequence)
            }
            _ => None,
        });
        if let Some(sequence) = lost {
            return Err(Impossible::Lost { sequence });
        }
        self.written = read;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const ROOM: usize = 200;
    /// Longer messages are not copied.
    const COPIED: usize = 60;

    /// A sender, its connection and its receiver.
    struct Pair {
        resend: Resend,
        /// Every byte in order, and what is on its way.
        sent: Vec<u8>,
        wire: VecDeque<u8>,
        arrived: Vec<u8>,
        /// The memory of each message that is not copied.
        memory: HashMap<u64, (Vec<u8>, u64)>,
        /// The message that is partly written.
        current: Option<(u64, Vec<u8>)>,
        messages: u64,
    }

    impl Pair {
        fn new() -> Self {
            Self {
                resend: Resend::with_room(ROOM),
                sent: Vec::new(),
                wire: VecDeque::new(),
                arrived: Vec::new(),
                memory: HashMap::new(),
                current: None,
                messages: 0,
            }
        }

        /// Writes at most so many bytes, of a new message of `size` bytes if all others are written.
        fn write(&mut self, size: usize, most: usize) {
            let bytes = match self.resend.next() {
                Next::Bytes(bytes) => bytes.to_vec(),
                Next::Message(sequence, from) => {
                    let current = self.current.as_ref().filter(|one| one.0 == sequence);
                    let bytes = current.map(|(_, bytes)| bytes);
                    let bytes = bytes.unwrap_or_else(|| &self.memory[&sequence].0);
                    bytes[from..].to_vec()
                }
                Next::New if size > COPIED || self.resend.has_room(size) => {
                    let sequence = self.messages;
                    let bytes: Vec<u8> = (0..size).map(|at| at as u8 ^ sequence as u8).collect();
                    self.messages += 1;
                    self.resend.begin(sequence, size, false);
                    self.sent.extend(&bytes);
                    self.current = Some((sequence, bytes.clone()));
                    bytes
                }
                Next::New => return,
            };
            let taken = bytes.len().min(most);
            self.wire.extend(&bytes[..taken]);
            self.resend.wrote(taken);
            if self.resend.next() == Next::New
                && let Some((sequence, bytes)) = self.current.take()
            {
                if bytes.len() > COPIED {
                    let end = self.resend.end();
                    self.memory.insert(sequence, (bytes, end));
                } else {
                    let (head, rest) = bytes.split_at(bytes.len() / 3);
                    self.resend.copy_last([head, rest]);
                }
            }
        }

        fn read(&mut self, most: usize) {
            let count = self.wire.len().min(most);
            self.arrived.extend(self.wire.drain(..count));
        }

        fn acknowledge(&mut self) {
            let read = self.arrived.len() as u64;
            self.resend.acknowledged(read).unwrap();
            // Their callers have their memory back.
            self.memory.retain(|_, (_, end)| *end > read);
        }

        fn resume(&mut self) {
            self.wire.clear();
            self.resend.rewind(self.arrived.len() as u64).unwrap();
        }
    }

    proptest! {
        #[test]
        fn every_byte_arrives_once_and_in_order_whatever_breaks(
            steps in prop::collection::vec((0u8..10, 1usize..100, 1usize..150), 0..600),
        ) {
            let mut pair = Pair::new();
            for (kind, size, most) in steps {
                match kind {
                    0..=4 => pair.write(size, most),
                    5..=7 => pair.read(most),
                    8 => pair.acknowledge(),
                    _ => pair.resume(),
                }
            }
            pair.resume();
            while pair.resend.next() != Next::New {
                pair.write(1, usize::MAX);
            }
            pair.read(usize::MAX);
            pair.acknowledge();
            prop_assert_eq!(pair.arrived, pair.sent);
            prop_assert!(!pair.resend.is_unread() && pair.resend.has_room(ROOM));
        }
    }

    #[test]
    fn a_position_that_was_not_written_or_was_passed_is_impossible() {
        let mut pair = Pair::new();
        pair.write(50, 20);
        assert!(pair.resend.acknowledged(21).is_err());
        pair.resend.acknowledged(20).unwrap();
        pair.resend.acknowledged(3).unwrap();
        assert!(pair.resend.rewind(19).is_err());
        pair.resend.rewind(20).unwrap();
        assert_eq!(pair.resend.next(), Next::Message(0, 20));
        pair.write(0, 30);
        pair.resend.rewind(30).unwrap();
        // What only the connection before had taken.
        assert!(pair.resend.acknowledged(31).is_err());
    }

    #[test]
    fn what_is_retained_nowhere_cannot_be_sent_again_and_its_rest_can_be_sent() {
        let mut resend = Resend::with_room(ROOM);
        resend.push(&[1; 10]);
        resend.wrote(10);
        resend.begin(4, 100, false);
        resend.wrote(60);
        // It is still there.
        resend.rewind(30).unwrap();
        assert_eq!(resend.next(), Next::Message(4, 20));
        resend.wrote(80);
        resend.lose_last();
        assert_eq!(resend.rewind(109), Err(Impossible::Lost { sequence: 4 }));
        resend.rewind(110).unwrap();
        resend.begin(5, 100, true);
        resend.wrote(10);
        resend.rewind(120).unwrap();
        assert_eq!(resend.next(), Next::Message(5, 10));
        resend.wrote(1);
        assert_eq!(resend.rewind(120), Err(Impossible::Lost { sequence: 5 }));
    }
}

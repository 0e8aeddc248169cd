//! The sender's half of a numbered stream of bytes, as control connections are: which of its bytes
//! the peer may lack, and where they lie, so that another connection can go on where one broke.
//!
//! Nothing here touches a socket. Bytes are numbered from the first one on. The peer says now and
//! then how far it has read; behind a break both sides say so before anything else, and the rest is
//! written again. Most bytes are copied; of a long message its own memory is what is written again,
//! or nothing is.

use std::collections::VecDeque;

use thiserror::Error;

/// The numbered stream.
#[derive(Debug, Default)]
pub struct Resend {
    /// Copied bytes that may be needed, the oldest first.
    copies: VecDeque<u8>,
    /// Copied bytes before those.
    freed: u64,
    /// Without gaps, from `read` on.
    parts: VecDeque<Part>,
    /// The peer has read up to here.
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
    /// Among the copies, from this number of all copied bytes on.
    Copied(u64),
    /// In the memory of the message of this number.
    Message(u64),
    /// Nowhere, once they were written.
    Lost(u64),
}

/// What the connection is to take next.
#[derive(Debug, PartialEq, Eq)]
pub enum NextPart<'a> {
    /// These bytes.
    Bytes(&'a [u8]),
    /// The message of this number, from this byte of it on.
    Message(u64, usize),
    /// What was not pushed or begun yet.
    New,
}

/// The peer says what cannot be.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Impossible {
    /// It has read what was not written, or less than it said before.
    #[error(
        "control: expected a peer that has read {first} to {last} bytes, {arrived} arrived; run the same version on both sides"
    )]
    Position {
        /// The least that it can have read.
        first: u64,
        /// The most.
        last: u64,
        /// What it says.
        arrived: u64,
    },
    /// Bytes that it lacks are retained nowhere.
    #[error("message {sequence}, of which the peer lacks bytes, is retained nowhere")]
    Lost {
        /// Of this message.
        sequence: u64,
    },
}

impl Resend {
    /// A stream without bytes, with room for so many bytes of copies. Pages that were never used
    /// cost nothing.
    pub fn with_room(copies: usize) -> Self {
        Self {
            copies: VecDeque::with_capacity(copies),
            parts: VecDeque::with_capacity(256),
            ..Self::default()
        }
    }

    /// The peer has read up to here.
    pub const fn read(&self) -> u64 {
        self.read
    }

    /// The connection has taken up to here.
    pub const fn written(&self) -> u64 {
        self.written
    }

    /// Whether the peer may lack what was begun.
    pub fn is_unread(&self) -> bool {
        self.read < self.end()
    }

    /// Whether the connection has yet to take something.
    pub fn has_unwritten(&self) -> bool {
        self.written < self.end()
    }

    /// What was begun ends here.
    pub fn end(&self) -> u64 {
        self.parts.back().map_or(self.read, |part| part.end)
    }

    /// Bytes of copies.
    pub fn copied(&self) -> usize {
        self.copies.len()
    }

    /// What the connection is to take next.
    pub fn next(&self) -> NextPart<'_> {
        let at = self.written;
        let next = self.parts.partition_point(|part| part.end <= at);
        let Some(part) = self.parts.get(next) else {
            return NextPart::New;
        };
        // What of a part lies in memory fits a usize.
        let within = (at - part.start) as usize;
        match part.what {
            What::Copied(from) => {
                let index = (from - self.freed) as usize + within;
                let (first, second) = self.copies.as_slices();
                let bytes = match index.checked_sub(first.len()) {
                    None => &first[index..],
                    Some(index) => &second[index..],
                };
                let left = (part.end - at) as usize;
                NextPart::Bytes(&bytes[..bytes.len().min(left)])
            }
            What::Message(sequence) | What::Lost(sequence) => NextPart::Message(sequence, within),
        }
    }

    /// The message of a number follows all others, with so many bytes; gives where it ends. Its
    /// memory is what is written again.
    pub fn begin(&mut self, sequence: u64, bytes: usize) -> u64 {
        let start = self.end();
        let end = start + bytes as u64;
        let what = What::Message(sequence);
        self.parts.push_back(Part { start, end, what });
        end
    }

    /// The connection has taken so many of the bytes that are [next](Self::next).
    pub fn wrote(&mut self, bytes: usize) {
        self.written = (self.written + bytes as u64).min(self.end());
        self.most = self.most.max(self.written);
    }

    /// The message that was begun last is written: its bytes, in order, are copied. The caller may
    /// reuse its memory then.
    pub fn copy_last(&mut self, pieces: [&[u8]; 2]) {
        let Some(Part { mut start, .. }) = self.parts.pop_back() else {
            return;
        };
        for piece in pieces {
            start = self.append(start, piece);
        }
    }

    /// The message that was begun last is written, and its caller has its memory back: it cannot be
    /// written again.
    pub fn lose_last(&mut self) {
        if let Some(Part { what, .. }) = self.parts.back_mut()
            && let What::Message(sequence) = *what
        {
            *what = What::Lost(sequence);
        }
    }

    /// Callers have the memory of all messages back.
    pub fn lose_messages(&mut self) {
        for Part { what, .. } in &mut self.parts {
            if let What::Message(sequence) = *what {
                *what = What::Lost(sequence);
            }
        }
    }

    /// Whether the peer may lack bytes that are retained nowhere.
    pub fn has_lost(&self) -> bool {
        let mut parts = self.parts.iter();
        parts.any(|part| matches!(part.what, What::Lost(_)))
    }

    /// A copy of these bytes follows all that was begun.
    pub fn push(&mut self, bytes: &[u8]) {
        self.append(self.end(), bytes);
    }

    fn append(&mut self, start: u64, bytes: &[u8]) -> u64 {
        let from = self.freed + self.copies.len() as u64;
        self.copies.extend(bytes);
        let end = start + bytes.len() as u64;
        let what = What::Copied(from);
        match self.parts.back_mut() {
            Some(Part {
                end: before,
                what: What::Copied(_),
                ..
            }) => *before = end,
            _ if end > start => self.parts.push_back(Part { start, end, what }),
            _ => {}
        }
        end
    }

    /// The peer says that it has read up to here. Less than it said before is no news: what it said
    /// on a connection that broke may come again behind what it said on the next one.
    ///
    /// # Errors
    /// When so much was not written.
    pub fn acknowledged(&mut self, read: u64) -> Result<(), Impossible> {
        self.reach(read, self.written)
    }

    /// Nothing that was begun is written any more, again or at all.
    pub fn forget(&mut self) {
        let end = self.end();
        self.parts.clear();
        self.copies.clear();
        (self.read, self.written, self.most, self.freed) = (end, end, end, 0);
    }

    fn impossible(&self, last: u64, arrived: u64) -> Impossible {
        let first = self.read;
        Impossible::Position {
            first,
            last,
            arrived,
        }
    }

    fn reach(&mut self, read: u64, most: u64) -> Result<(), Impossible> {
        if read > most {
            return Err(self.impossible(most, read));
        }
        self.read = self.read.max(read);
        let mut freed = self.freed;
        while let Some(part) = self.parts.front_mut().filter(|part| part.start < read) {
            if let What::Copied(from) = &mut part.what {
                let end = part.end.min(read);
                *from += end - part.start;
                (part.start, freed) = (end, *from);
            }
            if part.end > read {
                break;
            }
            self.parts.pop_front();
        }
        self.copies.drain(..(freed - self.freed) as usize);
        self.freed = freed;
        Ok(())
    }

    /// Another connection goes on, and the peer has read up to here: the rest is to be written
    /// again.
    ///
    /// # Errors
    /// When so much was never written, when the peer has said before that it has read more, or when
    /// what it lacks is not retained.
    pub fn rewind(&mut self, read: u64) -> Result<(), Impossible> {
        if read < self.read {
            return Err(self.impossible(self.most, read));
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
                resend: Resend::default(),
                sent: Vec::new(),
                wire: VecDeque::new(),
                arrived: Vec::new(),
                memory: HashMap::new(),
                current: None,
                messages: 0,
            }
        }

        /// Writes at most so many bytes, of a new message of `size` bytes if all others are
        /// written.
        fn write(&mut self, size: usize, most: usize) {
            let bytes = match self.resend.next() {
                NextPart::Bytes(bytes) => bytes.to_vec(),
                NextPart::Message(sequence, from) => {
                    let current = self.current.as_ref().filter(|one| one.0 == sequence);
                    let bytes = current.map(|(_, bytes)| bytes);
                    let bytes = bytes.unwrap_or_else(|| &self.memory[&sequence].0);
                    bytes[from..].to_vec()
                }
                NextPart::New => {
                    let sequence = self.messages;
                    let bytes: Vec<u8> = (0..size).map(|at| at as u8 ^ sequence as u8).collect();
                    self.messages += 1;
                    self.resend.begin(sequence, size);
                    self.sent.extend(&bytes);
                    self.current = Some((sequence, bytes.clone()));
                    bytes
                }
            };
            let taken = bytes.len().min(most);
            self.wire.extend(&bytes[..taken]);
            self.resend.wrote(taken);
            if self.resend.next() == NextPart::New
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

        /// Bytes of its own, between messages.
        fn push(&mut self, size: usize) {
            if self.current.is_none() {
                let bytes: Vec<u8> = (0..size).map(|at| at as u8).collect();
                self.resend.push(&bytes);
                self.sent.extend(&bytes);
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
                    0..=3 => pair.write(size, most),
                    4 => pair.push(size),
                    5..=7 => pair.read(most),
                    8 => pair.acknowledge(),
                    _ => pair.resume(),
                }
            }
            pair.resume();
            while pair.resend.next() != NextPart::New {
                pair.write(1, usize::MAX);
            }
            pair.read(usize::MAX);
            pair.acknowledge();
            prop_assert_eq!(pair.arrived, pair.sent);
            prop_assert!(!pair.resend.is_unread() && pair.resend.copied() == 0);
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
        assert_eq!(pair.resend.next(), NextPart::Message(0, 20));
        pair.write(0, 30);
        pair.resend.rewind(30).unwrap();
        // What only the connection before had taken.
        assert!(pair.resend.acknowledged(31).is_err());
    }

    #[test]
    fn what_was_acknowledged_comes_again_behind_a_rewind() {
        let mut resend = Resend::default();
        resend.push(&[1; 40]);
        resend.wrote(40);
        resend.acknowledged(10).unwrap();
        resend.rewind(30).unwrap();
        // Said on the connection before, and lost with it.
        resend.acknowledged(10).unwrap();
        resend.acknowledged(20).unwrap();
        assert_eq!((resend.read(), resend.copied()), (30, 10));
        assert!(resend.acknowledged(40).is_err(), "not written again yet");
    }

    #[test]
    fn nothing_is_left_once_it_is_forgotten() {
        let mut resend = Resend::default();
        resend.push(&[1; 40]);
        resend.wrote(15);
        resend.forget();
        assert_eq!((resend.next(), resend.copied()), (NextPart::New, 0));
        resend.push(&[2; 5]);
        assert_eq!(resend.next(), NextPart::Bytes(&[2; 5]));
        resend.wrote(5);
        resend.acknowledged(45).unwrap();
        assert!(!resend.is_unread());
    }

    #[test]
    fn what_is_not_retained_cannot_be_sent_again() {
        let mut resend = Resend::default();
        resend.push(&[1; 10]);
        resend.wrote(10);
        resend.begin(4, 100);
        resend.wrote(60);
        // It is still there.
        resend.rewind(30).unwrap();
        assert_eq!(resend.next(), NextPart::Message(4, 20));
        resend.wrote(80);
        resend.lose_last();
        assert_eq!(resend.rewind(109), Err(Impossible::Lost { sequence: 4 }));
        resend.rewind(110).unwrap();
        resend.begin(5, 100);
        resend.wrote(10);
        resend.lose_messages();
        resend.rewind(120).unwrap();
        assert_eq!(resend.next(), NextPart::Message(5, 10));
        resend.wrote(1);
        assert_eq!(resend.rewind(120), Err(Impossible::Lost { sequence: 5 }));
    }

    #[test]
    fn what_lies_nowhere_is_known_until_it_is_read() {
        let mut resend = Resend::default();
        resend.push(&[1; 10]);
        resend.begin(4, 100);
        resend.wrote(110);
        assert!(!resend.has_lost());
        // Its caller takes the memory back.
        resend.lose_messages();
        assert!(resend.has_lost());
        resend.acknowledged(109).unwrap();
        assert!(resend.has_lost());
        resend.acknowledged(110).unwrap();
        assert!(!resend.has_lost());
    }
}

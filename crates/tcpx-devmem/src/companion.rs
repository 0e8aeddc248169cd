//! The connection beside the payload: how far each side has come, and the payload itself once it can no
//! longer travel on its own connection.
//!
//! Each direction carries words of 8 bytes, little endian: a place of the payload stream, counted from 0,
//! before which all bytes have arrived. The last word has [`MOVE`] too: from its place on, the bytes are to
//! come on this connection. Behind its own last word a side sends payload and nothing else, from the place
//! of the other side's last word on.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

/// Marks the last word of a direction; no stream gets so far.
const MOVE: u64 = 1 << 63;
/// Bytes of a word.
pub(super) const BYTES: usize = size_of::<u64>();

/// What a side says of the payload that comes to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// It has all bytes before this place.
    Have(u64),
    /// As [`Self::Have`], and it wants the rest here.
    Move(u64),
}

impl Word {
    pub(super) fn encode(self) -> [u8; BYTES] {
        match self {
            Self::Have(place) => place.to_le_bytes(),
            Self::Move(place) => (place | MOVE).to_le_bytes(),
        }
    }

    pub(super) fn decode(bytes: [u8; BYTES]) -> Self {
        let word = u64::from_le_bytes(bytes);
        match word & MOVE {
            0 => Self::Have(word),
            _ => Self::Move(word & !MOVE),
        }
    }
}

/// What a read gave.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Read {
    Word(Word),
    /// Nothing now.
    Nothing,
    /// The peer has closed.
    End,
}

/// The companion connection.
#[derive(Debug)]
pub(super) struct Companion {
    socket: OwnedFd,
    /// What has come of the next word.
    head: [u8; BYTES],
    filled: usize,
    /// The peer's last word was read.
    brings_payload: bool,
    /// What waits for the socket: a word for each chunk that the peer may have under way, at most.
    words: Vec<u8>,
}

impl Companion {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            head: [0; BYTES],
            filled: 0,
            brings_payload: false,
            words: Vec::new(),
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether all that the peer still sends is payload.
    pub(super) fn brings_payload(&self) -> bool {
        self.brings_payload
    }

    /// Reads the next word; not behind the last one.
    pub(super) fn read_word(&mut self) -> io::Result<Read> {
        loop {
            let room = &mut self.head[self.filled..];
            match rustix::net::recv(&self.socket, room, RecvFlags::DONTWAIT) {
                Ok((0, _)) | Ok((_, 0)) => return Ok(Read::End),
                Ok((_, bytes)) => self.filled += bytes,
                Err(Errno::AGAIN) => return Ok(Read::Nothing),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if self.filled == BYTES {
                self.filled = 0;
                let word = Word::decode(self.head);
                self.brings_payload = matches!(word, Word::Move(_));
                return Ok(Read::Word(word));
            }
        }
    }

    /// Queues a word.
    pub(super) fn say(&mut self, word: Word) {
        self.words.extend_from_slice(&word.encode());
    }

    /// Whether words wait for the socket.
    pub(super) fn wants_write(&self) -> bool {
        !self.words.is_empty()
    }

    /// Writes words; true when none are left, so that payload may be written behind the last one.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        while !self.words.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, &self.words, flags) {
                Ok(bytes) => {
                    self.words.drain(..bytes);
                }
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn words_arrive_in_order_whatever_their_pieces_up_to_the_last() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut theirs = Companion::new(theirs.into());
        let words = [Word::Have(5), Word::Have(u64::MAX >> 1), Word::Move(9)];
        let mut read = Vec::new();
        for byte in words.into_iter().flat_map(Word::encode) {
            assert!(!theirs.brings_payload());
            rustix::net::send(&ours, &[byte], SendFlags::empty()).unwrap();
            if let Read::Word(word) = theirs.read_word().unwrap() {
                read.push(word);
            }
        }
        assert_eq!(read, words);
        assert!(theirs.brings_payload());
    }

    #[test]
    fn what_waits_is_written_at_once_and_the_end_is_seen() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut ours, mut theirs) = (Companion::new(ours.into()), Companion::new(theirs.into()));
        ours.say(Word::Have(1));
        ours.say(Word::Have(2));
        assert!(ours.wants_write() && ours.flush().unwrap() && !ours.wants_write());
        for place in [1, 2] {
            let word = theirs.read_word().unwrap();
            assert_eq!(word, Read::Word(Word::Have(place)));
        }
        assert_eq!(theirs.read_word().unwrap(), Read::Nothing);
        drop(ours);
        assert_eq!(theirs.read_word().unwrap(), Read::End);
    }
}

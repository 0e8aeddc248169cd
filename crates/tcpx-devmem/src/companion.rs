//! The connection beside the payload: words of [`crate::word`], and the payload itself once it
//! can no longer travel on its own connection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::word::{Word, WordError, WordReader};
use rustix::net::{RecvFlags, SendFlags};
use tcpx_memory::RegionSlice;

use super::calls::SocketCalls;

/// Most payload behind one message, so that words to the peer never wait long.
const MOST_DATA: usize = 256 << 10;

/// What reading the companion can end with.
#[derive(Debug, thiserror::Error)]
pub(super) enum CompanionError {
    #[error(transparent)]
    Word(#[from] WordError),
    #[error(transparent)]
    Socket(#[from] io::Error),
}

/// What a read gave.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Read {
    Word(Word),
    /// So many bytes of the payload went to the offer.
    Payload(usize),
    /// Nothing now.
    Nothing,
    /// The peer has closed.
    End,
}

/// The companion connection.
#[derive(Debug)]
pub(super) struct Companion {
    socket: OwnedFd,
    reader: WordReader,
    /// What waits for the socket; a few messages at most.
    words: Vec<u8>,
    /// Payload of the last `DATA` in `words` that has not been written yet.
    data_left: usize,
    /// What was said since; it waits for the end of that payload.
    later: Vec<u8>,
}

impl Companion {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            reader: WordReader::new(),
            words: Vec::new(),
            data_left: 0,
            later: Vec::new(),
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Payload that is to be read before the next word.
    pub(super) fn payload_left(&self) -> usize {
        self.reader.payload_left()
    }

    /// Reads the next word; not while payload is to be read.
    pub(super) fn read_word(&mut self) -> Result<Read, CompanionError> {
        loop {
            match rustix::net::recv(&self.socket, self.reader.room(), RecvFlags::DONTWAIT) {
                Ok((0, _)) | Ok((_, 0)) => return Ok(Read::End),
                Ok((_, bytes)) => {
                    if let Some(word) = self.reader.filled(bytes)? {
                        return Ok(Read::Word(word));
                    }
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(Read::Nothing),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    /// Reads payload to `into`, which is no longer than [`Self::payload_left`].
    pub(super) fn read_payload(
        &mut self,
        calls: &dyn SocketCalls,
        into: &RegionSlice,
    ) -> Result<Read, CompanionError> {
        match calls.receive_plain(self.socket.as_fd(), into) {
            Ok(0) => Ok(Read::End),
            Ok(bytes) => {
                self.reader.took_payload(bytes);
                Ok(Read::Payload(bytes))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Read::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    /// Queues a word. A `HAVE` that still waits as a whole is replaced by a later one.
    pub(super) fn say(&mut self, word: Word) {
        let queue = if self.data_left > 0 {
            &mut self.later
        } else {
            &mut self.words
        };
        if let (Word::Have(_), Some(last)) = (word, queue.last_chunk())
            && let Ok(Word::Have(_)) = Word::decode(*last)
        {
            queue.truncate(queue.len() - Word::BYTES);
        }
        queue.extend_from_slice(&word.encode());
    }

    /// Begins the next stretch of payload, if none is under way: at most `length` bytes from `place`.
    pub(super) fn begin_data(&mut self, place: u64, length: usize) {
        if self.data_left == 0 && length > 0 {
            let length = length.min(MOST_DATA);
            self.data_left = length;
            let length = u32::try_from(length).unwrap_or(u32::MAX);
            self.words
                .extend_from_slice(&Word::Data { place, length }.encode());
        }
    }

    /// Payload of the stretch under way that is to be written before the next word.
    pub(super) fn data_left(&self) -> usize {
        self.data_left
    }

    /// So much of the stretch was written.
    pub(super) fn wrote_data(&mut self, bytes: usize) {
        self.data_left = self.data_left.saturating_sub(bytes);
        if self.data_left == 0 {
            self.words.append(&mut self.later);
        }
    }

    /// Whether words wait for the socket.
    pub(super) fn wants_write(&self) -> bool {
        !self.words.is_empty()
    }

    /// Writes words; true when none are left, so that the payload under way may be written.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        while !self.words.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, &self.words, flags) {
                Ok(bytes) => {
                    self.words.drain(..bytes);
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(rustix::io::Errno::INTR) => {}
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

    fn pair() -> (Companion, Companion) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Companion::new(ours.into()), Companion::new(theirs.into()))
    }

    #[test]
    fn words_arrive_in_order_and_a_waiting_have_is_replaced() {
        let (mut ours, mut theirs) = pair();
        for word in [Word::Have(5), Word::Have(9), Word::Move(9), Word::Have(12)] {
            ours.say(word);
        }
        assert!(ours.flush().unwrap());
        let mut words = Vec::new();
        while let Read::Word(word) = theirs.read_word().unwrap() {
            words.push(word);
        }
        assert_eq!(words, [Word::Have(9), Word::Move(9), Word::Have(12)]);
        drop(ours);
        assert_eq!(theirs.read_word().unwrap(), Read::End);
    }

    #[test]
    fn words_wait_for_the_end_of_the_payload_under_way() {
        let (mut ours, mut theirs) = pair();
        ours.say(Word::Have(1));
        ours.begin_data(100, 6);
        ours.say(Word::Have(2));
        assert!(ours.flush().unwrap());
        assert_eq!(ours.data_left(), 6);
        rustix::net::send(ours.socket(), b"abcdef", SendFlags::empty()).unwrap();
        ours.wrote_data(6);
        assert!(ours.wants_write() && ours.flush().unwrap());
        assert_eq!(theirs.read_word().unwrap(), Read::Word(Word::Have(1)));
        let data = Word::Data {
            place: 100,
            length: 6,
        };
        assert_eq!(theirs.read_word().unwrap(), Read::Word(data));
        assert_eq!(theirs.payload_left(), 6);
        let region = tcpx_memory::Region::host(8).unwrap();
        let into = region.slice(..6).unwrap();
        let read = theirs.read_payload(&crate::calls::LinuxSockets, &into);
        assert_eq!(read.unwrap(), Read::Payload(6));
        let mut bytes = [0; 6];
        region.read_to(0, &mut bytes).unwrap();
        assert_eq!((&bytes, theirs.payload_left()), (b"abcdef", 0));
        assert_eq!(theirs.read_word().unwrap(), Read::Word(Word::Have(2)));
    }
}

//! Asking the buffer daemon of Google's hosts: Unix sockets in one folder, a question and an answer on each.
//!
//! A frame is a length (two bytes, the high one first) and a protobuf message whose field 1 holds raw bytes. Only
//! questions that change nothing are asked.

mod frame;

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

/// How long the daemon may take for one answer; a healthy one needs milliseconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// Far more than an answer has: what says to be longer is none.
const MAX_ANSWER: usize = 1024;

/// What is asked on a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// Nothing: does anybody listen?
    Listens,
    /// Where is the receive memory of the GPU at this PCI address (`get_gpu_fd_*`)?
    Descriptor { pci: String },
    /// How large is it (`get_gpu_metadata_*`)?
    Metadata { pci: String },
}

/// What came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Nobody is there.
    Absent { why: String },
    /// Somebody listens.
    Listens,
    /// The descriptor of a GPU's receive memory, which was closed again.
    Descriptor,
    /// Bytes of a GPU's receive memory, and what its address must be a multiple of.
    Metadata { bytes: u64, align: u64 },
    /// Somebody listens and says nothing.
    Silent { waited: Duration },
    /// The connection was closed instead of an answer.
    Closed,
    /// Something else came.
    Garbage {
        expected: &'static str,
        arrived: String,
    },
}

/// Asks, and waits at most `patience` for the answer.
pub(crate) fn ask(socket: &Path, question: &Question, patience: Duration) -> Answer {
    let deadline = Instant::now() + patience;
    let stream = match connect(socket) {
        Ok(stream) => stream,
        // The queue of a listener that accepts nobody is full.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Answer::Silent {
                waited: Duration::ZERO,
            };
        }
        Err(error) => {
            return Answer::Absent {
                why: error.to_string(),
            };
        }
    };
    let answered = match question {
        Question::Listens => Ok(Answer::Listens),
        Question::Descriptor { pci } => {
            send(&stream, pci, deadline).and_then(|()| descriptor(&stream, deadline))
        }
        Question::Metadata { pci } => {
            send(&stream, pci, deadline).and_then(|()| metadata(&stream, deadline))
        }
    };
    answered.unwrap_or_else(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Answer::Silent { waited: patience },
        _ => Answer::Closed,
    })
}

/// Connects without waiting for room in the listener's queue.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// What is left until `deadline`; none is a timeout.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}

fn send(mut stream: &UnixStream, pci: &str, deadline: Instant) -> io::Result<()> {
    stream.set_write_timeout(Some(left(deadline)?))?;
    stream.write_all(&frame::raw(pci.to_ascii_lowercase().as_bytes())?)
}

/// One byte of no meaning and one descriptor.
fn descriptor(stream: &UnixStream, deadline: Instant) -> io::Result<Answer> {
    stream.set_read_timeout(Some(left(deadline)?))?;
    // Room for more than the one that is due, so that more are noticed (and closed).
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 64];
    let received = rustix::net::recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            descriptors.extend(some);
        }
    }
    if received.bytes == 0 {
        return Ok(Answer::Closed);
    }
    if received.bytes == 1 && descriptors.len() == 1 {
        return Ok(Answer::Descriptor);
    }
    Ok(Answer::Garbage {
        expected: "one byte and one descriptor",
        arrived: format!(
            "{} bytes and {} descriptors",
            received.bytes,
            descriptors.len()
        ),
    })
}

/// A frame whose raw bytes are `{int fd; size_t size; size_t align}`.
fn metadata(stream: &UnixStream, deadline: Instant) -> io::Result<Answer> {
    let mut head = [0; 2];
    if !fill(stream, &mut head, deadline)? {
        return Ok(Answer::Closed);
    }
    let length = usize::from(u16::from_be_bytes(head));
    if length > MAX_ANSWER {
        return Ok(Answer::Garbage {
            expected: "a frame with 24 raw bytes",
            arrived: format!("\"{}\", which begins no such frame", head.escape_ascii()),
        });
    }
    let mut body = vec![0; length];
    if !fill(stream, &mut body, deadline)? {
        return Ok(Answer::Closed);
    }
    let words = frame::raw_bytes(&body).and_then(|raw| <[u8; 24]>::try_from(raw).ok());
    let Some(words) = words else {
        return Ok(Answer::Garbage {
            expected: "a frame with 24 raw bytes",
            arrived: format!(
                "a frame of {} bytes that begins with \"{}\"",
                body.len(),
                body[..body.len().min(16)].escape_ascii()
            ),
        });
    };
    let word = |at: usize| {
        let bytes = words[at..].first_chunk::<8>();
        bytes.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    };
    Ok(Answer::Metadata {
        bytes: word(8),
        align: word(16),
    })
}

/// Fills `bytes`; false when the connection ended first.
fn fill(mut stream: &UnixStream, bytes: &mut [u8], deadline: Instant) -> io::Result<bool> {
    let mut done = 0;
    while done < bytes.len() {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut bytes[done..]) {
            Ok(0) => return Ok(false),
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

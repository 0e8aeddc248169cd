//! Messages through the plugin from this process to itself: fresh random bytes, poisoned destinations, guards around
//! them, every byte compared.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_net::constants::UNPACK_MAX_RECEIVE_BYTES;
use nccl_net::{
    Accepting, Connecting, DeviceOffload, HostError, MemoryHandle, MemoryOwner, MemoryType, Plugin,
    PostOutcome, Properties, RecvComm, SendComm,
};
use tcpx::{MemoryError, Region};

use super::events::{Event, Moved, of_host};
use super::part::{doing, tell};
use crate::error::Error;
use crate::sizes::Size;

/// Bytes on both sides of the destination that must stay as they are.
const GUARD: usize = 4096;
const GUARD_BYTE: u8 = 0x5a;
/// Bytes of the largest message.
const LARGEST: usize = 64 << 20;
/// Pause between polls that found nothing.
const PAUSE: Duration = Duration::from_micros(50);

/// Messages sent in one request each, if the plugin takes requests of that size.
const SIZES: [usize; 25] = [
    0,
    1,
    2,
    3,
    7,
    8,
    63,
    64,
    65,
    255,
    1023,
    4095,
    4096,
    4097,
    65_535,
    65_536,
    65_537,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 1,
    (4 << 20) - 1,
    4 << 20,
    (4 << 20) + 3,
    (16 << 20) + 1,
    LARGEST,
];

/// Messages and the size of their requests: many are in flight at once.
const WINDOWED: [(usize, usize); 3] = [(1000, 1), ((1 << 20) + 1, 61_441), (LARGEST, 512 << 10)];

/// Connects, moves every message and closes.
pub(super) fn run(
    plugin: &Plugin,
    device: usize,
    properties: &Properties,
    limit: Duration,
) -> Result<(), Error> {
    if !properties.pointer_support.host() {
        return Err(Error::failed(
            "the device takes no host memory, which the self-test uses",
            "try it with a GPU: tcpx perf server 0 --plugin PATH",
        ));
    }
    let mut pair = Pair::connect(plugin, device, limit)?;
    let largest_request = largest_request(properties);
    let single = SIZES.iter().map(|bytes| (*bytes, largest_request));
    let windowed = WINDOWED.iter().copied();
    for (bytes, request) in single.chain(windowed) {
        doing(format!("moving {}", Size(bytes as u64)));
        let requests = cut(bytes, request.min(largest_request));
        pair.fill(bytes)?;
        pair.transfer(&requests, limit)?;
        pair.verify(bytes)?;
        tell(&Event::Moved(Moved {
            bytes,
            requests: requests.len(),
        }));
    }
    doing("deregMr and close");
    pair.close()
}

/// Bytes that one request may carry.
fn largest_request(properties: &Properties) -> usize {
    let most = match properties.offload {
        DeviceOffload::None => LARGEST,
        _ => UNPACK_MAX_RECEIVE_BYTES,
    };
    match properties.max_p2p_bytes {
        Some(bytes) if bytes > 0 => most.min(bytes),
        _ => most,
    }
}

/// Offset and length of each request of a message; one empty request for an empty message.
fn cut(bytes: usize, request: usize) -> Vec<(usize, usize)> {
    if bytes == 0 {
        return vec![(0, 0)];
    }
    let starts = (0..bytes).step_by(request.max(1));
    starts
        .map(|start| (start, request.min(bytes - start)))
        .collect()
}

/// Both ends of a connection, and the memory registered on them.
struct Pair {
    send: SendComm,
    receive: RecvComm,
    source: Region,
    destination: Region,
    source_handle: MemoryHandle,
    destination_handle: MemoryHandle,
}

impl Pair {
    fn connect(plugin: &Plugin, device: usize, limit: Duration) -> Result<Self, Error> {
        doing("listen");
        let (handle, listen) = plugin.listen(device).map_err(of_host)?;
        let connecting = plugin.connect(device, handle).map_err(of_host)?;
        let (send, receive) = set_up(connecting, listen.accept(), limit)?;
        doing("regMr");
        let bytes = LARGEST + 2 * GUARD;
        let source = Region::host(bytes).map_err(memory())?;
        let destination = Region::host(bytes).map_err(memory())?;
        let source_handle = register(&source, |data, owner| {
            // SAFETY: host memory that the owner keeps alive; it is written only while nothing is in flight.
            unsafe { send.register_owned(data, bytes, MemoryType::Host, owner) }
        })?;
        let destination_handle = register(&destination, |data, owner| {
            // SAFETY: as above; it is touched only while nothing is in flight.
            unsafe { receive.register_owned(data, bytes, MemoryType::Host, owner) }
        })?;
        Ok(Self {
            send,
            receive,
            source,
            destination,
            source_handle,
            destination_handle,
        })
    }

    /// Fresh random bytes at the source; at the destination whatever is not equal to them, and the guards.
    fn fill(&self, bytes: usize) -> Result<(), Error> {
        let message = GUARD..GUARD + bytes;
        let random = self
            .source
            .with_bytes_mut(message.clone(), getrandom::fill)
            .map_err(memory())?;
        random.map_err(|error| {
            Error::failed(
                format!("no random bytes: {error}"),
                "this is the operating system's refusal, not the plugin's",
            )
        })?;
        let poison = |source: &[u8]| {
            self.destination
                .with_bytes_mut(0..bytes + 2 * GUARD, |destination| {
                    destination[..GUARD].fill(GUARD_BYTE);
                    destination[GUARD + bytes..].fill(GUARD_BYTE);
                    for (to, from) in destination[GUARD..].iter_mut().zip(source) {
                        *to = !from;
                    }
                })
        };
        let poisoned = self.source.with_bytes(message, poison);
        poisoned.map_err(memory())?.map_err(memory())
    }

    /// Posts and tests until every request is done on both sides. Neither end waits for the other's
    /// posts: there are plugins that take a receive only once the peer has begun to send.
    fn transfer(&mut self, requests: &[(usize, usize)], limit: Duration) -> Result<(), Error> {
        let (mut posted, mut received, mut sending, mut sent) = (0, 0, 0, 0);
        let mut deadline = Instant::now() + limit;
        while received < requests.len() || sent < requests.len() {
            let before = (posted, received, sending, sent);
            while let Some(&(start, len)) = requests.get(posted) {
                let handle = &self.destination_handle;
                match self.receive.irecv(handle, GUARD + start, len, tag(posted)) {
                    Ok(PostOutcome::Posted(_)) => posted += 1,
                    Ok(PostOutcome::Full) => break,
                    Err(error) => return Err(of_host(error)),
                }
            }
            while let Some(&(start, len)) = requests.get(sending) {
                let handle = &self.source_handle;
                match self.send.isend(handle, GUARD + start, len, tag(sending)) {
                    Ok(PostOutcome::Posted(_)) => sending += 1,
                    Ok(PostOutcome::Full) => break,
                    Err(error) => return Err(of_host(error)),
                }
            }
            if let Some(done) = self.receive.test_head().map_err(of_host)? {
                let expected = requests[received].1;
                if done.bytes.is_some_and(|bytes| bytes != expected) {
                    return Err(wrong_size(expected, done.bytes.unwrap_or_default()));
                }
                if done.slot.is_some() {
                    self.receive.consume_next(done.ticket).map_err(of_host)?;
                }
                received += 1;
            }
            if self.send.test_head().map_err(of_host)?.is_some() {
                sent += 1;
            }
            let now = Instant::now();
            if before != (posted, received, sending, sent) {
                deadline = now + limit;
            } else if now >= deadline {
                return Err(stalled(requests, received, sent, limit));
            } else {
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Compares every byte, and the guards.
    fn verify(&self, bytes: usize) -> Result<(), Error> {
        let compare = |source: &[u8]| {
            self.destination
                .with_bytes(0..bytes + 2 * GUARD, |destination| {
                    check(source, destination)
                })
        };
        let compared = self.source.with_bytes(GUARD..GUARD + bytes, compare);
        let found = compared.map_err(memory())?.map_err(memory())?;
        found.map_err(|what| Error::failed(what, "do not use this plugin: it reported success for a message that did not arrive whole [TCPX-D035]"))
    }

    /// Closes both ends at once: there are plugins whose close of one end waits for the other's.
    fn close(self) -> Result<(), Error> {
        drop((self.source_handle, self.destination_handle));
        let (send, receive) = (self.send, self.receive);
        std::thread::scope(|scope| {
            let sender = std::thread::Builder::new()
                .name("tcpx-close".into())
                .spawn_scoped(scope, || send.close())
                .map_err(|error| {
                    Error::failed(
                        format!("no thread to close one end on: {error}"),
                        "this is the operating system's refusal, not the plugin's",
                    )
                })?;
            let received = receive.close();
            let sent = sender.join().unwrap_or(Err(HostError::SetupEnded));
            sent.and(received).map_err(of_host)
        })
    }
}

/// The bytes of one message against its source, and the guards around them.
fn check(source: &[u8], destination: &[u8]) -> Result<(), String> {
    let bytes = source.len();
    let guards = [&destination[..GUARD], &destination[GUARD + bytes..]];
    if guards
        .iter()
        .any(|guard| guard.iter().any(|byte| *byte != GUARD_BYTE))
    {
        return Err(format!(
            "a message of {bytes} bytes was reported done, and bytes outside its destination were written"
        ));
    }
    let arrived = &destination[GUARD..GUARD + bytes];
    if source == arrived {
        return Ok(());
    }
    let differs = source.iter().zip(arrived).position(|(a, b)| a != b);
    let at = differs.unwrap_or_default();
    let missing = source.iter().zip(arrived).filter(|(a, b)| **a == !**b);
    Err(format!(
        "a message of {bytes} bytes was reported done, but byte {at} is {:#04x} instead of {:#04x}; {} of its bytes were never written",
        arrived[at],
        source[at],
        missing.count()
    ))
}

/// Polls connect before accept: there are plugins whose accept waits for the connect.
fn set_up(
    mut connecting: Connecting,
    mut accepting: Accepting,
    limit: Duration,
) -> Result<(SendComm, RecvComm), Error> {
    let deadline = Instant::now() + limit;
    let (mut send, mut receive) = (None, None);
    doing("connect and accept");
    loop {
        if send.is_none() {
            send = connecting.poll().map_err(of_host)?;
        }
        if receive.is_none() {
            receive = accepting.poll().map_err(of_host)?;
        }
        match (send.take(), receive.take()) {
            (Some(send), Some(receive)) => return Ok((send, receive)),
            (one, other) => (send, receive) = (one, other),
        }
        if Instant::now() >= deadline {
            let what = match (&send, &receive) {
                (None, Some(_)) => "connect",
                (Some(_), None) => "accept",
                _ => "connect and accept",
            };
            return Err(Error::failed(
                format!("{what} gave no comm within {limit:.1?}"),
                "look at the plugin's log; its interfaces, or the daemon that it needs, do not answer [TCPX-D032]",
            ));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn register(
    region: &Region,
    call: impl FnOnce(*mut u8, MemoryOwner) -> Result<MemoryHandle, HostError>,
) -> Result<MemoryHandle, Error> {
    let data = region.all().host_ptr().ok_or_else(|| {
        Error::failed(
            "host memory without an address",
            "this is a defect of tcpx, please report it",
        )
    })?;
    call(data, Arc::new(region.clone())).map_err(of_host)
}

fn tag(index: usize) -> i32 {
    i32::try_from(index % 1000).unwrap_or_default()
}

fn memory() -> impl FnOnce(MemoryError) -> Error {
    Error::memory("use the self-test's memory")
}

fn wrong_size(expected: usize, reported: usize) -> Error {
    Error::failed(
        format!("a receive of {expected} bytes was reported done with {reported}"),
        "do not use this plugin: what it reports is not what was sent",
    )
}

fn stalled(requests: &[(usize, usize)], received: usize, sent: usize, limit: Duration) -> Error {
    Error::failed(
        format!(
            "nothing moved for {limit:.1?}: of {} requests {sent} were sent and {received} received",
            requests.len()
        ),
        "look at the plugin's log; for Google's plugin NCCL_DYNAMIC_CHUNK_SIZE must not be 0",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_cover_a_message_without_gap_or_overlap() {
        assert_eq!(cut(0, 10), [(0, 0)]);
        assert_eq!(cut(10, 10), [(0, 10)]);
        assert_eq!(cut(21, 10), [(0, 10), (10, 10), (20, 1)]);
    }

    #[test]
    fn wrong_bytes_unwritten_bytes_and_touched_guards_are_found() {
        let source = [1, 2, 3];
        let with = |middle: [u8; 3]| {
            let guard = vec![GUARD_BYTE; GUARD];
            [&guard[..], &middle, &guard].concat()
        };
        assert_eq!(check(&source, &with([1, 2, 3])), Ok(()));
        let error = check(&source, &with([1, !2, !3])).expect_err("unwritten");
        assert!(
            error.contains("byte 1 ") && error.contains("2 of its bytes"),
            "{error}"
        );
        for place in [0, GUARD - 1, GUARD + 3, 2 * GUARD + 2] {
            let mut destination = with([1, 2, 3]);
            destination[place] ^= 1;
            let error = check(&source, &destination).expect_err("a touched guard");
            assert!(error.contains("outside"), "{error}");
        }
    }
}

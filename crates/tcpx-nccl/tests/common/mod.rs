//! A host program in miniature: connected comms, random data, bounded waits.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use nccl_net::export::{
    Buffer, HostLogger, MemoryRegion, NetComm, NetConnect, NetError, NetListen, NetPlugin, NetRecv,
    NetSend, RequestId,
};
use nccl_net_tcpx::{Config, Memory, RecvComm, SendComm, TcpxPlugin};

/// The sizes that matter: nothing, one byte, around a page, around a chunk, the largest.
pub(crate) const SIZES: [usize; 11] = [
    0,
    1,
    23,
    4095,
    4096,
    4097,
    (512 << 10) - 1,
    512 << 10,
    (512 << 10) + 1,
    (4 << 20) - 1,
    4 << 20,
];

/// Bytes of a message that is large enough for lanes.
pub(crate) const MIB: usize = 1 << 20;

/// Everything here runs on loopback within this time, also where a busy machine seldom runs the
/// lanes, or something hangs.
const PATIENCE: Duration = Duration::from_secs(300);

/// How long a wait keeps its core, as NCCL does; behind that it leaves it to those that have
/// something to do.
const SPINS: Duration = Duration::from_millis(50);

pub(crate) fn host_config() -> Config {
    Config {
        interfaces: "lo".to_owned(),
        ..Config::default()
    }
}

/// A few lanes for large messages, some parts of which are then sent without a copy and some with
/// one.
pub(crate) fn lane_config() -> Config {
    Config {
        lanes: Some(3),
        threads: Some(2),
        chunk_bytes: 96 << 10,
        ..host_config()
    }
}

pub(crate) fn plugin(config: Config) -> TcpxPlugin {
    TcpxPlugin::with_config(config, HostLogger::default()).unwrap()
}

/// Calls `attempt` until it gives something.
#[track_caller]
pub(crate) fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(result) = attempt() {
            return result;
        }
        let waited = began.elapsed();
        assert!(waited < PATIENCE, "{what}: nothing after {PATIENCE:?}");
        if waited < SPINS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// A connected pair.
pub(crate) struct Pair {
    pub(crate) send: SendComm,
    pub(crate) receive: RecvComm,
}

pub(crate) fn pair(plugin: &TcpxPlugin) -> Pair {
    pair_between(plugin, plugin)
}

/// As [`pair`], of two plugins.
pub(crate) fn pair_between(listening: &TcpxPlugin, connecting: &TcpxPlugin) -> Pair {
    let (handle, listener) = listening.listen(0).unwrap();
    let connect = connecting.connect(0, &handle).unwrap();
    accepted(&listener, connect)
}

/// The pair that comes of a connect to this listener.
pub(crate) fn accepted(
    listener: &<TcpxPlugin as NetPlugin>::Listen,
    mut connect: <TcpxPlugin as NetPlugin>::Connect,
) -> Pair {
    let (mut send, mut receive) = (None, None);
    until("connecting", || {
        if send.is_none() {
            send = connect.poll().unwrap();
        }
        if receive.is_none() {
            receive = listener.accept().unwrap();
        }
        (send.is_some() && receive.is_some()).then_some(())
    });
    Pair {
        send: send.unwrap(),
        receive: receive.unwrap(),
    }
}

/// Memory of a test. A panic leaves it in place, as lanes may still write to it.
#[derive(Debug, PartialEq)]
pub(crate) struct Bytes(Vec<u8>);

impl Deref for Bytes {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.0
    }
}

impl DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.0
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::mem::forget(std::mem::take(&mut self.0));
        }
    }
}

/// Memory of a test, registered on a comm.
pub(crate) struct Registered {
    pub(crate) bytes: Bytes,
    pub(crate) memory: Memory,
}

impl Registered {
    pub(crate) fn new(
        comm: &impl NetComm<Memory = Memory>,
        mut bytes: Vec<u8>,
        cuda: bool,
    ) -> Self {
        let memory = comm
            .register(MemoryRegion {
                data: bytes.as_mut_ptr(),
                len: bytes.len(),
                cuda,
            })
            .unwrap();
        Self {
            bytes: Bytes(bytes),
            memory,
        }
    }

    pub(crate) fn buffer(&mut self, offset: usize, len: usize) -> Buffer {
        assert!(offset + len <= self.bytes.len());
        Buffer {
            data: self.bytes.as_mut_ptr().wrapping_add(offset),
            len,
        }
    }
}

/// Whether a byte that a lane may write meanwhile has this value.
pub(crate) fn has(bytes: &[u8], at: usize, value: u8) -> bool {
    // SAFETY: a byte of a slice that lives.
    unsafe { bytes.as_ptr().add(at).read_volatile() == value }
}

pub(crate) fn random(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        })
        .collect()
}

#[track_caller]
pub(crate) fn posted<T>(outcome: Result<Option<T>, NetError>) -> T {
    outcome.unwrap().expect("there was room")
}

/// Drives both ends until both requests are done; gives the received bytes.
#[track_caller]
pub(crate) fn finish(pair: &Pair, send: RequestId, receive: RequestId) -> usize {
    let (mut sent, mut received) = (None, None);
    until("a transfer", || {
        if sent.is_none() {
            sent = pair.send.test(send).unwrap();
        }
        if received.is_none() {
            received = pair.receive.test(receive).unwrap();
        }
        (sent.is_some() && received.is_some()).then_some(())
    });
    assert_eq!(sent, received);
    received.unwrap()
}

/// Posts and finishes one transfer of `len` bytes.
#[track_caller]
pub(crate) fn transfer(
    pair: &Pair,
    from: &mut Registered,
    to: &mut Registered,
    len: usize,
    capacity: usize,
) {
    let buffer = to.buffer(0, capacity);
    let receive = posted(pair.receive.irecv(buffer, 0, &to.memory));
    let buffer = from.buffer(0, len);
    let send = posted(pair.send.isend(buffer, 0, &from.memory));
    assert_eq!(finish(pair, send, receive), len);
}

/// Sends `messages` of `len` bytes with as many in flight as fit; everything must arrive.
pub(crate) fn stream(pair: &Pair, len: usize, messages: usize) {
    stream_between(&pair.send, &pair.receive, len, messages);
}

pub(crate) fn stream_between(send: &SendComm, receive: &RecvComm, len: usize, messages: usize) {
    let bytes = random(len + messages, 11);
    let mut from = Registered::new(send, bytes.clone(), false);
    let mut to = Registered::new(receive, vec![0; len * messages], false);
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    let (mut sent, mut received) = (0, 0);
    until("a stream of messages", || {
        // The contents differ by one byte of offset, so that no message can be taken for another.
        if sends.len() < messages
            && let Some(id) = send
                .isend(from.buffer(sends.len(), len), 0, &from.memory)
                .unwrap()
        {
            sends.push(id);
        }
        if receives.len() < messages
            && let Some(id) = receive
                .irecv(to.buffer(receives.len() * len, len), 0, &to.memory)
                .unwrap()
        {
            receives.push(id);
        }
        if sent < sends.len() && send.test(sends[sent]).unwrap().is_some() {
            sent += 1;
        }
        if received < receives.len() && receive.test(receives[received]).unwrap().is_some() {
            received += 1;
        }
        (sent == messages && received == messages).then_some(())
    });
    for (number, message) in to.bytes.chunks(len).enumerate() {
        assert!(message == &bytes[number..number + len], "message {number}");
    }
}

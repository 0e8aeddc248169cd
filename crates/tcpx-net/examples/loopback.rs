//! Bandwidth of one channel between two ends of this process.
//!
//! `cargo run --release -p tcpx-net --example loopback -- [MODE] [LANES] [CHUNK_BYTES] [TOTAL_BYTES]`
//!
//! - `host` (default): host memory to host memory, in place.
//! - `staged`: the same through slots and the copy worker, as GPU memory goes.
//! - `cuda`: memory of GPU 0 to memory of GPU 0.
//! - `plain`: two threads that write and read one socket, for comparison.
//!
//! The timed pass reuses a working set of 32 MiB per side; a second pass over fresh patterns checks
//! every byte.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, SockRef, Socket, Type};
use tcpx_memory::{CopyWorker, Gpu, Region};
use tcpx_net::{
    Auth, Channel, Completion, DialOptions, Exchange, ListenOptions, Listener, Network,
    NetworkError, Posted, Readiness, ReceiveChunk, SendChunk, Setup, Side, TcpNetwork, TcpOptions,
    dial,
};

const WORKING_SET: usize = 32 << 20;
const PATIENCE: Duration = Duration::from_secs(30);

type Failure = Box<dyn Error + Send + Sync>;

struct Wire(mpsc::Sender<Vec<u8>>, mpsc::Receiver<Vec<u8>>);

impl Exchange for Wire {
    fn exchange(&mut self, payload: &[u8]) -> Result<Vec<u8>, NetworkError> {
        let gone = |reason: String| NetworkError::Control { reason };
        self.0
            .send(payload.to_vec())
            .map_err(|error| gone(error.to_string()))?;
        self.1
            .recv_timeout(PATIENCE)
            .map_err(|error| gone(error.to_string()))
    }
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: usize| -> Result<usize, Failure> {
        Ok(arguments
            .get(index)
            .map_or(Ok(default), |text| text.parse())?)
    };
    let lanes = u16::try_from(number(1, 0)?)?;
    let chunk = number(2, 1 << 20)?.clamp(1, WORKING_SET);
    let total = number(3, 16 << 30)?;
    let mode = arguments.first().map_or("host", String::as_str);
    let gpu = match mode {
        "plain" => return plain(chunk, total),
        "cuda" => Some(Gpu::open(0)?),
        "host" | "staged" => None,
        other => return Err(format!("no mode {other:?}: host, staged, cuda or plain").into()),
    };
    let workers = gpu
        .iter()
        .map(CopyWorker::for_gpu)
        .collect::<Result<Vec<_>, _>>()?;
    let client_workers = workers.clone();
    let memory = || match &gpu {
        Some(gpu) => Region::cuda(gpu, WORKING_SET),
        None => Region::host(WORKING_SET),
    };
    let timed = (total / chunk).max(1) as u64;
    let passes = [
        Pass {
            first: 0,
            count: timed,
            chunk,
        },
        Pass {
            first: timed,
            count: (WORKING_SET / chunk) as u64,
            chunk,
        },
    ];
    // No two chunks in flight share memory.
    let window = u16::try_from(WORKING_SET / chunk)
        .unwrap_or(u16::MAX)
        .min(tcpx_net::tcp::WINDOW);
    let options = TcpOptions {
        window,
        stage_host: mode == "staged",
        ..TcpOptions::default()
    };

    let auth = Auth::Insecure;
    let listener = Listener::bind(ListenOptions {
        address: SocketAddr::from(([127, 0, 0, 1], 0)),
        auth: auth.clone(),
        one_time: false,
        capabilities: 0,
    })?;
    let address = listener.local_addr();
    let deadline = Instant::now() + PATIENCE;
    let ((to_server, at_server), (to_client, at_client)) = (mpsc::channel(), mpsc::channel());
    let network = TcpNetwork::new(options);
    let client_network = network.clone();
    let (source, memory) = (memory()?, memory()?);
    source.write_from(0, &pattern())?;
    let sender_passes = passes.clone();
    let sender = std::thread::spawn(move || -> Result<_, Failure> {
        let dialled = dial(address, &auth, &DialOptions::until(deadline))?;
        let setup = Setup {
            side: Side::Client,
            session: &dialled.session,
            local: dialled.stream.local_addr()?,
            peer: address,
            channels: lanes,
            deadline,
            workers: &client_workers,
            lanes: None,
        };
        let mut channels = client_network.establish(&setup, &mut Wire(to_server, at_client))?;
        let mut channel = channels.pop().ok_or("no channel")?;
        sender_passes
            .iter()
            .try_for_each(|pass| send(&mut *channel, &source, pass))?;
        Ok(channel)
    });
    let accepted = listener.accept(deadline)?;
    let setup = Setup {
        side: Side::Server,
        session: &accepted.session,
        local: accepted.stream.local_addr()?,
        peer: accepted.peer,
        channels: lanes,
        deadline,
        workers: &workers,
        lanes: Some(accepted.lanes.clone()),
    };
    let mut channels = network.establish(&setup, &mut Wire(to_client, at_server))?;
    let mut channel = channels.pop().ok_or("no channel")?;

    memory.write_from(0, &vec![0; WORKING_SET])?;
    let started = Instant::now();
    receive(&mut *channel, &memory, &passes[0])?;
    let elapsed = started.elapsed();
    memory.write_from(0, &vec![0; WORKING_SET])?;
    receive(&mut *channel, &memory, &passes[1])?;
    sender.join().map_err(|_| "the sender panicked")??;
    let verified = WORKING_SET / chunk * chunk;
    let expected = pattern();
    let mut arrived = vec![0; verified];
    memory.read_to(0, &mut arrived)?;
    if arrived != expected[..verified] {
        return Err("the second pass arrived with other bytes than were sent".into());
    }
    let bytes = timed * chunk as u64;

    let stats = channel.stats();
    println!(
        "{mode}: {}: {:.2} GB/s, {} bytes in {:.3} s, chunks of {chunk}; {:.0} KiB per receive call; {verified} bytes verified",
        channel.describe(),
        bytes as f64 / elapsed.as_secs_f64() / 1e9,
        bytes,
        elapsed.as_secs_f64(),
        stats.bytes_received as f64 / stats.wire_calls as f64 / 1024.0,
    );
    Ok(())
}

fn pattern() -> Vec<u8> {
    (0..WORKING_SET as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

/// Which chunks a pass moves: sequence numbers go on from pass to pass.
#[derive(Clone)]
struct Pass {
    first: u64,
    count: u64,
    chunk: usize,
}

impl Pass {
    fn start(&self, sequence: u64) -> usize {
        (sequence - self.first) as usize * self.chunk % (WORKING_SET / self.chunk * self.chunk)
    }
}

fn send(channel: &mut dyn Channel, memory: &Region, pass: &Pass) -> Result<(), Failure> {
    drive(channel, pass, |channel, sequence| {
        let start = pass.start(sequence);
        let source = memory.slice(start..start + pass.chunk)?;
        let offset = sequence * pass.chunk as u64;
        let (token, transfer, tag) = (sequence, 1, 0);
        let request = SendChunk {
            token,
            sequence,
            transfer,
            offset,
            tag,
            source,
            fence: None,
        };
        Ok(matches!(channel.post_send(request)?, Posted::Accepted))
    })
}

fn receive(channel: &mut dyn Channel, memory: &Region, pass: &Pass) -> Result<(), Failure> {
    drive(channel, pass, |channel, sequence| {
        let start = pass.start(sequence);
        let destination = memory.slice(start..start + pass.chunk)?;
        let offset = sequence * pass.chunk as u64;
        let (token, transfer, tag) = (sequence, 1, 0);
        let request = ReceiveChunk {
            token,
            sequence,
            transfer,
            offset,
            tag,
            destination,
            fence: None,
        };
        Ok(matches!(channel.post_receive(request)?, Posted::Accepted))
    })
}

/// Keeps the window full until every chunk of the pass has ended.
fn drive(
    channel: &mut dyn Channel,
    pass: &Pass,
    mut post: impl FnMut(&mut dyn Channel, u64) -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let end = pass.first + pass.count;
    let (mut next, mut ended) = (pass.first, 0);
    let mut out = Vec::new();
    while ended < pass.count {
        while next < end && post(channel, next)? {
            next += 1;
        }
        wait(channel)?;
        channel.poll(&mut out)?;
        for completion in out.drain(..) {
            if let Completion::Failed { error, .. } = completion {
                return Err(error.into());
            }
            ended += 1;
        }
    }
    Ok(())
}

fn wait(channel: &dyn Channel) -> Result<(), Failure> {
    let Readiness::Fd(descriptor) = channel.readiness() else {
        return Ok(());
    };
    let limit = Timespec {
        tv_sec: 30,
        tv_nsec: 0,
    };
    let mut watched = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
    if poll(&mut watched, Some(&limit))? == 0 {
        return Err("nothing moved for 30 s".into());
    }
    Ok(())
}

/// The same bytes through one socket, without any protocol.
fn plain(chunk: usize, total: usize) -> Result<(), Failure> {
    let congestion_control = |socket: SockRef<'_>| {
        ["cubic", "reno"]
            .iter()
            .any(|name| socket.set_tcp_congestion(name.as_bytes()).is_ok())
    };
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    congestion_control(SockRef::from(&listener));
    listener.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())?;
    listener.listen(1)?;
    let listener: TcpListener = listener.into();
    let address = listener.local_addr()?;
    let count = (total / chunk).max(1);
    let places = WORKING_SET / chunk;
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        congestion_control(SockRef::from(&socket));
        socket.connect(&address.into())?;
        let mut stream: TcpStream = socket.into();
        let memory = pattern();
        (0..count).try_for_each(|index| {
            let start = index % places * chunk;
            stream.write_all(&memory[start..start + chunk])
        })
    });
    let (mut stream, _) = listener.accept()?;
    let mut memory = vec![1; WORKING_SET];
    let started = Instant::now();
    for index in 0..count {
        let start = index % places * chunk;
        stream.read_exact(&mut memory[start..start + chunk])?;
    }
    let elapsed = started.elapsed().as_secs_f64();
    sender.join().map_err(|_| "the sender panicked")??;
    let bytes = count * chunk;
    println!(
        "plain: {:.2} GB/s, {bytes} bytes in {elapsed:.3} s",
        bytes as f64 / elapsed / 1e9
    );
    Ok(())
}

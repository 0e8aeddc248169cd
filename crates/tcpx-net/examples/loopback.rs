//! Bandwidth of one channel between two ends of this process.
//!
//! `cargo run --release -p tcpx-net --example loopback -- [MODE] [LANES] [CHUNK_BYTES] [TOTAL_BYTES] [WORKING_SET]`
//!
//! - `host` (default): host memory to host memory, in place.
//! - `staged`: the same through slots and the copy worker, as GPU memory goes.
//! - `cuda`: memory of GPU 0 to memory of GPU 0.
//! - `plain`: for comparison, two threads for each lane that write and read one socket.
//!
//! The timed pass reuses a working set of WORKING_SET bytes per side, 32 MiB by default; a second
//! pass over fresh patterns checks every byte. CPU seconds are those of both sides together.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use socket2::{Domain, SockRef, Socket, Type};
use tcpx_memory::{CopyWorker, Gpu, Region};
use tcpx_net::{
    Auth, Channel, Completion, Congestion, DialOptions, Exchange, ListenOptions, Listener,
    Meanwhile, Network, NetworkError, Posted, Readiness, ReceiveWindow, SendChunk, Setup, Side,
    TcpNetwork, TcpOptions, dial,
};
use tcpx_wire::ChunkPlan;

const PATIENCE: Duration = Duration::from_secs(30);

type Failure = Box<dyn Error + Send + Sync>;

struct Wire(mpsc::Sender<Vec<u8>>, mpsc::Receiver<Vec<u8>>);

impl Exchange for Wire {
    fn exchange(&mut self, payload: &[u8], _: &mut dyn Meanwhile) -> Result<Vec<u8>, NetworkError> {
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
    let working_set = number(4, 32 << 20)?.max(1);
    let chunk = number(2, 1 << 20)?.clamp(1, working_set);
    let total = number(3, 16 << 30)?;
    let mode = arguments.first().map_or("host", String::as_str);
    let gpu = match mode {
        "plain" => return plain(usize::from(lanes.max(1)), chunk, total, working_set),
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
        Some(gpu) => Region::cuda(gpu, working_set),
        None => Region::host(working_set),
    };
    let timed = (total / chunk).max(1) as u64;
    let places = working_set / chunk;
    let passes = [
        Pass {
            first: 0,
            count: timed,
            chunk,
            places,
        },
        Pass {
            first: timed,
            count: places as u64,
            chunk,
            places,
        },
    ];
    let options = TcpOptions {
        stage_host: mode == "staged",
        ..TcpOptions::default()
    };

    let auth = Auth::Insecure;
    let listener = Listener::bind(ListenOptions {
        address: SocketAddr::from(([127, 0, 0, 1], 0)),
        auth: auth.clone(),
        one_time: false,
        congestion: Congestion::Automatic,
    })?;
    let address = listener.local_addr();
    let deadline = Instant::now() + PATIENCE;
    let ((to_server, at_server), (to_client, at_client)) = (mpsc::channel(), mpsc::channel());
    let (opened, at_sender) = mpsc::channel();
    let network = TcpNetwork::new(options);
    let client_network = network.clone();
    let (source, memory) = (memory()?, memory()?);
    source.write_from(0, &pattern(working_set))?;
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
            encrypt: false,
            dead_after: Duration::from_secs(10),
            congestion: &Congestion::Automatic,
            workers: &client_workers,
            lanes: None,
            listening: None,
        };
        let mut channels = client_network.establish(&setup, &mut Wire(to_server, at_client))?;
        let mut channel = channels.pop().ok_or("no channel")?;
        sender_passes
            .iter()
            .try_for_each(|pass| send(&mut *channel, &source, pass, &at_sender))?;
        Ok(channel)
    });
    let accepted = listener.accept(deadline)?;
    let setup = Setup {
        side: Side::Server,
        session: &accepted.session,
        local: accepted.stream.local_addr()?,
        peer: accepted.peer.address,
        channels: lanes,
        deadline,
        encrypt: false,
        dead_after: Duration::from_secs(10),
        congestion: &Congestion::Automatic,
        workers: &workers,
        lanes: Some(accepted.lanes.clone()),
        listening: Some(accepted.listening),
    };
    let mut channels = network.establish(&setup, &mut Wire(to_client, at_server))?;
    let mut channel = channels.pop().ok_or("no channel")?;

    memory.write_from(0, &vec![0; working_set])?;
    let started = Instant::now();
    let cpu = processor_seconds();
    receive(&mut *channel, &memory, &passes[0], &opened)?;
    let elapsed = started.elapsed();
    let cpu = processor_seconds() - cpu;
    memory.write_from(0, &vec![0; working_set])?;
    receive(&mut *channel, &memory, &passes[1], &opened)?;
    sender.join().map_err(|_| "the sender panicked")??;
    let verified = places * chunk;
    let expected = pattern(working_set);
    let mut arrived = vec![0; verified];
    memory.read_to(0, &mut arrived)?;
    if arrived != expected[..verified] {
        return Err("the second pass arrived with other bytes than were sent".into());
    }
    let bytes = timed * chunk as u64;

    let stats = channel.stats();
    println!(
        "{mode}: {}: {:.2} GB/s, {:.3} CPU s/GB, {} bytes in {:.3} s, chunks of {chunk}; {:.0} KiB per receive call; {verified} bytes verified",
        channel.describe(),
        bytes as f64 / elapsed.as_secs_f64() / 1e9,
        cpu / (bytes as f64 / 1e9),
        bytes,
        elapsed.as_secs_f64(),
        stats.bytes_received as f64 / stats.wire_calls as f64 / 1024.0,
    );
    Ok(())
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

/// Which chunks a pass moves: sequence numbers go on from pass to pass.
#[derive(Clone)]
struct Pass {
    first: u64,
    count: u64,
    chunk: usize,
    /// Chunks in the working set.
    places: usize,
}

impl Pass {
    fn place(&self, sequence: u64) -> usize {
        (sequence - self.first) as usize % self.places
    }

    fn start(&self, sequence: u64) -> usize {
        self.place(sequence) * self.chunk
    }
}

/// What the receiver says.
enum News {
    /// So many windows were opened.
    Opened(u64),
    /// This chunk was placed.
    Placed(u64),
}

/// Sends as far as the peer says that its windows are open.
fn send(
    channel: &mut dyn Channel,
    memory: &Region,
    pass: &Pass,
    news: &mpsc::Receiver<News>,
) -> Result<(), Failure> {
    let end = pass.first + pass.count;
    let (mut next, mut ended, mut open) = (pass.first, pass.first, pass.first);
    let mut placed = 0;
    while ended < end {
        if placed < pass.count {
            match news.recv()? {
                News::Opened(windows) => open = windows,
                News::Placed(sequence) => {
                    channel.placed(sequence)?;
                    placed += 1;
                }
            }
        } else {
            wait(channel)?;
        }
        while next < open {
            let start = pass.start(next);
            let request = SendChunk {
                token: next,
                sequence: next,
                transfer: next,
                offset: 0,
                index: 0,
                total: pass.chunk as u64,
                window: next,
                tag: 0,
                source: memory.slice(start..start + pass.chunk)?,
                fence: None,
            };
            match channel.post_send(request)? {
                Posted::Accepted => next += 1,
                Posted::Full(_) => break,
            }
        }
        ended += ends(channel)?.len() as u64;
    }
    Ok(())
}

/// Opens a window for each chunk as soon as the chunk that had its memory before has arrived.
fn receive(
    channel: &mut dyn Channel,
    memory: &Region,
    pass: &Pass,
    news: &mpsc::Sender<News>,
) -> Result<(), Failure> {
    let end = pass.first + pass.count;
    let (mut next, mut ended) = (pass.first, pass.first);
    let mut is_open = vec![false; pass.places];
    while ended < end {
        let most = u64::from(tcpx_net::tcp::WINDOW);
        while next < end && next - ended < most && !is_open[pass.place(next)] {
            is_open[pass.place(next)] = true;
            let start = pass.start(next);
            channel.open_window(ReceiveWindow {
                token: next,
                window: next,
                cut: ChunkPlan::even(pass.chunk as u64, u32::try_from(pass.chunk)?),
                destination: memory.slice(start..start + pass.chunk)?,
                fence: None,
            })?;
            next += 1;
            news.send(News::Opened(next))?;
        }
        wait(channel)?;
        for token in ends(channel)? {
            is_open[pass.place(token)] = false;
            news.send(News::Placed(token))?;
            ended += 1;
        }
    }
    Ok(())
}

/// The requests that have ended since the last call.
fn ends(channel: &mut dyn Channel) -> Result<Vec<u64>, Failure> {
    let (mut out, mut tokens) = (Vec::new(), Vec::new());
    channel.poll(&mut out)?;
    for completion in out {
        match completion {
            Completion::Sent { token } | Completion::Closed { token, .. } => tokens.push(token),
            Completion::Failed { error, .. } | Completion::NotPlaced { error, .. } => {
                return Err(error.into());
            }
            _ => {}
        }
    }
    Ok(tokens)
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

/// Processor time of this process so far.
fn processor_seconds() -> f64 {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9
}

/// The same bytes through sockets, without any protocol: each stream has its part of the working
/// set and two threads.
fn plain(streams: usize, chunk: usize, total: usize, working_set: usize) -> Result<(), Failure> {
    let congestion_control = |socket: SockRef<'_>| {
        ["cubic", "reno"]
            .iter()
            .any(|name| socket.set_tcp_congestion(name.as_bytes()).is_ok())
    };
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    congestion_control(SockRef::from(&listener));
    listener.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())?;
    listener.listen(64)?;
    let listener: TcpListener = listener.into();
    let address = listener.local_addr()?;
    let places = (working_set / streams / chunk).max(1);
    let count = (total / streams / chunk).max(1);
    let start = Arc::new(Barrier::new(2 * streams + 1));
    let mut threads = Vec::new();
    for _ in 0..streams {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        congestion_control(SockRef::from(&socket));
        socket.connect(&address.into())?;
        let mut sending: TcpStream = socket.into();
        let (mut receiving, _) = listener.accept()?;
        let (at_sender, at_receiver) = (Arc::clone(&start), Arc::clone(&start));
        threads.push(std::thread::spawn(move || -> std::io::Result<()> {
            let memory = pattern(places * chunk);
            at_sender.wait();
            (0..count).try_for_each(|index| {
                let start = index % places * chunk;
                sending.write_all(&memory[start..start + chunk])
            })
        }));
        threads.push(std::thread::spawn(move || -> std::io::Result<()> {
            let mut memory = vec![1; places * chunk];
            at_receiver.wait();
            (0..count).try_for_each(|index| {
                let start = index % places * chunk;
                receiving.read_exact(&mut memory[start..start + chunk])
            })
        }));
    }
    start.wait();
    let started = Instant::now();
    let cpu = processor_seconds();
    for thread in threads {
        thread.join().map_err(|_| "a stream's thread panicked")??;
    }
    let elapsed = started.elapsed().as_secs_f64();
    let bytes = streams * count * chunk;
    println!(
        "plain, {streams} streams: {:.2} GB/s, {:.3} CPU s/GB, {bytes} bytes in {elapsed:.3} s, calls of {chunk}",
        bytes as f64 / elapsed / 1e9,
        (processor_seconds() - cpu) / (bytes as f64 / 1e9),
    );
    Ok(())
}

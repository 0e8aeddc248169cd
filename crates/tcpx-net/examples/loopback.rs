//! Bandwidth of one channel between two ends of this process, host memory to host memory.
//!
//! `cargo run --release -p tcpx-net --example loopback -- [LANES] [CHUNK_BYTES] [TOTAL_BYTES] [staged]`
//!
//! The timed pass reuses a working set of 32 MiB per side; a second pass over fresh patterns checks
//! every byte.

use std::error::Error;
use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tcpx_memory::Region;
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
    let lanes = u16::try_from(number(0, 0)?)?;
    let chunk = number(1, 1 << 20)?.clamp(1, WORKING_SET);
    let total = number(2, 16 << 30)?;
    let stage_host = arguments.get(3).is_some_and(|word| word == "staged");
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
        stage_host,
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
    let memory = Region::host(WORKING_SET)?;
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
            workers: &[],
            lanes: None,
        };
        let mut channels = client_network.establish(&setup, &mut Wire(to_server, at_client))?;
        let mut channel = channels.pop().ok_or("no channel")?;
        let memory = Region::host(WORKING_SET)?;
        memory.write_from(0, &pattern())?;
        sender_passes
            .iter()
            .try_for_each(|pass| send(&mut *channel, &memory, pass))?;
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
        workers: &[],
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
    if !memory.with_bytes(..verified, |held| held == &expected[..verified])? {
        return Err("the second pass arrived with other bytes than were sent".into());
    }
    let bytes = timed * chunk as u64;

    let stats = channel.stats();
    println!(
        "{}: {:.2} GB/s, {} bytes in {:.3} s, chunks of {chunk}; {:.0} KiB per receive call; {verified} bytes verified",
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

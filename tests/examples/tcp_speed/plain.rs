//! What sockets alone do: a thread a lane and side, blocking calls, host memory.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use rustix::net::sockopt::set_tcp_congestion;

use crate::cases::{Figures, cpu};
use crate::link::Pipe;
use crate::{Outcome, text};

/// Lanes, bytes of a call, bytes in all, bytes of memory a side.
pub(crate) fn run<R: Read, W: Write>(
    leads: bool,
    pipe: &mut Pipe<R, W>,
    [lanes, call, bytes, set]: [usize; 4],
) -> Outcome<Figures> {
    let streams: Vec<TcpStream> = if leads {
        let address = pipe.hear()?;
        let connect = || TcpStream::connect(&address).map_err(text);
        (0..lanes).map(|_| connect()).collect::<Outcome<_>>()?
    } else {
        let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(text)?;
        // A host's own default may pace a local link; a lane asks for the same.
        if set_tcp_congestion(&listener, "cubic").is_err() {
            set_tcp_congestion(&listener, "reno").map_err(text)?;
        }
        pipe.tell(&listener.local_addr().map_err(text)?.to_string())?;
        let accept = || listener.accept().map(|(stream, _)| stream).map_err(text);
        (0..lanes).map(|_| accept()).collect::<Outcome<_>>()?
    };
    let mut memory = vec![1u8; set.max(lanes * call)];
    let (pieces, taken) = (bytes.div_ceil(call), AtomicUsize::new(0));
    let share = memory.len() / lanes / call * call;
    pipe.meet()?;
    let (start, spent) = (Instant::now(), cpu());
    let moved: usize = thread::scope(|scope| {
        let lanes: Vec<_> = streams
            .into_iter()
            .zip(memory.chunks_exact_mut(share))
            .map(|(stream, part)| {
                let taken = &taken;
                scope.spawn(move || {
                    if leads {
                        write(stream, part, call, || {
                            taken.fetch_add(1, Ordering::Relaxed) < pieces
                        })
                    } else {
                        read(stream, part, call)
                    }
                })
            })
            .collect();
        lanes.into_iter().try_fold(0, |sum, lane| {
            let moved = lane.join().map_err(|_| "a lane panicked".to_owned())?;
            Ok::<_, String>(sum + moved.map_err(text)?)
        })
    })?;
    let (seconds, mut spent) = (start.elapsed().as_secs_f64(), cpu() - spent);
    if leads {
        spent += pipe.hear()?.parse::<f64>().map_err(text)?;
    } else {
        pipe.tell(&spent.to_string())?;
    }
    let gigabytes = moved as f64 / 1e9;
    Ok(Figures {
        gb_per_second: gigabytes / seconds,
        latency_us: None,
        cpu_seconds_per_gb: spent / gigabytes,
    })
}

fn write(
    mut stream: TcpStream,
    part: &mut [u8],
    call: usize,
    mut more: impl FnMut() -> bool,
) -> std::io::Result<usize> {
    let mut moved = 0;
    for piece in (0..part.len() / call).cycle() {
        if !more() {
            break;
        }
        stream.write_all(&part[piece * call..(piece + 1) * call])?;
        moved += call;
    }
    Ok(moved)
}

fn read(mut stream: TcpStream, part: &mut [u8], call: usize) -> std::io::Result<usize> {
    let (mut moved, mut at) = (0, 0);
    loop {
        let end = part.len().min(at + call);
        match stream.read(&mut part[at..end])? {
            0 => return Ok(moved),
            bytes => {
                moved += bytes;
                at = (at + bytes) % part.len();
            }
        }
    }
}

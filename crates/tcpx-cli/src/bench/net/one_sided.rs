//! Messages that one end alone moves: puts into windows of the other end, gets from them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tcpx::request::PreparedBatch;
use tcpx::{Region, Rights, Transfer, Window, WindowKey};

use super::engine::{End, Part, Pins, after};
use super::orders::{Layout, Mode, Op, Run};
use crate::error::Error;

/// What an end is notified of when the other is done.
const DONE: &[u8] = b"done";
/// What comes behind each put of a ping-pong.
const BALL: &[u8] = b"there";
/// How long one look for a notification takes; the connection's own limits bound all of them.
const LOOK: Duration = Duration::from_secs(1);
/// How long the other end may take to let go of a window when it is done.
const LETTING_GO: Duration = Duration::from_secs(10);

impl End<'_> {
    /// The part of one end where one alone moves a message; see [`End::take_part`].
    pub(super) fn move_alone(
        &self,
        run: &Run,
        measures: bool,
        pins: &Pins,
        ready: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Part, Error> {
        let both = run.mode == Mode::Both;
        // Each end moves something into, or out of, the other's windows.
        let mutual = both || (run.mode == Mode::Latency && run.op == Op::Put);
        let windows = match !measures || mutual {
            true => self.expose(run)?,
            false => Vec::new(),
        };
        ready()?;
        if !windows.is_empty() {
            self.tell_keys(&windows)?;
        }
        let keys = match measures || mutual {
            true => self.keys()?,
            false => Vec::new(),
        };
        let started = Instant::now();
        let mut part = match run.mode {
            Mode::Latency if measures => self.half_trips(run, &keys, pins)?,
            Mode::Latency if mutual => self.send_back(run, &keys, pins)?,
            _ if measures || both => self.move_all(run, &keys, pins)?,
            _ => Part::default(),
        };
        if measures || both {
            self.connection.notify(DONE)?.wait()?;
        }
        if !measures || both {
            self.expect(DONE)?;
        }
        if both {
            part.elapsed = started.elapsed();
        }
        for window in windows {
            window.revoke(LETTING_GO)?;
        }
        Ok(part)
    }

    /// The answers to the other end's half trips.
    fn send_back(&self, run: &Run, keys: &[WindowKey], pins: &Pins) -> Result<Part, Error> {
        for index in 0..run.count {
            self.expect(BALL)?;
            self.throw(run, keys, index)?.wait()?;
            pins.look();
        }
        Ok(Part::default())
    }

    /// Opens what the other end writes, or reads.
    fn expose(&self, run: &Run) -> Result<Vec<Window>, Error> {
        let (regions, rights): (&[Region], _) = match run.op {
            Op::Get | Op::BatchGet => (self.buffers.sources(), Rights::Get),
            _ => (self.buffers.sinks(), Rights::Put),
        };
        let depth = usize::from(run.depth).min(regions.len());
        let open = |region| Ok(self.connection.expose(self.slice(region)?, rights)?);
        regions[..depth].iter().map(open).collect()
    }

    fn tell_keys(&self, windows: &[Window]) -> Result<(), Error> {
        let keys: Vec<u8> = windows
            .iter()
            .flat_map(|window| window.key().to_bytes())
            .collect();
        self.connection.notify(&keys)?.wait()?;
        Ok(())
    }

    /// The keys of the other end's windows.
    fn keys(&self) -> Result<Vec<WindowKey>, Error> {
        let message = self.notification()?;
        let keys: Result<Vec<_>, _> = message
            .chunks(WindowKey::BYTES)
            .map(WindowKey::from_bytes)
            .collect();
        match keys {
            Ok(keys) if !keys.is_empty() => Ok(keys),
            _ => Err(Error::unexpected(
                "the keys of the other end's windows",
                format!("{} other bytes", message.len()),
            )),
        }
    }

    fn notification(&self) -> Result<Vec<u8>, Error> {
        loop {
            if let Some(bytes) = self.connection.notification(LOOK)? {
                return Ok(bytes);
            }
        }
    }

    fn expect(&self, expected: &[u8]) -> Result<(), Error> {
        let found = self.notification()?;
        if found == expected {
            return Ok(());
        }
        Err(Error::unexpected(
            "the other end's notification",
            format!("{} other bytes", found.len()),
        ))
    }

    /// Starts a put or a get.
    fn move_one(&self, run: &Run, keys: &[WindowKey], index: u32) -> Result<Transfer, Error> {
        let place = index as usize % keys.len();
        let key = &keys[place];
        let batch = self.connection.batch().after(after(run));
        if run.op == Op::Get {
            let sink = self.slice(&self.buffers.sinks()[place])?;
            return Ok(batch.get(sink, key, 0).start()?);
        }
        let source = self.slice(&self.buffers.sources()[place])?;
        Ok(batch.put(source, key, 0).start()?)
    }

    /// A batch for each window, where messages are moved in pieces.
    fn batches(&self, run: &Run, keys: &[WindowKey]) -> Result<Vec<PreparedBatch>, Error> {
        let (regions, gets) = match run.op {
            Op::Batch => (self.buffers.sources(), false),
            Op::BatchGet => (self.buffers.sinks(), true),
            Op::Send | Op::Put | Op::Get => return Ok(Vec::new()),
        };
        let batch = |(key, region)| {
            let whole = self.slice(region)?;
            let mut batch = self.connection.batch().after(after(run));
            for start in starts(run) {
                let piece = start..(start + run.cut().bytes as usize).min(whole.len());
                let piece = whole.slice(piece).map_err(Error::memory("take a piece"))?;
                batch = match gets {
                    true => batch.get(piece, key, start as u64),
                    false => batch.put(piece, key, start as u64),
                };
            }
            Ok(batch.prepare()?)
        };
        keys.iter().zip(regions).map(batch).collect()
    }

    fn move_all(&self, run: &Run, keys: &[WindowKey], pins: &Pins) -> Result<Part, Error> {
        let mut times = Vec::with_capacity(run.count as usize);
        let mut running: VecDeque<Transfer> = VecDeque::with_capacity(keys.len());
        let batches = self.batches(run, keys)?;
        let started = Instant::now();
        for index in 0..run.count {
            // As many windows as messages in flight: none is used twice at a time.
            if running.len() >= keys.len()
                && let Some(oldest) = running.pop_front()
            {
                times.push(oldest.wait()?.elapsed);
                pins.look();
            }
            let place = index as usize % keys.len();
            running.push_back(match batches.get(place) {
                Some(batch) => batch.start()?,
                None => self.move_one(run, keys, index)?,
            });
        }
        for transfer in running {
            times.push(transfer.wait()?.elapsed);
        }
        Ok(Part {
            times,
            elapsed: started.elapsed(),
            ..Part::default()
        })
    }

    /// A put and what comes behind it.
    fn throw(&self, run: &Run, keys: &[WindowKey], index: u32) -> Result<Transfer, Error> {
        let place = index as usize % keys.len();
        let source = self.slice(&self.buffers.sources()[place])?;
        let put = self.connection.put(source, &keys[place], 0).notify(BALL);
        Ok(put.after(after(run)).start()?)
    }

    /// Puts there and back with notifications, or gets: a request there, the bytes back.
    fn half_trips(&self, run: &Run, keys: &[WindowKey], pins: &Pins) -> Result<Part, Error> {
        let mut times = Vec::with_capacity(run.count as usize);
        let started = Instant::now();
        for index in 0..run.count {
            let now = Instant::now();
            match run.op {
                Op::Get => {
                    self.move_one(run, keys, index)?.wait()?;
                    times.push(now.elapsed() / 2);
                }
                _ => {
                    let put = self.throw(run, keys, index)?;
                    self.expect(BALL)?;
                    times.push(now.elapsed() / 2);
                    put.wait()?;
                }
            }
            pins.look();
        }
        Ok(Part {
            times,
            elapsed: started.elapsed(),
            ..Part::default()
        })
    }
}

/// Where the pieces of a message begin, in the order of their batch.
fn starts(run: &Run) -> Vec<usize> {
    let cut = run.cut();
    let mut starts: Vec<usize> = (0..run.bytes as usize)
        .step_by(cut.bytes as usize)
        .collect();
    match cut.layout {
        Layout::Dense => {}
        Layout::Strided => starts.sort_by_key(|start| start / cut.bytes as usize % 2),
        // Neighbours in this order are far from each other, and no two distances alike.
        Layout::Shuffled => starts.sort_by_key(|start| {
            let mixed = (*start as u64 / cut.bytes).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        }),
    }
    starts
}

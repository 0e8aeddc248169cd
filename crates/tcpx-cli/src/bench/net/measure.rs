//! The measuring end: every case in every round, contenders taking turns.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tcpx_net::{ChannelStats, congestion};

use super::case::{Case, Contender, cases, contenders};
use super::engine::Part;
use super::iperf3;
use super::meter::Meter;
use super::orders::{self, At, Cost, Drive, MOST_MESSAGES, Mode, Op, Order, RawRun, Run};
use super::raw;
use super::report;
use crate::args::bench::NetArgs;
use crate::error::Error;
use crate::output::say::{self, aside};
use crate::perf::summary::Latency;
use crate::sizes::Size;

/// What one measurement gave.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// 10^9 payload bytes a second; sums of both directions where there are two.
    pub(super) rate: f64,
    /// Times of the messages in microseconds; half round trips where that is the mode.
    pub(super) latency: Option<Latency>,
    /// Processor seconds for 10^9 bytes, here and at the other end.
    pub(super) cpu: [f64; 2],
    /// Most bytes of pinned slots in use, here and at the other end.
    pub(super) pinned: [u64; 2],
    /// TCP bytes of lanes and control connection for each payload byte; `None` where they cannot be seen.
    pub(super) tcp: Option<f64>,
}

/// A contender in a case, over all rounds.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) case: Case,
    pub(super) contender: Contender,
    pub(super) samples: Vec<Sample>,
    /// Messages of one measurement.
    count: u32,
}

impl Series {
    #[cfg(test)]
    pub(super) fn new(case: Case, contender: Contender, samples: Vec<Sample>) -> Self {
        Self {
            case,
            contender,
            samples,
            count: 1,
        }
    }
}

/// Everything that was measured.
#[derive(Debug)]
pub(super) struct Results {
    pub(super) series: Vec<Series>,
    /// Streams of the connection.
    pub(super) streams: u16,
    /// What plain streams and iperf3 ran with.
    pub(super) notes: Vec<String>,
    /// Whether iperf3 ran under another congestion control: then its rates say nothing about ours.
    pub(super) iperf3_differs: bool,
}

/// The measuring end of a benchmark.
pub(super) struct Bench<'a> {
    pub(super) meter: Meter<'a>,
    pub(super) args: &'a NetArgs,
}

impl Bench<'_> {
    /// Verifies every size, then measures. No figure is given for a size whose contents were not proven.
    pub(super) fn run(&mut self) -> Result<Results, Error> {
        let cases = cases(self.args);
        let streams = u16::try_from(self.meter.connection.statistics().streams).unwrap_or(u16::MAX);
        let mut results = Results {
            series: Vec::new(),
            streams: streams.max(1),
            notes: Vec::new(),
            iperf3_differs: false,
        };
        let mut proven = 0;
        for case in &cases {
            let same = cases.iter().filter(|other| other.bytes == case.bytes);
            let deepest = same.map(|other| other.depth).max().unwrap_or(case.depth);
            if case.bytes != proven {
                let contenders = contenders(case, &cases, self.args);
                for op in contenders.iter().filter_map(|contender| contender.op()) {
                    self.meter.verify(op, case.bytes, deepest)?;
                }
                proven = case.bytes;
                if !say::is_json() {
                    aside!("measuring messages of {}, contents verified", Size(proven));
                }
            }
            // The rounds of a case follow each other, so that a size's memory is made once; contenders
            // take turns within a round, and another one begins each time.
            let first = results.series.len();
            for contender in contenders(case, &cases, self.args) {
                let count = self.calibrate(case, contender, &mut results)?;
                results.series.push(Series {
                    case: case.clone(),
                    contender,
                    samples: Vec::new(),
                    count,
                });
            }
            let here = results.series.len() - first;
            for round in 0..self.args.rounds {
                for turn in 0..here {
                    let place = first + (turn + round as usize) % here;
                    let (contender, count) =
                        (results.series[place].contender, results.series[place].count);
                    let sample = self.sample(case, contender, count, &mut results)?;
                    if let Some(folder) = &self.args.runs {
                        report::write_run(folder, case, contender, &sample)?;
                    }
                    results.series[place].samples.push(sample);
                }
            }
        }
        self.meter.end()?;
        Ok(results)
    }

    fn limit(&self) -> Duration {
        self.meter.limit
    }

    fn patience(&self, case: &Case) -> Duration {
        let run = case.run(Op::Send, 1, self.args);
        self.meter.patience(&run, self.args.span.0)
    }

    /// How many messages take about as long as one measurement should.
    fn calibrate(
        &mut self,
        case: &Case,
        contender: Contender,
        results: &mut Results,
    ) -> Result<u32, Error> {
        if contender == Contender::Iperf3 {
            return Ok(0);
        }
        if matches!(contender, Contender::Raw(_)) && case.mode != Mode::Latency {
            self.verify_plain(case, results.streams)?;
        }
        let least = u32::from(case.depth).max(2);
        let most = u64::from(MOST_MESSAGES);
        let mut count = least;
        // A few messages say little about many: twice is enough to come near.
        for _ in 0..2 {
            let sample = self.sample(case, contender, count, results)?;
            let directions = if case.mode == Mode::One { 1.0 } else { 2.0 };
            let each = case.bytes as f64 * directions / 1e9 / sample.rate.max(f64::MIN_POSITIVE);
            let wanted = self.args.span.0.as_secs_f64() / each;
            count = (wanted.clamp(0.0, most as f64) as u32).clamp(least, MOST_MESSAGES);
        }
        Ok(count)
    }

    fn sample(
        &mut self,
        case: &Case,
        contender: Contender,
        count: u32,
        results: &mut Results,
    ) -> Result<Sample, Error> {
        let run = case.run(contender.op().unwrap_or(Op::Send), count, self.args);
        match contender {
            Contender::Ours(_) => self.ours(&run),
            Contender::Raw(drive) => self.raw(case, &run, drive, results),
            Contender::Iperf3 => self.iperf3(case, results),
        }
    }

    fn ours(&mut self, run: &Run) -> Result<Sample, Error> {
        let before = self.meter.connection.statistics();
        let (part, theirs) = self.meter.run(run, self.args.span.0)?;
        let after = self.meter.connection.statistics();
        let moved = run.moved();
        let mut sample = Sample::of(moved, part.elapsed, [part.cost, theirs]);
        sample.latency = Latency::of(&part.times);
        sample.tcp = tcp_bytes(&before, &after).map(|tcp| tcp as f64 / moved as f64);
        Ok(sample)
    }

    fn raw(
        &self,
        case: &Case,
        run: &Run,
        drive: Drive,
        results: &mut Results,
    ) -> Result<Sample, Error> {
        let streams = if case.mode == Mode::Latency {
            1
        } else {
            results.streams
        };
        let order = RawRun {
            run: *run,
            streams,
            drive,
        };
        let (part, theirs, elapsed, control) = self.plain(case, &order)?;
        let note = format!("raw: {} streams, {control}", results.streams);
        if case.mode != Mode::Latency && !results.notes.contains(&note) {
            results.notes.push(note);
        }
        let both = if case.mode == Mode::One { 1 } else { 2 };
        let mut sample = Sample::of(order.bytes() * both, elapsed, [part.cost, theirs]);
        if case.mode == Mode::Latency {
            sample.rate = Sample::of(run.moved(), elapsed, [Cost::default(); 2]).rate;
        }
        sample.latency = Latency::of(&part.times);
        Ok(sample)
    }

    /// Has plain loops carry fresh contents once; every byte is compared.
    fn verify_plain(&self, case: &Case, streams: u16) -> Result<(), Error> {
        let mut run = case.run(Op::Send, case.depth.into(), self.args);
        run.seed = Some(crate::key::seed()?);
        let order = RawRun {
            run,
            streams,
            drive: Drive::Blocking,
        };
        self.plain(case, &order).map(drop)
    }

    fn plain(&self, case: &Case, order: &RawRun) -> Result<(Part, Cost, Duration, String), Error> {
        let mut memory = raw::Memory::new(order, true);
        let patience = self.patience(case);
        let place = orders::expect_place(self.meter.connection, patience)?;
        let reply = orders::give(self.meter.connection, &Order::Raw(*order), patience)?;
        let (at, there) = self.meet(place)?;
        let congestion = orders::same_congestion(self.meter.connection);
        let started = Instant::now();
        let measured = raw::measure(order, &mut memory, at, &congestion, self.limit());
        let theirs = orders::finished(reply, self.patience(case));
        let elapsed = started.elapsed();
        match (measured, theirs) {
            (_, Err(error @ Error::Peer(_))) | (Err(error), _) | (_, Err(error)) => Err(error),
            (Ok((part, control)), Ok(theirs)) => {
                let elapsed = if case.mode == Mode::Latency {
                    part.elapsed
                } else {
                    elapsed
                };
                let control = controls(&control, there.as_deref());
                Ok((part, theirs, elapsed, control))
            }
        }
    }

    /// Where to meet, and the congestion control there.
    fn meet(
        &self,
        place: crate::messages::Expected,
    ) -> Result<(SocketAddr, Option<String>), Error> {
        let At { port, congestion } = place.wait_at_most(self.limit(), "where to meet")?;
        // Its address as it is: one of a single link says of which.
        let mut at = self.meter.connection.peer().address;
        at.set_port(port);
        Ok((at, congestion))
    }

    fn iperf3(&self, case: &Case, results: &mut Results) -> Result<Sample, Error> {
        let place = orders::expect_place(self.meter.connection, self.limit())?;
        let reply = orders::give(self.meter.connection, &Order::Iperf3, self.limit())?;
        let (at, _) = self.meet(place)?;
        let ours = self
            .meter
            .connection
            .congestion_control()
            .unwrap_or_default();
        let usual = congestion::usual().unwrap_or_default();
        let outcome = iperf3::measure(
            at,
            case.bytes,
            results.streams,
            self.args.span.0,
            Some(ours.as_str()).filter(|ours| !ours.is_empty() && *ours != usual),
            self.limit(),
        );
        let theirs = orders::finished(reply, self.limit());
        let outcome = outcome?;
        theirs?;
        let [here, _] = &outcome.congestion;
        let used = controls(here, Some(&outcome.congestion[1]));
        let mut note = format!("iperf3: {} streams, {used}", results.streams);
        if *here != ours {
            note.push_str(&format!(", ours {ours}, so the two are not compared"));
            results.iperf3_differs = true;
        } else if paces_on(&usual, &ours, at) {
            note.push_str(&format!(
                ", which it sets when {usual} paces its streams already and goes on to, so the two are not compared: --congestion {usual} gives both the same"
            ));
            results.iperf3_differs = true;
        }
        if !results.notes.contains(&note) {
            results.notes.push(note);
        }
        Ok(Sample {
            rate: outcome.gb_per_second,
            cpu: outcome.cpu,
            ..Sample::default()
        })
    }
}

/// The congestion controls of both ends, for a note.
fn controls(here: &str, there: Option<&str>) -> String {
    match there {
        Some(there) if there != here && !there.is_empty() => {
            format!("{here} here and {there} there")
        }
        _ => here.to_owned(),
    }
}

/// Whether streams that began under `usual` go on being paced after they were given `ours`. Loopback has
/// no queue that a pace could hold up.
fn paces_on(usual: &str, ours: &str, at: SocketAddr) -> bool {
    congestion::paces(usual) && usual != ours && !at.ip().is_loopback()
}

/// TCP bytes of this end between two looks, those of small messages on the control stream among them; `None`
/// where payload travelled out of sight.
fn tcp_bytes(before: &ChannelStats, after: &ChannelStats) -> Option<u64> {
    let payload = |stats: &ChannelStats| stats.bytes_sent + stats.bytes_received;
    let lanes = |stats: &ChannelStats| stats.tcp_bytes_sent + stats.tcp_bytes_received;
    let control = |stats: &ChannelStats| stats.control_bytes_sent + stats.control_bytes_received;
    let between = |what: &dyn Fn(&ChannelStats) -> u64| what(after).saturating_sub(what(before));
    let (payload, lanes, control) = (between(&payload), between(&lanes), between(&control));
    let is_seen = control > 0 && (payload == 0 || lanes > 0);
    is_seen.then_some(lanes + control)
}

impl Sample {
    fn of(bytes: u64, elapsed: Duration, costs: [Cost; 2]) -> Self {
        let gigabytes = (bytes as f64 / 1e9).max(f64::MIN_POSITIVE);
        Self {
            rate: gigabytes / elapsed.as_secs_f64().max(1e-9),
            cpu: costs.map(|cost| cost.cpu_us as f64 / 1e6 / gigabytes),
            pinned: costs.map(|cost| cost.pinned),
            ..Self::default()
        }
    }
}

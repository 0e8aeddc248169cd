//! Cases beside peers: every case in every round, its contenders in turn.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::json;
use tcpx::Congestion;

use crate::end::depth;
use crate::meter::{Meter, Sample, calibrate};
use crate::orders::{Mode, Op, Run};
use crate::process::{Figures, Metric, Process};
use crate::report::{Row, size};
use crate::statistics::median;
use crate::{Error, iperf3, plain};

/// Who is measured beside tcpx.
#[derive(Debug)]
pub enum Peer {
    /// Plain loops.
    Plain,
    /// The program of that name.
    Iperf3,
    /// Another library: its name, and a process in a group of its own that measures it on command.
    Other(String, Process),
}

impl Peer {
    fn name(&self) -> &str {
        match self {
            Self::Plain => "raw",
            Self::Iperf3 => "iperf3",
            Self::Other(name, _) => name,
        }
    }
}

/// What is measured, beside whom.
#[derive(Debug, Default)]
pub struct Plan {
    /// The cases, in this order; counts are found.
    pub cases: Vec<Run>,
    /// One-sided operations beside sends.
    pub ops: Vec<Op>,
    /// Those that stream also move pieces of so many bytes; 0: not.
    pub piece: u64,
    /// Who takes part.
    pub peers: Vec<Peer>,
    /// Rounds over the contenders of a case.
    pub rounds: u32,
    /// How long one measurement should take.
    pub span: Duration,
}

/// One who is measured in a case.
struct Contender {
    /// The place among the peers; none: tcpx.
    peer: Option<usize>,
    run: Run,
    rounds: Vec<Figures>,
}

/// What a case is called: `1 MiB, 8 in flight`.
pub fn title(run: &Run) -> String {
    let size = size(run.bytes);
    match run.mode {
        Mode::Latency => format!("{size}, half a round trip"),
        Mode::One | Mode::Back => format!("{size}, {} in flight", run.depth),
        Mode::Both => format!("{size}, {} in flight each way, sum", run.depth),
    }
}

impl Plan {
    /// Who is measured in this case. iperf3 knows no messages: it stands beside the deepest
    /// streaming.
    fn contenders(&self, case: &Run) -> Vec<Contender> {
        let run = |(op, piece)| Run { op, piece, ..*case };
        let mut moved = Vec::new();
        if matches!(case.mode, Mode::One | Mode::Latency) {
            moved.extend(self.ops.iter().map(|op| run((*op, 0))));
        }
        if case.mode == Mode::One && (1..case.bytes).contains(&self.piece) {
            moved.extend(self.ops.iter().map(|op| run((*op, self.piece))));
        }
        let sent = run((Op::Send, 0));
        let mut all = vec![(None, sent)];
        all.extend(moved.iter().map(|run| (None, *run)));
        let streams = self.cases.iter().filter(|other| other.mode == Mode::One);
        let like = streams.filter(|other| other.bytes == case.bytes);
        let deepest = like.map(|other| depth(other.bytes, other.depth)).max();
        let is_deepest = case.mode == Mode::One && deepest == Some(case.depth);
        for (at, peer) in self.peers.iter().enumerate() {
            match peer {
                Peer::Iperf3 if !is_deepest => {}
                Peer::Other(..) if !moved.is_empty() => {
                    all.extend(moved.iter().map(|run| (Some(at), *run)));
                }
                _ => all.push((Some(at), sent)),
            }
        }
        let contender = |(peer, run)| Contender {
            peer,
            run,
            rounds: Vec::new(),
        };
        all.into_iter().map(contender).collect()
    }

    fn name(&self, contender: &Contender) -> String {
        let who = contender.peer.map_or("tcpx", |at| self.peers[at].name());
        match (contender.run.op, contender.run.piece) {
            (Op::Send, _) => who.to_owned(),
            (op, 0) => format!("{who}, {op}"),
            (op, piece) => format!("{who}, {op}s of {}", size(piece)),
        }
    }

    /// Verifies every size, then measures. No figure is given for a size whose contents were not
    /// proven. `proven` hears of each size.
    ///
    /// # Errors
    /// Whatever tcpx, plain loops or iperf3 end with; another library that fails in a case is left
    /// out of it.
    pub fn measure(
        &mut self,
        meter: &mut Meter<'_>,
        mut proven: impl FnMut(u64),
    ) -> Result<(Vec<Row>, Vec<String>), Error> {
        let cases = self.cases.clone();
        let mut turns = Turns {
            plan: self,
            meter,
            notes: Vec::new(),
            iperf3_differs: false,
        };
        let mut rows = Vec::new();
        let mut last = 0;
        for case in &cases {
            let case = &Run {
                depth: depth(case.bytes, case.depth),
                ..*case
            };
            let contenders = turns.plan.contenders(case);
            if case.bytes != last {
                for own in contenders.iter().filter(|one| one.peer.is_none()) {
                    turns.meter.verify(&own.run)?;
                }
                last = case.bytes;
                proven(last);
            }
            rows.extend(turns.case(case, contenders)?);
        }
        Ok((rows, turns.notes))
    }
}

/// A plan that is under way.
struct Turns<'a, 'm> {
    plan: &'a mut Plan,
    meter: &'a mut Meter<'m>,
    /// What peers ran with, and who is left out.
    notes: Vec<String>,
    /// iperf3 ran under another congestion control: then its rates say nothing about ours.
    iperf3_differs: bool,
}

impl Turns<'_, '_> {
    /// The contenders of a case take turns within a round, and another one begins each time.
    fn case(&mut self, case: &Run, mut all: Vec<Contender>) -> Result<Vec<Row>, Error> {
        let span = self.plan.span;
        for contender in &mut all {
            let run = &contender.run;
            contender.run = match contender.peer.map(|at| &self.plan.peers[at]) {
                None => calibrate(run, span, |run| self.meter.run(run, span))?,
                Some(Peer::Plain) => calibrate(run, span, |run| self.plain(run))?,
                Some(Peer::Iperf3 | Peer::Other(..)) => *run,
            };
        }
        for round in 0..self.plan.rounds as usize {
            let mut failed = Vec::new();
            for turn in 0..all.len() {
                let at = (turn + round) % all.len();
                let (peer, run) = (all[at].peer, all[at].run);
                let peers = &self.plan.peers;
                let is_other = peer.is_some_and(|at| matches!(peers[at], Peer::Other(..)));
                match self.turn(peer, &run) {
                    Ok(figures) => all[at].rounds.push(figures),
                    Err(why) if is_other => {
                        let name = self.plan.name(&all[at]);
                        let out = format!("{name} is left out: ");
                        if !self.notes.iter().any(|note| note.starts_with(&out)) {
                            self.notes.push(format!("{out}{why}"));
                        }
                        failed.push(at);
                    }
                    Err(error) => return Err(error),
                }
            }
            let mut places = 0..;
            all.retain(|_| places.next().is_some_and(|at| !failed.contains(&at)));
        }
        let rows = all.iter().map(|contender| self.rows(case, contender, &all));
        Ok(rows.flatten().collect())
    }

    fn turn(&mut self, peer: Option<usize>, run: &Run) -> Result<Figures, Error> {
        let span = self.plan.span;
        let limit = self.meter.patience(run, span);
        let sample = match peer.map(|at| &mut self.plan.peers[at]) {
            None => self.meter.run(run, span)?,
            Some(Peer::Plain) => self.plain(run)?,
            Some(Peer::Iperf3) => return self.iperf3(run),
            Some(Peer::Other(_, process)) => {
                let group = i32::try_from(process.child.0.id())
                    .ok()
                    .and_then(Pid::from_raw);
                let signal = |signal| group.map(|group| kill_process_group(group, signal));
                signal(Signal::CONT);
                let case = json!({ "run": run, "ms": span.as_millis() as u64 });
                let measured = process.measure(&case, limit);
                if process.polls {
                    signal(Signal::STOP);
                }
                return measured.map_err(Error::system("measure"));
            }
        };
        Ok(sample.figures(run.mode))
    }

    /// As many streams as the connection has by now, and their congestion control.
    fn streams(&mut self, who: &str, run: &Run) -> (u16, Option<String>) {
        let connection = self.meter.connection;
        let control = connection.congestion_control();
        if run.mode == Mode::Latency {
            return (1, control);
        }
        let streams = u16::try_from(connection.statistics().streams).unwrap_or(u16::MAX);
        let used = control.as_deref().unwrap_or_default();
        self.note(format!("{who}: {streams} streams, {used}"));
        (streams.max(1), control)
    }

    fn plain(&mut self, run: &Run) -> Result<Sample, Error> {
        let (streams, control) = self.streams("raw", run);
        let control = control.map_or(Congestion::Automatic, Congestion::Named);
        plain::measure(run, streams, &control, self.meter.limit)
    }

    fn iperf3(&mut self, run: &Run) -> Result<Figures, Error> {
        let (streams, ours) = self.streams("iperf3", run);
        let (span, limit) = (self.plan.span, self.meter.limit);
        let outcome = iperf3::measure(run.bytes, streams, span, ours.as_deref(), limit)?;
        if ours.is_some_and(|ours| ours != outcome.congestion) {
            self.iperf3_differs = true;
            self.note(format!("iperf3 used {}: not compared", outcome.congestion));
        }
        Ok(Figures::from([
            (Metric::Rate, outcome.gb_per_second),
            (Metric::Cpu, outcome.cpu),
        ]))
    }

    fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Figures of one contender over all rounds; ours say how they stand to the others' of the same
    /// rounds.
    fn rows(&self, case: &Run, contender: &Contender, all: &[Contender]) -> Vec<Row> {
        let of = |contender: &Contender, metric| -> Vec<f64> {
            let rounds = contender.rounds.iter();
            rounds
                .filter_map(|figures| figures.get(&metric).copied())
                .collect()
        };
        let (main, unit) = match case.mode {
            Mode::Latency => (Metric::P50, "us"),
            _ => (Metric::Rate, "GB/s"),
        };
        let values = of(contender, main);
        let beside = all.iter().filter(|other| {
            let is_iperf3 = other
                .peer
                .is_some_and(|at| matches!(self.plan.peers[at], Peer::Iperf3));
            !(std::ptr::eq(*other, contender) || is_iperf3 && self.iperf3_differs)
        });
        let ratios = beside.map(|other| {
            let theirs = of(other, main);
            let pairs = values.iter().zip(&theirs).map(|(a, b)| a / b);
            let ratio = median(&pairs.collect::<Vec<_>>());
            format!("{ratio:.2} of {}", self.plan.name(other))
        });
        let notes = match contender.peer {
            None => ratios.collect::<Vec<_>>().join(", "),
            Some(_) => String::new(),
        };
        let name = format!("{}: {}", title(case), self.plan.name(contender));
        if case.mode != Mode::Latency {
            let row = Row::of(name, unit, &values).cpu(&of(contender, Metric::Cpu));
            return vec![Row { notes, ..row }];
        }
        let p50 = Row::of(format!("{name}, p50"), unit, &values);
        let mut rows = vec![Row { notes, ..p50 }];
        let p99 = of(contender, Metric::P99);
        if p99.len() == values.len() {
            rows.push(Row::of(format!("{name}, p99"), unit, &p99));
        }
        rows
    }
}

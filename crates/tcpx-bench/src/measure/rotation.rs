//! Cases beside peers: every case in every round, its contenders in turn.

use std::time::Duration;

use tcpx_net::congestion;

use crate::end::depth;
use crate::meter::{Meter, Sample, calibrate};
use crate::orders::{MOST_IN_FLIGHT, Mode, Op, Order, Run};
use crate::report::{Row, size};
use crate::statistics::median;
use crate::{Error, iperf3, plain};

/// What is measured, beside whom.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The cases, in this order; counts are found.
    pub cases: Vec<Run>,
    /// One-sided operations beside sends.
    pub ops: Vec<Op>,
    /// Those that stream also move pieces of so many bytes; 0: not.
    pub piece: u64,
    /// Plain loops take part.
    pub plain: bool,
    /// iperf3 takes part.
    pub iperf3: bool,
    /// Rounds over the contenders of a case.
    pub rounds: u32,
    /// How long one measurement should take.
    pub span: Duration,
}

/// Who is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contender {
    /// In pieces of so many bytes; 0: whole.
    Ours(Op, u64),
    Plain,
    Iperf3,
}

impl Contender {
    fn name(self) -> String {
        match self {
            Self::Ours(Op::Send, _) => "tcpx".to_owned(),
            Self::Ours(op, 0) => format!("tcpx, {op}"),
            Self::Ours(op, piece) => format!("tcpx, {op}s of {}", size(piece)),
            Self::Plain => "raw".to_owned(),
            Self::Iperf3 => "iperf3".to_owned(),
        }
    }
}

/// One figure of a measurement: a rate, or a median time.
#[derive(Clone, Copy, Debug)]
struct Figure {
    value: f64,
    p99: Option<f64>,
    cpu: f64,
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
    /// Who is measured in this case. iperf3 knows no messages: it stands beside the deepest streaming.
    fn contenders(&self, case: &Run) -> Vec<Contender> {
        let mut all = vec![Contender::Ours(Op::Send, 0)];
        if matches!(case.mode, Mode::One | Mode::Latency) {
            all.extend(self.ops.iter().map(|op| Contender::Ours(*op, 0)));
        }
        if case.mode == Mode::One && (1..case.bytes).contains(&self.piece) {
            all.extend(self.ops.iter().map(|op| Contender::Ours(*op, self.piece)));
        }
        if self.plain {
            all.push(Contender::Plain);
        }
        let streams = |other: &&Run| other.mode == Mode::One && other.bytes == case.bytes;
        let deepest = self
            .cases
            .iter()
            .filter(streams)
            .map(|other| other.depth)
            .max();
        if self.iperf3 && case.mode == Mode::One && Some(case.depth) == deepest {
            all.push(Contender::Iperf3);
        }
        all
    }

    /// Verifies every size, then measures. No figure is given for a size whose contents were not proven. `proven` hears
    /// of each size.
    ///
    /// # Errors
    /// Whatever a contender ends with.
    pub fn measure(
        &self,
        meter: &mut Meter<'_>,
        mut proven: impl FnMut(u64),
    ) -> Result<(Vec<Row>, Vec<String>), Error> {
        let streams = meter.connection.statistics().streams;
        let streams = u16::try_from(streams)
            .unwrap_or(u16::MAX)
            .clamp(1, MOST_IN_FLIGHT);
        let mut turns = Turns {
            plan: self,
            meter,
            streams,
            notes: Vec::new(),
            iperf3_differs: false,
        };
        let mut rows = Vec::new();
        let mut last = 0;
        for case in &self.cases {
            let case = &Run {
                depth: depth(case.bytes, case.depth),
                ..*case
            };
            let contenders = self.contenders(case);
            if case.bytes != last {
                for contender in &contenders {
                    if let Contender::Ours(..) = contender {
                        turns.meter.verify(&self.run(case, *contender))?;
                    }
                }
                last = case.bytes;
                proven(last);
            }
            rows.extend(turns.case(case, &contenders)?);
        }
        Ok((rows, turns.notes))
    }

    fn run(&self, case: &Run, contender: Contender) -> Run {
        let (op, piece) = match contender {
            Contender::Ours(op, piece) => (op, piece),
            Contender::Plain | Contender::Iperf3 => (Op::Send, 0),
        };
        Run { op, piece, ..*case }
    }
}

/// A plan that is under way.
struct Turns<'a, 'm> {
    plan: &'a Plan,
    meter: &'a mut Meter<'m>,
    /// Of the connection.
    streams: u16,
    /// What peers ran with.
    notes: Vec<String>,
    /// iperf3 ran under another congestion control: then its rates say nothing about ours.
    iperf3_differs: bool,
}

impl Turns<'_, '_> {
    /// The contenders of a case take turns within a round, and another one begins each time.
    fn case(&mut self, case: &Run, contenders: &[Contender]) -> Result<Vec<Row>, Error> {
        let mut runs = Vec::new();
        for contender in contenders {
            let mut run = self.plan.run(case, *contender);
            run.count = match contender {
                Contender::Ours(..) => self.meter.calibrate(&run, self.plan.span)?,
                Contender::Plain => calibrate(&run, self.plan.span, |run| Ok(self.plain(run)?.0))?,
                Contender::Iperf3 => 0,
            };
            runs.push((*contender, run, Vec::new()));
        }
        let all = runs.len();
        for round in 0..self.plan.rounds as usize {
            for turn in 0..all {
                let at = (turn + round) % all;
                let (contender, run) = (runs[at].0, runs[at].1);
                let figure = self.figure(contender, &run)?;
                runs[at].2.push(figure);
            }
        }
        let mut rows = Vec::new();
        for (contender, _, figures) in &runs {
            rows.extend(self.rows(case, *contender, figures, &runs));
        }
        Ok(rows)
    }

    fn figure(&mut self, contender: Contender, run: &Run) -> Result<Figure, Error> {
        let sample = match contender {
            Contender::Ours(..) => self.meter.run(run, self.plan.span)?,
            Contender::Plain => {
                let (sample, control) = self.plain(run)?;
                if run.mode != Mode::Latency {
                    self.note(format!("raw: {} streams, {control}", self.streams));
                }
                sample
            }
            Contender::Iperf3 => return self.iperf3(run),
        };
        let latency = sample.latency().filter(|_| run.mode == Mode::Latency);
        Ok(Figure {
            value: latency.map_or_else(|| sample.rate(), |latency| latency.p50),
            p99: latency.and_then(|latency| latency.p99),
            cpu: sample.cpu(),
        })
    }

    fn plain(&mut self, run: &Run) -> Result<(Sample, String), Error> {
        let streams = if run.mode == Mode::Latency {
            1
        } else {
            self.streams
        };
        plain::measure(self.meter, run, streams, self.plan.span)
    }

    fn iperf3(&mut self, run: &Run) -> Result<Figure, Error> {
        let limit = self.meter.limit;
        self.meter.talk.say(&Order::Iperf3)?;
        let (at, _) = plain::meet(self.meter, limit)?;
        let ours = self
            .meter
            .connection
            .congestion_control()
            .unwrap_or_default();
        let usual = congestion::usual().unwrap_or_default();
        let asked = Some(ours.as_str()).filter(|ours| !ours.is_empty() && *ours != usual);
        let outcome = iperf3::measure(at, run.bytes, self.streams, self.plan.span, asked, limit);
        let theirs = self.meter.talk.done(limit);
        let outcome = outcome?;
        theirs?;
        let [here, there] = outcome.congestion;
        // Its streams begin under the host's own control, and go on being paced where that paces them; loopback has
        // no queue that a pace could hold up.
        let paces_on = asked.is_some() && congestion::paces(&usual) && !at.ip().is_loopback();
        let differs = here != ours || paces_on;
        self.iperf3_differs |= differs;
        let streams = self.streams;
        let used = plain::controls(Some(here), Some(there));
        self.note(match differs {
            true => format!("iperf3: {streams} streams, {used}, and ours {ours}: not compared"),
            false => format!("iperf3: {streams} streams, {used}"),
        });
        Ok(Figure {
            value: outcome.gb_per_second,
            p99: None,
            cpu: outcome.cpu,
        })
    }

    fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Figures of one contender over all rounds; ours say how they stand to the others' of the same rounds.
    fn rows(
        &self,
        case: &Run,
        contender: Contender,
        figures: &[Figure],
        all: &[(Contender, Run, Vec<Figure>)],
    ) -> Vec<Row> {
        let of = |value: fn(&Figure) -> f64| figures.iter().map(value).collect::<Vec<_>>();
        let name = format!("{}: {}", title(case), contender.name());
        let beside = all.iter().filter(|(other, ..)| {
            *other != contender && (*other != Contender::Iperf3 || !self.iperf3_differs)
        });
        let ratios = beside.map(|(other, _, theirs)| {
            let pairs = figures.iter().zip(theirs).map(|(a, b)| a.value / b.value);
            format!(
                "{:.2} of {}",
                median(&pairs.collect::<Vec<_>>()),
                other.name()
            )
        });
        let notes = match contender {
            Contender::Ours(..) => ratios.collect::<Vec<_>>().join(", "),
            Contender::Plain | Contender::Iperf3 => String::new(),
        };
        if case.mode != Mode::Latency {
            let row =
                Row::of(name, "GB/s", &of(|figure| figure.value)).cpu(&of(|figure| figure.cpu));
            return vec![Row { notes, ..row }];
        }
        let p50 = Row::of(format!("{name}, p50"), "us", &of(|figure| figure.value));
        let mut rows = vec![Row { notes, ..p50 }];
        let p99: Option<Vec<f64>> = figures.iter().map(|figure| figure.p99).collect();
        rows.extend(p99.map(|p99| Row::of(format!("{name}, p99"), "us", &p99)));
        rows
    }
}

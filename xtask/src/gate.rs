//! `cargo xtask gate BASE`: whether this tree is as fast as the commit BASE.
//!
//! The driver of this tree (`crates/tcpx-bench`) is built against both, and runs the same cases in
//! turns (CONTRIBUTING.md says how to read the table).

mod build;
mod cases;
mod rounds;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Parser, value_parser};
use tcpx_bench::process::Metric;
use tcpx_bench::report::{Row, Subject, figure, machine};
use tcpx_bench::statistics::{Interval, Verdict, bootstrap, median};

use crate::workspace::root;
pub(crate) use build::{git, worktree};
use cases::{Case, judged};
use rounds::Round;

/// Rounds before anything is judged, and at most.
const LEAST_ROUNDS: usize = 5;
const MOST_ROUNDS: usize = 25;

/// Whether this tree is as fast as the commit BASE.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask gate")]
struct Arguments {
    /// A commit, or a folder with its files tcpx-bench and libnccl_net_tcpx.so.
    #[arg(required_unless_present = "list")]
    base: Option<String>,
    /// This tree's folder with such files, where it cannot be built.
    #[arg(long, value_name = "FOLDER")]
    own: Option<PathBuf>,
    /// The cases to run; `*` stands for anything.
    #[arg(long = "case", value_name = "GLOB")]
    cases: Vec<String>,
    /// Rounds before anything is judged.
    #[arg(long, value_name = "N", default_value_t = LEAST_ROUNDS as u64, value_parser = value_parser!(u64).range(LEAST_ROUNDS as u64..=MOST_ROUNDS as u64))]
    rounds: u64,
    /// Messages move from a GPU's memory to another one's.
    #[arg(long, value_name = "GPU,GPU", value_delimiter = ',', num_args = 1)]
    gpus: Vec<u32>,
    /// Where the report goes.
    #[arg(long, value_name = "FILE", default_value = "target/gate/gate.json")]
    out: PathBuf,
    /// Names the cases.
    #[arg(long)]
    list: bool,
}

/// What the rounds of a case gave.
struct Measured<'a> {
    case: &'a Case,
    rounds: Vec<Round>,
    /// Why there are no more.
    error: Option<String>,
}

impl Measured<'_> {
    /// The figures of BASE and of this tree, round by round.
    fn both(&self, metric: Metric) -> [Vec<f64>; 2] {
        [0, 1].map(|side| {
            let rounds = self.rounds.iter();
            rounds
                .filter_map(|round| round[side].get(&metric).copied())
                .collect()
        })
    }

    /// How many times as good as BASE this tree is, over the rounds.
    fn interval(&self, metric: Metric) -> Interval {
        let [base, own] = self.both(metric);
        let (_, _, more_is_better, _) = judged(metric);
        let ratio = |(base, own): (&f64, &f64)| match more_is_better {
            true => own / base,
            false => base / own,
        };
        bootstrap(&base.iter().zip(&own).map(ratio).collect::<Vec<_>>())
    }

    fn verdict(&self, metric: Metric) -> Verdict {
        Verdict::of(self.interval(metric), judged(metric).3)
    }

    fn is_open(&self, least: usize) -> bool {
        let verdicts = self.case.figures.iter().map(|metric| self.verdict(*metric));
        let mut undecided = verdicts.filter(|verdict| *verdict == Verdict::Undecided);
        self.error.is_none() && (self.rounds.len() < least || undecided.next().is_some())
    }

    fn add(&mut self, outcome: Result<Round>) {
        let is_whole = |round: &Round| {
            let mut judged = self.case.figures.iter();
            judged.all(|metric| round.iter().all(|figures| figures.contains_key(metric)))
        };
        match outcome {
            Ok(round) if is_whole(&round) => self.rounds.push(round),
            Ok(_) => self.error = Some("the driver did not give every figure".to_owned()),
            Err(error) => self.error = Some(format!("{error:#}")),
        }
    }

    fn row(&self, metric: Metric) -> Row {
        let (name, unit, _, bound) = judged(metric);
        let interval = self.interval(metric);
        let [base, own] = self.both(metric).map(|values| figure(median(&values)));
        let word = self.verdict(metric).word();
        Row {
            name: format!("{}, {name}", self.case.name),
            unit: "ratio".to_owned(),
            median: interval.median,
            min: interval.low.max(0.0),
            max: interval.high.min(f64::MAX),
            runs: u32::try_from(self.rounds.len()).unwrap_or(u32::MAX),
            notes: format!("{base} -> {own} {unit}; bound {bound}: {word}"),
            ..Row::default()
        }
    }
}

/// Runs the gate; an error where a case fails, cannot be decided or cannot be run.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let name = "cargo xtask gate".to_owned();
    let arguments = Arguments::parse_from([&name].into_iter().chain(arguments));
    let mut chosen = cases::all(arguments.gpus.as_slice().try_into().ok())?;
    chosen.retain(|case| case.is_chosen(&arguments.cases));
    let Some(base) = arguments.base.as_deref().filter(|_| !arguments.list) else {
        chosen.iter().for_each(|case| println!("{}", case.name));
        return Ok(());
    };
    ensure!(
        !chosen.is_empty(),
        "no case has such a name; `cargo xtask gate --list` names them"
    );
    let root = root()?;
    let started = Instant::now();
    let builds = build::both(&root, base, arguments.own.as_deref())?;
    println!("built in {} s", started.elapsed().as_secs());
    let measured = chosen.iter().map(|case| Measured {
        case,
        rounds: Vec::new(),
        error: None,
    });
    let mut measured: Vec<Measured<'_>> = measured.collect();
    for round in 0..MOST_ROUNDS {
        let is_open = |one: &&Measured<'_>| one.is_open(arguments.rounds as usize);
        let open: Vec<&Case> = measured
            .iter()
            .filter(is_open)
            .map(|one| one.case)
            .collect();
        if open.is_empty() {
            break;
        }
        let began = Instant::now();
        for (case, outcome) in rounds::run(&builds, &open, round % 2 == 1)? {
            let mut of_case = measured.iter_mut().filter(|one| one.case.name == case);
            if let Some(one) = of_case.next() {
                one.add(outcome);
            }
        }
        let (round, took) = (round + 1, began.elapsed().as_secs());
        println!("round {round}: {} cases in {took} s", open.len());
    }
    let subject = report(&measured, &builds);
    println!("\n{}\n{}", subject.machine, subject.table());
    let out = root.join(arguments.out);
    std::fs::create_dir_all(out.parent().unwrap_or(&root))?;
    std::fs::write(&out, subject.json())
        .with_context(|| format!("cannot write {}", out.display()))?;
    println!(
        "{}; {} s in all",
        out.display(),
        started.elapsed().as_secs()
    );
    let failed = measured.iter().filter_map(|one| {
        let error = one.error.as_ref();
        error.map(|why| format!("{}: {why}", one.case.name))
    });
    let passed = format!(": {}", Verdict::Passed.word());
    let rows = subject
        .rows
        .iter()
        .filter(|row| !row.notes.ends_with(&passed));
    let not_passed = rows.map(|row| format!("{}: {}", row.name, row.notes));
    let all: Vec<String> = failed.chain(not_passed).collect();
    ensure!(
        all.is_empty(),
        "not everything has passed:\n{}",
        all.join("\n")
    );
    Ok(())
}

/// The figures of the cases that ran.
fn report(measured: &[Measured<'_>], builds: &build::Builds) -> Subject {
    let ran = measured.iter().filter(|one| one.error.is_none());
    let rows = ran.flat_map(|one| one.case.figures.iter().map(|metric| one.row(*metric)));
    let mut host = "both ends on one host, over TCP".to_owned();
    if measured.iter().any(|one| one.case.lends()) {
        host.push_str(", TCPX_LEND=always where memory is staged");
    }
    let notes = vec![
        format!("BASE {}, this tree {}.", builds.base.commit, builds.own.commit),
        "A ratio above 1: this tree is better, for rates and times alike. Least and most are the 95 % interval of its median.".to_owned(),
    ];
    Subject::new(
        "This tree beside BASE",
        machine(&host),
        rows.collect(),
        notes,
    )
}

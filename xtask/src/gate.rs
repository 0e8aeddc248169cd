//! `cargo xtask gate BASE`: whether this tree is as fast as the commit BASE.
//!
//! The driver of this tree (`crates/tcpx-bench`) is built against both, and runs the same cases in turns
//! (CONTRIBUTING.md says how to read the table).

mod build;
mod cases;
mod nics;
mod rounds;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tcpx_bench::report::{Row, Subject, figure, machine};
use tcpx_bench::statistics::{Interval, Verdict, bootstrap, median};

use crate::workspace::root;
pub(crate) use build::git;
use cases::{Case, Metric};
use nics::Nics;
use rounds::{Driver, Round};

/// Rounds before anything is judged, and at most.
const LEAST_ROUNDS: usize = 5;
const MOST_ROUNDS: usize = 25;

const USAGE: &str = "\
usage: cargo xtask gate BASE [--own FOLDER] [--case GLOB]... [--rounds N] [--gpus A,B] [--out FILE]
       cargo xtask gate --list
BASE is a commit, or a folder with its files tcpx-bench and libnccl_net_tcpx.so; --own names this tree's folder,
where it cannot be built. --gpus has messages move from a GPU's memory to another one's.";

#[derive(Debug, Default)]
struct Arguments {
    base: Option<String>,
    cases: Vec<String>,
    least_rounds: usize,
    gpus: Option<[u32; 2]>,
    out: Option<PathBuf>,
    /// A folder with files that were built before.
    own: Option<PathBuf>,
    lists: bool,
}

fn parse(arguments: &[String]) -> Result<Arguments> {
    let mut parsed = Arguments {
        least_rounds: LEAST_ROUNDS,
        ..Arguments::default()
    };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value = || {
            let missing = || format!("{argument} takes a value\n{USAGE}");
            rest.next().with_context(missing)
        };
        match argument.as_str() {
            "--list" => parsed.lists = true,
            "--case" => parsed.cases.push(value()?.clone()),
            "--own" => parsed.own = Some(value()?.into()),
            "--out" => parsed.out = Some(value()?.into()),
            "--gpus" => {
                let pair = value()?.split_once(',').context(USAGE)?;
                parsed.gpus = Some([pair.0.parse()?, pair.1.parse()?]);
            }
            "--rounds" => {
                let rounds = value()?.parse().context(USAGE)?;
                ensure!(
                    (LEAST_ROUNDS..=MOST_ROUNDS).contains(&rounds),
                    "--rounds takes {LEAST_ROUNDS} to {MOST_ROUNDS}"
                );
                parsed.least_rounds = rounds;
            }
            base if !base.starts_with('-') && parsed.base.is_none() => {
                parsed.base = Some(base.to_owned())
            }
            other => bail!("{other} is not known\n{USAGE}"),
        }
    }
    Ok(parsed)
}

/// One metric of one case: what its turns gave, round by round.
struct Figure<'a> {
    case: &'a Case,
    metric: Metric,
    base: Vec<f64>,
    own: Vec<f64>,
}

impl Figure<'_> {
    /// Takes the means of both turns of each.
    fn add(&mut self, round: &Round) -> Result<()> {
        let mean = |[first, second]: &[rounds::Figures; 2]| {
            let one =
                |figures: &rounds::Figures| figures.get(self.metric.name()).copied().flatten();
            Some(f64::midpoint(one(first)?, one(second)?))
        };
        let missing = || format!("the driver gave no {}", self.metric.name());
        let (base, own) = (mean(&round.base), mean(&round.own));
        self.base.push(base.with_context(missing)?);
        self.own.push(own.with_context(missing)?);
        Ok(())
    }

    /// How many times as good as BASE this tree is, over the rounds.
    fn interval(&self) -> Interval {
        let ratio = |(base, own): (&f64, &f64)| match self.metric.more_is_better() {
            true => own / base,
            false => base / own,
        };
        let ratios: Vec<f64> = self.base.iter().zip(&self.own).map(ratio).collect();
        bootstrap(&ratios)
    }

    fn verdict(&self) -> Verdict {
        Verdict::of(self.interval(), self.metric.bound())
    }

    fn name(&self) -> String {
        format!("{}, {}", self.case.name, self.metric.name())
    }

    fn row(&self) -> Row {
        let interval = self.interval();
        let (base, own) = (figure(median(&self.base)), figure(median(&self.own)));
        let (unit, bound) = (self.metric.unit(), self.metric.bound());
        Row {
            name: self.name(),
            unit: "ratio".to_owned(),
            median: interval.median,
            min: interval.low.max(0.0),
            max: interval.high.min(f64::MAX),
            runs: u32::try_from(self.base.len()).unwrap_or(u32::MAX),
            notes: format!(
                "{base} -> {own} {unit}; bound {bound}: {}",
                self.verdict().word()
            ),
            ..Row::default()
        }
    }
}

/// Runs the gate; an error where a case fails, cannot be decided or cannot be run.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let arguments = parse(arguments)?;
    let chosen = cases::all(arguments.gpus)?;
    let is_chosen = |case: &Case| case.is_chosen(&arguments.cases);
    let chosen: Vec<Case> = chosen.into_iter().filter(is_chosen).collect();
    if arguments.lists {
        chosen.iter().for_each(|case| println!("{}", case.name));
        return Ok(());
    }
    let base = arguments.base.as_deref().context(USAGE)?;
    ensure!(
        !chosen.is_empty(),
        "no case has such a name; `cargo xtask gate --list` names them"
    );
    let root = root()?;
    let started = Instant::now();
    let builds = build::both(&root, base, arguments.own.as_deref())?;
    println!("built in {} s", started.elapsed().as_secs());
    let nics = Nics::make();
    let mut figures: Vec<Figure<'_>> = Vec::new();
    for case in &chosen {
        if let (true, Err(why)) = (case.needs_nics(), &nics) {
            println!("skipped: {}: {why}", case.name);
            continue;
        }
        figures.extend(case.metrics().iter().map(|metric| Figure {
            case,
            metric: *metric,
            base: Vec::new(),
            own: Vec::new(),
        }));
    }
    let mut errors: Vec<(String, String)> = Vec::new();
    let is_broken = |errors: &[(String, String)], figure: &Figure<'_>| {
        errors.iter().any(|(case, _)| *case == figure.case.name)
    };
    for round in 0..MOST_ROUNDS {
        let is_open = |figure: &&Figure<'_>| {
            let is_undecided =
                || round < arguments.least_rounds || figure.verdict() == Verdict::Undecided;
            !is_broken(&errors, figure) && is_undecided()
        };
        let mut open: Vec<&Case> = figures.iter().filter(is_open).map(|one| one.case).collect();
        open.dedup_by(|a, b| a.name == b.name);
        if open.is_empty() {
            break;
        }
        let began = Instant::now();
        for (case, outcome) in run_round(&builds, &open, round, nics.as_ref().ok())? {
            let mine = figures.iter_mut().filter(|figure| figure.case.name == case);
            let added = outcome.and_then(|outcome| {
                let mut mine = mine;
                mine.try_for_each(|figure| figure.add(&outcome))
            });
            errors.extend(added.err().map(|error| (case, format!("{error:#}"))));
        }
        let (round, took) = (round + 1, began.elapsed().as_secs());
        println!("round {round}: {} cases in {took} s", open.len());
    }
    figures.retain(|figure| !is_broken(&errors, figure));
    let rows = figures.iter().map(Figure::row).collect();
    let notes = vec![
        format!("BASE {}, this tree {}.", builds.base.commit, builds.own.commit),
        "A ratio above 1: this tree is better, for rates and times alike. Least and most are the 95 % interval of its median.".to_owned(),
    ];
    let subject = Subject::new(
        "This tree beside BASE",
        machine("both ends on one host"),
        rows,
        notes,
    );
    println!("\n{}", subject.table());
    let out = arguments
        .out
        .unwrap_or_else(|| root.join("target/gate/gate.json"));
    std::fs::create_dir_all(out.parent().unwrap_or(&root))?;
    std::fs::write(&out, subject.json())
        .with_context(|| format!("cannot write {}", out.display()))?;
    println!(
        "{}; {} s in all",
        out.display(),
        started.elapsed().as_secs()
    );
    let errors: Vec<_> = errors
        .iter()
        .map(|(case, why)| format!("{case}: {why}"))
        .collect();
    ensure!(
        errors.is_empty(),
        "cases that could not be run:\n{}",
        errors.join("\n")
    );
    let not_passed = figures
        .iter()
        .filter(|figure| figure.verdict() != Verdict::Passed);
    let not_passed: Vec<String> = not_passed
        .map(|figure| format!("{}: {}", figure.name(), figure.verdict().word()))
        .collect();
    ensure!(
        not_passed.is_empty(),
        "{} of {} figures have not passed:\n{}",
        not_passed.len(),
        figures.len(),
        not_passed.join("\n")
    );
    Ok(())
}

type Outcomes = Vec<(String, Result<Round>)>;

/// A start of both drivers, and each case in turns: BASE, this tree, this tree, BASE, or the other way round.
fn run_round(
    builds: &build::Builds,
    cases: &[&Case],
    round: usize,
    nics: Option<&Nics>,
) -> Result<Outcomes> {
    let mut outcomes = Outcomes::new();
    for in_namespaces in [false, true] {
        let mut mine = cases
            .iter()
            .filter(|case| case.needs_nics() == in_namespaces)
            .peekable();
        if mine.peek().is_none() {
            continue;
        }
        let place = nics.filter(|_| in_namespaces);
        let mut base = Driver::start(&builds.base, place)?;
        let mut own = Driver::start(&builds.own, place)?;
        for case in mine {
            let outcome = case
                .prepare(place)
                .and_then(|()| rounds::turns(case, &mut base, &mut own, round % 2 == 1));
            let has_failed = outcome.is_err();
            outcomes.push((case.name.clone(), outcome));
            if has_failed {
                return Ok(outcomes);
            }
        }
    }
    // Between rounds the machine may do what it has put off.
    std::thread::sleep(Duration::from_millis(200));
    Ok(outcomes)
}

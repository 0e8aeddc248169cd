//! `cargo xtask gate BASE`: whether this tree is as fast as the commit BASE.
//!
//! Both are built, and their drivers (`gate/`) run the same cases in turns. See `docs/gate.md`.

mod build;
mod cases;
mod nics;
mod rounds;
mod statistics;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::root;
pub(crate) use build::git;
use cases::{Case, Metric};
use nics::Nics;
use rounds::{Driver, Round};
use statistics::{Interval, Verdict};

/// Rounds before anything is judged, and at most.
const LEAST_ROUNDS: usize = 5;
const MOST_ROUNDS: usize = 25;

const USAGE: &str = "\
usage: cargo xtask gate BASE [--own FOLDER] [--case GLOB]... [--rounds N] [--out FILE]
       cargo xtask gate --list
BASE is a commit, or a folder with its files tcpx-gate and libnccl_net_tcpx.so; --own names
this tree's folder, where it cannot be built.";

#[derive(Debug, Default)]
struct Arguments {
    base: Option<String>,
    cases: Vec<String>,
    least_rounds: usize,
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
            rest.next()
                .with_context(|| format!("{argument} takes a value\n{USAGE}"))
        };
        match argument.as_str() {
            "--list" => parsed.lists = true,
            "--case" => parsed.cases.push(value()?.clone()),
            "--own" => parsed.own = Some(value()?.into()),
            "--out" => parsed.out = Some(value()?.into()),
            "--rounds" => {
                let rounds = value()?
                    .parse()
                    .with_context(|| format!("--rounds takes a number\n{USAGE}"))?;
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

/// One metric of one case: all its samples, and what they say.
struct Row {
    case: Case,
    metric: Metric,
    /// By round.
    samples: Vec<Turns>,
}

/// A figure in its unit, of both turns of BASE and of this tree in one round.
#[derive(Clone, Copy)]
struct Turns {
    base: [f64; 2],
    own: [f64; 2],
}

impl Turns {
    /// An error where an answer lacks the figure.
    fn of(round: &Round, metric: Metric) -> Result<Self> {
        let figure = |[first, second]: &[rounds::Figures; 2]| {
            let one = |figures: &rounds::Figures| figures.get(metric.name()).copied();
            Some([one(first)?, one(second)?].map(|value| metric.in_unit(value)))
        };
        let missing = || format!("the driver gave no {}", metric.name());
        Ok(Self {
            base: figure(&round.base).with_context(missing)?,
            own: figure(&round.own).with_context(missing)?,
        })
    }

    /// The means of BASE's turns and of this tree's.
    const fn means(self) -> (f64, f64) {
        let ([one, two], [three, four]) = (self.base, self.own);
        (f64::midpoint(one, two), f64::midpoint(three, four))
    }
}

impl Row {
    /// How many times as good as BASE this tree is, in each round.
    fn ratios(&self) -> Vec<f64> {
        let more_is_better = self.metric.more_is_better();
        let ratio = |turns: &Turns| {
            let (base, own) = turns.means();
            if more_is_better {
                own / base
            } else {
                base / own
            }
        };
        self.samples.iter().map(ratio).collect()
    }

    fn interval(&self) -> Interval {
        statistics::bootstrap(&self.ratios())
    }

    fn verdict(&self) -> Verdict {
        Verdict::of(self.interval(), self.metric.bound())
    }
}

/// Runs the gate; an error where a case fails, cannot be decided or cannot be run.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let arguments = parse(arguments)?;
    let chosen: Vec<Case> = cases::all()
        .into_iter()
        .filter(|case| case.is_chosen(&arguments.cases))
        .collect();
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
    let mut rows: Vec<Row> = Vec::new();
    for case in &chosen {
        if let (true, Err(why)) = (case.needs_nics(), &nics) {
            println!("skipped: {}: {why}", case.name);
            continue;
        }
        let row = |metric: &Metric| Row {
            case: case.clone(),
            metric: *metric,
            samples: Vec::new(),
        };
        rows.extend(case.metrics().iter().map(row));
    }
    let mut errors = Vec::new();
    for round in 0..MOST_ROUNDS {
        let mut open: Vec<String> = Vec::new();
        for row in &rows {
            let is_open = round < arguments.least_rounds || row.verdict() == Verdict::Undecided;
            if is_open && !open.contains(&row.case.name) {
                open.push(row.case.name.clone());
            }
        }
        if open.is_empty() {
            break;
        }
        let running: Vec<&Case> = chosen
            .iter()
            .filter(|case| open.contains(&case.name))
            .collect();
        let began = Instant::now();
        for (case, outcome) in run_round(&builds, &running, round, nics.as_ref().ok())? {
            match outcome {
                Ok(round) => {
                    for row in rows.iter_mut().filter(|row| row.case.name == case) {
                        match Turns::of(&round, row.metric) {
                            Ok(turns) => row.samples.push(turns),
                            Err(error) => errors.push(format!("{case}: {error:#}")),
                        }
                    }
                }
                Err(error) => errors.push(format!("{case}: {error:#}")),
            }
        }
        println!(
            "round {}: {} cases in {:.0} s",
            round + 1,
            running.len(),
            began.elapsed().as_secs_f64()
        );
        if !errors.is_empty() {
            break;
        }
    }
    print_table(&rows);
    let out = arguments
        .out
        .unwrap_or_else(|| root.join("target/gate/gate.json"));
    store(&out, &builds, &rows)?;
    println!(
        "\nall samples: {}; {} s in all",
        out.display(),
        started.elapsed().as_secs()
    );
    ensure!(
        errors.is_empty(),
        "cases that could not be run:\n{}",
        errors.join("\n")
    );
    let not_passed: Vec<String> = rows
        .iter()
        .filter(|row| row.verdict() != Verdict::Passed)
        .map(|row| {
            format!(
                "{} {}: {}",
                row.case.name,
                row.metric.name(),
                row.verdict().word()
            )
        })
        .collect();
    ensure!(
        not_passed.is_empty(),
        "{} of {} figures have not passed:\n{}",
        not_passed.len(),
        rows.len(),
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
        let mine: Vec<&&Case> = cases
            .iter()
            .filter(|case| case.needs_nics() == in_namespaces)
            .collect();
        if mine.is_empty() {
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

fn print_table(rows: &[Row]) {
    println!(
        "\n{:34} {:12} {:>11} {:>11} {:>6}  {:15} {:>5} {:>3}  verdict",
        "case", "figure", "BASE", "this tree", "ratio", "95 % interval", "bound", "n"
    );
    for row in rows {
        let means = row.samples.iter().map(|turns| turns.means());
        let (base, own): (Vec<f64>, Vec<f64>) = means.unzip();
        let interval = row.interval();
        println!(
            "{:34} {:12} {:>11} {:>11} {:>6.3}  {:.3} to {:.3}  {:>5.2} {:>3}  {}",
            row.case.name,
            row.metric.label(),
            row.metric.print(statistics::median(&base)),
            row.metric.print(statistics::median(&own)),
            interval.median,
            interval.low,
            interval.high,
            row.metric.bound(),
            row.samples.len(),
            row.verdict().word(),
        );
    }
}

fn store(path: &std::path::Path, builds: &build::Builds, rows: &[Row]) -> Result<()> {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            let interval = row.interval();
            serde_json::json!({
                "case": row.case.name,
                "figure": row.metric.name(),
                "unit": row.metric.unit(),
                "more_is_better": row.metric.more_is_better(),
                "bound": row.metric.bound(),
                "ratio": interval.median,
                "interval": [interval.low, interval.high],
                "verdict": row.verdict().word(),
                "base": row.samples.iter().map(|turns| turns.base).collect::<Vec<_>>(),
                "own": row.samples.iter().map(|turns| turns.own).collect::<Vec<_>>(),
            })
        })
        .collect();
    let whole = serde_json::json!({
        "schema": "tcpx-gate/2",
        "host": build::host(),
        "base": builds.base.commit,
        "own": builds.own.commit,
        "rows": rows,
    });
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(path, serde_json::to_string_pretty(&whole)?)
        .with_context(|| format!("cannot write {}", path.display()))
}

//! `tcpx status`: what running processes tell of their connections.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use tcpx_status::{
    ConnectionReport, LaneReport, Mappings, Processes, Report, ask_process, processes,
};

use crate::error::Error;
use crate::output::json::{self, Told};
use crate::output::say::{is_json, one_line};
use crate::output::{indented, table};
use crate::sizes::{Amount, Limit, grouped, time};

#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    /// This process alone [default: every process of this user, for root of every user].
    #[arg(value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Time between two looks, over which rates are measured.
    #[arg(short, long, value_name = "TIME", default_value = "1s")]
    pub(crate) interval: Limit,
}

/// Operations of a connection that are shown.
const SHOWN: usize = 8;

/// Errors that are shown.
const ERRORS: usize = 5;

/// Shows what the processes tell.
pub(crate) fn run(args: &StatusArgs) -> Result<Told, Error> {
    let before = ask_processes(args.pid, &[])?;
    if is_json() {
        return Ok(Told::Fields(before.fields()));
    }
    // Rates need two looks. Who was silent in the first would be waited for twice.
    if !before.reports.is_empty() {
        thread::sleep(args.interval.0);
    }
    let now = ask_processes(args.pid, &before.silent)?;
    json::print_text(now.text(&before).trim_end())?;
    Ok(Told::Nothing)
}

/// What the processes told at one time.
struct Answers {
    /// Each with the socket that it came from.
    reports: Vec<(PathBuf, Report)>,
    /// Those that did not tell, with the reason.
    silent: Vec<(u32, String)>,
    /// Folders whose sockets are not asked.
    untrusted: Vec<PathBuf>,
}

/// Asks all at once, but for those that are known to be silent.
fn ask_processes(pid: Option<u32>, known: &[(u32, String)]) -> Result<Answers, Error> {
    let Processes {
        mut found,
        untrusted,
    } = processes();
    if let Some(pid) = pid {
        found.retain(|(other, _)| *other == pid);
        if found.is_empty() {
            return Err(Error::failed(
                format!("process {pid} has no connection of tcpx that it could tell of"),
                "`tcpx status` lists the processes that have; run it as the user of that process, or as root, and see that TCPX_STATUS is not 0 there",
            ));
        }
    }
    found.retain(|(pid, _)| known.iter().all(|(silent, _)| silent != pid));
    let (mut reports, mut silent) = (Vec::new(), known.to_vec());
    thread::scope(|scope| {
        let asked = |(pid, socket): &(u32, PathBuf)| {
            let (pid, socket) = (*pid, socket.clone());
            (
                pid,
                scope.spawn(move || ask_process(pid, &socket).map(|report| (socket, report))),
            )
        };
        let asked: Vec<_> = found.iter().map(asked).collect();
        for (pid, answer) in asked {
            match answer.join() {
                Ok(Ok(report)) => reports.push(report),
                Ok(Err(error)) => silent.push((pid, error.to_string())),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    silent.sort();
    silent.dedup();
    Ok(Answers {
        reports,
        silent,
        untrusted,
    })
}

impl Answers {
    fn fields(&self) -> Value {
        let silent = |(pid, why): &(u32, String)| json!({ "pid": pid, "error": why });
        let silent: Vec<_> = self.silent.iter().map(silent).collect();
        let processes: Vec<_> = self.reports.iter().map(|(_, report)| report).collect();
        json!({ "processes": processes, "silent": silent, "untrusted_folders": self.untrusted })
    }

    fn text(&self, before: &Self) -> String {
        let mut out = String::new();
        if self.reports.is_empty() && self.silent.is_empty() {
            out.push_str("no process of this user has a connection of tcpx\n");
        }
        for (socket, report) in &self.reports {
            let mut earlier = before.reports.iter();
            let earlier = earlier
                .find(|(other, before)| other == socket && before.at_seconds <= report.at_seconds);
            process(&mut out, report, earlier.map(|(_, before)| before));
        }
        for (_, why) in &self.silent {
            let _ = writeln!(out, "{}", one_line(why));
        }
        for folder in &self.untrusted {
            let _ = writeln!(
                out,
                "{} is another user's, or open to others: its sockets are not asked; have it removed, or set XDG_RUNTIME_DIR for these programs and for this one",
                one_line(&folder.display().to_string())
            );
        }
        out
    }
}

fn process(out: &mut String, report: &Report, before: Option<&Report>) {
    let Report { pid, program, .. } = report;
    let rank = report.rank.as_ref();
    let rank = rank.map(|rank| format!(", rank {}", one_line(rank)));
    let _ = writeln!(
        out,
        "process {pid}, {}{}",
        one_line(program),
        rank.unwrap_or_default()
    );
    for listener in &report.listeners {
        let _ = write!(out, "  listens on {}", one_line(&listener.address));
        if let Some(last) = &listener.last_refusal {
            let (peer, reason) = (one_line(&last.peer), one_line(&last.reason));
            let count = grouped(listener.refused);
            let _ = write!(out, ", refused {count}, the last from {peer}: {reason}");
        }
        out.push('\n');
    }
    let Mappings { open, held_up } = report.mappings;
    if open + held_up > 0 {
        let _ = writeln!(
            out,
            "  GPU memory of other processes: {} mapped, {} closed while kernels ran",
            grouped(open),
            grouped(held_up),
        );
    }
    for connection in &report.connections {
        let earlier = before.and_then(|report| {
            let mut known = report.connections.iter();
            known.find(|other| other.id == connection.id)
        });
        show_connection(out, connection, earlier);
    }
    let first = report.errors.len().saturating_sub(ERRORS);
    for error in &report.errors[first..] {
        let ago = time(seconds(report.at_seconds - error.at_seconds));
        let (peer, what) = (one_line(&error.peer), one_line(&error.error));
        let _ = writeln!(out, "  error {ago} ago, {peer}: {what}");
    }
}

fn show_connection(
    out: &mut String,
    connection: &ConnectionReport,
    before: Option<&ConnectionReport>,
) {
    let _ = writeln!(
        out,
        "  connection {} to {}, {}, up {}",
        connection.id,
        one_line(&connection.peer),
        one_line(&connection.network),
        time(seconds(connection.up_seconds)),
    );
    let _ = writeln!(out, "    path      {}", one_line(&connection.path));
    let counters = &connection.counters;
    let moved = |what: &str, of: fn(&ConnectionReport) -> u64| {
        let now = of(connection);
        let rate = before.and_then(|before| {
            let span = seconds(connection.up_seconds - before.up_seconds);
            crate::sizes::rate(now.saturating_sub(of(before)), span)
        });
        let rate = rate.map_or_else(String::new, |rate| format!(", now {rate:.3} GB/s"));
        format!("    {what}  {}{rate}\n", Amount(now))
    };
    out.push_str(&moved("sent    ", |one| {
        one.counters.bytes_sent + one.counters.control_bytes_sent
    }));
    out.push_str(&moved("received", |one| {
        one.counters.bytes_received + one.counters.control_bytes_received
    }));
    let _ = writeln!(
        out,
        "    ended     {} operations, {} of them with an error",
        grouped(counters.operations_completed + counters.operations_failed),
        grouped(counters.operations_failed),
    );
    if !connection.lanes.is_empty() || counters.lanes_lost > 0 {
        let _ = writeln!(
            out,
            "    lanes     {} open, {} failed, {} came back, {} chunks resent",
            connection.lanes.len(),
            grouped(counters.lanes_lost),
            grouped(counters.lanes_restored),
            grouped(counters.chunks_resent),
        );
        lanes(out, &connection.lanes);
    }
    let _ = writeln!(
        out,
        "    running   {} operations, {} without progress for a second or longer",
        grouped(connection.operations_running),
        grouped(connection.operations_stalled),
    );
    for operation in connection.operations.iter().take(SHOWN) {
        let tag = operation.tag.map(|tag| format!(" tag {tag}"));
        let _ = writeln!(
            out,
            "      {}{}: {} of {}, {} without progress: {}",
            one_line(&operation.kind),
            tag.unwrap_or_default(),
            Amount(operation.bytes_done),
            Amount(operation.bytes_total),
            time(seconds(operation.waited_seconds)),
            one_line(&operation.next),
        );
    }
    if connection.operations_running > SHOWN as u64 {
        out.push_str("      ... (`--json` has more)\n");
    }
    if let Some(stuck) = &connection.stuck {
        let _ = writeln!(out, "    stuck     {}", one_line(stuck));
    }
}

fn lanes(out: &mut String, lanes: &[LaneReport]) {
    let mut rows = table(
        &[
            "lane",
            "peer",
            "sent",
            "received",
            "again",
            "round trip",
            "backlog",
        ],
        &[2, 3, 4, 5, 6],
    );
    for lane in lanes {
        rows.add_row([
            format!("{}.{}", lane.channel, lane.lane),
            one_line(&lane.peer),
            Amount(lane.bytes_sent).to_string(),
            Amount(lane.bytes_received).to_string(),
            grouped(lane.retransmits),
            time(Duration::from_micros(lane.round_trip_us)),
            Amount(lane.backlog_bytes).to_string(),
        ]);
    }
    out.push_str(&indented(&rows, "      "));
}

/// A time that another process told, whatever it is.
fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or_default()
}

//! The program iperf3 over loopback, and what it says.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;

use crate::Error;

const PROGRAM: &str = "iperf3";

/// Largest buffer that it is given, in bytes.
const LARGEST_BUFFER: u64 = 1 << 20;

/// How long a client that came too early waits until it tries again.
const AGAIN: Duration = Duration::from_millis(20);

/// What it measured.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) gb_per_second: f64,
    /// Processor seconds of both ends for 10^9 bytes.
    pub(crate) cpu: f64,
    /// The congestion control of its sending end, at the end of its run.
    pub(crate) congestion: String,
}

/// Says whether it is there, in its words.
///
/// # Errors
/// It is not.
pub fn version() -> Result<String, Error> {
    let output = Command::new(PROGRAM).arg("--version").output();
    let output = output.ok().filter(|output| output.status.success());
    let text = String::from_utf8(output.ok_or_else(missing)?.stdout).unwrap_or_default();
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

fn missing() -> Error {
    Error::failed(
        format!("{PROGRAM} cannot be started"),
        "install it, or leave --peer iperf3 out",
    )
}

/// It, ended by the system's `timeout` if it does not end within the limit.
fn command(limit: Duration) -> Command {
    let mut command = Command::new("timeout");
    let limit = format!("{}s", limit.as_secs().max(1));
    command.args(["--signal=KILL", &limit, PROGRAM]);
    command.env("LC_ALL", "C");
    command.stdin(Stdio::null()).stderr(Stdio::null());
    command
}

/// Runs a server on loopback and a client for `span`, and reads its report.
pub(crate) fn measure(
    bytes: u64,
    streams: u16,
    span: Duration,
    congestion: Option<&str>,
    limit: Duration,
) -> Result<Outcome, Error> {
    let system = Error::system("run iperf3");
    let loopback = Ipv4Addr::LOCALHOST.to_string();
    // Nobody else is given the port that was free a moment ago, in all likelihood.
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr());
    let port = free.map_err(system)?.port().to_string();
    // It takes whole seconds only.
    let seconds = span.as_secs().max(1);
    let limit = limit + Duration::from_secs(seconds);
    let mut server = command(limit);
    server.args([
        "--server",
        "--one-off",
        "--bind",
        &loopback,
        "--port",
        &port,
    ]);
    let mut server = server.stdout(Stdio::null()).spawn().map_err(system)?;
    let mut client = command(limit);
    client.args([
        "--client",
        &loopback,
        "--port",
        &port,
        "--no-delay",
        "--json",
    ]);
    client.args(["--length", &bytes.clamp(1, LARGEST_BUFFER).to_string()]);
    client.args([
        "--parallel",
        &streams.to_string(),
        "--time",
        &seconds.to_string(),
    ]);
    client.args(
        congestion
            .into_iter()
            .flat_map(|name| ["--congestion", name]),
    );
    let until = Instant::now() + limit;
    let outcome = loop {
        let output = client.output().map_err(system)?;
        match read(&output.stdout) {
            // The server does not listen yet.
            Err(error) if error.contains("refused") && Instant::now() < until => {
                std::thread::sleep(AGAIN);
            }
            Err(error) => break Err(format!("{error} ({})", output.status)),
            outcome => break outcome,
        }
    };
    // It has ended with its client, if that came.
    let _ = kill_process(Pid::from_child(&server), Signal::TERM);
    server.wait().map_err(system)?;
    outcome.map_err(|error| Error::unexpected("a report of iperf3", error))
}

#[derive(Deserialize)]
struct End {
    sum_received: Sum,
    cpu_utilization_percent: Percent,
    #[serde(default)]
    sender_tcp_congestion: String,
}

#[derive(Deserialize)]
struct Sum {
    seconds: f64,
    bytes: f64,
    bits_per_second: f64,
}

#[derive(Deserialize)]
struct Percent {
    host_total: f64,
    remote_total: f64,
}

/// What it says; when it fails, an error beside a report without figures.
#[derive(Deserialize)]
#[serde(untagged)]
enum Report {
    Complaint { error: String },
    Figures { end: End },
}

fn read(text: &[u8]) -> Result<Outcome, String> {
    let end = match serde_json::from_slice(text) {
        Ok(Report::Figures { end }) => end,
        Ok(Report::Complaint { error }) => return Err(error),
        Err(error) => return Err(error.to_string()),
    };
    let gigabytes = (end.sum_received.bytes / 1e9).max(f64::MIN_POSITIVE);
    let percent = end.cpu_utilization_percent.host_total + end.cpu_utilization_percent.remote_total;
    Ok(Outcome {
        gb_per_second: end.sum_received.bits_per_second / 8e9,
        cpu: percent / 100.0 * end.sum_received.seconds / gigabytes,
        congestion: end.sender_tcp_congestion,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_gives_rate_and_processor_time_of_both_ends() {
        let text = r#"{"end":{"sum_sent":{},"sum_received":{"seconds":2.0,"bytes":8e9,"bits_per_second":32e9},
            "cpu_utilization_percent":{"host_total":50.0,"remote_total":80.0},"sender_tcp_congestion":"cubic","receiver_tcp_congestion":"reno"}}"#;
        let outcome = read(text.as_bytes()).expect("a report");
        assert!((outcome.gb_per_second - 4.0).abs() < 1e-9);
        assert!((outcome.cpu - 0.325).abs() < 1e-9, "{}", outcome.cpu);
        assert_eq!(outcome.congestion, "cubic");
    }

    #[test]
    fn what_is_no_report_is_an_error_that_says_its_complaint() {
        for text in [
            "",
            "{}",
            r#"{"start":{},"end":{},"error":"unable to connect"}"#,
        ] {
            let error = read(text.as_bytes()).expect_err(text);
            assert!(
                !text.contains("unable") || error == "unable to connect",
                "{error}"
            );
        }
    }
}

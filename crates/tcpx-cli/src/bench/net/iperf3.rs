//! The program iperf3 at both ends, and what it says.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::child::Child;
use crate::error::Error;

const PROGRAM: &str = "iperf3";

/// Largest buffer that it is given, in bytes.
const LARGEST_BUFFER: u64 = 1 << 20;

/// What it measured.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outcome {
    pub(super) gb_per_second: f64,
    /// Processor seconds for 10^9 bytes at the sending and at the receiving end.
    pub(super) cpu: [f64; 2],
    /// The congestion control of its sending and of its receiving end, at the end of its run.
    pub(super) congestion: [String; 2],
}

/// Says whether it is there, in its words.
pub(super) fn version() -> Result<String, Error> {
    let output = Command::new(PROGRAM).arg("--version").output();
    match output {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            Ok(text.lines().next().unwrap_or_default().to_owned())
        }
        _ => Err(missing()),
    }
}

fn missing() -> Error {
    Error::failed(
        format!("{PROGRAM} cannot be started"),
        "install it at both ends, or leave --peer iperf3 out",
    )
}

fn start(command: &mut Command) -> Result<Child, Error> {
    Child::start(command).map_err(|_| missing())
}

/// Starts a server for one client and waits until it listens.
pub(super) fn serve(ip: IpAddr, limit: Duration) -> Result<(Child, u16), Error> {
    let free = TcpListener::bind((ip, 0)).and_then(|free| free.local_addr());
    let port = free.map_err(refused)?.port();
    let mut child = start(
        Command::new(PROGRAM)
            .args([
                "--server",
                "--one-off",
                "--forceflush",
                "--bind",
                &ip.to_string(),
            ])
            .args(["--port", &port.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null()),
    )?;
    let (sender, lines) = mpsc::channel();
    if let Some(output) = child.0.stdout.take() {
        // Ends with the program; reads on, so that the program never waits for its reader.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
    }
    let until = Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match lines.recv_timeout(left) {
            Ok(line) if line.contains("listening") => return Ok((child, port)),
            Ok(_) => {}
            Err(_) => {
                return Err(Error::failed(
                    format!("{PROGRAM} did not begin to listen"),
                    "run `iperf3 --server` by hand and look at what it says",
                ));
            }
        }
    }
}

/// Waits for its end.
pub(super) fn end(mut child: Child, limit: Duration) -> Result<(), Error> {
    let what = match child.end(limit).map_err(refused)? {
        Some(status) if status.success() => return Ok(()),
        Some(status) => format!("{PROGRAM} ended with {status}"),
        None => format!("{PROGRAM} did not end in time"),
    };
    let hint = "run it by hand with the same ends and look at what it says";
    Err(Error::failed(what, hint))
}

fn refused(source: std::io::Error) -> Error {
    Error::process("run iperf3")(source)
}

/// An address as the program takes it.
fn host(at: SocketAddr) -> String {
    match at {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => format!("{}%{}", v6.ip(), v6.scope_id()),
        at => at.ip().to_string(),
    }
}

/// Runs a client for `span` and reads its report.
pub(super) fn measure(
    at: SocketAddr,
    bytes: u64,
    streams: u16,
    span: Duration,
    congestion: Option<&str>,
    limit: Duration,
) -> Result<Outcome, Error> {
    // It takes whole seconds only.
    let seconds = span.as_secs().max(1);
    let report = tempfile::NamedTempFile::new().map_err(refused)?;
    let output = report.reopen().map_err(refused)?;
    let child = start(
        Command::new(PROGRAM)
            .args(["--client", &host(at), "--port", &at.port().to_string()])
            .args(["--length", &bytes.clamp(1, LARGEST_BUFFER).to_string()])
            .args([
                "--parallel",
                &streams.to_string(),
                "--time",
                &seconds.to_string(),
            ])
            .args(["--no-delay", "--json"])
            .args(congestion.iter().flat_map(|name| ["--congestion", name]))
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(Stdio::null()),
    )?;
    end(child, limit + Duration::from_secs(seconds))?;
    let text = std::fs::read_to_string(report.path()).map_err(refused)?;
    read(&text)
}

#[derive(Deserialize)]
struct Json {
    end: End,
}

#[derive(Deserialize)]
struct End {
    sum_received: Sum,
    cpu_utilization_percent: Percent,
    #[serde(default)]
    sender_tcp_congestion: String,
    #[serde(default)]
    receiver_tcp_congestion: String,
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

/// What it says when it fails, beside a report without figures.
#[derive(Deserialize)]
struct Complaint {
    error: String,
}

fn read(text: &str) -> Result<Outcome, Error> {
    if let Ok(Complaint { error }) = serde_json::from_str(text) {
        return Err(Error::unexpected(
            "a report of iperf3",
            crate::messages::brief(&error),
        ));
    }
    let Json { end } = serde_json::from_str(text)
        .map_err(|error| Error::unexpected("a report of iperf3", error.to_string()))?;
    let gigabytes = (end.sum_received.bytes / 1e9).max(f64::MIN_POSITIVE);
    let cpu = |percent: f64| percent / 100.0 * end.sum_received.seconds / gigabytes;
    let percent = &end.cpu_utilization_percent;
    Ok(Outcome {
        gb_per_second: end.sum_received.bits_per_second / 8e9,
        cpu: [cpu(percent.host_total), cpu(percent.remote_total)],
        congestion: [end.sender_tcp_congestion, end.receiver_tcp_congestion],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_gives_rate_and_processor_time_of_both_ends() {
        let text = r#"{"end":{"sum_sent":{},"sum_received":{"seconds":2.0,"bytes":8e9,"bits_per_second":32e9},
            "cpu_utilization_percent":{"host_total":50.0,"remote_total":80.0},"sender_tcp_congestion":"cubic","receiver_tcp_congestion":"reno"}}"#;
        let outcome = read(text).expect("a report");
        assert!((outcome.gb_per_second - 4.0).abs() < 1e-9);
        assert!((outcome.cpu[0] - 0.125).abs() < 1e-9 && (outcome.cpu[1] - 0.2).abs() < 1e-9);
        assert_eq!(outcome.congestion, ["cubic", "reno"]);
    }

    #[test]
    fn what_it_complains_of_is_passed_on() {
        let text = r#"{"start":{},"end":{},"error":"unable to connect"}"#;
        let error = read(text).expect_err("no report").to_string();
        assert!(error.contains("unable to connect"), "{error}");
    }

    #[test]
    fn an_address_of_one_link_says_of_which() {
        let text = |at: &str| host(at.parse().expect("an address"));
        assert_eq!(text("[fe80::1%3]:7"), "fe80::1%3");
        assert_eq!(text("[fd00::1]:7"), "fd00::1");
        assert_eq!(text("10.0.0.1:7"), "10.0.0.1");
    }

    #[test]
    fn what_is_no_report_is_an_error() {
        for text in ["", "{}", r#"{"error":"unable to connect"}"#] {
            assert!(
                matches!(read(text), Err(Error::Unexpected { .. })),
                "{text}"
            );
        }
    }
}

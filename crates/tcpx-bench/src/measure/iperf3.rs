//! The program iperf3 at both ends, and what it says.

use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::Error;

const PROGRAM: &str = "iperf3";

/// Largest buffer that it is given, in bytes.
const LARGEST_BUFFER: u64 = 1 << 20;

/// How often an end is looked for.
const LOOK: Duration = Duration::from_millis(5);

/// What it measured.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) gb_per_second: f64,
    /// Processor seconds of both ends for 10^9 bytes.
    pub(crate) cpu: f64,
    /// The congestion control of its sending and of its receiving end, at the end of its run.
    pub(crate) congestion: [String; 2],
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
        "install it at both ends, or leave --peer iperf3 out",
    )
}

/// It runs; killed when dropped.
pub(crate) struct Running(Child);

impl Running {
    fn start(arguments: &[&str]) -> Result<Self, Error> {
        let mut command = Command::new(PROGRAM);
        command.args(arguments).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        command.spawn().map(Self).map_err(|_| missing())
    }

    /// Waits for its end.
    pub(crate) fn end(mut self, limit: Duration) -> Result<(), Error> {
        let until = Instant::now() + limit;
        let what = loop {
            match self.0.try_wait().map_err(Error::system("run iperf3"))? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => break format!("{PROGRAM} ended with {status}"),
                None if Instant::now() > until => break format!("{PROGRAM} did not end in time"),
                None => std::thread::sleep(LOOK),
            }
        };
        let hint = "run it by hand with the same ends and look at what it says";
        Err(Error::failed(what, hint))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a server for one client and waits until it listens.
pub(crate) fn serve(ip: IpAddr, limit: Duration) -> Result<(Running, u16), Error> {
    let free = TcpListener::bind((ip, 0)).and_then(|free| free.local_addr());
    let port = free.map_err(Error::system("find a free port"))?.port();
    let (ip, text) = (ip.to_string(), port.to_string());
    let mut running = Running::start(&[
        "--server",
        "--one-off",
        "--forceflush",
        "--bind",
        &ip,
        "--port",
        &text,
    ])?;
    let (sender, lines) = mpsc::channel();
    if let Some(output) = running.0.stdout.take() {
        // Ends with the program; reads on, so that the program never waits for its reader.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
    }
    let until = Instant::now() + limit;
    loop {
        match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) if line.contains("listening") => return Ok((running, port)),
            Ok(_) => {}
            Err(_) => {
                let hint = "run `iperf3 --server` by hand and look at what it says";
                return Err(Error::failed(
                    format!("{PROGRAM} did not begin to listen"),
                    hint,
                ));
            }
        }
    }
}

/// An address as the program takes it.
fn host(at: SocketAddr) -> String {
    match at {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => format!("{}%{}", v6.ip(), v6.scope_id()),
        at => at.ip().to_string(),
    }
}

/// Runs a client for `span` and reads its report.
pub(crate) fn measure(
    at: SocketAddr,
    bytes: u64,
    streams: u16,
    span: Duration,
    congestion: Option<&str>,
    limit: Duration,
) -> Result<Outcome, Error> {
    // It takes whole seconds only.
    let seconds = span.as_secs().max(1);
    let words = [
        host(at),
        at.port().to_string(),
        bytes.clamp(1, LARGEST_BUFFER).to_string(),
        streams.to_string(),
        seconds.to_string(),
    ];
    let [host, port, length, streams, time] = words.each_ref().map(String::as_str);
    let mut arguments = vec!["--client", host, "--port", port, "--length", length];
    arguments.extend([
        "--parallel",
        streams,
        "--time",
        time,
        "--no-delay",
        "--json",
    ]);
    arguments.extend(
        congestion
            .into_iter()
            .flat_map(|name| ["--congestion", name]),
    );
    let mut running = Running::start(&arguments)?;
    let output = running.0.stdout.take();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        output.map_or(Ok(0), |mut output| output.read_to_string(&mut text))?;
        std::io::Result::Ok(text)
    });
    running.end(limit + Duration::from_secs(seconds))?;
    let text = reader.join().ok().and_then(Result::ok).unwrap_or_default();
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
        return Err(Error::unexpected("a report of iperf3", error));
    }
    let Json { end } = serde_json::from_str(text)
        .map_err(|error| Error::unexpected("a report of iperf3", error.to_string()))?;
    let gigabytes = (end.sum_received.bytes / 1e9).max(f64::MIN_POSITIVE);
    let percent = end.cpu_utilization_percent.host_total + end.cpu_utilization_percent.remote_total;
    Ok(Outcome {
        gb_per_second: end.sum_received.bits_per_second / 8e9,
        cpu: percent / 100.0 * end.sum_received.seconds / gigabytes,
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
        assert!((outcome.cpu - 0.325).abs() < 1e-9, "{}", outcome.cpu);
        assert_eq!(outcome.congestion, ["cubic", "reno"]);
    }

    #[test]
    fn what_is_no_report_is_an_error_that_says_its_complaint() {
        for text in [
            "",
            "{}",
            r#"{"start":{},"end":{},"error":"unable to connect"}"#,
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(
                !text.contains("unable") || error.contains("unable to connect"),
                "{error}"
            );
        }
    }

    #[test]
    fn an_address_of_one_link_says_of_which() {
        let text = |at: &str| host(at.parse().expect("an address"));
        assert_eq!(text("[fe80::1%3]:7"), "fe80::1%3");
        assert_eq!(text("10.0.0.1:7"), "10.0.0.1");
    }
}

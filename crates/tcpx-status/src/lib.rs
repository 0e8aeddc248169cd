//! What a running process of tcpx tells about its connections: over a local socket for
//! `tcpx status`, and as OpenMetrics for a monitoring system.
//!
//! A connection [registers](register) itself as a [`Source`]. While a process has sources, one
//! thread listens on a socket that only its user can open, `PID.sock` in a [folder](folders) of
//! that user (`PID.2.sock` where the process has loaded another library of ours), and answers
//! `GET /status` with a [`Report`] in JSON and `GET /metrics` with OpenMetrics text, both over
//! HTTP/1.0. Nothing of it touches the data path: a source counts what it counts anyway, and is
//! asked only when somebody asks the process.
//!
//! `TCPX_STATUS=0` leaves the socket out. `TCPX_METRICS=ADDR` (or [`serve_metrics`]) also serves
//! the metrics on a TCP port, to whoever reaches it.
#![forbid(unsafe_code)]

mod counters;
#[doc(hidden)]
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod http;
mod metrics;
mod reader;
mod registry;
mod report;
mod server;

pub use counters::{Counters, Histogram};
pub use metrics::openmetrics;
pub use reader::{Processes, ReadError, ask_process, processes};
pub use registry::{
    Description, Ended, LAUNCHERS, Registration, Source, register, serve_metrics, tell_mappings,
};
pub use report::{
    ConnectionReport, FailureReport, LaneReport, ListenerReport, Mappings, OperationReport,
    RefusalReport, Report, SCHEMA, VERSION,
};
pub use server::{folders, follow_listeners};

//! How tcpx is measured, by whoever measures it: `tcpx perf` between two hosts, `tcpx bench` on this one beside
//! its peers, `cargo xtask gate` on two commits in turns, and the documents.
//!
//! One end gives [orders], the other one [serves](serve) them; both do their part of a [`Run`] with the
//! same loops ([`Meter`]). What comes out is a [report]: rows of figures in one JSON form, one table and one
//! [plot].
//!
//! The feature `measure` has the driver; without it the crate reads and shows figures alone.

pub mod plot;
pub mod report;
pub mod statistics;

#[cfg(feature = "measure")]
mod contents;
#[cfg(feature = "measure")]
pub mod cost;
#[cfg(feature = "measure")]
pub mod driver;
#[cfg(feature = "measure")]
mod end;
#[cfg(feature = "measure")]
mod error;
#[cfg(feature = "measure")]
pub mod iperf3;
#[cfg(feature = "measure")]
mod meter;
#[cfg(feature = "measure")]
pub mod orders;
#[cfg(feature = "measure")]
pub mod pattern;
#[cfg(feature = "measure")]
mod plain;
#[cfg(feature = "measure")]
mod plugin;
#[cfg(feature = "measure")]
mod relay;
#[cfg(feature = "measure")]
pub mod rotation;
#[cfg(feature = "measure")]
pub mod serve;
#[cfg(feature = "measure")]
mod windows;

#[cfg(feature = "measure")]
pub use contents::{compare, fill, poison};
#[cfg(feature = "measure")]
pub use end::{Allocate, Buffers, Part, depth};
#[cfg(feature = "measure")]
pub use error::Error;
#[cfg(feature = "measure")]
pub use meter::{Meter, Sample};
#[cfg(feature = "measure")]
pub use orders::{Mode, Op, Run};

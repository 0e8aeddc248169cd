//! How tcpx is measured, by whoever measures it: `tcpx perf` between two hosts, `tcpx bench` on
//! this one beside its peers, `cargo xtask gate` on two commits in turns, and the documents.
//!
//! One end gives [orders], the other one [serves](serve) them; both do their part of a [`Run`] with
//! the same loops ([`Meter`]). What comes out is a [report]: rows of figures in one JSON form, one
//! table and one [plot].
//!
//! The feature `measure` has the driver; without it the crate reads and shows figures alone.

#[cfg(feature = "measure")]
mod measure;
pub mod plot;
pub mod process;
pub mod report;
pub mod statistics;

#[cfg(feature = "measure")]
pub use measure::*;

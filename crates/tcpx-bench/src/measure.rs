//! What measures, as opposed to what shows figures.

pub(crate) mod contents;
pub mod cost;
pub mod driver;
pub(crate) mod end;
pub(crate) mod error;
pub mod iperf3;
pub(crate) mod meter;
pub mod orders;
pub mod pattern;
pub(crate) mod plain;
pub(crate) mod plugin;
pub mod rotation;
pub mod serve;
pub(crate) mod windows;

pub use contents::{compare, fill, poison};
pub use end::{Allocate, Buffers, Part, depth};
pub use error::Error;
pub use meter::{Meter, Sample, fitting};
pub use orders::{Mode, Op, Run};

//! The ncclNet plugin ABI, from both sides.
//!
//! - *Layouts*: tables ([`tables`]) and properties ([`raw_properties`]) of ncclNet v5 to v12,
//!   the device handle and the unpack queue ([`device`]), numbers ([`constants`]). Sizes and
//!   offsets are checked when the crate is compiled.
//! - *Exporting*: [`export`] turns a safe trait into the C table that a host loads.

pub mod constants;
pub mod device;
pub mod export;
mod limiter;
mod properties;
pub mod raw_properties;
mod result;
pub mod tables;

pub use limiter::{RateLimiter, Verdict};
pub use properties::{DeviceOffload, PointerSupport, Properties};
pub use result::{RawResult, ResultCode};

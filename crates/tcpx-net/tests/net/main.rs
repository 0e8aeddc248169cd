//! The embedded network on loopback, with good peers and bad ones.

#![expect(clippy::unwrap_used, reason = "what fails here fails its test")]

mod breakage;
mod cancel;
mod cuda;
mod listener;
mod lanes;
mod support;
mod transfers;

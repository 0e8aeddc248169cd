//! The embedded network on loopback, with good peers and bad ones.

#![expect(clippy::unwrap_used, reason = "what fails here fails its test")]

mod again;
mod breakage;
mod cancel;
mod cuda;
mod lanes;
mod listener;
mod sealed;
mod support;
mod transfers;

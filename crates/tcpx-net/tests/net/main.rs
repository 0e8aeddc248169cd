//! The embedded network on loopback, with good peers and bad ones.

mod breakage;
mod cancel;
mod listener;
mod support;
mod transfers;

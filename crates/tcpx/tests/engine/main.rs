//! The engine's interface between two endpoints of this process. One program: each of its own would
//! link everything again.

mod alone;
mod common;
mod completions;
mod examples;
mod limits;
mod manual;
mod many;
mod tcp;
mod timeouts;
mod windows;

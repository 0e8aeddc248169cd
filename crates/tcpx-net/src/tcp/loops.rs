//! The event loops of this process, which all of its channels share.

use std::sync::OnceLock;

use nccl_net::export::fork::PerProcess;
use tcpx_lanes::event_loop::{EventLoops, loops_wanted};

use crate::error::IoError;

static LOOPS: PerProcess<OnceLock<Result<EventLoops, IoError>>> = PerProcess::new();

/// The process's loops. The first use starts them, for as long as the process lives: as many as are asked for, or with 0
/// as suit the machine; later ones take what there is.
pub(super) fn get(asked: u16) -> Result<&'static EventLoops, IoError> {
    LOOPS
        .get()
        .get_or_init(|| EventLoops::start("tcpx", loops_wanted(asked)).map_err(IoError::from))
        .as_ref()
        .map_err(Clone::clone)
}

/// Event loops: those that run, else those that would be started.
pub(super) fn count(asked: u16) -> usize {
    match LOOPS.get().get() {
        Some(Ok(loops)) => loops.count(),
        _ => loops_wanted(asked),
    }
}

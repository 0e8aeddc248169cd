//! Device-memory TCP of the mainline kernel: a network card's receive queue puts payload straight into a
//! bounce pool of GPU memory, or of host memory that stands in for it.
//!
//! [`ReceiveQueue`] and [`SendPath`] are what the data path gets: bound memory, and the means to steer
//! flows to it. Dropping them unbinds and puts back every setting of the card that was changed.

mod error;
mod flow;
mod receive_queue;
mod send_path;

pub use error::{DevmemError, Refusal};
pub use flow::{Flow, FlowRule, Steering};
pub use receive_queue::ReceiveQueue;
pub use send_path::SendPath;

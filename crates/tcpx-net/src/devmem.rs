//! Device-memory TCP of the mainline kernel: a network card's receive queue puts payload straight into a
//! bounce pool of GPU memory, or of host memory that stands in for it.
//!
//! [`ReceiveQueue`] and [`SendPath`] are what the data path gets: bound memory, and the means to steer
//! flows to it. Dropping them unbinds and puts back every setting of the card that was changed.

mod calls;
mod channel;
mod companion;
mod error;
mod flow;
mod in_kernel;
mod inflow;
mod landing;
mod network;
mod outflow;
mod pool_use;
mod receive_queue;
mod send_path;
mod set_up;
mod slots;
mod stage;
mod watch;
mod zero_copy;

pub use calls::{Arrival, Done, Kernel, SocketCalls};
pub use error::{DevmemError, Refusal};
pub use flow::{Flow, FlowRule, Steering};
pub use network::{DevmemNetwork, DevmemOptions};
pub use receive_queue::ReceiveQueue;
pub use send_path::SendPath;

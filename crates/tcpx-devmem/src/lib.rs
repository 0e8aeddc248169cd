//! Device-memory TCP of the mainline kernel: a network card's receive queue puts payload straight
//! into a bounce pool of GPU memory, or of host memory that stands in for it.
//!
//! [`Devmem`] binds memory to queues and shows or undoes what processes have changed on a card.
//! [`ReceiveQueue`] and [`SendPath`] are what the data path gets: bound memory, and the means to
//! steer flows to it. Dropping them unbinds and puts back every setting of the card that was
//! changed. [`DevmemNetwork`] moves chunks through them.

mod bind;
mod bound;
mod calls;
mod capability;
mod channel;
#[doc(hidden)]
pub mod cmsg;
mod error;
mod holders;
mod inflow;
pub mod kernel;
mod landing;
#[doc(hidden)]
pub mod netlink;
mod network;
mod ordinary;
mod outflow;
mod pool_use;
mod record;
mod refusals;
mod rule;
mod set_up;
mod settings;
mod slots;
mod stage;
mod state;
mod status;
mod steering;
#[doc(hidden)]
pub mod tokens;
mod watch;
mod zero_copy;

pub use bind::{Adjust, Devmem, ReceiveOptions};
pub use bound::{Flow, FlowRule, ReceiveQueue, SendPath, Steering};
pub use calls::{Arrival, LinuxSockets, SocketCalls};
pub use capability::{Capability, KernelCapability};
pub use error::{DevmemError, Refusal, Why};
pub use holders::Holder;
pub use netlink::QueueUse;
pub use network::{DevmemNetwork, DevmemOptions};
pub use rule::Rule;
pub use state::STATE_FOLDER;
pub use status::{HoldStatus, Released, Status};
pub use zero_copy::FinishedSends;

#[cfg(test)]
mod tests;

//! The TCP data plane of tcpx, for the engine's networks and for the NCCL plugin alike: event
//! loops, wakers, lanes and their queue, socket calls and options, congestion control, page
//! lending, interfaces.
//!
//! Users of tcpx see the crate `tcpx`; this one serves its siblings.

pub mod arrival;
pub mod claims;
pub mod congestion;
pub mod control_messages;
pub mod dial;
pub mod door;
pub mod error;
pub mod event_loop;
pub mod health;
pub mod hello;
pub mod idle;
pub mod interfaces;
pub mod lane_group;
pub mod monitor;
mod page_pipe;
pub mod protocols;
pub mod receive_lane;
pub mod redial;
pub mod resend;
pub mod sealing;
pub mod send_lane;
pub mod shared_words;
pub mod socket;
pub mod socket_calls;
pub mod splice;
pub mod tcp_info;
pub mod waker;

pub use congestion::Congestion;
pub use error::{IoError, SocketError};
pub use tcpx_memory::lock;

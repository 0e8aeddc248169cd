//! Large messages off NCCL's proxy thread: lanes that all comms to one peer process share.
//!
//! A comm keeps its own connection, which its host program drives: small messages, and everything
//! that keeps order. A message above the inline limit goes another way once the receiver has said
//! that a receive is posted for it (a *grant*): it is cut into chunks, the chunks are queued on the
//! [`lane_set`] of the peer process, and the first lane that is writable takes the next one. Each
//! lane is a pair of TCP connections with its own place in an event loop. On the other side a lane
//! reads each chunk straight into the posted buffer that its header names, and says on the second
//! connection how far it has read: until then the chunk is kept, and goes over another lane if this
//! one ends. Of a short chunk that is a copy, so that its send is done at once (`retention`). A
//! thread dials lanes again that ended or stall.
//!
//! GPU memory takes the same way with a stop in a pinned slot at each end, see `from_gpu` and
//! `to_gpu`.
//!
//! Nothing is put on a lane without a grant, so a lane never waits for a receive to be posted, and
//! one comm that stalls cannot hold up another.

pub(crate) mod door;
mod from_gpu;
pub(crate) mod group;
pub(crate) mod hello;
pub(crate) mod lane_set;
pub(crate) mod receive_lane;
pub(crate) mod recv_stream;
mod retention;
pub(crate) mod runtime;
pub(crate) mod send_path;
pub(crate) mod send_stream;
pub(crate) mod to_gpu;
mod transmit_lane;

//! The state machine of one connection: matching, grants, windows, acknowledgements, deadlines.
//!
//! A [`Session`] sees no socket and no clock. Its caller feeds it requests, the peer's frames, the
//! data plane's reports and the time, then takes out frames ([`Session::poll_transmit`]) and
//! actions ([`Session::poll_action`]) until both are empty, and calls again at
//! [`Session::next_timeout`]. Any call may produce both, `poll_transmit` included.
//!
//! Each side sends and receives. A send is announced; the peer matches it to a receive of the same
//! tag, first in, first out, and grants it. The chunks of granted transfers form one stream per
//! direction in grant order; both sides post them to the data channels in that order. Chunks that
//! are placed at their destination are acknowledged. Small transfers may travel in the announcement
//! (eager) within the receiver's credit.
//!
//! Every operation ends with exactly one [`Action::Complete`], and not before the data plane lets
//! go of its memory, except where [`Memory::Held`] says otherwise.

mod action;
mod config;
mod error;
mod stall;

pub use action::{Action, Chunk, Completed, Memory, OperationId, ReceiveRequest, SendRequest};
pub use config::{Agreed, CHUNK_GRAIN_BYTES, Config, Deadlines, MAX_TRANSFER_BYTES};
pub use error::{
    AckProblem, ConnectionFailure, DataFailure, Delivered, EndCause, OperationError, RequestError,
    SessionError,
};
pub use stall::{OperationState, Owes, StallReport};

use crate::frame::Frame;
use crate::time::Time;

/// One side of a connection after the handshake.
#[derive(Debug)]
pub struct Session {
    config: Config,
}

impl Session {
    /// A session whose first frame, the settings, waits for transmission.
    ///
    /// # Errors
    /// When a setting is out of bounds.
    pub fn new(config: Config, now: Time) -> Result<Self, SessionError> {
        let _ = (now, Agreed::new(&config.ours, &config.ours)?);
        Ok(Self { config })
    }

    /// What both sides agreed on; `None` before [`Action::PeerSettings`].
    pub fn agreed(&self) -> Option<&Agreed> {
        todo!()
    }

    /// Sends a set-up advertisement of the network.
    ///
    /// # Errors
    /// When the payload is longer than [`MAX_SETUP_BYTES`](crate::frame::MAX_SETUP_BYTES), or the
    /// session ended.
    pub fn setup(&mut self, round: u16, last: bool, payload: Vec<u8>) -> Result<(), RequestError> {
        let _ = (round, last, payload);
        todo!()
    }

    /// The data channels of this side are up. Chunks are posted once both sides said so.
    pub fn ready(&mut self, now: Time) {
        let _ = now;
        todo!()
    }

    /// Starts a send. An eager payload for which there is no room any more is dropped, and the send
    /// is announced instead.
    ///
    /// # Errors
    /// When the bounds of the session do not allow it, or it closes. Nothing was started then.
    pub fn send(&mut self, now: Time, request: SendRequest) -> Result<OperationId, RequestError> {
        let _ = (now, request);
        todo!()
    }

    /// Whether a payload of this length may travel eagerly now.
    pub fn eager_allowed(&self, bytes: u64) -> bool {
        let _ = bytes;
        todo!()
    }

    /// Starts a receive.
    ///
    /// # Errors
    /// When the bounds of the session do not allow it, or it closes. Nothing was started then.
    pub fn receive(
        &mut self,
        now: Time,
        request: ReceiveRequest,
    ) -> Result<OperationId, RequestError> {
        let _ = (now, request);
        todo!()
    }

    /// Ends an operation early. It still ends with one [`Action::Complete`], successfully when the
    /// peer had already placed everything. An ended operation is left alone.
    pub fn cancel(&mut self, now: Time, operation: OperationId) {
        let _ = (now, operation);
        todo!()
    }

    /// Closes in order: receives that match nothing end, transfers under way are finished and
    /// acknowledged, then the peer is told. [`Action::Closed`] follows, after
    /// [`Config::close_timeout`] at the latest.
    pub fn close(&mut self, now: Time) {
        let _ = now;
        todo!()
    }

    /// The source of a posted chunk may be reused.
    pub fn chunk_sent(&mut self, now: Time, operation: OperationId, index: u32) {
        let _ = (now, operation, index);
        todo!()
    }

    /// A posted chunk arrived with this many bytes, in place or in the bounce pool.
    pub fn chunk_arrived(&mut self, now: Time, operation: OperationId, index: u32, bytes: u64) {
        let _ = (now, operation, index, bytes);
        todo!()
    }

    /// An arrived chunk is at its destination, and its place in the bounce pool was given back.
    pub fn chunk_placed(&mut self, now: Time, operation: OperationId, index: u32) {
        let _ = (now, operation, index);
        todo!()
    }

    /// The data plane cannot finish an operation.
    pub fn data_failed(
        &mut self,
        now: Time,
        operation: OperationId,
        index: Option<u32>,
        failure: DataFailure,
    ) {
        let _ = (now, operation, index, failure);
        todo!()
    }

    /// Answer to [`Action::StopData`]: nothing points at the operation's memory any more.
    pub fn data_quiet(&mut self, now: Time, operation: OperationId) {
        let _ = (now, operation);
        todo!()
    }

    /// Answer to [`Action::DeliverEager`].
    pub fn eager_copied(&mut self, now: Time, operation: OperationId) {
        let _ = (now, operation);
        todo!()
    }

    /// Answer to [`Action::ComputeDigest`].
    pub fn digest(&mut self, now: Time, operation: OperationId, crc32c: u32) {
        let _ = (now, operation, crc32c);
        todo!()
    }

    /// Takes a frame of the peer.
    ///
    /// # Errors
    /// When the peer broke the protocol; the caller then calls [`Session::fail`].
    pub fn frame(&mut self, now: Time, frame: Frame) -> Result<(), SessionError> {
        let _ = (now, frame);
        todo!()
    }

    /// The next frame for the peer.
    pub fn poll_transmit(&mut self, now: Time) -> Option<Frame> {
        let _ = now;
        todo!()
    }

    /// The next thing to do.
    pub fn poll_action(&mut self) -> Option<Action> {
        todo!()
    }

    /// When [`Session::handle_timeout`] is due, at the latest. May come earlier than needed.
    pub fn next_timeout(&self) -> Option<Time> {
        todo!()
    }

    /// Does what time brings: deadlines, delayed acknowledgements, heartbeats.
    pub fn handle_timeout(&mut self, now: Time) {
        let _ = now;
        todo!()
    }

    /// The connection is lost. Operations whose memory the data plane may still touch get
    /// [`Action::StopData`] and end with [`Session::data_quiet`] (after [`Config::cancel_timeout`]
    /// at the latest, then with [`Memory::Held`]); all others end at once. [`Action::Closed`] is
    /// the last action.
    pub fn fail(&mut self, now: Time, failure: ConnectionFailure) {
        let _ = (now, failure);
        todo!()
    }

    /// Every live operation and where it stands.
    pub fn snapshot(&self, now: Time) -> Vec<OperationState> {
        let _ = now;
        todo!()
    }
}

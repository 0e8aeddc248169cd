//! Letting go: of the payload lane, of the memory that it was sent from, and of the channel.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

use super::DevmemChannel;
use crate::watch::Which;
use tcpx_net::channel::Completion;
use tcpx_net::error::ChannelError;

/// Longest wait for a card to be done with packets of a connection that was reset. They are in its
/// ring already; only a link that is down holds them for longer.
const LAST_REPORTS: Duration = Duration::from_millis(200);

impl DevmemChannel {
    /// Closes the payload lane once it is given up and nothing reads its part of the pool: closing
    /// gives its tokens back, and the pages of what nobody will read. What is under way on it is
    /// sent again.
    pub(super) fn close_payload_when_unread(&mut self) {
        if self.failed_over && !self.inflow.reads_pool() {
            self.close_payload();
        }
    }

    pub(super) fn close_payload(&mut self) {
        let Some(payload) = self.payload.take() else {
            return;
        };
        self.end_sends(&payload);
        drop(payload);
        self.inflow.forget_tokens();
        self.watch.forget(Which::Payload);
        self.rule = None;
    }

    /// Makes sure that neither the kernel nor the card reads a slot any more. One whose end is not
    /// told stays taken for good: what others wrote there would go out as this connection's bytes.
    fn end_sends(&mut self, payload: &OwnedFd) {
        let socket = payload.as_fd();
        if self.reap_rest(socket) {
            return;
        }
        // Closing would do the same, and leave nobody to ask.
        if let Err(error) = self.calls.reset(socket) {
            tracing::warn!(channel = %self.name, %error, "resetting the payload lane");
        }
        let deadline = Instant::now() + LAST_REPORTS;
        if let Err(error) = self.reap_until(socket, deadline) {
            tracing::warn!(channel = %self.name, %error, "waiting for reports about sends");
        }
        let mut kept = 0;
        for slot in self.in_kernel.take() {
            slot.keep_for_good();
            kept += 1;
        }
        if kept > 0 {
            tracing::warn!(
                channel = %self.name,
                sends = kept,
                "the card does not let go of memory that it was to send; it stays taken until this process ends"
            );
        }
    }

    /// Takes what reports there are; true when none is missing.
    fn reap_rest(&mut self, socket: BorrowedFd<'_>) -> bool {
        while !self.in_kernel.is_empty() {
            match self.calls.done(socket) {
                Ok(Some(done)) => {
                    if let Err(error) = self.in_kernel.done(done) {
                        tracing::warn!(channel = %self.name, %error, "a report about sends");
                        return false;
                    }
                }
                Ok(None) | Err(_) => return false,
            }
        }
        true
    }

    fn reap_until(&mut self, socket: BorrowedFd<'_>, deadline: Instant) -> Result<(), Errno> {
        // A socket that was reset is ready for ever: only what is new counts.
        let news = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&news, socket, EventData::new_u64(0), EventFlags::ET)?;
        while !self.reap_rest(socket) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return Ok(());
            };
            let mut event = [const { std::mem::MaybeUninit::uninit() }; 1];
            let left = rustix::event::Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
            match epoll::wait(&news, &mut event, Some(&left)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(super) fn fail_all(&mut self) {
        let error = match &self.broken {
            Some(error) => error.clone(),
            None => ChannelError::Closed {
                channel: self.name.clone(),
            },
        };
        let tokens = self.inflow.close().into_iter().chain(self.outflow.close());
        self.failed.extend(tokens.map(|token| Completion::Failed {
            token,
            error: error.clone(),
        }));
    }
}

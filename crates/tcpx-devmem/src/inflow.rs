//! From receives to chunks: what arrives on the payload stream goes to the posted receives, first
//! in, first out. No system calls here.
//!
//! The stream has no framing, because nobody but the pool could read it: it is the posted chunks,
//! one after the other. A receive is never offered more than the rest of one chunk, so each of the
//! kernel's tokens belongs to one part of one chunk.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::cmsg::{Binding, GatherError, Gathered, HostPiece, Received};
use crate::tokens::{TokenError, TokenSet};
use tcpx_memory::{BouncePool, RegionSlice};
use tcpx_wire::{Fragment, ScatterList};

use super::landing::LandingRing;
use super::ordinary::Header;
use super::pool_use::PoolUse;
use tcpx_net::channel::{ChannelStats, Completion, Payload, Ticket};

/// A card that leaves small packets whole now and then does not leave so many bytes in a row.
const PLAIN_RUN: u64 = 128 << 10;

/// Where a channel's payload lands.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) pool: Arc<BouncePool>,
    pub(super) dmabuf_id: u32,
    pub(super) usage: PoolUse,
}

/// The receiving half of a channel.
#[derive(Debug)]
pub(super) struct Inflow {
    target: Option<Target>,
    landing: LandingRing,
    posted: VecDeque<Wanted>,
    /// What has come of the first posted chunk and was not handed on.
    gathered: Gathered,
    tokens: TokenSet,
    pinned: u64,
    /// Parts handed on, oldest first.
    parts: VecDeque<Part>,
    next_ticket: u64,
    returns: TokenSet,
    /// The kernel takes no tokens any more: closing the socket gives them back.
    keeps_tokens: bool,
    spare: Vec<TokenSet>,
    /// The chunk that ended last.
    ended: Option<u64>,
    /// Plain bytes since the last record.
    plain_run: u64,
    stats: ChannelStats,
}

#[derive(Debug)]
struct Wanted {
    token: u64,
    sequence: u64,
    length: u64,
    done: u64,
}

/// What goes back when a part was unpacked.
#[derive(Debug)]
enum Part {
    Device { tokens: TokenSet, pinned: u64 },
    Host { bytes: usize },
}

/// Where a receive may write.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) slice: RegionSlice,
    host_offset: usize,
}

/// What a receive brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Came {
    /// What is to be expected: records of the pool, small packets that the card did not split, or
    /// plain bytes where there is no pool.
    Expected,
    /// Plain bytes for so long that no packet lands in the pool any more.
    Plain,
}

impl Inflow {
    pub(super) fn new(target: Option<Target>, landing: LandingRing) -> Self {
        Self {
            target,
            landing,
            posted: VecDeque::new(),
            gathered: Gathered::new(),
            tokens: TokenSet::new(),
            pinned: 0,
            parts: VecDeque::new(),
            next_ticket: 0,
            returns: TokenSet::new(),
            keeps_tokens: false,
            spare: Vec::new(),
            ended: None,
            plain_run: 0,
            stats: ChannelStats::default(),
        }
    }

    pub(super) fn post(&mut self, token: u64, sequence: u64, length: u64) {
        self.posted.push_back(Wanted {
            token,
            sequence,
            length,
            done: 0,
        });
    }

    /// Receives posted and not ended.
    pub(super) fn posted(&self) -> usize {
        self.posted.len()
    }

    /// How much of a chunk that follows this header is here already, and how much is wanted; `None`
    /// while its receive is not posted.
    ///
    /// # Errors
    /// What the peer may send instead.
    pub(super) fn missing_of(&self, header: Header) -> Result<Option<(u64, u64)>, String> {
        let length = u64::from(header.length);
        if length == 0 || self.ended.is_some_and(|ended| header.sequence <= ended) {
            return Ok(Some((length, 0)));
        }
        match self.posted.front() {
            None => Ok(None),
            Some(first) if (first.sequence, first.length) == (header.sequence, length) => {
                Ok(Some((first.done, length - first.done)))
            }
            Some(first) => Err(format!(
                "chunk {} of {} bytes",
                first.sequence, first.length
            )),
        }
    }

    pub(super) fn stats(&self) -> ChannelStats {
        self.stats
    }

    pub(super) fn target(&self) -> Option<&Target> {
        self.target.as_ref()
    }

    /// Where the next receive may write, at most `most` bytes; `None` while nothing is posted or
    /// there is no room.
    pub(super) fn offer(&mut self, most: usize) -> Option<Offer> {
        let first = self.posted.front()?;
        let rest = usize::try_from(first.length - first.done).unwrap_or(usize::MAX);
        let (host_offset, slice) = self.landing.offer(rest.min(most))?;
        Some(Offer { slice, host_offset })
    }

    /// Takes what one receive into `offer` brought, and reports what is complete or must not wait.
    ///
    /// # Errors
    /// The records do not describe the receive; nothing of it was taken.
    pub(super) fn arrived(
        &mut self,
        offer: &Offer,
        bytes: usize,
        control: &[u8],
        truncated: bool,
        out: &mut Vec<Completion>,
    ) -> Result<Came, GatherError> {
        let binding = match &self.target {
            Some(target) => Binding::Mainline {
                pool_bytes: target.pool.len() as u64,
                dmabuf_id: target.dmabuf_id,
            },
            None => Binding::Mainline {
                pool_bytes: 0,
                dmabuf_id: 0,
            },
        };
        let before = self.gathered.list().len();
        let received = Received {
            bytes,
            iovec_bytes: offer.slice.len(),
            control,
            truncated,
        };
        let added = self.gathered.add(
            received,
            binding,
            offer.host_offset as u64,
            &mut self.tokens,
        )?;
        if let Some(target) = &self.target {
            let new = self.gathered.list().iter().skip(before);
            let pinned = new
                .map(|one| target.usage.pages(one.source_offset, one.length))
                .fold(0, u64::saturating_add);
            self.pinned += pinned;
            target.usage.pin(pinned);
        }
        let host = usize::try_from(added.host).unwrap_or(usize::MAX);
        self.landing.wrote(host);
        self.stats.bytes_received += bytes as u64;
        self.stats.bytes_in_pool += added.device;
        if let Some(first) = self.posted.front_mut() {
            first.done += bytes as u64;
            if first.done >= first.length {
                self.finish(out);
            }
        }
        self.relieve(out);
        self.plain_run = match control.is_empty() && self.target.is_some() {
            true => self.plain_run.saturating_add(added.host),
            false => 0,
        };
        if self.plain_run < PLAIN_RUN {
            Ok(Came::Expected)
        } else {
            Ok(Came::Plain)
        }
    }

    /// Hands on what has come of an unfinished chunk if the pool or the landing area runs short.
    pub(super) fn relieve(&mut self, out: &mut Vec<Completion>) {
        let pool_presses = self.pinned > 0
            && self
                .target
                .as_ref()
                .is_some_and(|target| target.usage.presses());
        if !(pool_presses || self.landing.presses()) {
            return;
        }
        let Some(first) = self.posted.front() else {
            return;
        };
        let (token, done) = (first.token, first.done);
        if let Some((pool, list, ticket)) = self.cut_device() {
            out.push(Completion::Part {
                token,
                pool,
                list,
                ticket,
            });
        }
        if let Some((pool, list, ticket)) = self.cut_host() {
            out.push(Completion::Part {
                token,
                pool,
                list,
                ticket,
            });
        }
        self.gathered.restart(done);
    }

    /// The first posted chunk is complete.
    fn finish(&mut self, out: &mut Vec<Completion>) {
        let Some(done) = self.posted.pop_front() else {
            return;
        };
        self.stats.chunks_received += 1;
        self.ended = Some(done.sequence);
        let token = done.token;
        let device = self.cut_device();
        let host = self.cut_host();
        self.gathered.restart(0);
        let (first, last) = match (device, host) {
            (device, Some(host)) => (device, Some(host)),
            (device, None) => (None, device),
        };
        if let Some((pool, list, ticket)) = first {
            out.push(Completion::Part {
                token,
                pool,
                list,
                ticket,
            });
        }
        let payload = match last {
            Some((pool, list, ticket)) => Payload::Scattered {
                pool,
                bytes: list.iter().map(|f| u64::from(f.length)).sum(),
                list,
                ticket,
            },
            // A chunk of no bytes; any other has just been given its last ones.
            None => Payload::InPlace { bytes: done.done },
        };
        out.push(Completion::Received { token, payload });
    }

    fn ticket(&mut self, part: Part) -> Ticket {
        self.parts.push_back(part);
        self.next_ticket += 1;
        Ticket(self.next_ticket)
    }

    fn cut_device(&mut self) -> Option<(Arc<BouncePool>, ScatterList, Ticket)> {
        let fragments = self.gathered.list();
        if fragments.is_empty() {
            return None;
        }
        let pool = Arc::clone(&self.target.as_ref()?.pool);
        let list = fragments.to_vec();
        let empty = self.spare.pop().unwrap_or_default();
        let tokens = std::mem::replace(&mut self.tokens, empty);
        let pinned = std::mem::take(&mut self.pinned);
        let ticket = self.ticket(Part::Device { tokens, pinned });
        Some((pool, list, ticket))
    }

    fn cut_host(&mut self) -> Option<(Arc<BouncePool>, ScatterList, Ticket)> {
        if self.landing.written() == 0 {
            return None;
        }
        let list: ScatterList = self.gathered.host_pieces().iter().map(fragment).collect();
        let bytes = self.landing.hand_on();
        let ticket = self.ticket(Part::Host { bytes });
        Some((Arc::clone(self.landing.pool()), list, ticket))
    }

    /// A part was unpacked, the oldest one first; its tokens join [`Self::returns`].
    ///
    /// # Errors
    /// The ticket that was expected, or what is wrong with the tokens.
    pub(super) fn consume(&mut self, ticket: Ticket) -> Result<(), ConsumeError> {
        let oldest = self.next_ticket - self.parts.len() as u64 + 1;
        if ticket.0 != oldest || self.parts.is_empty() {
            let expected = (!self.parts.is_empty()).then_some(oldest);
            return Err(ConsumeError::Order { expected });
        }
        match self.parts.pop_front() {
            Some(Part::Device { mut tokens, pinned }) => {
                let moved = if self.keeps_tokens {
                    tokens.clear();
                    Ok(())
                } else {
                    self.returns.append(&mut tokens)
                };
                if let Some(target) = &self.target {
                    target.usage.unpin(pinned);
                }
                moved?;
                self.spare.push(tokens);
            }
            Some(Part::Host { bytes }) => self.landing.release(bytes),
            None => {}
        }
        Ok(())
    }

    /// Tokens to give back before the next receive.
    pub(super) fn returns(&mut self) -> &mut TokenSet {
        &mut self.returns
    }

    /// Whether parts of the pool are still to be unpacked.
    pub(super) fn reads_pool(&self) -> bool {
        let is_device = |part: &Part| matches!(part, Part::Device { .. });
        !self.gathered.list().is_empty() || self.parts.iter().any(is_device)
    }

    /// The socket was closed, which gave every token back, or will be without another receive.
    pub(super) fn forget_tokens(&mut self) {
        self.returns.clear();
        self.keeps_tokens = true;
    }

    /// Ends everything; the tokens of the receives that did not end.
    pub(super) fn close(&mut self) -> Vec<u64> {
        let held = self.parts.drain(..).map(|part| match part {
            Part::Device { pinned, .. } => pinned,
            Part::Host { .. } => 0,
        });
        let pinned = held.sum::<u64>() + std::mem::take(&mut self.pinned);
        if let Some(target) = &self.target {
            target.usage.unpin(pinned);
        }
        self.returns.clear();
        self.posted.drain(..).map(|wanted| wanted.token).collect()
    }
}

impl Drop for Inflow {
    fn drop(&mut self) {
        // Others share the count of the pool's pages.
        self.close();
    }
}

fn fragment(piece: &HostPiece) -> Fragment {
    Fragment {
        source_offset: piece.host_offset,
        // A piece lies in the landing area, which is far shorter.
        length: u32::try_from(piece.length).unwrap_or(u32::MAX),
        destination_offset: piece.destination_offset,
    }
}

/// A ticket that cannot be taken.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ConsumeError {
    #[error("the ticket is not the oldest one, {expected:?}")]
    Order { expected: Option<u64> },
    #[error(transparent)]
    Token(#[from] TokenError),
}

#[cfg(test)]
mod tests;

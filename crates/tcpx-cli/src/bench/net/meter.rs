//! The measuring end of a connection: gives orders, does its own part, and takes the other end's costs.

use std::time::Duration;

use tcpx::Connection;

use super::engine::{Buffers, End, Part};
use super::orders::{self, Cost, Mode, Op, Order, Run};
use super::server::{back, sized};
use crate::error::Error;
use crate::memory_choice::MemoryChoice;
use crate::messages::{self, ANSWER, REQUEST, Request};

/// A connection that is measured, with this end's memory.
#[derive(Debug)]
pub(crate) struct Meter<'a> {
    pub(super) connection: &'a Connection,
    memory: &'a MemoryChoice,
    /// Longest time without progress.
    pub(super) limit: Duration,
    buffers: Option<Buffers>,
}

impl<'a> Meter<'a> {
    /// Asks the other end to take orders.
    pub(crate) fn begin(
        connection: &'a Connection,
        memory: &'a MemoryChoice,
        limit: Duration,
    ) -> Result<Self, Error> {
        let answer = messages::expect(connection, ANSWER, limit)?;
        messages::tell(connection, REQUEST, &Request::Measure)?;
        messages::ready(answer)?;
        Ok(Self {
            connection,
            memory,
            limit,
            buffers: None,
        })
    }

    /// Has fresh contents cross in both directions, into poisoned memory; every byte is compared.
    pub(crate) fn verify(&mut self, op: Op, bytes: u64, depth: u16) -> Result<(), Error> {
        let depth = super::engine::depth(bytes, depth);
        let seed = getrandom::u64().map_err(crate::key::KeyError::random)?;
        let run = Run {
            mode: Mode::Both,
            op,
            bytes,
            count: depth.into(),
            depth,
            at_once: false,
            pieces: None,
        };
        sized(self.memory, &mut self.buffers, bytes, depth)?.prepare(seed)?;
        let order = Order::Verify {
            op,
            bytes,
            depth,
            seed,
        };
        self.take_part(&run, &order, Duration::ZERO)?;
        sized(self.memory, &mut self.buffers, bytes, depth)?.compare(back(seed), depth)
    }

    /// Does one measurement, which takes about `span`.
    pub(crate) fn run(&mut self, run: &Run, span: Duration) -> Result<(Part, Cost), Error> {
        self.take_part(run, &Order::Run(*run), span)
    }

    fn take_part(
        &mut self,
        run: &Run,
        order: &Order,
        span: Duration,
    ) -> Result<(Part, Cost), Error> {
        let patience = self.patience(run, span);
        let buffers = sized(self.memory, &mut self.buffers, run.bytes, run.depth)?;
        let end = End {
            connection: self.connection,
            buffers,
            memory: self.memory,
        };
        let mut reply = None;
        let part = end.measure(run, || {
            reply = Some(orders::give(self.connection, order, patience)?);
            Ok(())
        });
        // The peer's reason wins over what this end saw of it.
        let theirs = reply.map(|reply| orders::finished(reply, patience));
        match (part, theirs) {
            (Ok(part), Some(theirs)) => Ok((part, theirs?)),
            (_, Some(Err(error @ Error::Peer { .. }))) => Err(error),
            (Err(error), _) => Err(error),
            (Ok(part), None) => Ok((part, Cost::default())),
        }
    }

    /// Time for the other end to make, fill or compare memory: 100 MB/s is slow enough for any host.
    pub(super) fn patience(&self, run: &Run, span: Duration) -> Duration {
        let bytes = run.bytes.saturating_mul(u64::from(run.depth) * 4);
        self.limit + span * 4 + Duration::from_secs(bytes / 100_000_000)
    }

    /// Says that there are no more orders.
    pub(crate) fn end(&self) -> Result<(), Error> {
        orders::give(self.connection, &Order::End, self.limit).map(drop)
    }
}

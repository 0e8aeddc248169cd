//! The measuring end of a connection: gives orders, does its own part, and takes the other end's costs.

use std::time::Duration;

use tcpx::Connection;

use super::engine::{Buffers, End, Part};
use super::orders::{self, Cost, Mode, Op, Order, Run};
use super::server::sized;
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
        let mut run = Run::new(Mode::Both, op, bytes, depth.into(), depth);
        run.seed = Some(crate::key::seed()?);
        self.run(&run, Duration::ZERO).map(drop)
    }

    /// Does one measurement, which takes about `span`.
    pub(crate) fn run(&mut self, run: &Run, span: Duration) -> Result<(Part, Cost), Error> {
        let patience = self.patience(run, span);
        let end = End {
            connection: self.connection,
            buffers: sized(self.memory, &mut self.buffers, run.bytes, run.depth)?,
            memory: self.memory,
        };
        let mut reply = None;
        let part = end.take_part(run, true, || {
            reply = Some(orders::give(self.connection, &Order::Run(*run), patience)?);
            Ok(())
        });
        // The peer's reason wins over what this end saw of it.
        let theirs = reply.map(|reply| orders::finished(reply, patience));
        match (part, theirs) {
            (Ok(part), Some(theirs)) => Ok((part, theirs?)),
            (_, Some(Err(error @ Error::Peer(_)))) => Err(error),
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

//! Measurements over a connection of this program: how orders and answers of [`tcpx_bench`] travel
//! over it.

use std::time::Duration;

use serde_json::Value;
use tcpx::Connection;
use tcpx_bench::Meter;
use tcpx_bench::orders::Talk;
use tcpx_bench::serve::{self, Served};

use crate::error::Error;
use crate::memory_choice::MemoryChoice;
use crate::messages::{self, ANSWER, Expected, LONGEST_TRANSFER, REQUEST, Request, VERDICT};

/// Messages of one end.
struct Over<'a> {
    connection: &'a Connection,
    /// Tags of what this end says, and of what it hears.
    tags: (u64, u64),
    /// Posted before the answer to work that may fail, so that a reason for the failure comes in
    /// any case.
    next: Option<Expected>,
}

impl Over<'_> {
    fn expect(&self) -> Result<Expected, Error> {
        messages::expect(self.connection, self.tags.1, LONGEST_TRANSFER)
    }
}

impl Talk for Over<'_> {
    fn send_message(&mut self, message: Value) -> Result<(), tcpx_bench::Error> {
        Ok(messages::send_message(
            self.connection,
            self.tags.0,
            &message,
        )?)
    }

    fn next_message(&mut self, limit: Duration) -> Result<Value, tcpx_bench::Error> {
        let expected = match self.next.take() {
            Some(posted) => posted,
            None => self.expect()?,
        };
        // What bounds a server's wait is the connection, and the person.
        let value: Value = match limit >= LONGEST_TRANSFER {
            true => expected.wait("an order of the benchmark")?,
            false => expected.wait_at_most(limit, "the other end's answer")?,
        };
        if let Some("ready") = value["answer"].as_str() {
            self.next = Some(self.expect()?);
        }
        Ok(value)
    }
}

/// Has the other end take orders for some work.
pub(crate) fn measure<T>(
    connection: &Connection,
    memory: &MemoryChoice,
    limit: Duration,
    work: impl FnOnce(&mut Meter<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    let answer = messages::expect(connection, ANSWER, limit)?;
    messages::send_message(connection, REQUEST, &Request::Measure)?;
    messages::ready(answer)?;
    let mut over = Over {
        connection,
        tags: (REQUEST, VERDICT),
        next: None,
    };
    let allocate = |bytes| Ok(memory.allocate_pages(bytes)?);
    let mut meter = Meter::new(connection, &mut over, &allocate, limit);
    let done = work(&mut meter)?;
    meter.end()?;
    Ok(done)
}

/// Takes the orders of a measuring end until there are no more.
pub(crate) fn serve(
    connection: &Connection,
    memory: &MemoryChoice,
    limit: Duration,
) -> Result<Served, Error> {
    let request = messages::expect(connection, REQUEST, limit)?.wait("a request to measure")?;
    if request != Request::Measure {
        let expected = "a request to measure";
        return Err(messages::refuse(connection, expected, &request));
    }
    messages::tell_ready(connection)?;
    let mut over = Over {
        connection,
        tags: (VERDICT, REQUEST),
        next: None,
    };
    let allocate = |bytes| Ok(memory.allocate_pages(bytes)?);
    Ok(serve::serve(connection, &mut over, &allocate)?)
}

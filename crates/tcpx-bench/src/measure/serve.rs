//! The other end: does its part of each measurement until there is no more.

use std::time::Duration;

use tcpx::Connection;

use crate::Error;
use crate::cost::{Cost, cpu_us};
use crate::end::{Allocate, Buffers, End};
use crate::orders::{Answer, Op, Order, Run, Talk};

/// A person may look at figures between two orders, and other programs have their turns.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

/// What a measuring end had this one do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Served {
    /// Payload bytes of its measurements, both directions together where there were two.
    pub bytes: u64,
    /// Contents were compared before.
    pub verified: bool,
}

/// Takes the orders of a measuring end until there are no more.
///
/// # Errors
/// Why it could not do its part; the measuring end has been told.
pub fn serve(
    connection: &Connection,
    talk: &mut dyn Talk,
    allocate: Allocate<'_>,
) -> Result<Served, Error> {
    let (mut served, mut buffers) = (Served::default(), Buffers::default());
    loop {
        let order = talk.expect("an order of the benchmark", LONGEST)?;
        let done = match &order {
            Order::End => return talk.send_order(&Answer::done()).map(|()| served),
            Order::Run { run } => {
                served.verified |= run.seed.is_some();
                if run.seed.is_none() {
                    served.bytes = served.bytes.saturating_add(run.moved());
                }
                take_part(connection, talk, run, &mut buffers, allocate)
            }
            other => Err(Error::unexpected(
                "an order to measure",
                format!("{other:?}"),
            )),
        };
        answer(talk, done)?;
    }
}

/// Tells what an order came to.
pub(crate) fn answer(talk: &mut dyn Talk, done: Result<Answer, Error>) -> Result<(), Error> {
    match done {
        Ok(answer) => talk.send_order(&answer),
        Err(error) => {
            let reason = (&error).into();
            // This end's error is the news, also where the other one did not stay to hear it.
            let _ = talk.send_order(&Answer::Failed { reason });
            Err(error)
        }
    }
}

/// The part in one run.
pub(crate) fn take_part(
    connection: &Connection,
    talk: &mut dyn Talk,
    run: &Run,
    buffers: &mut Buffers,
    allocate: Allocate<'_>,
) -> Result<Answer, Error> {
    run.check()?;
    buffers.fit(run, allocate)?;
    let end = End {
        connection,
        buffers,
        run,
        measures: false,
    };
    if run.op == Op::Send {
        let ready = || talk.send_order(&Answer::Ready { keys: Vec::new() });
        let cost = end.take_part(ready)?.cost;
        return Ok(Answer::Done { cost });
    }
    let cpu = cpu_us();
    let windows = end.expose()?;
    let keys = windows
        .iter()
        .map(|window| window.key().to_bytes().to_vec());
    talk.send_order(&Answer::Ready {
        keys: keys.collect(),
    })?;
    let over: Order = talk.expect("the end of a measurement", LONGEST)?;
    if over != Order::Over {
        let arrived = format!("{over:?}");
        return Err(Error::unexpected("the end of a measurement", arrived));
    }
    let cost = Cost::since(cpu);
    end.let_go(windows)?;
    Ok(Answer::Done { cost })
}

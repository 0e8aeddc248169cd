//! Measures the embedded network between two processes of this host:
//!
//! `tcp_speed [--from GPU|host] [--to GPU|host] [--rounds N] [--out DIR] [SETTINGS] --case NAME=CASE ...`
//!
//! | CASE | what is timed |
//! |---|---|
//! | `stream:BYTES:DEPTH:COUNT` | COUNT transfers, DEPTH of them in flight |
//! | `both:BYTES:DEPTH:COUNT` | the same in both directions at once; the rate is the sum |
//! | `ping:BYTES:COUNT` | half of a round trip, one message at a time |
//! | `copies:BYTES:COUNT` | on the sender alone: each way of moving a small message to and from its GPU |
//! | `plain:LANES:CALL:BYTES:SET` | for comparison, blocking threads that write and read one socket each: BYTES in all, in calls of CALL bytes, over SET bytes of host memory a side |
//!
//! SETTINGS: `--lanes N`, `--chunk BYTES`, `--window N`, and
//! `--at-once` to wait for no stream;
//! without them the network chooses, as for everyone.
//!
//! With `TCP_SPEED_THREADS` set, a line a busy thread goes to standard error.
//!
//! Each round starts both processes anew and runs all cases. Contents are verified, in poisoned
//! destinations, before anything is timed. One JSON line a case goes to standard output and, with
//! `--out`, to DIR/NAME.ROUND.json, in the shape that `cargo xtask bench-collect` reads.

mod arguments;
mod cases;
mod copies;
mod link;
mod plain;
mod threads;

use std::process::ExitCode;

use arguments::Arguments;

fn main() -> ExitCode {
    let outcome = Arguments::parse(std::env::args().skip(1)).and_then(|arguments| {
        if arguments.child {
            link::serve(&arguments)
        } else {
            (1..=arguments.rounds).try_for_each(|round| link::lead(&arguments, round))
        }
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tcp_speed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Errors are for the person who measures: a sentence.
pub(crate) type Outcome<T> = Result<T, String>;

pub(crate) fn text(error: impl ToString) -> String {
    error.to_string()
}

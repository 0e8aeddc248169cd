//! Two sessions in virtual time.

mod arbitrary;
mod cancels;
mod closing;
mod data_plane;
mod deadlines;
mod exposed;
mod hostile;
mod model;
mod one_sided;
mod pair;
mod pieces;
mod posted;
mod random;
mod stopping;
mod storm;
mod transfers;
mod waiting;

use std::time::Duration;

use super::*;
use proptest::prelude::*;

use crate::frame::{
    Destination, Eager, Exposure, Grant, Level, Limits, Role, Settings, Tag, TimeLeft, drawn_limits,
};

/// The next thing to do, whatever frames wait.
fn next_action(session: &mut Session) -> Option<Action> {
    match session.poll(Takes::Actions)? {
        Output::Action(action) => Some(action),
        Output::Frame(frame) => unreachable!("{frame:?}"),
    }
}

/// Chunks of 512 KiB over 4 channels.
pub(in crate::session) fn settings() -> Settings {
    Settings {
        network: "tcp".into(),
        channels: 4,
        chunk_bytes: 512 * 1024,
        send_window: 12,
        receive_window: 16,
        eager_limit: 16 * 1024,
        eager_credit: 256 * 1024,
        heartbeat_ms: 1000,
        dead_after_ms: 10_000,
        limits: Limits::default(),
        memory: "host".into(),
        software: "test".into(),
    }
}

/// How long a close may take, where that does not matter.
const CLOSE: Duration = Duration::from_secs(2);

pub(super) fn config() -> Config {
    Config::new(settings())
}

/// What a side takes at a time: from 1 up, and of pieces as many as the lists of a test have.
fn any_limits(least_pieces: u32) -> impl Strategy<Value = Limits> {
    let few = || prop_oneof![3 => 1u32..4, 1 => 4u32..40, 1 => Just(4096u32)];
    let pieces = (least_pieces..3 * least_pieces).prop_map(|pieces| pieces.max(1));
    let drawn = drawn_limits(few, pieces);
    prop_oneof![1 => Just(Limits::default()), 3 => drawn]
}

/// How long a payload may be, and how many bytes of them a side takes at a time.
fn any_eager() -> impl Strategy<Value = (u32, u32)> {
    let limits = prop_oneof![3 => Just((16 * 1024, 48 * 1024)), 1 => (0u32..5000, 0u32..2000)];
    limits.prop_map(|(limit, beside)| (limit, limit + beside))
}

/// The same side, which takes so much at a time.
fn limited(config: &Config, limits: Limits) -> Config {
    let mut config = config.clone();
    config.ours.limits = limits;
    config.bounds.unread_bytes = limits.notifications.into();
    config
}

fn small_chunks(channels: u16) -> Config {
    let mut config = config();
    config.ours.chunk_bytes = 4096;
    config.ours.channels = channels;
    config
}

/// Why the connection of an operation was lost, and where the operation stood.
fn lost(cause: &EndCause) -> (&ConnectionFailure, &StallReport) {
    match cause {
        EndCause::ConnectionLost {
            failure,
            standing: Some(standing),
        } => (failure, standing),
        other => panic!("{other}"),
    }
}

fn send(tag: u64, bytes: u64, level: Level) -> SendRequest {
    SendRequest {
        to: Destination::next_receive(Tag(tag)),
        bytes,
        level,
        deadlines: None,
        eager: None,
        chunk_bytes: None,
    }
}

fn eager(tag: u64, bytes: usize, level: Level) -> SendRequest {
    SendRequest {
        eager: Some(Vec::from_iter((0..bytes).map(|at| at as u8 ^ tag as u8)).into()),
        ..send(tag, bytes as u64, level)
    }
}

fn exposed(tag: u64, bytes: u32, level: Level) -> SendRequest {
    let (entry, mark) = (3, u64::from(bytes));
    let at = Exposure { entry, mark, bytes };
    SendRequest {
        eager: Some(Eager::Exposed(at)),
        ..send(tag, bytes.into(), level)
    }
}

fn receive(tag: u64, capacity: u64, level: Level) -> ReceiveRequest {
    ReceiveRequest {
        tag: Tag(tag),
        capacity,
        level,
        deadlines: None,
        fenced: false,
    }
}

fn placing(chunk_bytes: u32, window: u64) -> Grant {
    Grant {
        chunk_bytes,
        window,
        level: Level::Placed,
        taper: None,
    }
}

fn stall(seconds: u64) -> Option<Deadlines> {
    Some(Deadlines {
        stall: Duration::from_secs(seconds),
        total: None,
    })
}

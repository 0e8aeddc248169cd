//! What of grants ahead no honest peer says.

use super::super::hostile::{drain_at, session};
use super::*;
use crate::frame::TransferId;
use crate::time::Time;

fn grant_ahead(transfer: u64, epoch: u32, first_sequence: u64) -> Frame {
    Frame::GrantAhead {
        transfer: TransferId(transfer),
        epoch,
        tag: Tag(1),
        bytes: BYTES,
        grant: placing(4096, first_sequence),
    }
}

/// The answers to these frames, the last of which must be refused if `refused`.
fn answers(config: Config, sends: usize, frames: &[Frame]) -> Result<Vec<Frame>, SessionError> {
    let mut session = session(config);
    for _ in 0..sends {
        session
            .send(Time(0), send(1, BYTES, Level::Placed))
            .unwrap();
    }
    drain_at(&mut session, Time(0));
    let mut said = Vec::new();
    for frame in frames {
        session.frame(Time(0), frame.clone())?;
        said.extend(drain_at(&mut session, Time(0)).0);
    }
    Ok(said)
}

#[test]
fn grants_ahead_that_no_honest_peer_sends_end_the_session() {
    let refused = |frames: &[Frame]| {
        let error = answers(guessing(), 0, frames).expect_err("refused");
        assert!(!error.to_string().is_empty());
        error
    };
    let first = || grant_ahead(0, 0, 0);
    let chunks = BYTES.div_ceil(4096);
    assert!(answers(guessing(), 0, &[first(), grant_ahead(1, 0, chunks)]).is_ok());
    let plain = answers(small_chunks(3), 0, &[first()]);
    assert!(
        matches!(plain, Err(SessionError::Unexpected { .. })),
        "unknown to this side"
    );
    let order = |error| matches!(error, SessionError::TransferOrder { .. });
    let field = |error| matches!(error, SessionError::Field { .. });
    let unexpected = |error| matches!(error, SessionError::Unexpected { .. });
    assert!(order(refused(&[grant_ahead(1, 0, 0)])));
    assert!(order(refused(&[first(), grant_ahead(0, 0, chunks)])));
    assert!(
        field(refused(&[grant_ahead(0, 0, 1)])),
        "the place in the stream"
    );
    assert!(field(refused(&[first(), grant_ahead(1, 0, 0)])));
    assert!(
        unexpected(refused(&[grant_ahead(0, 1, 0)])),
        "an epoch to come"
    );
    assert!(unexpected(refused(&[Frame::Recall { epoch: 1 }])));
    let many: Vec<_> = (0..33).map(|at| grant_ahead(at, 0, at * chunks)).collect();
    assert!(order(refused(&many)), "too many at a time");
    let empty = Frame::GrantAhead {
        transfer: TransferId(0),
        epoch: 0,
        tag: Tag(1),
        bytes: 0,
        grant: placing(4096, 0),
    };
    assert!(field(refused(&[empty])));
    // Nothing of this side was granted ahead.
    assert!(unexpected(refused(&[Frame::Decline {
        epoch: 1,
        next: TransferId(0)
    }])));
    assert!(order(refused(&[Frame::Decline {
        epoch: 0,
        next: TransferId(1)
    }])));
}

#[test]
fn a_grant_ahead_of_a_transfer_that_was_granted_or_of_an_old_epoch_behind_a_new_one_ends_the_session()
 {
    let chunks = BYTES.div_ceil(4096);
    let grant = Frame::Grant {
        transfer: TransferId(0),
        grant: placing(4096, 0),
    };
    let twice = answers(guessing(), 1, &[grant.clone(), grant_ahead(0, 0, chunks)]);
    assert!(
        matches!(twice, Err(SessionError::Unexpected { .. })),
        "{twice:?}"
    );
    // A grant of an announced transfer behind a grant ahead that nothing was sent to.
    let behind = answers(guessing(), 1, &[grant_ahead(1, 0, 0)]);
    assert!(behind.is_ok(), "{behind:?}");
    let behind = answers(guessing(), 1, &[grant_ahead(1, 0, 0), grant]);
    assert!(
        matches!(behind, Err(SessionError::Unexpected { .. })),
        "{behind:?}"
    );
    let recall = Frame::Recall { epoch: 0 };
    let said = answers(
        guessing(),
        0,
        &[grant_ahead(0, 0, 0), recall.clone(), recall.clone()],
    )
    .unwrap();
    assert_eq!(
        said,
        [Frame::Decline {
            epoch: 0,
            next: TransferId(0)
        }],
        "once"
    );
    let old = answers(
        guessing(),
        0,
        &[recall, grant_ahead(0, 1, 0), grant_ahead(0, 0, chunks)],
    );
    assert!(
        matches!(old, Err(SessionError::Unexpected { .. })),
        "{old:?}"
    );
}

#[test]
fn an_announcement_comes_behind_its_chunks_once_at_most() {
    let mut session = session(guessing());
    let now = Time(0);
    let announce = |transfer| Frame::Announce {
        transfer: TransferId(transfer),
        tag: Tag(1),
        bytes: BYTES,
        level: Level::Placed,
    };
    for transfer in 0..2 {
        session
            .receive(now, receive(1, BYTES, Level::Placed))
            .unwrap();
        session.frame(now, announce(transfer)).unwrap();
    }
    let open = session
        .receive(now, receive(1, BYTES, Level::Placed))
        .unwrap();
    let (frames, _) = drain_at(&mut session, now);
    assert!(frames.iter().any(|frame| matches!(
        frame,
        Frame::GrantAhead {
            transfer: TransferId(2),
            ..
        }
    )));
    session.chunk_arrived(now, open, 0, 4096);
    session.frame(now, announce(2)).unwrap();
    let again = session.frame(now, announce(2));
    assert!(
        matches!(again, Err(SessionError::TransferOrder { .. })),
        "{again:?}"
    );
}

/// A side that has not said that it knows grants ahead takes a decline.
#[test]
fn a_decline_of_nothing_ends_the_session_where_nothing_can_be_declined() {
    let mut session = session(small_chunks(3));
    let decline = Frame::Decline {
        epoch: 0,
        next: TransferId(0),
    };
    assert!(session.frame(Time(0), decline).is_err());
}

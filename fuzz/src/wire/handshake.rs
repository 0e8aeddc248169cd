//! Both sides of both handshakes against a hostile peer.

use std::sync::LazyLock;

use tcpx_wire::handshake::{
    Build, ClientHandshake, HandshakeError, LaneClient, LaneServer, ServerHandshake, ServerStep,
    Session, Step,
};
use tcpx_wire::{ClientKey, Identity, Key};

/// Input: the role (u8), then what the peer sends. Keys and randomness are fixed, so that a
/// recorded conversation in the corpus reaches the end.
pub fn run(data: &[u8]) {
    let Some((role, bytes)) = data.split_first() else {
        return;
    };
    let whole = converse(*role, bytes, bytes.len().max(1));
    let single = converse(*role, bytes, 1);
    assert_eq!(whole, single, "slicing changes nothing");
}

/// What came of it: bytes sent, bytes taken, and the end.
#[derive(Debug, PartialEq)]
struct Outcome {
    sent: Vec<u8>,
    taken: usize,
    end: Option<Result<(), HandshakeError>>,
}

/// One of the state machines, so far.
enum Side {
    Client(ClientHandshake),
    Server(ServerHandshake),
    LaneClient(LaneClient),
    LaneServer(LaneServer),
}

fn converse(role: u8, bytes: &[u8], cut: usize) -> Outcome {
    let mut outcome = Outcome {
        sent: Vec::new(),
        taken: 0,
        end: None,
    };
    let mut side = match role % 5 {
        0 => Side::Server(server(true)),
        1 => Side::Server(server(false)),
        2 => Side::Client(ClientHandshake::new(Some(&FIXED.client), &Build::OURS, [1; 32]).0),
        3 => Side::Client(ClientHandshake::new(None, &Build::OURS, [1; 32]).0),
        _ => Side::LaneClient(
            LaneClient::new(&SESSION, 3, 8, [3; 32])
                .expect("a constant lane")
                .0,
        ),
    };
    for mut slice in bytes.chunks(cut) {
        while outcome.end.is_none() {
            let before = slice.len();
            let more = step(&mut side, &mut slice, &mut outcome);
            outcome.taken += before - slice.len();
            if !more {
                break;
            }
        }
        if outcome.end.is_some() {
            assert!(!step(&mut side, &mut slice, &mut outcome), "it has ended");
            break;
        }
        assert!(slice.is_empty(), "all input is taken");
    }
    assert!(outcome.taken <= 512, "a stranger costs a bounded amount");
    if let Some(Err(HandshakeError::NotTcpx { .. })) = outcome.end {
        // How much of a wrong greeting is seen depends on how it was sliced, on purpose.
        outcome.taken = 0;
        outcome.end = Some(Err(HandshakeError::Ended));
    }
    outcome
}

/// Whether another call could go on without more input.
fn step(side: &mut Side, input: &mut &[u8], outcome: &mut Outcome) -> bool {
    let end = match side {
        Side::Client(client) => client.receive(input).map(|step| step.map_done()),
        Side::LaneClient(client) => client.receive(input).map(|answered| match answered {
            Some((proof, _)) => Next::SendLast(proof.to_vec()),
            None => Next::NeedMore,
        }),
        Side::LaneServer(server) => server.receive(input).map(|proved| match proved {
            Some(accepted) => {
                assert!(accepted.lane < accepted.lanes);
                Next::Done
            }
            None => Next::NeedMore,
        }),
        Side::Server(server) => match server.receive(input) {
            Ok(ServerStep::NeedMore) => Ok(Next::NeedMore),
            Ok(ServerStep::Send(message)) => Ok(Next::Send(message.to_vec())),
            Ok(ServerStep::Done(mut established)) => {
                outcome.sent.extend_from_slice(&established.welcome());
                Ok(Next::Done)
            }
            Ok(ServerStep::Lane(request)) => match request.accept(&SESSION.key) {
                Ok((lane, answer)) => {
                    *side = Side::LaneServer(lane);
                    Ok(Next::Send(answer.to_vec()))
                }
                Err(refusal) => {
                    let (send, error) = *refusal;
                    outcome.sent.extend_from_slice(&send);
                    Err(error)
                }
            },
            Ok(ServerStep::Refuse { send, error }) => {
                outcome.sent.extend_from_slice(&send);
                Err(error)
            }
            Err(error) => Err(error),
        },
    };
    match end {
        Ok(Next::NeedMore) => false,
        Ok(Next::Send(message)) => {
            outcome.sent.extend_from_slice(&message);
            true
        }
        Ok(Next::SendLast(message)) => {
            outcome.sent.extend_from_slice(&message);
            outcome.end = Some(Ok(()));
            false
        }
        Ok(Next::Done) => {
            outcome.end = Some(Ok(()));
            false
        }
        Err(HandshakeError::Ended) => {
            assert!(outcome.end.is_some(), "it had not ended");
            false
        }
        Err(error) => {
            outcome.end = Some(Err(error));
            false
        }
    }
}

enum Next {
    NeedMore,
    Send(Vec<u8>),
    SendLast(Vec<u8>),
    Done,
}

trait MapDone {
    fn map_done(self) -> Next;
}

impl<T> MapDone for Step<T> {
    fn map_done(self) -> Next {
        match self {
            Self::NeedMore => Next::NeedMore,
            Self::Send(message) => Next::Send(message.to_vec()),
            Self::Done(_) => Next::Done,
        }
    }
}

/// What both sides have of the key. To make it, as to make the session, takes longer than any
/// input.
struct Fixed {
    identity: Identity,
    client: ClientKey,
}

static FIXED: LazyLock<Fixed> = LazyLock::new(|| {
    let key = Key::generate(&mut |bytes| bytes.copy_from_slice(b"foobarfoobarfoob"));
    Fixed {
        identity: key.identity(),
        client: key.client_key(),
    }
});

/// The session that the fixed keys and randomness lead to.
static SESSION: LazyLock<Session> = LazyLock::new(|| {
    let (mut client, hello) = ClientHandshake::new(Some(&FIXED.client), &Build::OURS, [1; 32]);
    let mut server = server(true);
    let Ok(ServerStep::Send(answer)) = server.receive(&mut &hello[..]) else {
        unreachable!("the server answers a good hello");
    };
    let Ok(Step::Send(proof)) = client.receive(&mut &answer[..]) else {
        unreachable!("the client proves itself to a good server");
    };
    match server.receive(&mut &proof[..]) {
        Ok(ServerStep::Done(ours)) => ours.session,
        _ => unreachable!("the server takes a good proof"),
    }
});

/// A server, with the key or without one, that draws the same random bytes each time.
fn server(with_key: bool) -> ServerHandshake {
    let identity = with_key.then_some(&FIXED.identity);
    ServerHandshake::new(identity, &Build::OURS, std::array::from_fn(|at| at as u8))
}

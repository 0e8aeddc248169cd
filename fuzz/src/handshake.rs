//! Both sides of both handshakes against a hostile peer.

use tcpx_wire::Key;
use tcpx_wire::handshake::{
    ClientHandshake, HandshakeError, LaneClient, LaneServer, ServerHandshake, ServerStep, Session,
    Step,
};

/// Input: the role (u8), then what the peer sends. Keys and nonces are fixed, so that a recorded
/// conversation in the corpus reaches the end.
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
    let key = Key::parse("MZXW6YTBOJTG633CMFZGM33PMI").expect("a constant key");
    let mut outcome = Outcome {
        sent: Vec::new(),
        taken: 0,
        end: None,
    };
    let mut side = match role % 5 {
        0 => Side::Server(ServerHandshake::new(Some(&key), [2; 32], 3)),
        1 => Side::Server(ServerHandshake::new(None, [2; 32], 3)),
        2 => Side::Client(ClientHandshake::new(Some(&key), [1; 32], 6).0),
        3 => Side::Client(ClientHandshake::new(None, [1; 32], 6).0),
        _ => Side::LaneClient(
            LaneClient::new(&session(&key), 3, 8, [3; 32])
                .expect("a constant lane")
                .0,
        ),
    };
    for mut slice in bytes.chunks(cut) {
        while outcome.end.is_none() {
            let before = slice.len();
            let more = step(&mut side, &mut slice, &key, &mut outcome);
            outcome.taken += before - slice.len();
            if !more {
                break;
            }
        }
        if outcome.end.is_some() {
            assert!(
                !step(&mut side, &mut slice, &key, &mut outcome),
                "it has ended"
            );
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
fn step(side: &mut Side, input: &mut &[u8], key: &Key, outcome: &mut Outcome) -> bool {
    let end = match side {
        Side::Client(client) => client.receive(input).map(|step| step.map_done()),
        Side::LaneClient(client) => client.receive(input).map(|step| step.map_done()),
        Side::LaneServer(server) => server.receive(input).map(|step| match step {
            Step::Done(accepted) => {
                outcome.sent.extend_from_slice(&accepted.send);
                Next::Done
            }
            other => other.map_done(),
        }),
        Side::Server(server) => match server.receive(input) {
            Ok(ServerStep::NeedMore) => Ok(Next::NeedMore),
            Ok(ServerStep::Send(message)) => Ok(Next::Send(message.to_vec())),
            Ok(ServerStep::Done { send, .. }) => {
                outcome.sent.extend_from_slice(&send);
                Ok(Next::Done)
            }
            Ok(ServerStep::Lane(request)) => {
                assert!(request.lane() < request.lanes());
                let (lane, challenge) = request.accept(&session(key).key);
                *side = Side::LaneServer(lane);
                Ok(Next::Send(challenge.to_vec()))
            }
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

/// The session that the fixed keys and nonces lead to.
fn session(key: &Key) -> Session {
    let (mut client, hello) = ClientHandshake::new(Some(key), [1; 32], 6);
    let mut server = ServerHandshake::new(Some(key), [2; 32], 3);
    let Ok(ServerStep::Send(answer)) = server.receive(&mut &hello[..]) else {
        unreachable!("the server answers a good hello");
    };
    let Ok(Step::Send(proof)) = client.receive(&mut &answer[..]) else {
        unreachable!("the client proves itself to a good server");
    };
    let Ok(ServerStep::Done { session, .. }) = server.receive(&mut &proof[..]) else {
        unreachable!("the server takes a good proof");
    };
    session
}

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::key::Key;

mod known_answers;
mod lanes;

fn key(seed: u8) -> Key {
    Key::generate(&mut |out| out.fill(seed))
}

/// The bytes of one direction, handed over in slices of these lengths, again and again.
struct Wire<'a> {
    bytes: Vec<u8>,
    cuts: std::iter::Cycle<std::slice::Iter<'a, usize>>,
}

impl<'a> Wire<'a> {
    fn new(cuts: &'a [usize]) -> Self {
        Self {
            bytes: Vec::new(),
            cuts: cuts.iter().cycle(),
        }
    }

    /// Offers the next slice; what the reader leaves stays.
    fn offer<T>(&mut self, reader: impl FnOnce(&mut &[u8]) -> T) -> T {
        let cut = self.cuts.next().copied().unwrap_or(1).min(self.bytes.len());
        let mut slice = &self.bytes[..cut];
        let result = reader(&mut slice);
        let used = cut - slice.len();
        self.bytes.drain(..used);
        result
    }
}

/// Runs both sides of a control connection to their end.
fn control(
    client_key: Option<&Key>,
    server: ServerHandshake,
    cuts: &[usize],
) -> (
    Result<Session, HandshakeError>,
    Result<Session, HandshakeError>,
) {
    let (mut client, first) = ClientHandshake::new(client_key, [1; 32], 0b110);
    let mut server = server;
    let (mut to_server, mut to_client) = (Wire::new(cuts), Wire::new(cuts));
    to_server.bytes.extend_from_slice(&first);
    let mut server_end = None;
    for _ in 0..1000 {
        if server_end.is_none() {
            match to_server.offer(|input| server.receive(input)) {
                Ok(ServerStep::NeedMore) => {}
                Ok(ServerStep::Send(message)) => to_client.bytes.extend_from_slice(&message),
                Ok(ServerStep::Done { session, send }) => {
                    to_client.bytes.extend_from_slice(&send);
                    server_end = Some(Ok(session));
                }
                Ok(ServerStep::Refuse { send, error }) => {
                    to_client.bytes.extend_from_slice(&send);
                    server_end = Some(Err(error));
                }
                Ok(ServerStep::Lane(_)) => panic!("a control connection became a lane"),
                Err(error) => server_end = Some(Err(error)),
            }
        }
        match to_client.offer(|input| client.receive(input)) {
            Ok(Step::NeedMore) if to_client.bytes.is_empty() && server_end.is_some() => {
                return (Err(client.closed()), server_end.unwrap());
            }
            Ok(Step::NeedMore) => {}
            Ok(Step::Send(message)) => to_server.bytes.extend_from_slice(&message),
            Ok(Step::Done(session)) => return (Ok(session), server_end.unwrap()),
            Err(error) => {
                return (
                    Err(error),
                    server_end.unwrap_or_else(|| Err(server.closed())),
                );
            }
        }
    }
    panic!("neither side came to an end");
}

fn server(key: Option<&Key>) -> ServerHandshake {
    ServerHandshake::new(key, [2; 32], 0b011)
}

fn session() -> Session {
    let (client, server) = control(Some(&key(7)), server(Some(&key(7))), &[64]);
    assert_eq!(client, server);
    client.unwrap()
}

/// Runs a lane up to the server's lookup.
fn lane_request(session: &Session, lane: u16, lanes: u16) -> (LaneClient, LaneRequest) {
    let (client, hello) = LaneClient::new(session, lane, lanes, [3; 32]).unwrap();
    let step = server(Some(&key(7))).busy().receive(&mut &hello[..]);
    let Ok(ServerStep::Lane(request)) = step else {
        panic!("expected a lane, {step:?} arrived");
    };
    (client, request)
}

fn sent<T: std::fmt::Debug>(step: Result<Step<T>, HandshakeError>) -> Message {
    match step {
        Ok(Step::Send(message)) => message,
        other => panic!("expected a message, {other:?} arrived"),
    }
}

proptest! {
    #[test]
    fn both_sides_agree_in_any_slicing(
        cuts in vec(1usize..100, 1..10),
        with_key: bool,
    ) {
        let shared = key(7);
        let shared = with_key.then_some(&shared);
        let (client, server) = control(shared, server(shared), &cuts);
        let session = client.unwrap();
        prop_assert_eq!(&server.unwrap(), &session);
        prop_assert_eq!(session.capabilities, 0b010);
        prop_assert_eq!(session.authenticated, with_key);
    }

    #[test]
    fn any_damaged_byte_ends_the_handshake(
        message in 0usize..4,
        at in any::<prop::sample::Index>(),
        by in 1u8..,
    ) {
        let (mut client, hello) = ClientHandshake::new(Some(&key(7)), [1; 32], 6);
        let mut server = server(Some(&key(7)));
        let damage = |nth: usize, message_bytes: &[u8]| {
            let mut bytes = message_bytes.to_vec();
            if nth == message {
                let at = at.index(bytes.len());
                bytes[at] ^= by;
            }
            bytes
        };
        let mut agreed = || -> Result<bool, HandshakeError> {
            let ServerStep::Send(answer) = server.receive(&mut &damage(0, &hello)[..])? else {
                return Ok(false);
            };
            let Step::Send(proof) = client.receive(&mut &damage(1, &answer)[..])? else {
                return Ok(false);
            };
            let ServerStep::Done { send, .. } = server.receive(&mut &damage(2, &proof)[..])? else {
                return Ok(false);
            };
            Ok(matches!(client.receive(&mut &damage(3, &send)[..])?, Step::Done(_)))
        };
        prop_assert!(!matches!(agreed(), Ok(true)));
    }

    #[test]
    fn any_damaged_byte_keeps_a_lane_out(
        message in 0usize..4,
        at in any::<prop::sample::Index>(),
        by in 1u8..,
    ) {
        let session = session();
        let damage = |nth: usize, message_bytes: &[u8]| {
            let mut bytes = message_bytes.to_vec();
            if nth == message {
                let at = at.index(bytes.len());
                bytes[at] ^= by;
            }
            bytes
        };
        let agreed = || -> Result<bool, HandshakeError> {
            let (mut client, hello) = LaneClient::new(&session, 3, 8, [3; 32])?;
            let step = server(Some(&key(7))).receive(&mut &damage(0, &hello)[..])?;
            let ServerStep::Lane(request) = step else {
                return Ok(false);
            };
            let (mut lane, challenge) = request.accept(&session.key);
            let Step::Send(proof) = client.receive(&mut &damage(1, &challenge)[..])? else {
                return Ok(false);
            };
            let Step::Done(accepted) = lane.receive(&mut &damage(2, &proof)[..])? else {
                return Ok(false);
            };
            Ok(matches!(client.receive(&mut &damage(3, &accepted.send)[..])?, Step::Done(())))
        };
        prop_assert!(!matches!(agreed(), Ok(true)));
    }

    #[test]
    fn any_bytes_are_refused_or_wait(bytes in vec(any::<u8>(), 0..200), greet: bool) {
        let mut input = if greet { b"TCPX\r\n\x1a\n\x01\0\0\0".to_vec() } else { Vec::new() };
        input.extend_from_slice(&bytes);
        let mut server = server(Some(&key(7)));
        let mut rest = &input[..];
        for _ in 0..4 {
            if let Ok(ServerStep::Done { .. }) = server.receive(&mut rest) {
                prop_assert!(false, "a stranger was let in");
            }
        }
    }
}

#[test]
fn what_follows_the_handshake_is_left_in_the_input() {
    let (mut client, hello) = ClientHandshake::new(None, [1; 32], 0);
    let mut server = server(None);
    let Ok(ServerStep::Send(answer)) = server.receive(&mut &hello[..]) else {
        panic!("no answer");
    };
    let mut proof = sent(client.receive(&mut &answer[..])).to_vec();
    proof.extend_from_slice(b"frames");
    let mut input = &proof[..];
    let Ok(ServerStep::Done { send, .. }) = server.receive(&mut input) else {
        panic!("no session");
    };
    assert_eq!(input, b"frames");
    let mut welcome = send.to_vec();
    welcome.extend_from_slice(b"frames");
    let mut input = &welcome[..];
    assert!(matches!(client.receive(&mut input), Ok(Step::Done(_))));
    assert_eq!(input, b"frames");
    assert_eq!(client.receive(&mut input), Err(HandshakeError::Ended));
}

#[test]
fn another_key_is_noticed_by_the_client_first() {
    let (client, server) = control(Some(&key(7)), server(Some(&key(8))), &[100]);
    assert_eq!(client, Err(HandshakeError::WrongKey));
    assert_eq!(server, Err(HandshakeError::LeftAtProof));
}

#[test]
fn a_client_that_does_not_know_the_key_proves_nothing() {
    let (_, hello) = ClientHandshake::new(Some(&key(8)), [1; 32], 0);
    let mut server = server(Some(&key(7)));
    let Ok(ServerStep::Send(answer)) = server.receive(&mut &hello[..]) else {
        panic!("no answer");
    };
    // The server's own proof, sent back to it, is no client's proof.
    let mut reflected = &answer[mac::SERVER_HELLO_SIGNED..];
    assert!(matches!(
        server.receive(&mut reflected),
        Err(HandshakeError::WrongKey)
    ));
    assert!(matches!(
        server.receive(&mut &[][..]),
        Err(HandshakeError::Ended)
    ));
}

#[test]
fn both_sides_say_which_one_has_the_key() {
    let required = Err(HandshakeError::KeyRequired);
    assert_eq!(
        control(None, server(Some(&key(7))), &[9]),
        (required.clone(), required)
    );
    let unexpected = Err(HandshakeError::KeyNotExpected);
    assert_eq!(
        control(Some(&key(7)), server(None), &[9]),
        (unexpected.clone(), unexpected)
    );
}

#[test]
fn a_server_without_the_key_cannot_pass_for_one_that_has_it() {
    let (_, hello) = ClientHandshake::new(None, [1; 32], 0);
    let Ok(ServerStep::Send(answer)) = server(None).receive(&mut &hello[..]) else {
        panic!("no answer");
    };
    let (mut client, _) = ClientHandshake::new(Some(&key(7)), [1; 32], 0);
    assert_eq!(
        client.receive(&mut &answer[..]),
        Err(HandshakeError::KeyNotExpected)
    );
    let mut forged = answer.to_vec();
    forged[13] = 1;
    let (mut client, _) = ClientHandshake::new(Some(&key(7)), [1; 32], 0);
    assert_eq!(
        client.receive(&mut &forged[..]),
        Err(HandshakeError::WrongKey)
    );
}

#[test]
fn a_busy_server_says_so() {
    let (client, server) = control(None, server(None).busy(), &[100]);
    assert_eq!(client, Err(HandshakeError::Busy));
    assert_eq!(server, Err(HandshakeError::Busy));
}

#[test]
fn another_version_is_named_by_both_sides() {
    let (_, hello) = ClientHandshake::new(None, [1; 32], 0);
    let mut newer = hello.to_vec();
    newer[8] = 2;
    newer[10] = 5;
    let theirs = Version { major: 2, minor: 5 };
    // Nothing after the fixed beginning is needed: another version may be shorter.
    let step = server(None).receive(&mut &newer[..16]);
    let Ok(ServerStep::Refuse { send, error }) = step else {
        panic!("expected a refusal, {step:?} arrived");
    };
    let ours = Version::OURS;
    assert_eq!(error, HandshakeError::Version { ours, theirs });

    let (mut client, _) = ClientHandshake::new(None, [1; 32], 0);
    assert_eq!(
        client.receive(&mut &send[..16]),
        Err(HandshakeError::Version { ours, theirs: ours })
    );
    let mut newer = send.to_vec();
    newer[8] = 2;
    newer[10] = 5;
    let (mut client, _) = ClientHandshake::new(None, [1; 32], 0);
    assert_eq!(
        client.receive(&mut &newer[..]),
        Err(HandshakeError::Version { ours, theirs })
    );
}

#[test]
fn a_stranger_is_noticed_at_its_first_wrong_byte() {
    let mut web = server(None);
    let error = web.receive(&mut &b"GET / HTTP/1.1\r\n"[..]).unwrap_err();
    assert!(error.to_string().contains("\"GET / HT\""), "{error}");
    assert!(server(None).receive(&mut &b"TCPx"[..]).is_err());
    assert!(matches!(
        server(None).receive(&mut &b"TCPX"[..]),
        Ok(ServerStep::NeedMore)
    ));
    let (mut client, _) = ClientHandshake::new(None, [1; 32], 0);
    assert!(matches!(
        client.receive(&mut &b"SSH-2.0-"[..]),
        Err(HandshakeError::NotTcpx { .. })
    ));
}

#[test]
fn an_unknown_purpose_is_refused() {
    let (_, hello) = ClientHandshake::new(None, [1; 32], 0);
    let mut odd = hello.to_vec();
    odd[12] = 9;
    assert!(matches!(
        server(None).receive(&mut &odd[..]),
        Err(HandshakeError::Value {
            field: "purpose",
            arrived: 9,
            ..
        })
    ));
}

#[test]
fn a_cut_connection_says_what_was_due() {
    let (_, hello) = ClientHandshake::new(None, [1; 32], 0);
    let mut server = server(None);
    assert!(matches!(
        server.receive(&mut &hello[..40]),
        Ok(ServerStep::NeedMore)
    ));
    assert_eq!(
        server.closed(),
        HandshakeError::Truncated {
            message: "client hello",
            expected: 64,
            arrived: 40
        }
    );
}

#[test]
fn secrets_stay_out_of_debug_output() {
    let session = session();
    let (client, _) = ClientHandshake::new(Some(&key(0xAB)), [1; 32], 0);
    assert!(format!("{session:?}").contains("SessionKey(hidden)"));
    assert!(format!("{client:?}").contains("Key(hidden)"));
}

#[test]
fn a_stranger_costs_less_than_a_kibibyte() {
    assert!(size_of::<ServerHandshake>() < 1024);
    assert!(size_of::<LaneServer>() < 1024);
}

#[test]
fn a_client_has_no_more_capabilities_than_it_offered_whatever_the_server_says() {
    let (mut client, first) = ClientHandshake::new(None, [1; 32], 0b110);
    let mut server = server(None);
    let hello = match server.receive(&mut &first[..]) {
        Ok(ServerStep::Send(message)) => message,
        other => panic!("expected a hello, {other:?} arrived"),
    };
    let proof = sent(client.receive(&mut &hello[..]));
    let session = match server.receive(&mut &proof[..]) {
        Ok(ServerStep::Done { session, .. }) => session,
        other => panic!("expected a session, {other:?} arrived"),
    };
    let welcome = server::welcome(session.id, &session.key, u64::MAX);
    match client.receive(&mut &welcome[..]) {
        Ok(Step::Done(session)) => assert_eq!(session.capabilities, 0b110),
        other => panic!("expected a session, {other:?} arrived"),
    }
}

use data_encoding::BASE32_NOPAD;
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::key::{AnyKey, ClientKey, Key};
use crate::lane_seal::LaneKeys;
use crate::record::{LENGTH_BYTES, Records, TAG_BYTES, record_head};

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
    client_key: Option<&ClientKey>,
    server: ServerHandshake,
    cuts: &[usize],
) -> (
    Result<Established, HandshakeError>,
    Result<Established, HandshakeError>,
) {
    let (mut client, first) = ClientHandshake::new(client_key, &Build::OURS, [1; 32]);
    let mut server = server;
    let (mut to_server, mut to_client) = (Wire::new(cuts), Wire::new(cuts));
    to_server.bytes.extend_from_slice(&first);
    let mut server_end = None;
    for _ in 0..1000 {
        if server_end.is_none() {
            match to_server.offer(|input| server.receive(input)) {
                Ok(ServerStep::NeedMore) => {}
                Ok(ServerStep::Send(message)) => to_client.bytes.extend_from_slice(&message),
                Ok(ServerStep::Done(mut established)) => {
                    to_client.bytes.extend_from_slice(&established.welcome());
                    server_end = Some(Ok(*established));
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
            Ok(Step::Done(established)) => return (Ok(established), server_end.unwrap()),
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

/// The errors of both sides.
fn errors(
    client_key: Option<&ClientKey>,
    server: ServerHandshake,
) -> (HandshakeError, HandshakeError) {
    let (client, server) = control(client_key, server, &[9]);
    (client.unwrap_err(), server.unwrap_err())
}

fn server(key: Option<&Key>) -> ServerHandshake {
    let identity = key.map(Key::identity);
    ServerHandshake::new(
        identity.as_ref(),
        &Build::OURS,
        std::array::from_fn(|at| at as u8),
    )
}

fn client_key(seed: u8) -> ClientKey {
    key(seed).client_key()
}

fn session() -> Session {
    let (client, server) = control(Some(&client_key(7)), server(Some(&key(7))), &[64]);
    let session = client.unwrap().session;
    assert_eq!(session, server.unwrap().session);
    session
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

/// What a lane's client sends last, and what it has then.
fn sent_last(answered: Result<Option<(Message, LaneKeys)>, HandshakeError>) -> (Message, LaneKeys) {
    match answered {
        Ok(Some(last)) => last,
        other => panic!("expected the last message, {other:?} arrived"),
    }
}

/// What one side seals, the other opens.
fn assert_sealed_between(one: &mut Records, other: &mut Records) {
    for text in [&b"frames"[..], &[], b"more frames"] {
        let mut whole = Vec::new();
        assert_eq!(one.seal(text, &mut whole), text.len());
        let length = Records::length(&whole).unwrap().unwrap();
        let mut opened = vec![0; length];
        let count = other.open(&whole[LENGTH_BYTES..], &mut opened).unwrap();
        assert_eq!(&opened[..count], text);
    }
}

proptest! {
    #[test]
    fn both_sides_agree_in_any_slicing(
        cuts in vec(1usize..100, 1..10),
        with_key: bool,
    ) {
        let (ours, theirs) = (key(7), client_key(7));
        let (ours, theirs) = (with_key.then_some(&ours), with_key.then_some(&theirs));
        let (client, server) = control(theirs, server(ours), &cuts);
        let (mut client, mut server) = (client.unwrap(), server.unwrap());
        prop_assert_eq!(&server.session, &client.session);
        prop_assert_eq!(client.session.authenticated, with_key);
        assert_sealed_between(&mut client.records, &mut server.records);
        assert_sealed_between(&mut server.records, &mut client.records);
    }

    #[test]
    fn any_damaged_byte_ends_the_handshake(
        message in 0usize..4,
        at in any::<prop::sample::Index>(),
        by in 1u8..,
    ) {
        let (mut client, hello) = ClientHandshake::new(Some(&client_key(7)), &Build::OURS, [1; 32]);
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
            let ServerStep::Done(mut established) = server.receive(&mut &damage(2, &proof)[..])? else {
                return Ok(false);
            };
            let welcome = established.welcome();
            Ok(matches!(client.receive(&mut &damage(3, &welcome)[..])?, Step::Done(_)))
        };
        prop_assert!(!matches!(agreed(), Ok(true)));
    }

    #[test]
    fn any_damaged_byte_keeps_a_lane_out(
        message in 0usize..3,
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
            let (mut lane, answer) = request.accept(&session.key).map_err(|refusal| refusal.1)?;
            let Some((proof, _)) = client.receive(&mut &damage(1, &answer)[..])? else {
                return Ok(false);
            };
            Ok(lane.receive(&mut &damage(2, &proof)[..])?.is_some())
        };
        prop_assert!(!matches!(agreed(), Ok(true)));
    }

    #[test]
    fn any_bytes_are_refused_or_wait(bytes in vec(any::<u8>(), 0..200), greet: bool) {
        let mut input = if greet { b"TCPX\r\n\x1a\n\x02\0\0\0".to_vec() } else { Vec::new() };
        input.extend_from_slice(&bytes);
        let mut server = server(Some(&key(7)));
        let mut rest = &input[..];
        for _ in 0..4 {
            if let Ok(ServerStep::Done(_)) = server.receive(&mut rest) {
                prop_assert!(false, "a stranger was let in");
            }
        }
    }
}

#[test]
fn what_follows_the_handshake_is_left_in_the_input() {
    let (mut client, hello) = ClientHandshake::new(None, &Build::OURS, [1; 32]);
    let mut server = server(None);
    let Ok(ServerStep::Send(answer)) = server.receive(&mut &hello[..]) else {
        panic!("no answer");
    };
    let mut proof = sent(client.receive(&mut &answer[..])).to_vec();
    proof.extend_from_slice(b"frames");
    let mut input = &proof[..];
    let Ok(ServerStep::Done(mut established)) = server.receive(&mut input) else {
        panic!("no session");
    };
    assert_eq!(input, b"frames");
    let mut welcome = established.welcome().to_vec();
    welcome.extend_from_slice(b"frames");
    let mut input = &welcome[..];
    assert!(matches!(client.receive(&mut input), Ok(Step::Done(_))));
    assert_eq!(input, b"frames");
    assert!(matches!(
        client.receive(&mut input),
        Err(HandshakeError::Ended)
    ));
}

#[test]
fn both_sides_notice_another_key() {
    let wrong = HandshakeError::WrongKey;
    assert_eq!(
        errors(Some(&client_key(7)), server(Some(&key(8)))),
        (wrong.clone(), wrong)
    );
}

/// Replaces a key's pre-shared part; the public key of its server stays.
fn with_psk_of(ours: &ClientKey, other: &ClientKey) -> ClientKey {
    let bytes = |key: &ClientKey| BASE32_NOPAD.decode(key.to_text().as_bytes()).unwrap();
    let (mut mixed, other) = (bytes(ours), bytes(other));
    mixed[32..48].copy_from_slice(&other[32..48]);
    let check = crate::derive::hash(&[b"tcpx client key", &mixed[..48]]);
    mixed[48..].copy_from_slice(&check[..4]);
    match AnyKey::parse(&BASE32_NOPAD.encode(&mixed)) {
        Ok(AnyKey::Client(key)) => key,
        other => panic!("{other:?}"),
    }
}

/// Someone who knows the server's public key alone is told that its key is another one.
#[test]
fn the_public_key_alone_lets_nobody_in() {
    let stranger = with_psk_of(&client_key(7), &client_key(8));
    assert_eq!(
        errors(Some(&stranger), server(Some(&key(7)))),
        (HandshakeError::WrongKey, HandshakeError::WrongKey)
    );
    // Parts of the server's own answer, sent back to it, are no client's proof.
    let (_, hello) = ClientHandshake::new(Some(&client_key(7)), &Build::OURS, [1; 32]);
    let mut server = server(Some(&key(7)));
    let Ok(ServerStep::Send(answer)) = server.receive(&mut &hello[..]) else {
        panic!("no answer");
    };
    for part in answer.windows(TAG_BYTES) {
        let reflected = [&record_head(0), part].concat();
        let mut server = fresh_answerer(&hello);
        assert!(matches!(
            server.receive(&mut &reflected[..]),
            Err(HandshakeError::WrongKey)
        ));
        assert!(matches!(
            server.receive(&mut &[][..]),
            Err(HandshakeError::Ended)
        ));
    }
}

/// A server that has answered this hello.
fn fresh_answerer(hello: &Message) -> ServerHandshake {
    let mut server = server(Some(&key(7)));
    assert!(matches!(
        server.receive(&mut &hello[..]),
        Ok(ServerStep::Send(_))
    ));
    server
}

/// A recorded hello gets an answer that whoever replays it cannot use, and its proof fits no other
/// answer.
#[test]
fn a_recorded_conversation_opens_no_second_session() {
    let (mut client, hello) = ClientHandshake::new(Some(&client_key(7)), &Build::OURS, [1; 32]);
    let mut first = server(Some(&key(7)));
    let Ok(ServerStep::Send(answer)) = first.receive(&mut &hello[..]) else {
        panic!("no answer");
    };
    let proof = sent(client.receive(&mut &answer[..]));
    let mut again = ServerHandshake::new(Some(&key(7).identity()), &Build::OURS, [9; 80]);
    let Ok(ServerStep::Send(other)) = again.receive(&mut &hello[..]) else {
        panic!("no answer");
    };
    assert_ne!(&other[..], &answer[..]);
    assert!(matches!(
        again.receive(&mut &proof[..]),
        Err(HandshakeError::WrongKey)
    ));
}

#[test]
fn a_client_cannot_play_the_server() {
    // Its key derives from the same secret, and it knows all that a client's key holds.
    let mut pretender = server(Some(&key(8)));
    let (mut client, hello) = ClientHandshake::new(Some(&client_key(7)), &Build::OURS, [1; 32]);
    let Ok(ServerStep::Refuse { .. }) = pretender.receive(&mut &hello[..]) else {
        panic!("it cannot even read the hello");
    };
    // Nor does any answer of its making pass.
    let mut answer = [0; 143];
    answer[..16].copy_from_slice(b"TCPX\r\n\x1a\n\x03\0\x03\0\0\x01\0\0");
    answer[32] = 9;
    assert!(matches!(
        client.receive(&mut &answer[..]),
        Err(HandshakeError::WrongKey)
    ));
}

#[test]
fn both_sides_say_which_one_has_the_key() {
    let required = HandshakeError::KeyRequired;
    assert_eq!(
        errors(None, server(Some(&key(7)))),
        (required.clone(), required)
    );
    let unexpected = HandshakeError::KeyNotExpected;
    assert_eq!(
        errors(Some(&client_key(7)), server(None)),
        (unexpected.clone(), unexpected)
    );
}

#[test]
fn a_server_without_the_key_cannot_pass_for_one_that_has_it() {
    let (_, hello) = ClientHandshake::new(None, &Build::OURS, [1; 32]);
    let Ok(ServerStep::Send(answer)) = server(None).receive(&mut &hello[..]) else {
        panic!("no answer");
    };
    let (mut client, _) = ClientHandshake::new(Some(&client_key(7)), &Build::OURS, [1; 32]);
    assert!(matches!(
        client.receive(&mut &answer[..]),
        Err(HandshakeError::KeyNotExpected)
    ));
    let mut forged = answer.to_vec();
    forged[13] = 1;
    let (mut client, _) = ClientHandshake::new(Some(&client_key(7)), &Build::OURS, [1; 32]);
    assert!(matches!(
        client.receive(&mut &forged[..]),
        Err(HandshakeError::WrongKey)
    ));
}

#[test]
fn a_busy_server_says_so() {
    let busy = HandshakeError::Busy;
    assert_eq!(errors(None, server(None).busy()), (busy.clone(), busy));
}

#[test]
fn a_server_that_another_client_took_says_so_sealed() {
    let (mut client, hello) = ClientHandshake::new(Some(&client_key(7)), &Build::OURS, [1; 32]);
    let mut server = server(Some(&key(7)));
    let Ok(ServerStep::Send(answer)) = server.receive(&mut &hello[..]) else {
        panic!("no answer");
    };
    let proof = sent(client.receive(&mut &answer[..]));
    let Ok(ServerStep::Done(mut established)) = server.receive(&mut &proof[..]) else {
        panic!("no session");
    };
    let last = established.turn_away();
    assert!(matches!(
        client.receive(&mut &last[..]),
        Err(HandshakeError::Busy)
    ));
}

/// Versions from `lowest` to `highest`.
fn build(lowest: u16, highest: u16) -> Build {
    Build {
        lowest: Version(lowest),
        highest: Version(highest),
        ..Build::OURS
    }
}

#[test]
fn another_version_is_named_by_both_sides() {
    let (ours, theirs) = (
        Build::OURS,
        Build {
            release: [9, 1, 2],
            commit: [0xab; 8],
            ..build(98, 99)
        },
    );
    let (_, hello) = ClientHandshake::new(None, &theirs, [1; 32]);
    // Nothing behind the beginning is needed: another version may be shorter.
    let step = server(None).receive(&mut &hello[..32]);
    let Ok(ServerStep::Refuse { send, error }) = step else {
        panic!("expected a refusal, {step:?} arrived");
    };
    assert_eq!(
        error,
        HandshakeError::Version(Box::new(Mismatch { ours, theirs }))
    );
    let said = error.to_string();
    for part in [
        "the peer is tcpx 9.1.2 (commit abababababababab, protocols 98 to 99), and no",
        "protocol 3)",
        "this side is older: install there what the other side has, tcpx 9.1.2",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let (mut client, _) = ClientHandshake::new(None, &theirs, [1; 32]);
    let error = client.receive(&mut &send[..32]).unwrap_err();
    assert_eq!(
        error,
        HandshakeError::Version(Box::new(Mismatch {
            ours: theirs,
            theirs: ours
        }))
    );
    assert!(
        error
            .to_string()
            .contains("the peer is older: install there what the other side has, tcpx 9.1.2")
    );
}

/// A control handshake of a client and a server that speak so, with a key; `tamper` changes the
/// server's hello.
fn agreed(
    client: Build,
    server: Build,
    tamper: impl Fn(&mut [u8]),
) -> Result<[Version; 2], HandshakeError> {
    let (mut client, hello) = ClientHandshake::new(Some(&client_key(7)), &client, [1; 32]);
    let mut server = ServerHandshake::new(Some(&key(7).identity()), &server, [9; 80]);
    let answer = match server.receive(&mut &hello[..])? {
        ServerStep::Send(answer) => answer,
        ServerStep::Refuse { error, .. } => return Err(error),
        other => panic!("{other:?}"),
    };
    let mut answer = answer.to_vec();
    tamper(&mut answer);
    let Step::Send(proof) = client.receive(&mut &answer[..])? else {
        panic!("no proof");
    };
    let ServerStep::Done(mut theirs) = server.receive(&mut &proof[..])? else {
        panic!("no session");
    };
    let Step::Done(ours) = client.receive(&mut &theirs.welcome()[..])? else {
        panic!("no welcome");
    };
    Ok([ours.session.protocol, theirs.session.protocol])
}

proptest! {
    #[test]
    fn the_highest_common_version_is_spoken(low in [0..6_u16, 0..6], more in [0..4_u16, 0..4]) {
        let [client, server] = [0, 1].map(|at| build(low[at], low[at] + more[at]));
        let common = (0..10).rev().find(|version| {
            [client, server].iter().all(|side| (side.lowest.0..=side.highest.0).contains(version))
        });
        let found = agreed(client, server, |_| ()).ok();
        prop_assert_eq!(found, common.map(|version| [Version(version); 2]));
    }
}

#[test]
fn nobody_on_the_way_has_two_sides_speak_an_older_version() {
    let both = build(3, 4);
    assert_eq!(agreed(both, both, |_| ()), Ok([Version(4); 2]));
    let lower = |hello: &mut [u8]| hello[8] = 3;
    assert_eq!(agreed(both, both, lower), Err(HandshakeError::Changed));
    // Of the client's hello the mark would be another one.
    let (_, hello) = ClientHandshake::new(Some(&client_key(7)), &both, [1; 32]);
    let mut changed = hello.to_vec();
    lower(&mut changed);
    let step =
        ServerHandshake::new(Some(&key(7).identity()), &both, [9; 80]).receive(&mut &changed[..]);
    assert!(
        matches!(
            step,
            Ok(ServerStep::Refuse {
                error: HandshakeError::WrongKey,
                ..
            })
        ),
        "{step:?}"
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
    let (mut client, _) = ClientHandshake::new(None, &Build::OURS, [1; 32]);
    assert!(matches!(
        client.receive(&mut &b"SSH-2.0-"[..]),
        Err(HandshakeError::NotTcpx { .. })
    ));
}

#[test]
fn an_unknown_purpose_is_refused() {
    let (_, hello) = ClientHandshake::new(None, &Build::OURS, [1; 32]);
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
    let (_, hello) = ClientHandshake::new(None, &Build::OURS, [1; 32]);
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
            arrived: 40,
        }
    );
}

#[test]
fn secrets_stay_out_of_debug_output() {
    let session = session();
    let (client, _) = ClientHandshake::new(Some(&client_key(0xAB)), &Build::OURS, [1; 32]);
    assert!(format!("{session:?}").contains("SessionKey(hidden)"));
    let server = server(Some(&key(0xAB)));
    // No list of numbers.
    for text in [format!("{client:?}"), format!("{server:?}")] {
        assert!(!text.contains("171, 171"), "{text}");
    }
}

#[test]
fn a_stranger_costs_less_than_a_kibibyte() {
    assert!(size_of::<ServerHandshake>() < 1024);
    assert!(size_of::<LaneServer>() < 1024);
}

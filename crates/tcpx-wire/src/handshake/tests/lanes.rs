use super::*;

#[test]
fn a_lane_joins_its_session_even_when_no_new_session_is_taken() {
    let session = session();
    let (mut client, request) = lane_request(&session, 3, 8);
    assert_eq!(request.session(), session.id);
    let (mut server, answer) = request.accept(&session.key).unwrap();
    let (proof, ours) = sent_last(client.receive(&mut &answer[..]));
    let Ok(Some(accepted)) = server.receive(&mut &proof[..]) else {
        panic!("the proof did not fit");
    };
    assert_eq!(
        (accepted.session, accepted.lane, accepted.lanes),
        (session.id, 3, 8)
    );
    let (mut ours, mut theirs) = (Records::new(ours), Records::new(accepted.keys));
    assert_sealed_between(&mut ours, &mut theirs);
    assert_sealed_between(&mut theirs, &mut ours);
    for ended in [
        client.receive(&mut &answer[..]).map(drop),
        server.receive(&mut &proof[..]).map(drop),
    ] {
        assert_eq!(ended, Err(HandshakeError::Ended));
    }
}

#[test]
fn a_lane_of_another_session_stays_out() {
    let session = session();
    let (mut client, request) = lane_request(&session, 0, 1);
    let proof = HandshakeError::LaneProof { lane: 0 };
    let (answer, error) = *request.accept(&SessionKey([9; 32])).map(drop).unwrap_err();
    assert_eq!(error, proof);
    assert_eq!(client.receive(&mut &answer[..]).unwrap_err(), proof);
}

/// A recorded hello gets an answer that whoever replays it cannot use, and its proof fits no other
/// answer.
#[test]
fn a_recorded_lane_joins_nothing() {
    let session = session();
    let (mut client, hello) = LaneClient::new(&session, 0, 1, [3; 32]).unwrap();
    let answer = |entropy| {
        let step = ServerHandshake::new(None, &Build::OURS, [entropy; 80]).receive(&mut &hello[..]);
        let Ok(ServerStep::Lane(request)) = step else {
            panic!("a good hello");
        };
        request.accept(&session.key).unwrap()
    };
    let (mut first, for_client) = answer(1);
    let (mut again, _) = answer(2);
    let (proof, _) = sent_last(client.receive(&mut &for_client[..]));
    assert_eq!(
        again.receive(&mut &proof[..]).unwrap_err(),
        HandshakeError::LaneProof { lane: 0 }
    );
    assert!(matches!(first.receive(&mut &proof[..]), Ok(Some(_))));
}

/// A lane that has joined, both ends.
fn joined(entropy: u8) -> (LaneKeys, LaneKeys) {
    let (mut client, hello) =
        LaneClient::new(&test_session(SessionId([1; 16])), 0, 1, [entropy; 32]).unwrap();
    let Ok(ServerStep::Lane(request)) = server(None).receive(&mut &hello[..]) else {
        panic!("a good hello");
    };
    let key = test_session(SessionId([1; 16])).key;
    let (mut server, answer) = request.accept(&key).unwrap();
    let (proof, ours) = sent_last(client.receive(&mut &answer[..]));
    match server.receive(&mut &proof[..]) {
        Ok(Some(accepted)) => (ours, accepted.keys),
        other => panic!("the proof did not fit: {other:?}"),
    }
}

#[test]
fn each_lane_and_direction_has_keys_of_its_own() {
    let (client, server) = joined(3);
    let (mut sends, mut opens) = client.start();
    let (mut answers, mut reads) = server.start();
    let sealed = sends.seal_header(&[7; 48]);
    assert_eq!(reads.open_header(&mut sealed.clone()), Ok([7; 48]));
    let answer = answers.seal_header(&[7; 48]);
    assert_ne!(sealed, answer, "one nonce, two keys");
    assert_eq!(opens.open_header(&mut answer.clone()), Ok([7; 48]));
    // The same lane, opened anew; its server has drawn the same bytes.
    let (client, server) = joined(4);
    let (mut sends, _) = client.start();
    let (_, mut reads) = server.start();
    assert_ne!(sends.seal_header(&[7; 48]), sealed);
    assert!(reads.open_header(&mut sealed.clone()).is_err());
}

#[test]
fn the_refusal_of_a_lane_reaches_the_client() {
    let (mut client, request) = lane_request(&session(), 3, 8);
    let (message, error) = request.refuse();
    assert_eq!(error, HandshakeError::UnknownSession);
    assert_eq!(client.receive(&mut &message[..]).unwrap_err(), error);
}

#[test]
fn a_lane_out_of_range_is_refused_on_both_sides() {
    let session = session();
    for (lane, lanes) in [(8, 8), (0, 0), (0, 1025)] {
        let expected = HandshakeError::LaneOutOfRange { lane, lanes };
        assert_eq!(
            LaneClient::new(&session, lane, lanes, [3; 32]).err(),
            Some(expected.clone())
        );
        let (_, hello) = LaneClient::new(&session, 0, 1, [3; 32]).unwrap();
        let mut hello = hello.to_vec();
        hello[14..16].copy_from_slice(&lane.to_le_bytes());
        hello[32..34].copy_from_slice(&lanes.to_le_bytes());
        let step = server(None).receive(&mut &hello[..]);
        assert!(matches!(step, Ok(ServerStep::Refuse { error, .. }) if error == expected));
    }
}

#[test]
fn a_session_key_lets_control_take_anothers_place() {
    let session = session();
    let (mut client, hello) = LaneClient::resume(&session, [3; 32]);
    let Ok(ServerStep::Lane(request)) = server(None).receive(&mut &hello[..]) else {
        panic!("a good hello");
    };
    assert_eq!(request.session(), session.id);
    let (mut server, answer) = request.accept(&session.key).unwrap();
    let (proof, ours) = sent_last(client.receive(&mut &answer[..]));
    let Ok(Some(accepted)) = server.receive(&mut &proof[..]) else {
        panic!("the proof did not fit");
    };
    assert!(accepted.resumes);
    assert_sealed_between(&mut Records::new(ours), &mut Records::new(accepted.keys));
}

#[test]
fn a_lane_is_not_turned_into_a_control_connection_on_the_way() {
    let session = session();
    let (_, hello) = LaneClient::new(&session, 0, 1, [3; 32]).unwrap();
    let mut changed = hello.to_vec();
    changed[12] = 2;
    let Ok(ServerStep::Lane(request)) = server(None).receive(&mut &changed[..]) else {
        panic!("a good hello");
    };
    let (_, error) = *request.accept(&session.key).map(drop).unwrap_err();
    assert_eq!(error, HandshakeError::LaneProof { lane: 0 });
    let mut wrong = LaneClient::resume(&session, [3; 32]).1.to_vec();
    wrong[32] = 2;
    assert!(server(None).receive(&mut &wrong[..]).is_err());
}

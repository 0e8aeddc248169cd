use super::*;

#[test]
fn a_lane_joins_its_session_even_when_no_new_session_is_taken() {
    let session = session();
    let (mut client, request) = lane_request(&session, 3, 8);
    assert_eq!(
        (request.session(), request.lane(), request.lanes()),
        (session.id, 3, 8)
    );
    let (mut server, challenge) = request.accept(&session.key);
    let proof = sent(client.receive(&mut &challenge[..]));
    let Ok(Step::Done(accepted)) = server.receive(&mut &proof[..]) else {
        panic!("the proof did not fit");
    };
    assert_eq!(
        (accepted.session, accepted.lane, accepted.lanes),
        (session.id, 3, 8)
    );
    assert_eq!(client.receive(&mut &accepted.send[..]), Ok(Step::Done(())));
    assert_eq!(server.receive(&mut &proof[..]), Err(HandshakeError::Ended));
}

#[test]
fn a_lane_of_another_session_stays_out() {
    let session = session();
    let (mut client, request) = lane_request(&session, 0, 1);
    let other = SessionKey([9; 32]);
    let (mut server, challenge) = request.accept(&other);
    let proof = sent(client.receive(&mut &challenge[..]));
    assert_eq!(
        server.receive(&mut &proof[..]),
        Err(HandshakeError::LaneProof { lane: 0 })
    );
}

#[test]
fn each_refusal_of_a_lane_reaches_the_client() {
    let session = session();
    let cases = [
        (LaneRefusal::UnknownSession, HandshakeError::UnknownSession),
        (
            LaneRefusal::LaneOutOfRange,
            HandshakeError::LaneOutOfRange { lane: 3, lanes: 8 },
        ),
        (LaneRefusal::Busy, HandshakeError::Busy),
    ];
    for (refusal, expected) in cases {
        let (mut client, request) = lane_request(&session, 3, 8);
        let (message, error) = request.refuse(refusal);
        assert_eq!(error, expected);
        assert_eq!(client.receive(&mut &message[..]), Err(expected));
    }
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
        hello[16..18].copy_from_slice(&lanes.to_le_bytes());
        let step = server(None).receive(&mut &hello[..]);
        assert!(matches!(step, Ok(ServerStep::Refuse { error, .. }) if error == expected));
    }
}

#[test]
fn a_control_connection_takes_the_place_of_another_with_the_sessions_key() {
    let session = session();
    let (mut client, hello) = LaneClient::resume(&session, [3; 32]);
    let Ok(ServerStep::Lane(request)) = server(None).receive(&mut &hello[..]) else {
        panic!("a good hello");
    };
    assert!(request.resumes());
    assert_eq!(request.session(), session.id);
    let (mut server, challenge) = request.accept(&session.key);
    let proof = sent(client.receive(&mut &challenge[..]));
    let Ok(Step::Done(accepted)) = server.receive(&mut &proof[..]) else {
        panic!("the proof did not fit");
    };
    assert!(accepted.resumes);
    assert_eq!(client.receive(&mut &accepted.send[..]), Ok(Step::Done(())));
}

#[test]
fn a_lane_is_not_turned_into_a_control_connection_on_the_way() {
    let session = session();
    let (mut client, hello) = LaneClient::new(&session, 0, 1, [3; 32]).unwrap();
    let mut changed = hello.to_vec();
    changed[12] = 2;
    let Ok(ServerStep::Lane(request)) = server(None).receive(&mut &changed[..]) else {
        panic!("a good hello");
    };
    let (mut server, challenge) = request.accept(&session.key);
    let proof = sent(client.receive(&mut &challenge[..]));
    assert_eq!(
        server.receive(&mut &proof[..]),
        Err(HandshakeError::LaneProof { lane: 0 })
    );
    let mut wrong = LaneClient::resume(&session, [3; 32]).1.to_vec();
    wrong[16] = 2;
    assert!(super::server(None).receive(&mut &wrong[..]).is_err());
}

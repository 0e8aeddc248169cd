use super::*;

/// The values were computed from the description in `docs/wire-protocol.md` by another program.
#[test]
fn the_bytes_are_the_documented_ones() {
    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    let shared = Key::parse("MZXW6YTBOJTG633CMFZGM33PMI").unwrap();
    let (mut client, hello) = ClientHandshake::new(Some(&shared), [1; 32], 6);
    let mut control = ServerHandshake::new(Some(&shared), [2; 32], 3);
    let Ok(ServerStep::Send(answer)) = control.receive(&mut &hello[..]) else {
        panic!("no answer");
    };
    assert_eq!(
        hex(&answer[56..]),
        "3699d4746745e1bfbdb4e36aee24ecb46735330eadd1745ff7f7b22ca7a1ca29"
    );
    let proof = sent(client.receive(&mut &answer[..]));
    assert_eq!(
        hex(&proof),
        "1f4ab2f85bb8444688a75b6a4f41c918c9dc4a32f81ebdd367a965d513411026"
    );
    let Ok(ServerStep::Done { session, send }) = control.receive(&mut &proof[..]) else {
        panic!("no session");
    };
    assert_eq!(session.id.to_string(), "8ea35055d977b5da412b21aec7c5f0ab");
    assert_eq!(
        hex(&send[24..]),
        "175b011a9708bbd3d657501895d42d0540df1cfe8ff827902dc2eec7dc284c3b"
    );

    let (mut client, hello) = LaneClient::new(&session, 3, 8, [3; 32]).unwrap();
    let mut lane = ServerHandshake::new(Some(&shared), [2; 32], 3);
    let Ok(ServerStep::Lane(request)) = lane.receive(&mut &hello[..]) else {
        panic!("no lane");
    };
    let (mut lane, challenge) = request.accept(&session.key);
    let proof = sent(client.receive(&mut &challenge[..]));
    assert_eq!(
        hex(&proof),
        "c120211aa79c7a7a010e8fd165cf3db1830e1c42bf6e066daaa849da171fe6a6"
    );
    let Ok(Step::Done(accepted)) = lane.receive(&mut &proof[..]) else {
        panic!("the proof did not fit");
    };
    assert_eq!(
        hex(&accepted.send),
        "8e44a9f6852a9debf59e57eb860c79e4f427fd472907946b97e670b26c305945"
    );
}

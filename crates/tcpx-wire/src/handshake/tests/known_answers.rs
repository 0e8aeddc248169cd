use super::*;

/// The values were computed from the description in `docs/wire-protocol.md` by another program.
#[test]
fn the_bytes_are_the_documented_ones() {
    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    let shared = Key::generate(&mut |out| out.copy_from_slice(b"foobarfoobarfoob"));
    let entropy: [u8; 80] = std::array::from_fn(|at| at as u8);
    let (mut client, hello) = ClientHandshake::new(Some(&shared.client_key()), [1; 32]);
    let mut control = ServerHandshake::new(Some(&shared.identity()), entropy);
    let Ok(ServerStep::Send(answer)) = control.receive(&mut &hello[..]) else {
        panic!("no answer");
    };
    let proof = sent(client.receive(&mut &answer[..]));
    let Ok(ServerStep::Done(mut established)) = control.receive(&mut &proof[..]) else {
        panic!("no session");
    };
    let welcome = established.welcome();
    assert_eq!(
        hex(&hello),
        "544350580d0a1a0a0300000000010000a4e09292b651c278b9772c569f5fa9bb13d906b46ab68c9df9dc2b4409f8a209793212c78b66d35f96b11bca357ecbcb462c0ae6e10760272ab8267128fa9c53d009d95c81d40f23bdc15b3349a2f111"
    );
    assert_eq!(
        hex(&answer),
        "544350580d0a1a0a03000000000100008f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f83e8a18453b1144e97b87fb4997fa1ef4cf0d2f693e933b3d17ecc59e6b4ed5dca50ee428ea7e9b1f951b40bc6802ab1bc664e06d471d974431dd17489829fd8"
    );
    assert_eq!(hex(&proof), "1000efff5d72b6c43af191c8499de1c12d0e0992");
    assert_eq!(hex(&welcome), "1100eeff84b83e74a0150e7f4f97970afa96939eb0");

    let session = established.session;
    let (mut client, hello) = LaneClient::new(&session, 3, 8, [3; 32]).unwrap();
    let mut lane = ServerHandshake::new(Some(&shared.identity()), entropy);
    let Ok(ServerStep::Lane(request)) = lane.receive(&mut &hello[..]) else {
        panic!("no lane");
    };
    let (mut server, answer) = request.accept(&session.key).unwrap();
    let (proof, ours) = sent_last(client.receive(&mut &answer[..]));
    let Ok(Some(accepted)) = server.receive(&mut &proof[..]) else {
        panic!("the proof did not fit");
    };
    assert_eq!(
        hex(&hello),
        "544350580d0a1a0a03000000010103000800000000000000202122232425262728292a2b2c2d2e2f0303030303030303030303030303030303030303030303030303030303030303595dccb01e94b5207704e72245c35783"
    );
    assert_eq!(
        hex(&answer),
        "544350580d0a1a0a0300000000000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1ff12b1824b24aaf3ef9fdddc9348949ee"
    );
    assert_eq!(hex(&proof), "d6e67d1f29644d8097e2286368f13403");
    let headers = [ours, accepted.keys].map(|keys| hex(&keys.start().0.seal_header(&[7; 48])));
    assert_eq!(
        headers,
        [
            "300bc38d43bd1872286c6c6ad018e23f212b785b70f7417fdba33963b1bdcdd91e1eab41e91284ccc58f317a9c5d259c23d29328d1611dc4bcd3d570efed9ce3",
            "0482099e307d6f5a13466f09c5559319d39f35238df87901b32aebef9af2e8fb6536c7abacc8dd357d3cb7ad11fadb60b579c5b6cb1d24c5eaa1f5b1706f20e1",
        ]
    );
}

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
        "544350580d0a1a0a0200000000010000a4e09292b651c278b9772c569f5fa9bb13d906b46ab68c9df9dc2b4409f8a209793212c78b66d35f96b11bca357ecbcb2402afcfb5cfb845b48200dcfe4790ccdf7a794cf092e97fe8492ee92d548a61"
    );
    assert_eq!(
        hex(&answer),
        "544350580d0a1a0a02000000000100008f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f83e8a18453b1144e97b87fb4997fa1ef4cf0d2f693e933b3d17ecc59e6b4ed5dca50ee428ea7e9b1f951b40bc6802ab1113f119a692af9773c0fa421ff47bb30"
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
        "544350580d0a1a0a02000000010103000800000000000000202122232425262728292a2b2c2d2e2f0303030303030303030303030303030303030303030303030303030303030303931d9ba5608a58ef1c60451a92be8ee9"
    );
    assert_eq!(
        hex(&answer),
        "544350580d0a1a0a0200000000000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fce5f09c6500ea40b4fa0ca14961d2af9"
    );
    assert_eq!(hex(&proof), "4c84516454ea3b7d4e807c7417023674");
    let headers = [ours, accepted.keys].map(|keys| hex(&keys.start().0.seal_header(&[7; 48])));
    assert_eq!(
        headers,
        [
            "23b09bf82d28c70c5b51a13326f2485cd40c0e6c0e17aa16541fdd87e958d53fe6a5afcce8cd084ff4f11a953b0313948fd6335e7204192d6b5026285b72420c",
            "27f94477ad23e7692d71f85fdcfc6865fb2dc92a9cb9950202ad851f1af53a9840529963843b8205d22e0061613ed356eee8553e2d6eb44e909fc19a238de3db",
        ]
    );
}

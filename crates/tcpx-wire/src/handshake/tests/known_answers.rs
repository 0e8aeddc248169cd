use super::*;

/// The values were computed from the description in `docs/wire-protocol.md` by another program.
#[test]
fn the_bytes_are_the_documented_ones() {
    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    let shared = Key::generate(&mut |out| out.copy_from_slice(b"foobarfoobarfoob"));
    let entropy: [u8; 80] = std::array::from_fn(|at| at as u8);
    let (mut client, hello) = ClientHandshake::new(Some(&shared.client_key()), [1; 32], 6);
    let mut control = ServerHandshake::new(Some(&shared.identity()), entropy, 3);
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
        "544350580d0a1a0a0200000000010000a4e09292b651c278b9772c569f5fa9bb13d906b46ab68c9df9dc2b4409f8a209ce4641862b0b6afe08d8719301e4a946f104773fa781c15e87a977b327fdd921b82cab34ab61dbbeff39eb10002c713fdb8872c48955ba1b"
    );
    assert_eq!(
        hex(&answer),
        "544350580d0a1a0a02000000000100008f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f83e8a18453b1144e97b87fb4997fa1ef4cf0d2f693e933b3d17ecc59e6b4ed5dca50ee428ea7e9b1f951b40bc6802ab1e84e5f24eaf7a920aea0eb72dc203d3f09db4f60e9e995f1"
    );
    assert_eq!(hex(&proof), "100039020e6cc95c7464fe693562b7c17e63");
    assert_eq!(hex(&welcome), "1100b58ac80f8d36069652975b7d83ea2d6bce");

    let session = established.session;
    let (mut client, hello) = LaneClient::new(&session, 3, 8, [3; 32]).unwrap();
    let mut lane = ServerHandshake::new(Some(&shared.identity()), entropy, 3);
    let Ok(ServerStep::Lane(request)) = lane.receive(&mut &hello[..]) else {
        panic!("no lane");
    };
    let (_, answer) = request.accept(&session.key).unwrap();
    let (proof, _) = sent_last(client.receive(&mut &answer[..]));
    assert_eq!(
        hex(&hello),
        "544350580d0a1a0a02000000010103000800000000000000202122232425262728292a2b2c2d2e2f5dfedd3b6bd47f6fa28ee15d969d5bb0ea53774d488bdaf9df1c6e0124b3ef2273b1db5be22ae8d9c33796030b379342"
    );
    assert_eq!(
        hex(&answer),
        "544350580d0a1a0a02000000000000008f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285fd1a18e980a8954b182fbc82a8da7c7e3"
    );
    assert_eq!(hex(&proof), "1000426e4e88cfced705a4bc80a2bdf10032");
}

use super::*;

/// The values were computed from the description in `docs/wire-protocol/` by another program.
#[test]
fn the_bytes_are_the_documented_ones() {
    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    let shared = Key::generate(&mut |out| out.copy_from_slice(b"foobarfoobarfoob"));
    let build = Build {
        release: [1, 2, 3],
        commit: [0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77],
        ..Build::OURS
    };
    let entropy: [u8; 80] = std::array::from_fn(|at| at as u8);
    let (mut client, hello) = ClientHandshake::new(Some(&shared.client_key()), &build, [1; 32]);
    let mut control = ServerHandshake::new(Some(&shared.identity()), &build, entropy);
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
        "544350580d0a1a0a030003000001000001020300112233445566770000000000a4e09292b651c278b9772c569f5fa9bb13d906b46ab68c9df9dc2b4409f8a209793212c78b66d35f96b11bca357ecbcbc7a23c627abc5b79e138cf1c00301a3dbb4c78fe926c1ad7f3bc848effdd2ecd"
    );
    assert_eq!(
        hex(&answer),
        "544350580d0a1a0a0300030000010000010203001122334455667700000000008f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f83e8a18453b1144e97b87fb4997fa1ef4cf0d2f693e933b3d17ecc59e6b4ed5dca50ee428ea7e9b1f951b40bc6802ab1e84e5c24ebf5aa202d4fd97b0a702b312b13aae8254b6605d24284b521f6ff"
    );
    assert_eq!(hex(&proof), "1000efff5d72b6c43af191c8499de1c12d0e0992");
    assert_eq!(hex(&welcome), "1100eeff84b83e74a0150e7f4f97970afa96939eb0");

    let told = [&hello[..], &answer, &proof, &welcome].map(hex);
    crate::tests::assert_on_page(&told);
    let session = established.session;
    let (mut client, hello) = LaneClient::new(&session, 3, 8, [3; 32]).unwrap();
    let mut lane = ServerHandshake::new(Some(&shared.identity()), &build, entropy);
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
        "544350580d0a1a0a0300030001010300000000000000000000000000000000000800000000000000202122232425262728292a2b2c2d2e2f0303030303030303030303030303030303030303030303030303030303030303eae4a3b787e05648fe49938a843f2411"
    );
    assert_eq!(
        hex(&answer),
        "544350580d0a1a0a030003000000000000000000000000000000000000000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f42c61f0afd0cef0bbb04648cb64e31d6"
    );
    assert_eq!(hex(&proof), "25899a39a9270dd0989e0444ba05143e");
    let session = [&hello[..], &answer, &proof].map(hex);
    let headers = [ours, accepted.keys].map(|keys| hex(&keys.start().0.seal_header(&[7; 48])));
    assert_eq!(
        headers,
        [
            "d7714fd88f07ceee12a986d605a9594f3b0d9107752b7b0d2791a1b4f0ba3803e78ef7a4b19ae37c8cc539c75b407ef7a4f4b0125b730f709833b94727a623b4",
            "f251cbf33b4fa8c6d7600627853e033ce07c6180b5e2e6e04e02dd9542311f760137231667af2ca36da0cf421af096d003adddf4193f01d6022faf983a34d99b",
        ]
    );
    crate::tests::assert_on_page(session.iter().chain(&headers));
}

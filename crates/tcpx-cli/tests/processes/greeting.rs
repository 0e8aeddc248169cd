use crate::support::{Server, tcpx};

#[test]
fn the_greeting_passes_on_both_sides_with_a_hex_dump() {
    let server = Server::start(tcpx(&["transfer", "server", "--host"]));
    let key = server.key.clone().expect("a fresh key");
    assert_eq!(
        server.invitation,
        format!(
            "TCPX_KEY={key} tcpx transfer 127.0.0.1 --port {}",
            server.port
        )
    );
    let client = server.client(&["transfer"], &["--host"]);
    let (server, client) = server.finish(client);
    for side in [server, client] {
        side.assert_code(0)
            .assert_says("transfer: PASSED")
            .assert_says("23 bytes");
        side.assert_says("48 65 6c 6c 6f 20 66 72  6f 6d 20 54 43 50 58 20  |Hello from TCPX |");
        side.assert_says("63 6c 69 65 6e 74 21                              |client!|");
    }
}

#[test]
fn payloads_of_other_sizes_pass() {
    for size in ["0", "1", "4096", "4097", "1MiB"] {
        let server = Server::start(tcpx(&["transfer", "server", "--host"]));
        let mut client = server.client(&["transfer"], &["--host"]);
        client.env("UCCL_TCPX_PAYLOAD_BYTES", size);
        let (server, client) = server.finish(client);
        for side in [server, client] {
            side.assert_code(0).assert_says("transfer: PASSED");
        }
    }
}

#[test]
fn through_our_plugin_the_fragments_and_the_bounce_buffer_are_shown() {
    let plugin = ["--host", "--network", "plugin", "--abi", "v7"];
    for size in ["23", "300000"] {
        let server = [&["transfer", "server", "--debug"][..], &plugin].concat();
        let server = Server::start(tcpx(&server));
        assert!(
            server.invitation.contains("--network plugin"),
            "{}",
            server.invitation
        );
        let mut client = server.client(&["transfer"], &plugin);
        client.env("UCCL_TCPX_PAYLOAD_BYTES", size);
        let (server, client) = server.finish(client);
        client.assert_code(0).assert_says("transfer: PASSED");
        server
            .assert_code(0)
            .assert_says("transfer: PASSED")
            .assert_says("unpacked from");
        server.assert_complains("descriptor 0: pool");
        server.assert_complains("bounce buffer before it is unpacked");
    }
}

#[test]
fn two_networks_that_do_not_match_are_an_error_on_both_sides() {
    let server = Server::start(tcpx(&["transfer", "server", "--host"]));
    let client = server.client(&["transfer"], &["--host", "--network", "plugin"]);
    let (server, client) = server.finish(client);
    for side in [server, client] {
        side.assert_code(1)
            .assert_says("transfer: FAILED")
            .assert_complains("plugin");
    }
}

use tcpx_tests::plugin_file;

use crate::support::{Server, scattering, tcpx};

#[test]
fn the_greeting_passes_on_both_sides_with_a_hex_dump() {
    let server = Server::start(tcpx(&["transfer", "server", "--host"]));
    // A line for a shell, which keeps a history: without the key.
    assert_eq!(
        server.invitation,
        format!("tcpx transfer 127.0.0.1 --port {}", server.port)
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
fn a_scattering_plugin_shows_fragments_and_buffer() {
    for (size, unpack) in [("23", "host"), ("23", "d2d"), ("300000", "kernel")] {
        let plugin = ["--host", "--plugin", scattering::path(), "--unpack", unpack];
        let server = [&["transfer", "server", "--debug"][..], &plugin].concat();
        let server = Server::start(scattering::takes_host_memory(tcpx(&server)));
        assert!(
            server.invitation.contains("--plugin"),
            "{}",
            server.invitation
        );
        let mut client = scattering::takes_host_memory(server.client(&["transfer"], &plugin));
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
fn a_client_key_moves_a_payload_over_our_plugin() {
    plugin_file::path();
    let plugin = ["--host", "--network", "plugin"];
    let server = Server::start(tcpx(&[&["transfer", "server"][..], &plugin].concat()));
    let client = server.client(&["transfer"], &plugin);
    let (server, client) = server.finish(client);
    for side in [server, client] {
        side.assert_code(0).assert_says("transfer: PASSED");
    }
}

#[test]
fn two_networks_that_do_not_match_are_an_error_on_both_sides() {
    plugin_file::path();
    let server = Server::start(tcpx(&["transfer", "server", "--host"]));
    let client = server.client(&["transfer"], &["--host", "--network", "plugin"]);
    let (server, client) = server.finish(client);
    for side in [server, client] {
        side.assert_code(1)
            .assert_says("transfer: FAILED")
            .assert_complains("plugin");
    }
}

//! Host memory through a plugin with a device queue, in place. Processes of their own: a plugin is
//! started once, for one kind of memory.

use std::time::Duration;

use tcpx::{Connection, Deadlines, Error, Level, Report};
use tcpx_net::PluginMemory;
use tcpx_tests::child;
use tcpx_tests::double::{self, Lie};
use tcpx_tests::pair::{LONG, Listening, close, double_network_of, try_move};

fn connected() -> (Connection, Connection) {
    let one_channel = |options: &mut tcpx::Options| {
        options.channels = 1;
        options.eager_limit = 0;
        options.deadlines = Deadlines {
            stall: Duration::from_secs(10),
            total: None,
        };
    };
    let network = double_network_of(PluginMemory::Host);
    Listening::new(network, one_channel, one_channel).connect()
}

/// The receiver's end, and whether every byte is there.
fn transfer(
    server: &Connection,
    client: &Connection,
    len: usize,
    level: Level,
) -> (Result<Report, Error>, bool) {
    let (received, sent, defect) = try_move(client, server, len, level);
    assert_eq!(received.is_ok(), sent.is_ok(), "{received:?} {sent:?}");
    (received, defect.is_none())
}

/// Slots are taken whatever the memory, so they must be given back whatever the memory.
#[test]
fn more_messages_than_the_queue_has_slots_arrive() {
    child::run(&[], || {
        let (server, client) = connected();
        for len in [0, 1, 23, 4097, 16 * (512 << 10), 64 << 20] {
            let (received, same) = transfer(&server, &client, len, Level::Placed);
            assert_eq!((received.unwrap().bytes, same), (len as u64, true));
        }
        close(server, client);
    });
}

#[test]
fn a_lie_in_a_size_ends_in_an_error() {
    child::run(&[], || {
        for lie in Lie::IN_SIZE {
            let (server, client) = connected();
            double::lie_next(lie);
            let (received, _) = transfer(&server, &client, 4 << 20, Level::Placed);
            received.expect_err("the size is wrong");
            // The channel was lost, or the other end went first.
            let _ = (server.close(LONG), client.close(LONG));
        }
    });
}

/// Nothing but the contents tells that bytes in place came short when the plugin tells no size.
#[test]
fn a_completion_without_bytes_is_found_by_checksums() {
    child::run(&[], || {
        let (server, client) = connected();
        double::lie_next(Lie::DoneEarly);
        let (received, same) = transfer(&server, &client, 4 << 20, Level::Verified);
        assert!(received.is_err() && !same, "{received:?}");
        let _ = (server.close(LONG), client.close(LONG));
    });
}

//! Transfers that are cancelled or dropped at any time, and what stays usable afterwards.

use std::thread;
use std::time::Duration;

use tcpx::{Error, ErrorKind, Report, TcpNetwork, Transfer};
use tcpx_tests::buffers::{Destination, Source};
use tcpx_tests::content::{Choices, Content};
use tcpx_tests::double;
use tcpx_tests::pair::{LONG, Listening, close, double_network, moves};
use tcpx_tests::support::wait;
use tcpx_tests::withholding::Withholding;

const ROUNDS: u64 = 150;

fn ended(transfer: &Transfer) -> Result<Report, Error> {
    transfer.wait_timeout(LONG).expect("its deadline bounds it")
}

/// Ended well, or because one side cancelled; never with its memory still held.
fn check_end(round: u64, outcome: &Result<Report, Error>) {
    let Err(error) = outcome else { return };
    assert!(!matches!(error, Error::MemoryHeld { .. }), "{error}");
    let by_peer = error.to_string().contains("cancelled by its program");
    assert!(
        error.kind() == ErrorKind::Cancelled || by_peer,
        "round {round}: {error}"
    );
}

#[test]
fn cancelled_transfers_leave_tcp_usable() {
    let listening = Listening::new(
        std::sync::Arc::new(TcpNetwork::default()),
        |server| server.channels = 2,
        |client| client.channels = 2,
    );
    let (server, client) = listening.connect();
    let mut choices = Choices::new(0xca);
    let (mut cut_short, mut whole) = (0, 0);
    for round in 0..ROUNDS {
        let tag = 1000 + round;
        let bytes = choices.below(8 << 20);
        let content = Content::new(2, round);
        let source = Source::new(content, bytes, 0);
        let destination = Destination::new(bytes, 0);
        let receive = server.receive(destination.slice(), tag).start();
        let receive = receive.expect("room");
        let send = client.send(source.slice(), tag).start().expect("room");
        let moment = Duration::from_micros(choices.below(6000));
        // However fast the machine is, some are over by then and some have hardly begun.
        match round % 10 {
            0 => wait(LONG, "its end", || receive.test().map(drop)),
            1 => {}
            _ => thread::sleep(moment),
        }
        // An announcement leaves at once and finds its receive, so the end of the send ends that
        // too. A receive may go before the announcement came: then the send goes on waiting.
        let (sent, received) = match choices.below(5) {
            0 => {
                send.cancel();
                (Some(ended(&send)), Some(ended(&receive)))
            }
            1 => {
                drop(send);
                (None, Some(ended(&receive)))
            }
            2 => {
                receive.cancel();
                let received = ended(&receive);
                send.cancel();
                (Some(ended(&send)), Some(received))
            }
            3 => {
                drop(receive);
                send.cancel();
                (Some(ended(&send)), None)
            }
            _ => {
                drop(send);
                drop(receive);
                (None, None)
            }
        };
        for outcome in [&sent, &received].into_iter().flatten() {
            check_end(round, outcome);
        }
        match &received {
            Some(Ok(_)) => {
                assert_eq!(destination.defect(content), None, "round {round}");
                whole += 1;
            }
            Some(Err(_)) => cut_short += 1,
            None => {}
        }
        if received.is_some() {
            destination.poison();
        } else {
            // Nobody tells when a dropped transfer has ended; its memory does.
            wait(LONG, "the destination", || {
                destination.try_poison().then_some(())
            });
        }
        moves(&client, &server, 1 << 20);
        assert_eq!(destination.touched(), None, "round {round}");
    }
    assert!(
        cut_short > 0 && whole > 0,
        "{cut_short} cut short, {whole} whole"
    );
    close(server, client);
}

#[test]
fn cancelling_a_plugins_granted_transfer_ends_it_all() {
    let _serial = double::serial();
    let withholding = Withholding::after_consumes(double_network(), 2);
    let bytes = 16 << 20;
    for by_receiver in [true, false] {
        let listening = Listening::new(
            double_network(),
            |server| server.network = withholding.clone(),
            |_| {},
        );
        let (server, client) = listening.connect();
        let source = Source::new(Content::new(3, 0), bytes, 0);
        let destination = Destination::new(bytes, 0);
        let receive = server
            .receive(destination.slice(), 1)
            .start()
            .expect("room");
        let send = client.send(source.slice(), 1).start().expect("room");
        // It can neither end nor be anywhere else once two chunks were acknowledged.
        wait(LONG, "two chunks", || {
            (send.progress().bytes_done == 1 << 20).then_some(())
        });
        let (one, other) = if by_receiver {
            (&receive, &send)
        } else {
            (&send, &receive)
        };
        one.cancel();
        let error = ended(one).expect_err("it was cancelled");
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
        let error = ended(other).expect_err("the other side cancelled it");
        assert!(error.to_string().contains("tag 1"), "{error}");
        destination.poison();
        for end in [server, client] {
            let error = end.close(LONG).expect_err("the channels are lost");
            let error = error.to_string();
            assert!(
                error.contains("network that cannot cancel") && error.contains("connect again"),
                "{error}"
            );
        }
        // Another connection has channels of its own.
        let listening = Listening::new(double_network(), |_| {}, |_| {});
        let (server, client) = listening.connect();
        moves(&client, &server, 4 << 20);
        assert_eq!(destination.touched(), None);
        close(server, client);
    }
}

#[test]
fn cancelling_an_unmatched_receive_keeps_the_plugin() {
    let _serial = double::serial();
    let listening = Listening::new(double_network(), |_| {}, |_| {});
    let (server, client) = listening.connect();
    let destination = Destination::new(1 << 20, 0);
    let receive = server
        .receive(destination.slice(), 9)
        .start()
        .expect("room");
    receive.cancel();
    let error = ended(&receive).expect_err("it was cancelled");
    assert!(
        error.to_string().contains("nothing was delivered"),
        "{error}"
    );
    moves(&client, &server, 3 << 20);
    assert_eq!(destination.touched(), None);
    close(server, client);
}

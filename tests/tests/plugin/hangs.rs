//! Foreign code that does not return, and code of ours that panics: every wait ends, and other
//! connections go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tcpx::{Connection, Deadlines, Error, Event, Observer, Region};
use tcpx_tests::child;
use tcpx_tests::double::{Call, Fault};
use tcpx_tests::pair::{self, LONG, Listening, double_network, moves};
use tcpx_tests::panicking::Panicking;
use tcpx_tests::support::until;
use tcpx_tests::withholding::Withholding;

const CHUNK: usize = 512 << 10;
/// What a transfer may stall over a network that hangs; a call that takes longer is stuck.
const STALL: Duration = Duration::from_secs(3);
/// Twenty times that.
const BOUND: Duration = LONG;

/// For connections that live on.
fn patient(options: &mut tcpx::Options) {
    options.channels = 1;
    options.eager_limit = 0;
    options.deadlines = Deadlines {
        stall: LONG,
        total: None,
    };
}

fn impatient(options: &mut tcpx::Options) {
    patient(options);
    options.deadlines.stall = STALL;
}

fn listening(options: fn(&mut tcpx::Options)) -> Listening {
    Listening::new(double_network(), options, options)
}

fn within<T>(bound: Duration, what: &str, work: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let answer = work();
    assert!(started.elapsed() < bound, "{what}: {:?}", started.elapsed());
    answer
}

#[test]
fn a_call_that_hangs_holds_no_caller_and_no_other_connection() {
    child::run(&[], || {
        for call in [
            Call::RegMr,
            Call::Isend,
            Call::Irecv,
            Call::Test,
            Call::Consumed,
        ] {
            let (server, client) = listening(impatient).connect();
            let (other_server, other_client) =
                Listening::new(Arc::new(tcpx::TcpNetwork::default()), patient, patient).connect();
            let fault = Fault::hangs(call, 0);
            let memory = Region::host(4 * CHUNK).unwrap();
            let target = Region::host(4 * CHUNK).unwrap();
            let receive = within(BOUND, "starting", || {
                server.receive(target.all(), 1).start()
            });
            let send = within(BOUND, "starting", || client.send(memory.all(), 1).start());
            until("the call hangs", || fault.is_hanging().then_some(()));

            // Neither end's memory can be given up, so the wait says that instead.
            let ended: Vec<_> = [receive, send]
                .into_iter()
                .map(|transfer| {
                    within(BOUND, "waiting", || transfer.and_then(tcpx::Transfer::wait))
                })
                .collect();
            assert!(ended.iter().all(Result::is_err), "{call:?}: {ended:?}");
            let stuck = |end: &Connection| {
                within(BOUND, "status", || end.status())
                    .iter()
                    .any(|line| line.contains("inside one call of the network"))
            };
            assert!(stuck(&server) || stuck(&client), "{call:?}");
            for end in [&server, &client] {
                within(BOUND, "statistics", || end.statistics());
                let more = Region::host(16).unwrap();
                // On the end that hangs it does not start; on the other the connection is lost.
                let refused = within(BOUND, "one more", || end.send(more.all(), 2).start());
                if let Ok(transfer) = refused {
                    within(BOUND, "its end", || transfer.wait()).expect_err("the peer hangs");
                }
            }
            moves(&other_client, &other_server, 3 * CHUNK);
            for end in [server, client] {
                within(BOUND, "closing", || end.close(Duration::from_millis(100)))
                    .expect_err("it hangs");
            }
            // The call returns after all: then everything is let go of.
            drop(fault);
            for region in [&memory, &target] {
                until("the memory is free", || region.with_bytes(.., |_| ()).ok());
            }
        }
    });
}

#[test]
fn a_set_up_call_that_hangs_ends_at_the_deadline_of_the_set_up() {
    child::run(&[], || {
        for call in [
            Call::Properties,
            Call::Listen,
            Call::Connect,
            Call::Accept,
            Call::CloseListen,
        ] {
            let listening = listening(|options| {
                patient(options);
                options.connect_timeout = Duration::from_secs(2);
            });
            let fault = Fault::hangs(call, 0);
            let (server, client) = within(BOUND, "the set-up", || listening.try_connect());
            assert!(server.is_err() && client.is_err(), "{call:?}");
            let words = format!("{} {}", server.unwrap_err(), client.unwrap_err());
            assert!(words.contains("plugin"), "{call:?}: {words}");
            drop(fault);
            // On a busy machine it may take longer than it may.
            let (server, client) = until("a set-up in time", || match listening.try_connect() {
                (Ok(server), Ok(client)) => Some((server, client)),
                _ => None,
            });
            moves(&client, &server, 3 * CHUNK);
        }
    });
}

#[test]
fn a_hanging_close_holds_no_close_with_a_limit() {
    child::run(&[], || {
        for (call, name) in [
            (Call::DeregMr, "deregMr or close"),
            (Call::CloseSend, "closeSend"),
            (Call::CloseRecv, "closeRecv"),
        ] {
            let (server, client) = listening(patient).connect();
            let others = listening(patient).connect();
            moves(&client, &server, 3 * CHUNK);
            let fault = Fault::hangs(call, 0);
            // The call has begun by then.
            let limit = Duration::from_secs(3);
            let ends = std::thread::scope(|scope| {
                let other = scope.spawn(|| client.close(limit));
                let ours = within(BOUND, "closing", || server.close(limit));
                [ours, within(BOUND, "closing", || other.join().unwrap())]
            });
            let stuck = |end: &Result<(), Error>| match end {
                Err(Error::CloseStuck { call, .. }) => call.contains(name),
                _ => false,
            };
            assert!(ends.iter().any(stuck), "{call:?}: {ends:?}");
            if call != Call::DeregMr {
                moves(&others.1, &others.0, 3 * CHUNK);
                let (server, client) = listening(patient).connect();
                moves(&client, &server, 3 * CHUNK);
            }
            drop(fault);
            pair::close(others.0, others.1);
        }
    });
}

/// Hears that chunks of a tag were given to the network.
#[derive(Debug)]
struct Posted(u64, AtomicBool);

impl Observer for Posted {
    fn event(&self, event: &Event) {
        if let Event::ChunkPosted(chunk) = event
            && chunk.tag == self.0
        {
            self.1.store(true, Ordering::SeqCst);
        }
    }
}

#[test]
fn memory_stays_held_while_the_close_that_gives_it_back_hangs() {
    child::run(&[], || {
        let posted = Arc::new(Posted(2, AtomicBool::new(false)));
        let listening = Listening::new(
            double_network(),
            |server| {
                impatient(server);
                // Its pool runs dry amid the first transfer.
                server.network = Withholding::after_consumes(double_network(), 2);
                server.observer = Some(posted.clone());
            },
            impatient,
        );
        let (server, client) = listening.connect();
        let regions: Vec<_> = (0..4).map(|_| Region::host(8 * CHUNK).unwrap()).collect();
        let receives: Vec<_> = [1, 2]
            .map(|tag| {
                server
                    .receive(regions[tag].all(), tag as u64)
                    .start()
                    .unwrap()
            })
            .into();
        let _sends = [(1, 0), (2, 3)].map(|(tag, region): (u64, usize)| {
            client.send(regions[region].all(), tag).start().unwrap()
        });
        until("both are in flight", || {
            posted.1.load(Ordering::SeqCst).then_some(())
        });
        let fault = Fault::hangs(Call::CloseRecv, 0);
        receives[0].cancel();
        until("the close hangs", || fault.is_hanging().then_some(()));
        receives[1].cancel();
        for (receive, region) in receives.iter().zip(&regions[1..]) {
            let ended = within(BOUND, "its end", || receive.wait_timeout(LONG)).unwrap();
            let error = ended.unwrap_err();
            assert!(matches!(error, Error::MemoryHeld { .. }), "{error}");
            region.with_bytes(.., |_| ()).unwrap_err();
        }
        let status = within(BOUND, "status", || server.status());
        let names = |line: &String| line.contains("closeRecv of the plugin has not returned");
        assert!(status.iter().any(names), "{status:?}");
        drop(fault);
        for region in &regions {
            until("the memory is free", || region.with_bytes(.., |_| ()).ok());
        }
    });
}

#[test]
fn a_network_that_panics_ends_its_connection_and_no_other() {
    let tcp = || Arc::new(tcpx::TcpNetwork::default());
    // Patient: printing where a panic came from takes seconds on a busy machine, and is no hang.
    // Both kinds share the engine's thread with the connection that must live on.
    let (server, client) = Listening::new(tcp(), patient, patient).connect();
    for times in [1, 100] {
        let panicking = Panicking::after_receives(tcp(), 2, times);
        let listening = Listening::new(
            tcp(),
            |options| {
                patient(options);
                options.network = panicking.clone();
                // What is posted may still arrive, but the rest is never posted.
                options.receive_window = Some(2);
            },
            patient,
        );
        let (bad_server, bad_client) = listening.connect();
        let (source, target) = (
            Region::host(64 * CHUNK).unwrap(),
            Region::host(64 * CHUNK).unwrap(),
        );
        let receive = bad_server.receive(target.all(), 1).start();
        let send = bad_client.send(source.all(), 1).start();
        let end = |transfer: Result<tcpx::Transfer, Error>| {
            transfer.and_then(|transfer| within(LONG, "its end", || transfer.wait()))
        };
        let error = end(receive).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("a defect of tcpx ended the connection: made to panic"),
            "{error}"
        );
        end(send).expect_err("the other end is gone");
        within(LONG, "closing", || bad_server.close(LONG)).expect_err("it panicked");
        within(LONG, "closing", || bad_client.close(LONG)).expect_err("it was lost");
        moves(&client, &server, 3 * CHUNK);
        until("the memory is free", || target.with_bytes(.., |_| ()).ok());
    }
}

//! What a peer that takes nothing costs another one: some of its rate at most, on the clock of the
//! simulated system.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tcpx::{Auth, Connection, Deadlines, Endpoint, Error, Limits, Options, Transfer};

use crate::plan::Plan;
use crate::programs::{GOODBYE, all_closed, host, options};
use crate::system::{self, fail, note};

/// Bytes of a message, and how many are under way at a time.
const MESSAGE: usize = 70_000;
const UNDER_WAY: usize = 4;
/// Messages whose time is taken, and those that fill everything of a peer that takes none.
const MESSAGES: usize = 100;
/// How often their time is taken: the least of these depends on whose turn it was by a few
/// hundredths, one by a tenth.
const TIMES: usize = 3;
const UNTAKEN: usize = 64;
const FILLS: Duration = Duration::from_millis(50);
/// Of the time without such a peer, as much passes with one at most.
const MOST: f64 = 1.1;
const LONG: Duration = Duration::from_secs(3_600);
const ENDLESS: Deadlines = Deadlines {
    stall: LONG,
    total: None,
};

fn done<T>(result: Result<T, Error>, what: &str) -> T {
    result.unwrap_or_else(|error| fail(&format!("{what}: {error}")))
}

/// Two ends of a connection, and where its lanes come to.
struct Pair {
    ends: [Connection; 2],
    endpoint: Endpoint,
}

impl Pair {
    fn new(plan: &Plan, auth: &Auth) -> Self {
        let silent = |mut options: Options| {
            // One that says nothing meanwhile is not given up.
            options.dead_after = LONG;
            options
        };
        let server = silent(options(plan, auth, Limits::default(), false, plan.encrypt));
        let client = silent(options(plan, auth, Limits::default(), false, plan.encrypt));
        let endpoint = done(
            Endpoint::listen(([127, 0, 0, 1], 0).into(), server),
            "listening",
        );
        let address = endpoint.local_addr();
        let dialling = std::thread::spawn(move || Endpoint::connect(address, &client));
        let accepted = done(endpoint.accept(LONG), "accepting");
        let Ok(dialled) = dialling.join() else {
            fail("the dialling thread panicked")
        };
        Self {
            ends: [done(dialled, "connecting"), accepted],
            endpoint,
        }
    }

    /// Starts a message from the client to the server.
    fn start(&self) -> [Transfer; 2] {
        let (source, destination) = (host(MESSAGE), host(MESSAGE));
        let receive = self.ends[1].receive(destination.all(), 1);
        let receive = done(receive.deadlines(ENDLESS).start(), "receiving");
        let send = self.ends[0].send(source.all(), 1).deadlines(ENDLESS);
        [done(send.start(), "sending"), receive]
    }

    fn end(message: [Transfer; 2]) {
        for transfer in message {
            done(transfer.wait(), "a message");
        }
    }

    /// How long some messages take at least.
    fn measure(&self) -> Duration {
        let times = (0..TIMES).map(|_| self.measure_once());
        times.min().unwrap_or_default()
    }

    fn measure_once(&self) -> Duration {
        let started = Instant::now();
        let mut under_way = VecDeque::new();
        for _ in 0..MESSAGES {
            if under_way.len() == UNDER_WAY
                && let Some(oldest) = under_way.pop_front()
            {
                Self::end(oldest);
            }
            under_way.push_back(self.start());
        }
        under_way.into_iter().for_each(Self::end);
        started.elapsed()
    }
}

/// Takes the time of messages beside a peer that rests, and beside the same while it takes nothing
/// of what it is sent.
pub fn run(plan: &Plan) {
    let auth = Auth::Key(done(tcpx::generate_key(), "a key"));
    let [measured, stopped] = [(); 2].map(|()| Pair::new(plan, &auth));
    // What is set up by the first ones is there.
    measured.measure_once();
    Pair::end(stopped.start());
    let alone = measured.measure();
    system::stop_peer(stopped.endpoint.local_addr().port());
    let untaken: Vec<_> = (0..UNTAKEN).map(|_| stopped.start()).collect();
    // Its receives are known, and all is full.
    std::thread::sleep(FILLS);
    let most = alone.mul_f64(MOST);
    let mut beside = measured.measure();
    if beside > most {
        // One run of some hundred was unlucky so often; what a peer costs, it costs again.
        beside = beside.min(measured.measure());
    }
    note(|| format!("{alone:?} alone, {beside:?} beside a peer that takes nothing"));
    if beside > most {
        fail(&format!(
            "a peer that takes nothing costs another one too much: {alone:?} became {beside:?}"
        ));
    }
    system::end_faults();
    untaken.into_iter().for_each(Pair::end);
    let ends = [measured, stopped].map(|pair| pair.ends);
    let closing = ends
        .into_iter()
        .flatten()
        .map(|end| std::thread::spawn(move || done(end.close(GOODBYE), "closing")));
    let closing: Vec<_> = closing.collect();
    for one in closing {
        if one.join().is_err() {
            fail("a closing thread panicked");
        }
    }
    all_closed();
}

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};

use super::*;

/// It knows its own place, as lanes do: a loop that kept it would keep itself.
#[derive(Debug)]
struct Counted {
    socket: TcpStream,
    _place: Remote,
    finished: Arc<AtomicUsize>,
    dropped: Arc<AtomicUsize>,
}

impl Source for Counted {
    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn interest(&self) -> epoll::EventFlags {
        epoll::EventFlags::IN
    }

    fn turn(&mut self) -> Turn {
        Turn::Rest
    }

    fn finish(&mut self) {
        self.finished.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

fn counted(place: &Remote, counts: &[Arc<AtomicUsize>; 2], near: &TcpListener) -> Counted {
    Counted {
        socket: near
            .local_addr()
            .and_then(TcpStream::connect)
            .expect("it listens"),
        _place: place.clone(),
        finished: Arc::clone(&counts[0]),
        dropped: Arc::clone(&counts[1]),
    }
}

#[test]
fn loops_that_end_let_go_of_what_they_were_just_given() {
    const ROUNDS: usize = 200;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let counts = [Arc::default(), Arc::default()];
    for _ in 0..ROUNDS {
        let loops = EventLoops::start("test", 1).unwrap();
        for place in loops.spread(2).iter().map(Loop::place) {
            place.start(Box::new(counted(&place, &counts, &listener)));
        }
        drop(loops);
        drop(listener.accept());
        drop(listener.accept());
    }
    assert_eq!(
        counts.map(|count| count.load(Ordering::SeqCst)),
        [2 * ROUNDS; 2]
    );
}

#[test]
fn a_loop_that_has_ended_finishes_a_source_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let counts = [Arc::default(), Arc::default()];
    let loops = EventLoops::start("test", 1).unwrap();
    let all = loops.all();
    drop(loops);
    let place = all.fewest().unwrap().place();
    for place in [place.clone(), place] {
        place.start(Box::new(counted(&place, &counts, &listener)));
    }
    assert_eq!(counts.map(|count| count.load(Ordering::SeqCst)), [2; 2]);
    assert_eq!(all.sources(), 0);
}

#[test]
fn lanes_spread_over_all_loops_before_one_has_two() {
    let loops = EventLoops::start("test", 3).unwrap();
    let spread = loops.spread(7);
    let of = |one: &Loop| {
        let same = |place: &&Loop| place.is(one);
        spread.iter().filter(same).count()
    };
    let mut counts: Vec<_> = loops.loops.0.iter().map(of).collect();
    counts.sort_unstable();
    assert_eq!(counts, [2, 2, 3]);
    assert!(
        !Arc::ptr_eq(&loops.spread(1)[0].0, &spread[0].0),
        "each begins elsewhere"
    );
}

/// It moves a byte a turn, as often as one has come.
#[derive(Debug)]
struct Reading(Arc<TcpStream>, Arc<AtomicUsize>);

impl Source for Reading {
    fn socket(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn interest(&self) -> epoll::EventFlags {
        epoll::EventFlags::IN
    }

    fn turn(&mut self) -> Turn {
        let mut byte = [0];
        match rustix::io::read(&self.0, &mut byte) {
            Ok(1) => {
                self.1.fetch_add(1, Ordering::SeqCst);
                Turn::Again
            }
            _ => Turn::Rest,
        }
    }
}

/// It counts its turns.
#[derive(Debug)]
struct Writing(Arc<TcpStream>, Arc<AtomicUsize>);

impl Source for Writing {
    fn socket(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn interest(&self) -> epoll::EventFlags {
        epoll::EventFlags::OUT
    }

    fn turn(&mut self) -> Turn {
        match self.1.fetch_add(1, Ordering::SeqCst) {
            0 => Turn::Rest,
            _ => Turn::End,
        }
    }
}

const LONG: Duration = Duration::from_secs(60);

fn pair() -> (TcpStream, Arc<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let far = listener.local_addr().and_then(TcpStream::connect);
    let near = listener.accept().expect("it connects").0;
    near.set_nonblocking(true).expect("a socket");
    (far.expect("it listens"), Arc::new(near))
}

#[test]
fn a_lanes_other_half_stays_watched() {
    let (mut far, near) = pair();
    let loops = EventLoops::start("test", 1).unwrap();
    let [here] = loops.spread(1).try_into().unwrap();
    let (read, turns): (Arc<AtomicUsize>, Arc<AtomicUsize>) = Default::default();
    let places = [here.place(), here.place()];
    places[0].start(Box::new(Writing(Arc::clone(&near), Arc::clone(&turns))));
    places[1].start(Box::new(Reading(near, Arc::clone(&read))));
    let until = Instant::now() + LONG;
    for count in 1..=3 {
        far.write_all(&[0]).unwrap();
        while read.load(Ordering::SeqCst) < count {
            assert!(Instant::now() < until, "byte {count} was not read");
            std::thread::yield_now();
        }
        // It ends, and the other half goes on.
        places[0].resume();
    }
    assert!(turns.load(Ordering::SeqCst) >= 2);
}

/// A loop that reads, its other end, and how many bytes it has read.
fn reading() -> (EventLoops, Loop, TcpStream, Arc<AtomicUsize>) {
    let (far, near) = pair();
    let loops = EventLoops::start("test", 1).expect("a thread");
    let [here] = loops.spread(1).try_into().expect("one");
    let read = Arc::default();
    let source = Reading(near, Arc::clone(&read));
    here.place().start(Box::new(source));
    (loops, here, far, read)
}

fn until_read(read: &AtomicUsize, count: usize, mut meanwhile: impl FnMut()) {
    let until = Instant::now() + LONG;
    while read.load(Ordering::SeqCst) < count {
        assert!(Instant::now() < until, "byte {count} was not read");
        meanwhile();
        std::thread::yield_now();
    }
}

#[test]
fn a_leader_moves_what_comes_and_leaves_the_rest_to_the_thread() {
    let (_loops, here, mut far, read) = reading();
    for round in 0..50 {
        let lead = here.lead().expect("nobody leads");
        assert!(here.lead().is_none(), "one leads at a time");
        for count in 1..=2 {
            far.write_all(&[0]).unwrap();
            until_read(&read, 3 * round + count, || _ = lead.round());
        }
        drop(lead);
        far.write_all(&[0]).unwrap();
        until_read(&read, 3 * round + 3, || ());
    }
}

#[test]
fn a_loop_is_served_once_its_leaders_lease_is_over() {
    let (_loops, here, mut far, read) = reading();
    for round in 0..50 {
        let lead = here.lead().expect("nobody leads");
        far.write_all(&[0]).unwrap();
        until_read(&read, 2 * round + 1, || _ = lead.round());
        let ends_early = round % 2 == 0;
        let lease = if ends_early { LONG * 2 } else { LONG / 60_000 };
        let left = lead.leave_until(Instant::now() + lease);
        far.write_all(&[0]).unwrap();
        if ends_early {
            left.end_lease();
        }
        until_read(&read, 2 * round + 2, || ());
    }
}

#[test]
fn what_is_raised_while_nobody_runs_the_loop_is_seen() {
    let (_far, near) = pair();
    let loops = EventLoops::start("test", 1).unwrap();
    let here = &loops.spread(1)[0];
    for _ in 0..50 {
        let turns = Arc::default();
        let place = here.place();
        let lead = here.lead().expect("nobody leads");
        place.start(Box::new(Writing(Arc::clone(&near), Arc::clone(&turns))));
        until_read(&turns, 1, || _ = lead.round());
        lead.leave_until(Instant::now() + LONG / 60_000);
        place.resume();
        until_read(&turns, 2, || ());
    }
}

fn until_asleep(here: &Loop) {
    let until = Instant::now() + LONG;
    while !(lock(&here.0.runner).waits && here.sources() == 1) {
        assert!(Instant::now() < until, "the loop's thread does not sleep");
        std::thread::yield_now();
    }
}

/// It has two turns each time, the second at once.
#[derive(Debug)]
struct Twice(Arc<TcpStream>, Arc<AtomicUsize>);

impl Source for Twice {
    fn socket(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn interest(&self) -> epoll::EventFlags {
        epoll::EventFlags::IN
    }

    fn turn(&mut self) -> Turn {
        match self.1.fetch_add(1, Ordering::SeqCst) % 2 {
            0 => Turn::Again,
            _ => Turn::Rest,
        }
    }
}

#[test]
fn turns_that_a_leader_leaves_are_given_by_a_thread_that_slept() {
    let (_far, near) = pair();
    let loops = EventLoops::start("test", 1).unwrap();
    let here = &loops.spread(1)[0];
    let turns = Arc::default();
    let place = here.place();
    place.start(Box::new(Twice(Arc::clone(&near), Arc::clone(&turns))));
    for round in 1..=50 {
        until_read(&turns, 4 * round - 2, || ());
        until_asleep(here);
        let lead = here.lead().expect("nobody leads");
        // The event for the waker is the leader's, so that the thread sleeps on.
        lead.round();
        place.resume();
        lead.round();
        match round % 2 {
            0 => drop(lead),
            _ => _ = lead.leave_until(Instant::now() + LONG),
        }
        until_read(&turns, 4 * round, || ());
        place.resume();
    }
}

/// Its thread sleeps, or is parked, or anything between; its leader stays, goes on, or has a lease.
#[test]
fn a_loop_ends_while_somebody_leads_it() {
    for (asleep, lease) in [
        (false, None),
        (true, None),
        (false, Some(LONG)),
        (true, Some(LONG)),
    ] {
        let (loops, here, _far, _read) = reading();
        if asleep {
            until_asleep(&here);
        }
        let lead = here.lead().expect("nobody leads");
        lead.round();
        let lead = match lease {
            None => Some(lead),
            Some(lease) => {
                lead.leave_until(Instant::now() + lease);
                None
            }
        };
        drop(loops);
        assert_eq!(here.sources(), 0);
        drop(lead);
    }
}

#[test]
fn a_loop_ends_while_its_leader_goes_on() {
    for round in 0..50 {
        let (loops, here, _far, _read) = reading();
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let leader = scope.spawn(|| {
                let lead = here.lead().expect("nobody leads");
                while !ended.load(Ordering::SeqCst) {
                    lead.round();
                    if round % 2 == 0 {
                        lead.prepare_sleep();
                        std::thread::yield_now();
                    }
                }
            });
            drop(loops);
            ended.store(true, Ordering::SeqCst);
            leader.join().expect("it leads");
            assert_eq!(here.sources(), 0);
        });
    }
}

#[test]
fn loops_grow_with_the_cores_up_to_a_limit() {
    let counted = [1, 2, 4, 5, 8, 16, 24, 32, 256].map(loops_for);
    assert_eq!(counted, [1, 2, 2, 2, 4, 8, 12, 12, 12]);
}

#[test]
fn a_number_that_was_asked_for_counts_within_reason() {
    let counted = [1, 3, MAX_LOOPS, u16::MAX].map(loops_wanted);
    assert_eq!(counted, [1, 3, MAX_LOOPS.into(), MAX_LOOPS.into()]);
    assert!(loops_wanted(0) > 0);
}

/// What it does in a turn, and how it ended.
#[derive(Debug)]
struct Odd {
    socket: TcpStream,
    panics: bool,
    told: std::sync::mpsc::Sender<&'static str>,
}

impl Odd {
    fn new(
        near: &TcpListener,
        panics: bool,
        told: &std::sync::mpsc::Sender<&'static str>,
    ) -> Box<Self> {
        let socket = near.local_addr().and_then(TcpStream::connect);
        Box::new(Self {
            socket: socket.expect("it listens"),
            panics,
            told: told.clone(),
        })
    }
}

impl Source for Odd {
    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn interest(&self) -> epoll::EventFlags {
        epoll::EventFlags::IN
    }

    fn turn(&mut self) -> Turn {
        self.told.send("turn").expect("the test listens");
        assert!(!self.panics, "this is what the test is about");
        Turn::Rest
    }

    fn broke(&mut self) {
        self.told.send("broke").expect("the test listens");
    }

    fn finish(&mut self) {
        // The test may be over.
        let _ = self.told.send("finish");
    }
}

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_source_that_panics_ends_and_the_loop_goes_on() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let loops = EventLoops::start("test", 1).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let here = &loops.spread(1)[0];
    let places = [here.place(), here.place()];
    places[0].start(Odd::new(&listener, true, &tell));
    let hear = || told.recv_timeout(LIMIT).expect("it is told");
    assert_eq!([hear(), hear(), hear()], ["turn", "broke", "finish"]);
    for _ in 0..2 {
        places[1].start(Odd::new(&listener, false, &tell));
        assert_eq!(hear(), "turn");
        places[1].remove();
        assert_eq!(hear(), "finish");
    }
}

#[test]
fn a_late_removal_spares_the_places_next_source() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let loops = EventLoops::start("test", 1).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let place = loops.spread(1)[0].place();
    let hear = || told.recv_timeout(LIMIT).expect("it is told");
    for _ in 0..100 {
        place.start(Odd::new(&listener, false, &tell));
        assert_eq!(hear(), "turn");
        place.remove();
        assert_eq!(hear(), "finish");
        // Whoever looks at the lane finds it dead too.
        place.remove();
    }
    place.start(Odd::new(&listener, false, &tell));
    assert_eq!(hear(), "turn");
    place.resume();
    assert_eq!(hear(), "turn");
}

/// What the one thread that may lead a loop of two sources does next.
#[derive(Debug, Clone)]
enum Deed {
    Write(usize),
    Lead,
    Round,
    SleepUntilNews,
    Leave,
    LeaveFor(u64),
    EndLease,
    Pause(u64),
}

fn deed() -> impl proptest::strategy::Strategy<Value = Deed> {
    use proptest::prelude::*;
    prop_oneof![
        4 => (0..2usize).prop_map(Deed::Write),
        2 => Just(Deed::Lead),
        2 => Just(Deed::Round),
        1 => Just(Deed::SleepUntilNews),
        1 => Just(Deed::Leave),
        2 => (0..2000u64).prop_map(Deed::LeaveFor),
        1 => Just(Deed::EndLease),
        2 => (0..300u64).prop_map(Deed::Pause),
    ]
}

proptest::proptest! {
    // A byte that is not read is waited for at each try.
    #![proptest_config(proptest::test_runner::Config {
        max_shrink_iters: 8,
        ..Default::default()
    })]

    /// Every byte is read in the end, by whom and when ever.
    #[test]
    fn a_loop_is_served_whoever_led_it(deeds in proptest::collection::vec(deed(), 1..60)) {
        let (loops, here, mut far, read) = reading();
        let (mut second, near) = pair();
        here.place().start(Box::new(Reading(near, Arc::clone(&read))));
        let (mut lead, mut written) = (None, 0);
        for deed in deeds {
            match deed {
                Deed::Write(which) => {
                    let far = if which == 0 { &mut far } else { &mut second };
                    far.write_all(&[0, 0]).unwrap();
                    written += 2;
                }
                Deed::Lead if lead.is_none() => lead = here.lead(),
                Deed::Lead => {}
                Deed::Round => _ = lead.as_ref().map(Lead::round),
                Deed::SleepUntilNews => {
                    if lead.as_ref().is_some_and(Lead::prepare_sleep) {
                        let mut watched = [PollFd::new(&here, PollFlags::IN)];
                        let millisecond = timespec(Duration::from_millis(1));
                        let _ = poll(&mut watched, Some(&millisecond));
                    }
                }
                Deed::Leave => lead = None,
                Deed::LeaveFor(micros) => {
                    let until = Instant::now() + Duration::from_micros(micros);
                    lead.take().map(|lead| lead.leave_until(until));
                }
                Deed::EndLease => here.end_lease(),
                Deed::Pause(micros) => std::thread::sleep(Duration::from_micros(micros)),
            }
        }
        drop(lead);
        until_read(&read, written, || ());
        drop(loops);
        assert_eq!(here.sources(), 0);
    }
}

#[test]
fn a_loop_serves_only_sources_that_were_raised() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let loops = EventLoops::start("test", 1).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let hear = || told.recv_timeout(LIMIT).expect("it is told");
    // More than the list has room for.
    let here = &loops.spread(1)[0];
    let places: Vec<_> = (0..RAISED + 50).map(|_| here.place()).collect();
    for place in &places {
        place.start(Odd::new(&listener, false, &tell));
        drop(listener.accept());
    }
    let turns = |count: usize| (0..count).for_each(|_| assert_eq!(hear(), "turn"));
    turns(places.len());
    let inbox = &places[0].inbox;
    let looked = inbox.looked.load(Ordering::SeqCst);
    for _ in 0..10 {
        places[7].resume();
        turns(1);
    }
    assert!(inbox.looked.load(Ordering::SeqCst) <= looked + 10);
    // None is forgotten, however many are raised at once.
    for _ in 0..20 {
        places.iter().for_each(Remote::resume);
        turns(places.len());
    }
}

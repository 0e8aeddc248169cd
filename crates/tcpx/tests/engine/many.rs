//! Puts, gets, sends and receives of both sides, many of each under way at once: each ends well,
//! with its own bytes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tcpx::{
    Completion, CompletionQueue, Connection, Limits, Options, Region, Rights, Window, WindowKey,
};

use crate::common::{self, contents, filled, random};

/// Bytes of each operation, which begin with a number that tells it from the others.
const EACH: usize = 4096;
const TAG: u64 = 1;
const LONG: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Put,
    Get,
    Send,
    Receive,
}

const KINDS: [Kind; 4] = [Kind::Put, Kind::Get, Kind::Send, Kind::Receive];

/// What both sides know.
struct Course {
    under_way: usize,
    is_over: AtomicBool,
    /// Sends of each side, once it begins no more.
    sends: [AtomicUsize; 2],
}

struct Side<'a> {
    course: &'a Course,
    number: usize,
    connection: &'a Connection,
    /// The peer's windows: to put to, and to get from.
    keys: [WindowKey; 2],
    queue: CompletionQueue,
    /// Memory of each kind, in the order of the kinds.
    memory: Vec<Region>,
    /// What each of them carries now, or should.
    carried: Vec<u64>,
    begun: [usize; 4],
    ended: [usize; 4],
}

fn number_in(region: &Region) -> u64 {
    let mut bytes = [0; 8];
    region.read_to(0, &mut bytes).expect("free");
    u64::from_le_bytes(bytes)
}

impl Side<'_> {
    /// Begins an operation in the memory of this place, unless there is none left to begin.
    fn begin(&mut self, place: usize) {
        let (kind, slot) = (place / self.course.under_way, place % self.course.under_way);
        let is_over = match KINDS[kind] {
            Kind::Receive => {
                self.begun[kind] >= self.course.sends[1 - self.number].load(Ordering::SeqCst)
            }
            _ => self.course.is_over.load(Ordering::SeqCst),
        };
        if is_over {
            return;
        }
        let region = &self.memory[place];
        let carried = match KINDS[kind] {
            Kind::Get => slot as u64,
            _ => self.begun[kind] as u64,
        };
        let bytes = match KINDS[kind] {
            Kind::Put | Kind::Send => carried,
            Kind::Get | Kind::Receive => u64::MAX,
        };
        region.write_from(0, &bytes.to_le_bytes()).expect("free");
        let offset = (slot * EACH) as u64;
        let [put, get] = &self.keys;
        let started = match KINDS[kind] {
            Kind::Put => self.connection.put(region.all(), put, offset).start(),
            Kind::Get => self.connection.get(region.all(), get, offset).start(),
            Kind::Send => self.connection.send(region.all(), TAG).start(),
            Kind::Receive => self.connection.receive(region.all(), TAG).start(),
        };
        started.expect("room").queue(&self.queue, place as u64);
        self.carried[place] = carried;
        self.begun[kind] += 1;
    }

    fn end(&mut self, completion: Completion) {
        let place = completion.key as usize;
        let report = completion.outcome.expect("an honest operation");
        assert_eq!(report.bytes, EACH as u64);
        assert_eq!(number_in(&self.memory[place]), self.carried[place]);
        self.ended[place / self.course.under_way] += 1;
    }

    /// Until it is over; how many had ended by then.
    fn run(&mut self) -> usize {
        let mut free: Vec<usize> = (0..4 * self.course.under_way).collect();
        let mut completions = Vec::new();
        let mut in_time = None;
        let began = Instant::now();
        loop {
            assert!(began.elapsed() < LONG, "it does not end");
            free.drain(..).for_each(|place| self.begin(place));
            if self.course.is_over.load(Ordering::SeqCst) && in_time.is_none() {
                in_time = Some(self.ended.iter().sum());
                self.course.sends[self.number].store(self.begun[2], Ordering::SeqCst);
            }
            let received = self.course.sends[1 - self.number].load(Ordering::SeqCst);
            if let Some(in_time) = in_time
                && self.ended[..3] == self.begun[..3]
                && self.ended[3] == received
            {
                return in_time;
            }
            let wait = Duration::from_millis(20);
            let polled = self.queue.poll(&mut completions, 1024, wait);
            polled.expect("a queue");
            for completion in completions.drain(..) {
                free.push(completion.key as usize);
                self.end(completion);
            }
        }
    }
}

/// How many operations a second end while so many of each kind are under way for this time, or as
/// soon as they are.
fn rate(under_way: usize, lasts: Duration, adjust: impl Fn(usize, &mut Options)) -> f64 {
    let (one, other) = common::pair(adjust);
    let connections = [one, other];
    let course = Course {
        under_way,
        is_over: AtomicBool::new(false),
        sends: [usize::MAX, usize::MAX].map(AtomicUsize::new),
    };
    let windows = connections.each_ref().map(|connection| {
        let written = Region::host(under_way * EACH).expect("memory");
        let numbers = (0..under_way as u64).flat_map(|slot| {
            let mut bytes = [0; EACH];
            bytes[..8].copy_from_slice(&slot.to_le_bytes());
            bytes
        });
        let read = filled(&numbers.collect::<Vec<_>>());
        let open = |region: &Region, rights| connection.expose(region.all(), rights).expect("open");
        let windows = [open(&written, Rights::Put), open(&read, Rights::Get)];
        (windows, written)
    });
    let mut sides = [0, 1].map(|number| Side {
        course: &course,
        number,
        connection: &connections[number],
        keys: windows[1 - number].0.each_ref().map(Window::key),
        queue: CompletionQueue::new().expect("a queue"),
        memory: (0..4 * under_way)
            .map(|_| Region::host(EACH).expect("memory"))
            .collect(),
        carried: vec![0; 4 * under_way],
        begun: [0; 4],
        ended: [0; 4],
    });
    let began = Instant::now();
    let (ended, took) = thread::scope(|threads| {
        let running = sides
            .each_mut()
            .map(|side| threads.spawn(move || side.run()));
        while began.elapsed() < lasts && !running.iter().any(|one| one.is_finished()) {
            thread::park_timeout(lasts.saturating_sub(began.elapsed()));
        }
        course.is_over.store(true, Ordering::SeqCst);
        let took = began.elapsed();
        let ended: usize = running
            .map(|one| one.join().expect("nothing is lost"))
            .iter()
            .sum();
        (ended, took)
    });
    for (side, ([put, get], written)) in windows.into_iter().enumerate() {
        for window in [put, get] {
            window.revoke(LONG).expect("nothing runs");
        }
        let written = contents(&written);
        let from = &sides[1 - side];
        for slot in 0..from.begun[0].min(under_way) {
            let number = written[slot * EACH..][..8].try_into().expect("eight bytes");
            assert_eq!(u64::from_le_bytes(number), from.carried[slot]);
        }
    }
    ended as f64 / took.as_secs_f64()
}

#[test]
fn many_of_all_kinds_end_well_whatever_the_sides_take() {
    for _ in 0..4 {
        let drawn = random(17);
        let few = |at: usize| 1 + u32::from(drawn[at] % 8);
        let limits = [0, 8].map(|from| Limits {
            puts: few(from),
            notifications: few(from + 1),
            gets: few(from + 2),
            asks: few(from + 3),
            windows: few(from + 4),
            tags: few(from + 5),
            pieces: few(from + 6),
            list_windows: few(from + 7),
        });
        let under_way = 1 + usize::from(drawn[16]);
        eprintln!("{under_way} of each, {limits:?}");
        let lasts = Duration::from_millis(50);
        rate(under_way, lasts, |side, options| {
            options.limits = limits[side]
        });
    }
}

#[test]
#[ignore = "90 seconds of full load: run with --ignored"]
fn thousands_of_all_kinds_lose_nothing_and_cost_no_more() {
    let few = || rate(64, Duration::from_secs(15), |_, _| ());
    let before = few();
    let many = rate(4096, Duration::from_secs(60), |_, _| ());
    let few = (before + few()) / 2.0;
    eprintln!(
        "{many:.0} operations a second, {few:.0} with 64 of each: {:.2}",
        many / few
    );
    // A busy machine may halve either; work that grows with what is under way takes far more.
    assert!(many >= 0.25 * few, "{many:.0} and {few:.0} a second");
}

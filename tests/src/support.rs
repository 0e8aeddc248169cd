//! Small things that many tests need.

use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};

/// Bytes of a page, as the plugins mean it.
pub const PAGE: usize = 4096;

/// How long a wait keeps its core, as NCCL does; behind that it leaves it to those that have
/// something to do.
const SPINS: Duration = Duration::from_millis(50);

/// Polls until there is an answer.
///
/// # Panics
/// After a deadline far beyond what any answer takes; `what` is in the message.
#[track_caller]
pub fn until<T>(what: &str, poll: impl FnMut() -> Option<T>) -> T {
    wait(Duration::from_secs(60), what, poll)
}

/// As [`until`], with a deadline of the caller's.
///
/// # Panics
/// There is no answer in time.
#[track_caller]
pub fn wait<T>(limit: Duration, what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(answer) = poll() {
            return answer;
        }
        let waited = began.elapsed();
        assert!(waited < limit, "waited {limit:?} for {what}");
        if waited < SPINS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// Gives this process so much of a resource and no more.
///
/// # Panics
/// It has less.
pub fn limit(resource: Resource, most: u64) {
    let most = Some(most);
    let both = Rlimit {
        current: most,
        maximum: most,
    };
    setrlimit(resource, both).expect("a limit can be lowered");
}

/// Bytes of their own at each call.
///
/// # Panics
/// The system has none.
pub fn random(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    getrandom::fill(&mut bytes).expect("the system has random bytes");
    bytes
}

/// Page-aligned host memory, as registration of CUDA memory demands of its stand-in.
#[derive(Debug)]
pub struct Pages {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Pages {
    /// Zeroes.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0_u8; len + PAGE];
        let start = bytes.as_ptr().align_offset(PAGE);
        Self { bytes, start, len }
    }

    /// Random bytes.
    pub fn random(len: usize) -> Self {
        let mut pages = Self::new(len);
        getrandom::fill(pages.slice_mut()).expect("the system has random bytes");
        pages
    }

    /// Bytes in use.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// The bytes.
    pub fn slice_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    /// Their address.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.slice_mut().as_mut_ptr()
    }
}

//! Completions of many transfers in one place, with a descriptor to wait on.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use tcpx_lanes::lock;

use crate::driver::timespec;
use crate::error::Error;
use crate::report::Report;
use crate::wait::FOREVER;

/// How a transfer ended that [`Transfer::queue`](crate::Transfer::queue) left to a queue.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The program's name for the transfer, as it was given to the queue.
    pub key: u64,
    /// What [`Transfer::wait`](crate::Transfer::wait) would have returned.
    pub outcome: Result<Report, Error>,
}

/// Where transfers of any number of connections leave their completions. Clones are the same queue.
///
/// Its descriptor is readable while completions wait, so it fits into the program's own event loop
/// (`poll`, `epoll`, mio, tokio's `AsyncFd`). The descriptor is for waiting only: do not read it.
///
/// ```
/// # use std::time::Duration;
/// # use tcpx::{Auth, Endpoint, Options, Region};
/// use tcpx::CompletionQueue;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let key = tcpx::generate_key()?;
/// # let server = Endpoint::listen("127.0.0.1:0".parse()?, Options::tcp(Auth::Key(key.clone())))?;
/// # let address = server.local_addr();
/// # let client = std::thread::spawn(move || Endpoint::connect(address, &Options::tcp(Auth::Key(key))));
/// # let receiver = server.accept(Duration::from_secs(10))?;
/// # let sender = client.join().expect("the client does not panic")?;
/// let queue = CompletionQueue::new()?;
/// let source = Region::host(4096)?;
/// let destinations = [Region::host(4096)?, Region::host(4096)?];
/// for (key, destination) in (0..).zip(&destinations) {
///     receiver.receive(destination.all(), 7).start()?.queue(&queue, key);
///     sender.send(source.all(), 7).start()?.queue(&queue, 100 + key);
/// }
/// let mut completions = Vec::new();
/// while completions.len() < 4 {
///     if queue.poll(&mut completions, 16, Duration::from_secs(10))? == 0 {
///         return Err("nothing ended in time".into());
///     }
/// }
/// for completion in completions {
///     println!("{} moved {} bytes", completion.key, completion.outcome?.bytes);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct CompletionQueue(Arc<Queue>);

struct Queue {
    waiting: Mutex<VecDeque<Completion>>,
    /// Readable exactly while `waiting` is not empty; both change under its lock.
    signal: OwnedFd,
}

impl CompletionQueue {
    /// An empty queue.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub fn new() -> Result<Self, Error> {
        let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::system("making a completion queue", error.into()))?;
        Ok(Self(Arc::new(Queue {
            waiting: Mutex::default(),
            signal,
        })))
    }

    /// Moves at most `most` completions to the end of `into`, in the order in which they came, and
    /// returns how many. With none there it waits at most `timeout`; [`Duration::ZERO`] never
    /// blocks.
    ///
    /// # Errors
    /// The system refused to wait.
    pub fn poll(
        &self,
        into: &mut Vec<Completion>,
        most: usize,
        timeout: Duration,
    ) -> Result<usize, Error> {
        let started = Instant::now();
        let timeout = timeout.min(FOREVER);
        loop {
            let taken = self.take(into, most);
            let left = timeout.saturating_sub(started.elapsed());
            if taken > 0 || most == 0 || left.is_zero() {
                return Ok(taken);
            }
            let mut polled = [PollFd::new(&self.0.signal, PollFlags::IN)];
            match poll(&mut polled, Some(&timespec(left))) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    return Err(Error::system("waiting for completions", error.into()));
                }
            }
        }
    }

    fn take(&self, into: &mut Vec<Completion>, most: usize) -> usize {
        let mut waiting = lock(&self.0.waiting);
        let taken = most.min(waiting.len());
        into.extend(waiting.drain(..taken));
        if taken > 0 && waiting.is_empty() {
            // It cannot be empty: whoever added the first completion has written it.
            let _ = rustix::io::read(&self.0.signal, &mut [0u8; 8]);
        }
        taken
    }

    pub(crate) fn add(&self, completion: Completion) {
        let mut waiting = lock(&self.0.waiting);
        waiting.push_back(completion);
        if waiting.len() == 1 {
            // A counter that was zero takes a one.
            let _ = rustix::io::write(&self.0.signal, &1u64.to_ne_bytes());
        }
    }
}

impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.signal.as_fd()
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("waiting", &lock(&self.0.waiting).len())
            .finish_non_exhaustive()
    }
}

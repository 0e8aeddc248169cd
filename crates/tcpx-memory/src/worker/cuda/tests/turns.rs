//! Whose turn it is, where ends are to be told and copies to be begun.

use std::sync::Mutex;

use super::*;
use crate::worker::queue::{JobQueue, Ticket};

/// Submits another copy as soon as one has ended.
struct GoesOn {
    channel: Arc<Channel>,
    queue: Arc<JobQueue>,
    next: Mutex<Option<Work>>,
}

impl CompletionSink for GoesOn {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        self.channel.complete(token, result);
        if let Some(work) = self.next.lock().unwrap().take() {
            let job = Job {
                work,
                fence: None,
                sink: Arc::<Channel>::clone(&self.channel),
                token: 9,
            };
            self.queue.push(Ticket::admit(job).unwrap()).unwrap();
        }
    }
}

/// Keeps the worker's thread until the test has submitted what is to begin together.
struct Waits(Mutex<Receiver<()>>);

impl CompletionSink for Waits {
    fn complete(&self, _token: u64, _result: Result<u64, MemoryError>) {
        self.0.lock().unwrap().recv_timeout(LIMIT).unwrap();
    }
}

#[test]
fn the_next_copy_starts_before_completions_are_reported() {
    const LEN: usize = 1000;
    let bench = Bench::new();
    let near = bench.region(MemoryKind::Pinned, &noise(4 * LEN, 3));
    let far = bench.region(bench.gpu.kind(), &[1; 4 * LEN]);
    let host = bench.region(MemoryKind::Host, &[1; 2 * LEN]);
    let to_host = |at: usize| Work::Copy {
        from: near.slice((2 * at + 1) * LEN..(2 * at + 2) * LEN).unwrap(),
        to: host.slice(at * LEN..(at + 1) * LEN).unwrap(),
    };
    let submit = |work: Work, sink: Arc<dyn CompletionSink>, token: u64| {
        let job = Job {
            work,
            fence: None,
            sink,
            token,
        };
        bench.worker.submit(job).unwrap();
    };
    let (go, wait) = mpsc::channel();
    submit(to_host(0), Arc::new(Waits(Mutex::new(wait))), 8);
    let (channel, ended) = channel();
    let sink = Arc::new(GoesOn {
        channel,
        queue: Arc::clone(&bench.worker.queue),
        next: Mutex::new(Some(to_host(1))),
    });
    // In memory they do not follow each other. Both have ended when the worker looks for the second
    // time.
    for token in 0..2 {
        let part = 2 * token * LEN..(2 * token + 1) * LEN;
        let work = Work::Copy {
            from: near.slice(part.clone()).unwrap(),
            to: far.slice(part).unwrap(),
        };
        submit(work, Arc::<GoesOn>::clone(&sink), token as u64);
    }
    go.send(()).unwrap();
    let order = [(); 3].map(|()| ended.recv_timeout(LIMIT).unwrap().0);
    assert_eq!(order, [0, 9, 1]);
}

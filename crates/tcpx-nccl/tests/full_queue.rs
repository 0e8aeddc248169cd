//! A copy worker that takes no more jobs delays a device receive and does not end it.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

#[expect(dead_code, reason = "shared with tests that need more of it")]
mod common;

use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use nccl_net::export::{NetComm, NetRecv, NetSend};
use nccl_net_tcpx::{Config, Mode, PoolKind};
use tcpx_memory::{CompletionSink, CopyWorker, Job, MemoryError, Region, Work};

/// The first job that ends holds the worker up until the gate's other end says go, or is gone.
struct Gate(Mutex<Receiver<()>>);

impl CompletionSink for Gate {
    fn complete(&self, _token: u64, _result: Result<u64, MemoryError>) {
        let _ = self.0.lock().unwrap().recv_timeout(Duration::from_secs(60));
    }
}

#[test]
fn a_full_copy_queue_delays_a_receive_and_does_not_end_it() {
    let size = 100_000;
    let pair = pair(&plugin(Config {
        mode: Mode::Unpack,
        pool: PoolKind::Gpu,
        standin: true,
        ..host_config()
    }));
    let mut from = Registered::new(&pair.send, random(size, 5), false);
    let mut to = Registered::new(&pair.receive, vec![0; size], true);

    // The stand-in's worker is the process's worker for host memory.
    let worker = CopyWorker::host().unwrap();
    let (go, gate) = mpsc::channel();
    let sink = Arc::new(Gate(Mutex::new(gate)));
    let nothing = Region::host(0).unwrap();
    let full = |refused: MemoryError| matches!(refused, MemoryError::QueueFull { .. });
    let refused = std::iter::repeat_with(|| {
        worker.submit(Job {
            work: Work::Copy {
                from: nothing.all(),
                to: nothing.all(),
            },
            fence: None,
            sink: sink.clone(),
            token: 0,
        })
    })
    .find_map(Result::err)
    .unwrap();
    assert!(full(refused.error));

    let receive = posted(pair.receive.irecv(to.buffer(0, size), 0, &to.memory));
    let send = posted(pair.send.isend(from.buffer(0, size), 0, &from.memory));
    let sent = until("the send", || {
        assert_eq!(pair.receive.test(receive).unwrap(), None);
        pair.send.test(send).unwrap()
    });
    // Nothing says when the last byte has come; without a place in the queue none of these may fail.
    for _ in 0..1000 {
        assert_eq!(pair.receive.test(receive).unwrap(), None);
    }
    drop(go);
    let received = until("the receive", || pair.receive.test(receive).unwrap());
    assert_eq!((sent, received), (size, size));
}

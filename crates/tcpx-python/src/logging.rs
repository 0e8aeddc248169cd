//! The engine's log in Python's `logging`.
//!
//! A thread of its own takes the interpreter's lock; the engine's threads only fill a bounded
//! queue, and count what finds no room. The thread ends before the interpreter does: Python ends
//! other threads by unwinding them, which Rust's frames do not bear.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Mutex, OnceLock};
use std::thread::JoinHandle;

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::{error, lock};

/// Records that wait for the interpreter.
const QUEUE: usize = 1024;

struct Record {
    level: u32,
    target: &'static str,
    text: String,
}

/// What the thread reads: a record, or nothing as its end.
type Queue = SyncSender<Option<Record>>;

struct Forward {
    queue: Queue,
    lost: AtomicU64,
}

/// The thread that calls Python, and the process that it runs in.
struct Delivery {
    thread: JoinHandle<()>,
    queue: Queue,
    process: u32,
}

static DELIVERY: Mutex<Option<Delivery>> = Mutex::new(None);

/// Passes records of `level` (a number of `logging`) and above to `emit(level, name, text)`, which
/// a thread of this module calls until [`end_log`]. Once for a process.
#[pyfunction]
pub(crate) fn log_to(emit: Py<PyAny>, level: u32) -> PyResult<()> {
    static STARTED: OnceLock<()> = OnceLock::new();
    let filter = match level {
        0..=5 => LevelFilter::TRACE,
        6..=10 => LevelFilter::DEBUG,
        11..=20 => LevelFilter::INFO,
        21..=30 => LevelFilter::WARN,
        _ => LevelFilter::ERROR,
    };
    if STARTED.set(()).is_err() {
        return Err(error::setting("logging is set up already"));
    }
    let (queue, records) = sync_channel(QUEUE);
    let forward = Forward {
        queue: queue.clone(),
        lost: AtomicU64::new(0),
    };
    let thread = std::thread::Builder::new()
        .name("tcpx-log".to_owned())
        .spawn(move || deliver(&emit, &records))?;
    *lock(&DELIVERY) = Some(Delivery {
        thread,
        queue,
        process: std::process::id(),
    });
    tracing_subscriber::registry()
        .with(forward.with_filter(filter))
        .try_init()
        .map_err(|error| error::setting(&error.to_string()))
}

/// Passes on what was logged so far, and ends the thread. Python calls it before it ends.
#[pyfunction]
pub(crate) fn end_log(py: Python<'_>) {
    // A child of a fork has no such thread.
    let ours = |delivery: &mut Delivery| delivery.process == std::process::id();
    let Some(delivery) = lock(&DELIVERY).take_if(ours) else {
        return;
    };
    py.detach(|| {
        // Both fail only where the thread has ended by itself.
        let _ = delivery.queue.send(None);
        let _ = delivery.thread.join();
    });
}

fn deliver(emit: &Py<PyAny>, records: &Receiver<Option<Record>>) {
    while let Ok(Some(record)) = records.recv() {
        let attached = Python::try_attach(|py| {
            let arguments = (record.level, record.target, record.text);
            if let Err(error) = emit.call1(py, arguments) {
                error.write_unraisable(py, None);
            }
        });
        if attached.is_none() {
            // The interpreter has ended.
            return;
        }
    }
}

impl<S: Subscriber> Layer<S> for Forward {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            // Writing to a String cannot fail.
            let _ = write!(text.0, " ({lost} earlier records found no room)");
        }
        let record = Record {
            level: match *event.metadata().level() {
                Level::ERROR => 40,
                Level::WARN => 30,
                Level::INFO => 20,
                Level::DEBUG => 10,
                Level::TRACE => 5,
            },
            target: event.metadata().target(),
            text: text.0,
        };
        if let Err(TrySendError::Full(_)) = self.queue.try_send(Some(record)) {
            self.lost.fetch_add(lost + 1, Ordering::Relaxed);
        }
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a String cannot fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}

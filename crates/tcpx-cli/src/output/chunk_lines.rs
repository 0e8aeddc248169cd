//! One line per step of each chunk, for `--debug`.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use tcpx::{ChunkEvent, Event, Observer, Role};
use tcpx_wire::TransferId;

use super::hexdump::hex_dump;
use super::say::aside;

/// Events that wait to be printed; more are counted and left out, because an observer must not
/// block.
const BACKLOG: usize = 16 * 1024;

/// Prints events from a thread of its own.
#[derive(Debug)]
pub(crate) struct ChunkLines {
    sink: Arc<Sink>,
    printer: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Sink {
    queue: mpsc::SyncSender<Option<Event>>,
    lost: AtomicU64,
}

impl Observer for Sink {
    fn event(&self, event: &Event) {
        if self.queue.try_send(Some(event.clone())).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl ChunkLines {
    pub(crate) fn start() -> Self {
        let (queue, events) = mpsc::sync_channel::<Option<Event>>(BACKLOG);
        let printer = std::thread::spawn(move || {
            for event in events.iter().map_while(|event| event) {
                if let Some(text) = describe(&event) {
                    aside!("{text}");
                }
            }
        });
        Self {
            sink: Arc::new(Sink {
                queue,
                lost: AtomicU64::new(0),
            }),
            printer: Some(printer),
        }
    }

    pub(crate) fn observer(&self) -> Arc<dyn Observer> {
        self.sink.clone()
    }
}

impl Drop for ChunkLines {
    /// Prints what still waits.
    fn drop(&mut self) {
        let _ = self.sink.queue.send(None);
        if let Some(printer) = self.printer.take() {
            let _ = printer.join();
        }
        let lost = self.sink.lost.load(Ordering::Relaxed);
        if lost > 0 {
            aside!(
                "debug: {lost} lines were left out, because they came faster than they could be printed"
            );
        }
    }
}

/// The line of an event; `None` for those that say nothing a person looks for.
fn describe(event: &Event) -> Option<String> {
    Some(match event {
        Event::Connected {
            peer,
            network,
            channels,
        } => {
            format!("debug: connected to {peer} over {network}, {channels} channels")
        }
        Event::Started { role, tag, bytes } => {
            format!("debug: {} tag {tag}: {bytes} bytes", verb(*role))
        }
        Event::ChunkPosted(chunk) => format!("debug: {} posted", name(chunk)),
        Event::ChunkSent(chunk) => format!("debug: {} left its source", name(chunk)),
        Event::ChunkArrived {
            chunk,
            fragments,
            sample,
            probe,
        } => {
            let plural = if *fragments == 1 { "" } else { "s" };
            let mut text = format!(
                "debug: {} arrived as {fragments} fragment{plural}",
                name(chunk)
            );
            for (index, (source, length, destination)) in sample.iter().enumerate() {
                let _ = write!(
                    text,
                    "\ndebug:   descriptor {index}: pool {source:#010x} + {length} -> destination {destination:#x}"
                );
            }
            if let (Some(bytes), Some((source, ..))) = (probe, sample.first()) {
                let _ = write!(text, "\ndebug:   bounce buffer before it is unpacked:\n");
                text.push_str(hex_dump(bytes, *source, 64, "debug:     ").trim_end());
            }
            text
        }
        Event::ChunkPlaced { chunk, elapsed } => {
            format!(
                "debug: {} placed after {}",
                name(chunk),
                crate::sizes::time(*elapsed)
            )
        }
        Event::Completed {
            role,
            tag,
            bytes,
            level,
        } => format!("debug: {} tag {tag}: {bytes} bytes, {level:?}", verb(*role)).to_lowercase(),
        Event::Failed { role, tag, error } => {
            format!("debug: {} tag {tag} failed: {error}", verb(*role))
        }
        Event::PathChanged { channel, path, why } => {
            format!("debug: channel {channel} goes on over {path}: {why}")
        }
        Event::Closed { error } => match error {
            None => "debug: connection closed".to_owned(),
            Some(error) => format!("debug: connection closed: {error}"),
        },
        _ => return None,
    })
}

fn name(chunk: &ChunkEvent) -> String {
    format!(
        "{} tag {} transfer {} chunk {} channel {} offset {} bytes {}",
        verb(chunk.role),
        chunk.tag,
        TransferId(chunk.transfer),
        chunk.index,
        chunk.channel,
        chunk.offset,
        chunk.length
    )
}

fn verb(role: Role) -> &'static str {
    match role {
        Role::Sender => "send",
        Role::Receiver => "receive",
    }
}

//! One peer's part in a scenario.

use std::time::{Duration, Instant};

use tcpx::{Connection, Error, Level, Report, Transfer};

use crate::buffers::{Destination, Source};
use crate::content::scramble;
use crate::instructions::{Failure, Summary};
use crate::scenario::{Flow, Message, Messages, Scenario, Side};

/// Plays the part of `side`; what went wrong is in the summary.
pub fn play(connection: &Connection, scenario: &Scenario, side: Side) -> Summary {
    let other = match side {
        Side::Server => Side::Client,
        Side::Client => Side::Server,
    };
    let mut part = Part {
        connection,
        scenario,
        summary: Summary {
            path: connection.path(),
            ..Summary::default()
        },
    };
    let (outgoing, incoming) = (scenario.flow_to(other), scenario.flow_to(side));
    match scenario.messages {
        Messages::Shuffled { .. } => part.all_at_once(&outgoing, &incoming),
        Messages::Each(ref sizes) => {
            for index in 0..sizes.len() {
                part.all_at_once(&only(&outgoing, index), &only(&incoming, index));
                if scenario.gives_up && part.summary.failed.is_some() {
                    break;
                }
            }
        }
    }
    part.summary
}

fn only(flow: &Flow, index: usize) -> Flow {
    let messages: Vec<_> = flow.messages.get(index).copied().into_iter().collect();
    Flow {
        receives: (0..messages.len()).collect(),
        messages,
    }
}

struct Part<'a> {
    connection: &'a Connection,
    scenario: &'a Scenario,
    summary: Summary,
}

struct Sending {
    message: Message,
    transfer: Result<Transfer, Error>,
}

struct Receiving {
    message: Message,
    destination: Destination,
    transfer: Result<Transfer, Error>,
}

impl Part<'_> {
    /// Starts everything, sends and receives in turn, then waits for it.
    fn all_at_once(&mut self, outgoing: &Flow, incoming: &Flow) {
        let mut sending = Vec::with_capacity(outgoing.messages.len());
        let mut receiving = Vec::with_capacity(incoming.messages.len());
        let mut sends = outgoing.messages.iter();
        let mut receives = incoming.receives.iter();
        loop {
            let (send, receive) = (sends.next(), receives.next());
            if let Some(index) = receive {
                receiving.push(self.receive(incoming.messages[*index]));
            }
            if let Some(message) = send {
                sending.push(self.send(*message));
            }
            if send.is_none() && receive.is_none() {
                break;
            }
        }
        for sent in sending {
            let outcome = self.wait(sent.transfer, true, sent.message);
            if outcome.is_some() {
                self.summary.succeeded += 1;
            }
        }
        for received in receiving {
            self.look_at(received);
        }
    }

    fn send(&self, message: Message) -> Sending {
        let content = self.scenario.content(message.number);
        let source = Source::new(content, message.bytes, place(message, 64));
        let level = if message.verified {
            Level::Verified
        } else {
            Level::Placed
        };
        let request = self.connection.send(source.slice(), message.tag);
        let transfer = request.level(level).start();
        Sending { message, transfer }
    }

    fn receive(&self, message: Message) -> Receiving {
        let destination = Destination::new(message.bytes, place(message, 4096));
        let slice = destination.shorter(usize::from(message.short));
        let transfer = self.connection.receive(slice, message.tag).start();
        Receiving {
            message,
            destination,
            transfer,
        }
    }

    fn look_at(&mut self, received: Receiving) {
        let Receiving {
            message,
            destination,
            transfer,
        } = received;
        let defect = match self.wait(transfer, false, message) {
            Some(report) => {
                self.summary.succeeded += 1;
                self.summary.received += report.bytes;
                self.summary.chunks += u64::from(report.chunks);
                self.summary.fragments += report.fragments;
                destination.defect(self.scenario.content(message.number))
            }
            None if message.short => destination.touched(),
            None => None,
        };
        let words = |defect| format!("message {}: {defect}", message.number);
        self.summary.defects.extend(defect.map(words));
    }

    /// The report; an error goes into the summary.
    fn wait(
        &mut self,
        transfer: Result<Transfer, Error>,
        send: bool,
        message: Message,
    ) -> Option<Report> {
        let (error, bytes_done) = match transfer {
            Err(error) => (error, 0),
            Ok(transfer) => {
                let state = loop {
                    if let Some(outcome) = transfer.wait_timeout(PATIENCE) {
                        break outcome;
                    }
                };
                let bytes_done = transfer.progress().bytes_done;
                match state {
                    Ok(report) if report.bytes == message.bytes => return Some(report),
                    Ok(report) => {
                        let defect = format!(
                            "message {}: {} bytes were to be moved, {} were reported",
                            message.number, message.bytes, report.bytes
                        );
                        self.summary.defects.push(defect);
                        return None;
                    }
                    Err(error) => (error, bytes_done),
                }
            }
        };
        self.summary.failed.get_or_insert_with(Instant::now);
        let debug = format!("{error:?}");
        self.summary.failures.push(Failure {
            send,
            number: message.number,
            tag: message.tag,
            kind: debug.chars().take_while(|c| c.is_alphanumeric()).collect(),
            error: error.to_string(),
            bytes_done,
        });
        None
    }
}

/// Where in a page the memory of a message starts: at its beginning or anywhere.
fn place(message: Message, range: u64) -> usize {
    let anywhere = scramble(message.number);
    if anywhere.is_multiple_of(2) {
        return 0;
    }
    (anywhere >> 8) as usize % range as usize
}

/// A transfer ends by its own deadlines; the test has another one for the whole program.
const PATIENCE: Duration = Duration::from_secs(1);

//! The receiving process: one connection and one transfer per step, each byte compared.

use std::fmt::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tcpx::{Auth, Deadlines, Endpoint, Event, Observer, Options, Rights, UnpackMethod};

use super::networks::Networks;
use super::one_sided;
use super::orders::{How, NetworkOrder, SendOrder};
use super::peer_process::PeerProcess;
use crate::error::Error;
use crate::key;
use crate::link;
use crate::memory_choice::{self, MemoryChoice};
use crate::messages::{self, ANSWER, Answer, PAYLOAD};
use crate::output::hexdump::hex_dump;
use crate::output::progress::{Busy, Progress};
use crate::sizes::grouped;
use crate::transfer::greeting::Payload;

/// How much of the payload is shown, in bytes.
const SHOWN: usize = 32;

/// How many fragments are shown.
const FRAGMENTS_SHOWN: usize = 4;

/// One transfer of the demo.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) network: NetworkOrder,
    /// How fragments reach their destination; `None` where the network places bytes itself.
    pub(crate) unpack: Option<UnpackMethod>,
    pub(crate) how: How,
    pub(crate) bytes: u64,
    pub(crate) label: String,
    /// Too small for a progress bar, and shown as a hex dump instead.
    pub(crate) show: bool,
}

impl Step {
    pub(crate) fn unpack_name(&self) -> String {
        self.unpack
            .map_or_else(|| "-".to_owned(), |method| method.to_string())
    }
}

/// A transfer whose every byte was right.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) bytes: u64,
    /// From the sender's start to its knowledge that everything is placed.
    pub(crate) elapsed: Duration,
    pub(crate) fragments: u64,
    pub(crate) path: String,
    pub(crate) sent_dump: String,
    pub(crate) received_dump: String,
}

/// The receiving side of all steps.
pub(crate) struct Receiver {
    memory: MemoryChoice,
    limit: Duration,
    networks: Networks,
    first: Arc<FirstFragments>,
}

/// Keeps the first fragments that were seen.
#[derive(Debug, Default)]
struct FirstFragments(Mutex<Vec<(u64, u32, u64)>>);

impl Observer for FirstFragments {
    fn event(&self, event: &Event) {
        if let Event::ChunkArrived { sample, .. } = event {
            let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.is_empty() {
                kept.extend(sample.iter().take(FRAGMENTS_SHOWN));
            }
        }
    }
}

impl Receiver {
    pub(crate) fn new(memory: MemoryChoice, limit: Duration) -> Self {
        Self {
            memory,
            limit,
            networks: Networks::default(),
            first: Arc::default(),
        }
    }

    /// The first fragments of a chunk in the order in which they came, for a person.
    pub(crate) fn first_fragments(&self) -> Option<String> {
        let kept = self.first.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.is_empty() {
            return None;
        }
        let mut text = String::from(
            "a chunk's first fragments as they came (pool offset, bytes, destination):",
        );
        for (source, length, destination) in kept.iter() {
            let _ = write!(
                text,
                "\n    {source:#010x}  {:>6}  {destination:#010x}",
                grouped(u64::from(*length))
            );
        }
        Some(text)
    }

    /// Has the peer send, receives, and compares.
    pub(crate) fn receive(
        &mut self,
        step: &Step,
        peer: &mut PeerProcess,
    ) -> Result<Received, Error> {
        let key = key::fresh()?;
        let payload = Payload {
            bytes: step.bytes,
            seed: getrandom::u64().map_err(key::KeyError::random)?,
        };
        let mut options = Options::new(
            self.networks.get(&step.network, &self.memory)?,
            Auth::Key(key.clone()),
        );
        options.deadlines = Deadlines {
            stall: self.limit,
            total: None,
        };
        options.connect_timeout = self.limit;
        // The smallest payload takes the data path too: that is what is shown here.
        options.eager_limit = 0;
        options.gpu = self.memory.gpu.clone();
        options.unpack = step.unpack;
        options.one_time = true;
        options.observer = Some(self.first.clone());
        let destination = self.memory.allocate_pages(step.bytes)?;
        memory_choice::poison(&destination)?;
        let endpoint = Endpoint::listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), options)?;
        let filling = Busy::new(&format!("{}: the sender fills its source", step.label));
        peer.prepare(SendOrder {
            network: step.network.clone(),
            port: endpoint.local_addr().port(),
            key: key.client_key().to_text(),
            bytes: payload.bytes,
            seed: payload.seed,
            how: step.how,
        })?;
        drop(filling);
        let connection = endpoint.accept(self.limit)?;
        let length = usize::try_from(step.bytes).unwrap_or(usize::MAX);
        let slice = destination
            .slice(..length)
            .map_err(Error::memory("post the receive"))?;
        let (mut fragments, mut took) = (0, None);
        match step.how {
            How::Send => {
                let transfer = connection.receive(slice, PAYLOAD).start()?;
                messages::tell(&connection, ANSWER, &Answer::Ready)?;
                let report = if step.show {
                    transfer.wait()?
                } else {
                    Progress::new(&step.label, step.bytes).follow(transfer, 0)?
                };
                fragments = report.fragments;
            }
            How::Put | How::Batch => one_sided::lend(&connection, slice, Rights::Put)?,
            How::Get => took = Some(one_sided::get(&connection, slice)?),
        }
        let path = connection.path().to_owned();
        link::part(connection)?;
        let (sent, theirs, head) = peer.sent(step.bytes)?;
        let elapsed = took.unwrap_or(sent);
        let _comparing = Busy::new(&format!("{}: comparing every byte", step.label));
        payload.check(&destination)?;
        let ours = destination
            .checksum(..length)
            .map_err(Error::memory("checksum the destination"))?;
        messages::same_crc32c(ours, Some(theirs))?;
        let shown = memory_choice::head(&destination, step.bytes, SHOWN)?;
        Ok(Received {
            bytes: step.bytes,
            elapsed,
            fragments,
            path,
            sent_dump: hex_dump(&head, 0, SHOWN, "    "),
            received_dump: hex_dump(&shown, 0, SHOWN, "    "),
        })
    }
}

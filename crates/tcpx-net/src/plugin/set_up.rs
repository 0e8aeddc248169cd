//! Setting up a plugin's comms.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nccl_net::{Accepting, Handle128, NoAnswer, Plugin, Properties, bounded};
use tcpx_lanes::lock;

use super::channel::PluginChannel;
use super::offload::Offload;
use super::{HANDLE_BYTES, PluginMemory};
use crate::channel::Channel;
use crate::error::NetworkError;
use crate::network::{Setup, Side};

/// Pause between polls of a connect or accept that is not up yet.
const PAUSE: Duration = Duration::from_millis(1);
/// What an orderly end by the deadline may take after it.
const GRACE: Duration = Duration::from_millis(500);

/// The threads on which plugins are set up.
pub(super) const THREAD: &str = "tcpx-set-up";
/// What to tell of a panic.
pub(super) const PANICKED: &str = "the thread that made it panicked: report this with the log";

/// A plugin that runs, and what it is given.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) plugin: Plugin,
    pub(super) device: usize,
    pub(super) properties: Properties,
    pub(super) memory: PluginMemory,
    /// Plugins need not allow listens and connects from several threads at once. NCCL accepts from
    /// several.
    pub(super) setup: Mutex<()>,
}

/// Whose set-up it is, and how long it may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    peer: SocketAddr,
    side: Side,
    deadline: Instant,
}

impl Limits {
    pub(super) fn of(setup: &Setup<'_>) -> Self {
        Self {
            peer: setup.peer,
            side: setup.side,
            deadline: setup.deadline,
        }
    }

    /// Runs a part of the set-up on a thread of its own and waits for it until the deadline.
    pub(super) fn bound<T: Send + 'static>(
        self,
        started: &Arc<Started>,
        call: &'static str,
        work: impl FnOnce(&Arc<Started>) -> Result<T, NetworkError> + Send + 'static,
    ) -> Result<T, NetworkError> {
        let left = self.deadline.saturating_duration_since(Instant::now()) + GRACE;
        let shared = Arc::clone(started);
        match bounded(THREAD, left, move || work(&shared), drop) {
            Ok(answer) => answer,
            Err(NoAnswer::NoThread(error)) => {
                Err(started.failed("starting a thread for set-up", error))
            }
            Err(NoAnswer::Panicked) => Err(started.failed(call, PANICKED)),
            Err(NoAnswer::Stuck) => Err(NetworkError::PluginStuck {
                network: started.name(),
                call,
                waited: left,
            }),
        }
    }
}

impl Started {
    pub(super) fn name(&self) -> String {
        format!("plugin:{}", self.plugin.name())
    }

    pub(super) fn failed(&self, call: &'static str, cause: impl ToString) -> NetworkError {
        NetworkError::Plugin {
            network: self.name(),
            call,
            cause: cause.to_string(),
        }
    }

    /// Listens for `count` connections; their handles one behind the other. One listen or connect
    /// at a time, whichever connection it is for.
    pub(super) fn listen(&self, count: usize) -> Result<(Vec<u8>, Vec<Accepting>), NetworkError> {
        let _entered = self
            .memory
            .enter()
            .map_err(|error| self.failed("listen", error))?;
        let mut handles = Vec::with_capacity(count * HANDLE_BYTES);
        let mut accepting = Vec::with_capacity(count);
        let _calls = lock(&self.setup);
        for _ in 0..count {
            let (handle, listen) = self
                .plugin
                .listen(self.device)
                .map_err(|error| self.failed("listen", error))?;
            handles.extend_from_slice(&handle.0);
            accepting.push(listen.accept());
        }
        Ok((handles, accepting))
    }

    /// Brings up one connection in each direction per channel. What listens beyond the peer's
    /// handles is closed unused.
    pub(super) fn bring_up(
        self: &Arc<Self>,
        theirs: &[Handle128],
        mut accepting: Vec<Accepting>,
        limits: Limits,
    ) -> Result<Vec<Box<dyn Channel>>, NetworkError> {
        let _entered = self
            .memory
            .enter()
            .map_err(|error| self.failed("connect", error))?;
        accepting.truncate(theirs.len());
        let mut sends = Vec::with_capacity(theirs.len());
        for handle in theirs {
            let connecting = self
                .plugin
                .connect(self.device, *handle)
                .map_err(|error| self.failed("connect", error))?;
            sends.push((connecting, None));
        }
        let mut receives: Vec<_> = accepting.into_iter().map(|comm| (comm, None)).collect();
        loop {
            // Every connect is polled before any accept: there are plugins whose accept blocks
            // until the peer has connected. The peer may be another thread of this process, so
            // nothing is held meanwhile.
            let calls = lock(&self.setup);
            for (comm, up) in sends.iter_mut().filter(|(_, up)| up.is_none()) {
                *up = comm.poll().map_err(|error| self.failed("connect", error))?;
            }
            drop(calls);
            for (comm, up) in receives.iter_mut().filter(|(_, up)| up.is_none()) {
                *up = comm.poll().map_err(|error| self.failed("accept", error))?;
            }
            let up = sends.iter().filter(|(_, up)| up.is_some()).count()
                + receives.iter().filter(|(_, up)| up.is_some()).count();
            if up == sends.len() + receives.len() {
                break;
            }
            if Instant::now() >= limits.deadline {
                return Err(NetworkError::TimedOut {
                    peer: limits.peer,
                    operation: "connecting the plugin's comms",
                });
            }
            std::thread::sleep(PAUSE);
        }
        let sends = sends.into_iter().filter_map(|(_, up)| up);
        let receives = receives.into_iter().filter_map(|(_, up)| up);
        let closer = Arc::default();
        let mut channels: Vec<Box<dyn Channel>> = Vec::with_capacity(sends.size_hint().0);
        for (index, (send, receive)) in sends.zip(receives).enumerate() {
            let offload = Offload::of(&receive, &self.memory)
                .map_err(|cause| self.failed("accept (device handle)", cause))?;
            let name = format!("{} channel {index} to {}", self.name(), limits.peer);
            let closes = (Arc::clone(&closer), limits.side);
            let started = Arc::clone(self);
            let channel = PluginChannel::new(name, send, receive, started, offload, closes);
            channels.push(Box::new(channel));
        }
        Ok(channels)
    }
}

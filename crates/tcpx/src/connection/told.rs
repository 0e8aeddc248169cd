//! What `tcpx status` tells of a connection.

use std::sync::Arc;

use tcpx_memory::peer_mappings;
use tcpx_status::{
    ConnectionReport, Counters, Description, Mappings, Source, register, tell_mappings,
};

use super::shared::Shared;

impl Shared {
    /// Has the status of this process tell of the connection until it is finished.
    pub(crate) fn tell_status(self: &Arc<Self>) {
        tell_mappings(|| {
            let [open, held_up] = peer_mappings();
            Mappings { open, held_up }
        });
        let source = Arc::downgrade(self);
        let registration = register(source, true);
        self.lock().program.register(registration);
    }
}

impl Source for Shared {
    fn describe(&self) -> Option<Description> {
        let mut report = Box::new(ConnectionReport {
            id: 0,
            peer: self.peer.address.to_string(),
            peer_software: self.peer.software.clone(),
            network: self.peer.network.clone(),
            path: self.path(),
            congestion: None,
            up_seconds: self.origin.elapsed().as_secs_f64(),
            counters: Counters::default(),
            lanes: Vec::new(),
            operations_running: 0,
            operations_stalled: 0,
            operations: Vec::new(),
            stuck: None,
        });
        match self.lock_in_time() {
            Ok(mut core) => {
                if core.ending.is_finished() {
                    return None;
                }
                core.tell_operations(&mut report);
                report.counters = core.counters();
                report.lanes = core.channels.lanes();
                report.congestion = core.channels.congestion_control();
                report.stuck = core.stuck_close().map(|error| error.to_string());
            }
            Err(stuck) => report.stuck = Some(stuck.to_string()),
        }
        Some(Description::Connection(report))
    }
}

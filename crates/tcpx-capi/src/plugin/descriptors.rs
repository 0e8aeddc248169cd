//! What a finished receive left in the plugin's device queue, checked.

use nccl_net::{LoadMeta, QueueSlot, RecvComm};
use tcpx_net::plugin::Offload;
use tcpx_wire::{Descriptors, descriptor::Limits};
use tcpx_wire::{Fragment, ScatterList};

use crate::error::{Failure, Outcome};
use crate::plugin::codes::TCPX_PLUGIN_FAULT;
use crate::plugin::types::tcpx_descriptor;

/// The device queue of a receive comm.
#[derive(Debug)]
pub(crate) struct Queue {
    offload: Offload,
    entries: Vec<LoadMeta>,
    list: ScatterList,
    checked: Descriptors,
}

impl Queue {
    /// The queue that the plugin made with the comm, if it made one.
    pub(crate) fn of(comm: &RecvComm) -> Outcome<Option<Self>> {
        let offload = Offload::discover(comm).map_err(|cause| {
            Failure::new(
                TCPX_PLUGIN_FAULT,
                format!("the plugin's device queue cannot be read: {cause}"),
            )
        })?;
        Ok(offload.map(|offload| Self {
            offload,
            entries: Vec::new(),
            list: ScatterList::new(),
            checked: Descriptors::new(),
        }))
    }

    /// First byte and length of the pool.
    pub(crate) fn pool(&self) -> (u64, usize) {
        let pool = self.offload.pool();
        (pool.slice().address(), pool.len())
    }

    /// Takes the pieces of a finished receive of at most `posted` bytes. They cover the first bytes
    /// of the destination without gap or overlap; `told` is what the plugin says that they add up
    /// to.
    pub(crate) fn take(
        &mut self,
        slot: QueueSlot,
        posted: usize,
        told: Option<usize>,
    ) -> Outcome<(u64, Vec<tcpx_descriptor>)> {
        let fault = |cause: String| Failure::new(TCPX_PLUGIN_FAULT, cause);
        self.offload
            .take(slot, &mut self.entries)
            .map_err(|error| fault(error.to_string()))?;
        self.list.clear();
        let mut sum = 0_u64;
        for entry in &self.entries {
            // At most 2048 of 32 bits each.
            sum += u64::from(entry.len);
            self.list.push(Fragment {
                source_offset: u64::from(entry.src_off),
                length: entry.len,
                destination_offset: entry.dst_off,
            });
        }
        let received = told.map_or(sum, |told| told as u64);
        if sum > posted as u64 {
            return Err(fault(format!(
                "the plugin lists {sum} bytes for a receive of {posted}: close the comm"
            )));
        }
        // Inside `sum` bytes, `sum` together and none twice: no byte is left out either.
        let limits = Limits {
            pool_bytes: self.offload.pool().len() as u64,
            destination_bytes: sum,
            received_bytes: received,
        };
        self.checked
            .build(&self.list, limits)
            .map_err(|error| fault(error.to_string()))?;
        let pieces = self.checked.as_slice().iter().map(|piece| tcpx_descriptor {
            src_off: piece.source_offset,
            len: piece.length,
            dst_off: piece.destination_offset,
        });
        Ok((sum, pieces.collect()))
    }
}

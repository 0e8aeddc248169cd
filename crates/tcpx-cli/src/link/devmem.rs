//! From flags to the device-memory network: the card's queue, the pool, and what this side can do.

use std::sync::Arc;

use tcpx::Network;
use tcpx_devmem::{Adjust, Devmem, DevmemError, DevmemNetwork, DevmemOptions, ReceiveOptions};
use tcpx_memory::{DmaBuf, DmaBufError};
use tcpx_net::{ChannelStats, NetworkError};

use crate::args::link::CardArgs;
use crate::error::Error;
use crate::memory_choice::MemoryChoice;
use crate::output::say::aside;

/// Device memory that chunks wait in until the card has sent them.
const SEND_BYTES: usize = 32 << 20;

/// The network, and a line that says what it is.
pub(super) fn network(
    args: &CardArgs,
    memory: &MemoryChoice,
) -> Result<(Arc<dyn Network>, String), Error> {
    let mut options = DevmemOptions::default();
    let mut line = "devmem, this side receives through host memory".to_owned();
    if let Some(interface) = &args.devmem_interface {
        let devmem = Devmem::system();
        let bytes = usize::try_from(args.devmem_pool.0).map_err(|_| {
            Error::usage(
                format!(
                    "a pool of {} does not fit in this host's addresses",
                    args.devmem_pool
                ),
                "give a smaller --devmem-pool",
            )
        })?;
        let queue = devmem
            .bind_receive(&ReceiveOptions {
                interface: interface.clone(),
                queue: args.devmem_queue,
                memory: exported(memory, bytes)?,
                adjust: Adjust::Settings,
            })
            .map_err(refused)?;
        line = format!(
            "devmem, payload lands in {} of {} through queue {} of {interface}",
            args.devmem_pool,
            queue.pool.kind(),
            queue.queue
        );
        if args.devmem_send {
            let slots = exported(memory, SEND_BYTES)?;
            match devmem.bind_send(interface, &slots) {
                Ok(path) => {
                    line.push_str(", and leaves device memory");
                    options.send = Some(path);
                }
                Err(error) if error.leaves_staging() => {
                    aside!("note: {error}; payload leaves through host memory");
                }
                Err(error) => return Err(refused(error)),
            }
        }
        options.interface = Some(interface.clone());
        options.receive.push(queue);
    }
    let network = DevmemNetwork::new(options).map_err(tcpx::Error::from)?;
    Ok((Arc::new(network), line))
}

/// Where what was received has landed: the bytes' own word, whatever was set up.
pub(super) fn landed(statistics: &ChannelStats) -> Option<String> {
    let (all, in_pool) = (statistics.bytes_received, statistics.bytes_in_pool);
    (all > 0).then(|| format!("landed: {in_pool} of {all} received bytes in device memory"))
}

/// Memory that a card can be given: the GPU's, or the host's in its place.
fn exported(memory: &MemoryChoice, bytes: usize) -> Result<DmaBuf, Error> {
    let made = match &memory.gpu {
        Some(gpu) => DmaBuf::cuda(gpu, bytes),
        None => DmaBuf::host(bytes),
    };
    made.map_err(|error: DmaBufError| {
        tcpx::Error::from(NetworkError::Memory {
            network: "devmem".to_owned(),
            cause: error.to_string(),
        })
        .into()
    })
}

fn refused(error: DevmemError) -> Error {
    tcpx::Error::from(NetworkError::from(error)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_bytes_landed_is_told_once_there_were_some() {
        let mut statistics = ChannelStats::default();
        assert_eq!(landed(&statistics), None);
        (statistics.bytes_received, statistics.bytes_in_pool) = (23, 0);
        let line = landed(&statistics);
        assert_eq!(
            line.as_deref(),
            Some("landed: 0 of 23 received bytes in device memory")
        );
    }
}

//! The networks that an end of the demonstration has used.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use tcpx::{Network, TcpNetwork};

use super::orders::NetworkOrder;
use crate::error::Error;
use crate::link;
use crate::memory_choice::MemoryChoice;
use crate::plugin_file::PluginFile;

/// Plugins by their file: each is started once.
#[derive(Default)]
pub(super) struct Networks(HashMap<PathBuf, Arc<dyn Network>>);

impl Networks {
    /// The network of an order, for transfers of this memory.
    pub(super) fn get(
        &mut self,
        order: &NetworkOrder,
        memory: &MemoryChoice,
    ) -> Result<Arc<dyn Network>, Error> {
        let path = match order {
            NetworkOrder::Tcp => return Ok(Arc::new(TcpNetwork::default())),
            NetworkOrder::Plugin { path } => path,
        };
        if let Some(network) = self.0.get(path) {
            return Ok(network.clone());
        }
        let file = PluginFile::given(path)?;
        let limit = link::PLUGIN_START;
        let network: Arc<dyn Network> =
            Arc::new(link::plugin_network(&file, Some(7), 0, memory, limit)?);
        self.0.insert(path.clone(), network.clone());
        Ok(network)
    }
}

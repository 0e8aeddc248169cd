//! The device whose memory a comm sends from or receives for: a GPU, or host memory standing in.

use std::sync::Arc;

use nccl_net::export::{MemoryRegion, NetError};
use tcpx_memory::{CopyWorker, Gpu, MemoryError, Region};

use crate::config::Mode;
use crate::error;
use crate::plugin::ProcessState;

/// A device and the copy worker that moves its memory.
#[derive(Clone)]
pub(crate) struct Device {
    gpu: Option<Gpu>,
    worker: Arc<CopyWorker>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.gpu {
            Some(gpu) => write!(f, "GPU {}", gpu.ordinal()),
            None => f.write_str("host memory standing in for a GPU"),
        }
    }
}

impl Device {
    /// The device of the calling thread: the stand-in when it was asked for, else the GPU of the
    /// current context, which is the one NCCL works on.
    pub(crate) fn current(shared: &ProcessState) -> Result<Self, NetError> {
        if shared.config.standin {
            let failed = error::copy("plugin", "starting the copy worker for host memory");
            let worker = CopyWorker::host().map_err(failed)?;
            return Ok(Self { gpu: None, worker });
        }
        let no_device = |error: String| {
            NetError::invalid_argument(format!(
                "no GPU to work with: {error}; make a CUDA context current in the calling thread, or \
                 set TCPX_NET_STANDIN=host to let host memory stand in for device memory"
            ))
        };
        let gpu = Gpu::current().map_err(|error| no_device(error.to_string()))?;
        let worker = CopyWorker::for_gpu(&gpu).map_err(|error| no_device(error.to_string()))?;
        Ok(Self {
            gpu: Some(gpu),
            worker,
        })
    }

    /// The device for a registration; `None` for host memory.
    pub(crate) fn for_registration(
        shared: &ProcessState,
        region: MemoryRegion,
    ) -> Result<Option<Self>, NetError> {
        if !region.cuda {
            return Ok(None);
        }
        if shared.config.mode == Mode::Host {
            return Err(NetError::invalid_argument(
                "CUDA memory cannot be registered: this plugin runs with host memory only; set \
                 TCPX_NET_DEVICE=cuda for device memory"
                    .to_owned(),
            ));
        }
        Self::current(shared).map(Some)
    }

    /// The host program's memory as a region of this device.
    pub(crate) fn region(&self, region: MemoryRegion) -> Result<Region, MemoryError> {
        let address = region.data.expose_provenance();
        // SAFETY: the host program keeps registered memory valid until it deregisters it, and
        // posts nothing on it afterwards; that is the contract of regMr.
        unsafe { Region::from_address(self.gpu.as_ref(), address, region.len, Arc::new(())) }
    }

    pub(crate) const fn worker(&self) -> &Arc<CopyWorker> {
        &self.worker
    }
}

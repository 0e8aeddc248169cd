//! The worker of a GPU.

use std::sync::Arc;

use super::CopyWorker;
use crate::error::{CudaError, MemoryError};
use crate::gpu::Gpu;

pub(super) fn worker(_gpu: &Gpu) -> Result<Arc<CopyWorker>, MemoryError> {
    Err(CudaError::NoDriver {
        why: "no driver answers on this host".to_owned(),
    }
    .into())
}

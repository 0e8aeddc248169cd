//! Order between what other devices wrote to GPU memory and GPU work that reads it.

use super::{Current, Gpu};
use crate::driver::{self, sys};
use crate::error::CudaError;

/// From this answer on, writes are visible to the owning GPU without a flush.
const OWNER: i32 =
    sys::CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as i32;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`.
const THIS_CONTEXT: i32 = 0;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER`.
const TO_OWNER: i32 = 100;

impl Gpu {
    /// Whether a network card's writes to this GPU's memory need [`Self::flush_device_writes`]
    /// before GPU work may read them.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn needs_flush(&self) -> Result<bool, CudaError> {
        let device = driver::device(self.api(), self.ordinal())?;
        let ordering = driver::attribute(
            self.api(),
            device,
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
        )?;
        Ok(ordering < OWNER)
    }

    /// Makes what other devices have written to this GPU's memory visible to work launched from now
    /// on. Blocks for as long as the flush takes.
    ///
    /// # Errors
    /// [`CudaError::MissingSymbol`] or the driver's refusal.
    pub fn flush_device_writes(&self) -> Result<(), CudaError> {
        let flush = self
            .api()
            .cuFlushGPUDirectRDMAWrites
            .ok_or(CudaError::MissingSymbol {
                name: "cuFlushGPUDirectRDMAWrites",
                needs: "11.3",
            })?;
        let _current = Current::enter(self)?;
        // SAFETY: both arguments are documented values; the context is current.
        self.api().check("cuFlushGPUDirectRDMAWrites", unsafe {
            flush(THIS_CONTEXT, TO_OWNER)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_goes_to_the_driver_with_the_context_current() {
        let gpu = Gpu::fake();
        assert_eq!(gpu.needs_flush(), Ok(true));
        assert_eq!(gpu.flush_device_writes(), Ok(()));
    }
}

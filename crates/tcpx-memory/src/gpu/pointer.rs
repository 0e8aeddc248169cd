//! What the driver knows about an address that somebody else allocated.

use super::{Current, Gpu};
use crate::driver::sys;
use crate::error::CudaError;

/// An allocation that contains a device address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerInfo {
    /// Device address of the allocation's first byte.
    pub start: u64,
    /// Bytes in the allocation.
    pub len: usize,
    /// The CPU's address for the asked device address, when the memory is mapped host memory.
    pub host: Option<usize>,
}

impl PointerInfo {
    /// Bytes from `address` to the end of the allocation.
    pub fn len_from(&self, address: u64) -> Option<usize> {
        let before = usize::try_from(address.checked_sub(self.start)?).ok()?;
        self.len.checked_sub(before)
    }
}

impl Gpu {
    /// Describes the allocation that contains a device address.
    ///
    /// # Errors
    /// The driver's refusal, when the address belongs to no allocation that it knows.
    pub fn pointer(&self, address: u64) -> Result<PointerInfo, CudaError> {
        use sys::CUpointer_attribute as Attribute;
        let _current = Current::enter(self)?;
        let mut start = 0u64;
        let mut len = 0usize;
        let mut host = 0usize;
        let api = self.api();
        // SAFETY: the value is of the attribute's type, a device address.
        api.check("cuPointerGetAttribute(RANGE_START_ADDR)", unsafe {
            (api.cuPointerGetAttribute)(
                (&raw mut start).cast(),
                Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as i32,
                address,
            )
        })?;
        // SAFETY: the value is of the attribute's type, a size.
        api.check("cuPointerGetAttribute(RANGE_SIZE)", unsafe {
            (api.cuPointerGetAttribute)(
                (&raw mut len).cast(),
                Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE as i32,
                address,
            )
        })?;
        // SAFETY: the value is of the attribute's type, a CPU address; memory without one is an
        // ordinary answer.
        let code = unsafe {
            (api.cuPointerGetAttribute)(
                (&raw mut host).cast(),
                Attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER as i32,
                address,
            )
        };
        let mapped = api
            .check("cuPointerGetAttribute(HOST_POINTER)", code)
            .is_ok();
        Ok(PointerInfo {
            start,
            len,
            host: (mapped && host != 0).then_some(host),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Region;

    #[test]
    fn an_address_inside_an_allocation_is_described() {
        let gpu = Gpu::fake();
        let region = Region::cuda(&gpu, 4096).expect("memory");
        let address = region.all().address() + 100;
        let known = gpu.pointer(address).expect("it is allocated");
        let inside = (address - known.start) as usize;
        assert_eq!(known.len_from(address), Some(known.len - inside));
        assert_eq!(known.host, Some(address as usize));
        assert_eq!(known.len_from(known.start - 1), None);
    }

    #[test]
    fn a_strange_address_is_an_error() {
        assert!(Gpu::fake().pointer(64).is_err());
    }
}

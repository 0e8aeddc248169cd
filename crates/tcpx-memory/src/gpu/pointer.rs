//! What the driver and the kernel know about an address that the program gives.

use std::ffi::c_void;

use super::{Current, Gpu};
use crate::driver::sys::CUpointer_attribute as Attribute;
use crate::error::{CudaError, MemoryError, PointerFault};

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

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u64 = 2;
/// `CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE`.
const READ_AND_WRITE: u64 = 3;

impl Gpu {
    /// Describes the allocation that contains a device address.
    ///
    /// # Errors
    /// The driver's refusal, when the address belongs to no allocation that it knows.
    pub fn pointer(&self, address: u64) -> Result<PointerInfo, CudaError> {
        let _current = Current::enter(self)?;
        let host = self.known(Attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER, address);
        let start = self.attribute(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address)?;
        let len = self.attribute(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, address)?;
        Ok(PointerInfo {
            start,
            len: len as usize,
            host: host.map(|host| host as usize),
        })
    }

    /// Whether this GPU's context can read and write so many bytes there, and they are a GPU's:
    /// allocated, mapped (in one part or many), of this device and context. Managed memory is one
    /// too.
    pub(crate) fn check_memory(&self, address: u64, len: usize) -> Result<(), MemoryError> {
        let fault = |fault| MemoryError::Pointer {
            address,
            len,
            fault,
        };
        let too_long = |end: u64| {
            let known = (end - address) as usize;
            fault(PointerFault::TooLong { known })
        };
        let _current = Current::enter(self)?;
        let end = address.checked_add(len as u64);
        let end = end.ok_or_else(|| too_long(address))?;
        let mut at = address;
        while at < end {
            let (behind, may_go_on) = self.part(at).map_err(|part| match part {
                PointerFault::Unknown { .. } if at > address => too_long(at),
                other => fault(other),
            })?;
            if behind < end && !may_go_on {
                return Err(too_long(behind));
            }
            at = behind;
        }
        Ok(())
    }

    /// Where the memory ends that an address lies in, and whether more of the same may follow:
    /// memory that is mapped by its parts.
    fn part(&self, at: u64) -> Result<(u64, bool), PointerFault> {
        let device = self.ordinal();
        let unknown = PointerFault::Unknown { device };
        let known = |attribute| self.known(attribute, at);
        let behind = |start, len| {
            let behind = known(start)?.checked_add(known(len)?)?;
            (behind > at).then_some(behind)
        };
        let kind = known(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
        let kind = kind.ok_or_else(|| unknown.clone())?;
        let allocated = behind(
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        );
        let allocated = allocated.ok_or_else(|| unknown.clone())?;
        if known(Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED).is_some() {
            return Ok((allocated, false));
        }
        if kind != DEVICE {
            return Err(PointerFault::OfHost);
        }
        let owner = self.attribute(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at);
        let owner = owner.map_or(device, |owner| owner as u32);
        if owner != device {
            return Err(PointerFault::OfAnotherGpu { device, owner });
        }
        match known(Attribute::CU_POINTER_ATTRIBUTE_CONTEXT) {
            Some(context) if context == self.context() => return Ok((allocated, false)),
            Some(_) => return Err(PointerFault::OfAnotherContext { device }),
            // It belongs to the device: mapped by its parts, each with its rights, or of a pool.
            None => {}
        }
        if self.attribute(Attribute::CU_POINTER_ATTRIBUTE_MAPPED, at) == Ok(0) {
            return Err(unknown);
        }
        let flags = self.attribute(Attribute::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, at);
        if flags.is_ok_and(|flags| flags != READ_AND_WRITE) {
            return Err(PointerFault::NoAccess { device });
        }
        let mapped = behind(
            Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
            Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
        );
        Ok((
            mapped.map_or(allocated, |mapped| mapped.min(allocated)),
            true,
        ))
    }

    /// An attribute that is there and not 0.
    fn known(&self, attribute: Attribute, address: u64) -> Option<u64> {
        let answer = self.attribute(attribute, address).ok();
        answer.filter(|answer| *answer != 0)
    }

    /// The context is current.
    pub(super) fn attribute(&self, attribute: Attribute, address: u64) -> Result<u64, CudaError> {
        let mut value = 0_u64;
        let place = (&raw mut value).cast::<c_void>();
        // SAFETY: no attribute that is asked for is longer; of a shorter one the rest stays 0.
        let code = unsafe { (self.api().cuPointerGetAttribute)(place, attribute as i32, address) };
        self.api().check("cuPointerGetAttribute", code)?;
        Ok(value)
    }
}

/// Whether so many bytes of this process's memory are mapped there, and the first and the last can
/// be read.
pub(crate) fn check_host_memory(address: usize, len: usize) -> Result<(), MemoryError> {
    if len == 0 {
        return Ok(());
    }
    let page = rustix::param::page_size();
    let start = address & !(page - 1);
    // SAFETY: without a flag to do more the kernel looks whether all of it is mapped.
    let mapped = address.checked_add(len).is_some_and(|end| unsafe {
        let start = std::ptr::without_provenance_mut(start);
        libc::msync(start, end - start.addr(), libc::MS_ASYNC) == 0
            || std::io::Error::last_os_error().raw_os_error() != Some(libc::ENOMEM)
    });
    if mapped && is_readable(address) && is_readable(address + len - 1) {
        return Ok(());
    }
    Err(MemoryError::Pointer {
        address: address as u64,
        len,
        fault: PointerFault::NotMapped,
    })
}

/// Whether the kernel can read the aligned word that a byte lies in: it does before it refuses the
/// call.
fn is_readable(address: usize) -> bool {
    const NO_SUCH_OPERATION: i32 = -1;
    let word = std::ptr::without_provenance::<u64>(address & !7);
    let nothing = std::ptr::null_mut::<c_void>();
    // SAFETY: the call changes nothing, as there is no such operation; the kernel reads the word by
    // itself.
    let refused = unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            NO_SUCH_OPERATION,
            word,
            nothing,
            size_of::<u64>(),
        )
    };
    refused == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Region;
    use crate::driver::fake;

    fn fault(checked: Result<(), MemoryError>) -> Option<PointerFault> {
        match checked {
            Ok(()) => None,
            Err(MemoryError::Pointer { fault, .. }) => Some(fault),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn an_address_inside_an_allocation_is_described() {
        let gpu = Gpu::fake();
        let region = Region::pinned(&gpu, 4096).expect("memory");
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

    #[test]
    fn wild_and_freed_gpu_memory_is_refused() {
        let gpu = Gpu::fake();
        let region = Region::cuda(&gpu, 100_000).unwrap();
        let address = region.all().address();
        assert_eq!(gpu.check_memory(address, 100_000), Ok(()));
        assert_eq!(gpu.check_memory(address + 99_999, 1), Ok(()));
        let unknown = Some(PointerFault::Unknown { device: 0 });
        assert_eq!(fault(gpu.check_memory(0x1_2345_6000, 4096)), unknown);
        assert_eq!(fault(gpu.check_memory(0, 1)), unknown);
        let stack = 0_u8;
        let on_stack = (&raw const stack).addr() as u64;
        assert_eq!(fault(gpu.check_memory(on_stack, 1)), unknown);
        for len in [200_000, usize::MAX, usize::MAX - address as usize] {
            let long = fault(gpu.check_memory(address, len));
            assert!(
                matches!(long, Some(PointerFault::TooLong { .. })),
                "{len}: {long:?}"
            );
        }
        drop(region);
        assert!(Region::wait_for_frees(std::time::Duration::from_secs(60)));
        assert_eq!(fault(gpu.check_memory(address, 1)), unknown);
    }

    #[test]
    fn memory_that_a_gpu_cannot_reach_is_refused() {
        let (gpu, other) = (Gpu::fake(), Gpu::fake());
        let foreign = Region::cuda(&other, 4096).unwrap();
        let refused = PointerFault::OfAnotherContext { device: 0 };
        let address = foreign.all().address();
        assert_eq!(fault(gpu.check_memory(address, 4096)), Some(refused));
        let address = fake::mapped(&gpu, 1, &[(4096, true)]);
        let refused = PointerFault::OfAnotherGpu {
            device: 0,
            owner: 1,
        };
        assert_eq!(fault(gpu.check_memory(address, 4096)), Some(refused));
        let pinned = Region::pinned(&gpu, 4096).unwrap();
        let address = pinned.all().address();
        assert_eq!(
            fault(gpu.check_memory(address, 4096)),
            Some(PointerFault::OfHost)
        );
    }

    #[test]
    fn memory_that_is_mapped_in_parts_is_one() {
        let gpu = Gpu::fake();
        let address = fake::mapped(
            &gpu,
            0,
            &[(8192, true), (4096, true), (4096, false), (4096, true)],
        );
        assert_eq!(gpu.check_memory(address, 12_288), Ok(()));
        assert_eq!(gpu.check_memory(address + 100, 12_188), Ok(()));
        let known = 12_288;
        assert_eq!(
            fault(gpu.check_memory(address, 12_289)),
            Some(PointerFault::TooLong { known })
        );
        let unknown = Some(PointerFault::Unknown { device: 0 });
        assert_eq!(fault(gpu.check_memory(address + 12_288, 1)), unknown);
        assert_eq!(gpu.check_memory(address + 16_384, 4096), Ok(()));
        let known = 4096;
        let refused = Some(PointerFault::TooLong { known });
        assert_eq!(fault(gpu.check_memory(address + 16_384, 4097)), refused);
    }

    #[test]
    fn host_memory_that_is_not_mapped_is_refused() {
        let region = Region::host(100_000).unwrap();
        let address = region.all().address() as usize;
        assert_eq!(check_host_memory(address, 100_000), Ok(()));
        assert_eq!(check_host_memory(0, 0), Ok(()));
        let bytes = [1_u8; 3];
        assert_eq!(check_host_memory(bytes.as_ptr().addr(), 3), Ok(()));
        drop(region);
        // Other tests may map something there again, but not at these.
        for (address, len) in [
            (0, 1),
            (64, 4096),
            (0xFFFF_8000_0000_0000, 8),
            (usize::MAX, 1),
        ] {
            assert_eq!(
                fault(check_host_memory(address, len)),
                Some(PointerFault::NotMapped)
            );
        }
        let long = check_host_memory(bytes.as_ptr().addr(), isize::MAX as usize);
        assert_eq!(fault(long), Some(PointerFault::NotMapped));
    }

    #[test]
    fn host_memory_that_cannot_be_read_is_refused() {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
        // As the addresses of GPU memory are to the CPU.
        // SAFETY: a new mapping at an address of the kernel's choice, which is unmapped below.
        let reserved = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                8192,
                ProtFlags::empty(),
                MapFlags::PRIVATE,
            )
        };
        let reserved = reserved.unwrap();
        let refused = fault(check_host_memory(reserved.addr() + 100, 4096));
        assert_eq!(refused, Some(PointerFault::NotMapped));
        // SAFETY: mapped above.
        unsafe { munmap(reserved, 8192) }.unwrap();
    }
}

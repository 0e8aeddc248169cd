//! Launches of the fake driver: the kernels' parameters, and the same work on the CPU.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use tcpx_wire::Descriptor;

use super::persistent::Residency;
use super::{Operation, pointer};

/// Where a launch says that it has ended.
pub(super) struct Done {
    flag: usize,
    value: u32,
}

/// A list, read when the launch runs unless the launch carries it.
pub(super) struct List {
    carried: Option<Vec<u32>>,
    address: usize,
    count: usize,
    /// The unit and the last piece of an even list.
    even: Option<(u32, u32)>,
}

impl List {
    pub(super) fn read(&self) -> Vec<Descriptor> {
        let words = self.count * if self.even.is_some() { 1 } else { 4 };
        let list = match &self.carried {
            Some(list) => list[..words].to_vec(),
            None => {
                let list = pointer(self.address).cast();
                // SAFETY: the code under test promises that the memory is there when the stream
                // gets here.
                unsafe { std::slice::from_raw_parts(list, words) }.to_vec()
            }
        };
        match self.even {
            None => list
                .chunks_exact(4)
                .map(|word| Descriptor {
                    source_offset: word[0],
                    length: word[1],
                    destination_offset: u64::from(word[2]) | u64::from(word[3]) << 32,
                })
                .collect(),
            Some((unit, last)) => list
                .iter()
                .enumerate()
                .map(|(index, source)| Descriptor {
                    source_offset: *source,
                    length: if index + 1 == self.count { last } else { unit },
                    destination_offset: index as u64 * u64::from(unit),
                })
                .collect(),
        }
    }
}

impl Done {
    fn new(counter: u64, flag: u64, value: u32) -> Option<Self> {
        let flag = flag as usize;
        (counter != 0).then_some(Self { flag, value })
    }

    pub(super) fn signal_completion(&self) {
        // SAFETY: four aligned bytes that stay.
        unsafe { AtomicU32::from_ptr(pointer(self.flag).cast()) }
            .store(self.value, Ordering::Release);
    }
}

/// The kernels, by their names.
pub(super) const FUNCTIONS: [&CStr; 6] = [
    c"tcpx_unpack_few",
    c"tcpx_unpack_mapped",
    c"tcpx_even_few",
    c"tcpx_even_many",
    c"tcpx_even_mapped",
    c"tcpx_persistent_copy",
];

/// What a launch will do; reads the parameters as the kernel of that name declares them.
///
/// # Safety
/// The parameters must be of that kernel.
pub(super) unsafe fn launched(name: &CStr, parameters: *mut *mut c_void) -> Operation {
    // SAFETY: the caller's promise.
    unsafe {
        let parameter = |index| *parameters.add(index);
        let long = |index| parameter(index).cast::<u64>().read();
        if name == c"tcpx_persistent_copy" {
            return Operation::Residency(Residency::new(parameter(0).cast()));
        }
        let longs = parameter(0).cast::<[u64; 4]>().read();
        let shorts = parameter(0).cast::<u32>().add(8).cast::<[u32; 6]>().read();
        let count = shorts[1] as usize;
        let name = name.to_bytes();
        let even = name
            .starts_with(b"tcpx_even")
            .then_some((shorts[2], shorts[3]));
        let words = count * if even.is_some() { 1 } else { 4 };
        let (carried, address) = if name.ends_with(b"mapped") {
            (None, long(1) as usize)
        } else {
            (
                Some(std::slice::from_raw_parts(parameter(1).cast(), words).to_vec()),
                0,
            )
        };
        Operation::Unpack {
            pool: longs[0] as usize,
            to: longs[1] as usize,
            packs: shorts[5] != 0,
            list: List {
                carried,
                address,
                count,
                even,
            },
            done: Done::new(longs[2], longs[3], shorts[0]),
        }
    }
}

//! What addresses are memory that can be moved, and what the others are said to be.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext};
use tcpx_memory::{MemoryError, MemoryKind, PointerFault, Region, Work};

use crate::support::{Bench, Outcome, Random, same_bytes, settle, text};
use crate::user::{User, check};

/// What is allocated in one part of memory that is mapped.
const MANAGED: usize = 1 << 20;

/// Whose memory an address is taken for.
#[derive(Clone, Copy, PartialEq)]
enum Named {
    Gpu,
    Host,
}

struct Asked<'bench> {
    bench: &'bench Bench,
    count: usize,
}

impl Asked<'_> {
    fn ask(&mut self, named: Named, address: u64, len: usize) -> Result<(), PointerFault> {
        self.count += 1;
        let gpu = (named == Named::Gpu).then_some(&self.bench.gpu);
        match Region::check_address(gpu, address as usize, len) {
            Ok(()) => Ok(()),
            Err(MemoryError::Pointer { fault, .. }) => Err(fault),
            Err(other) => panic!("{other}"),
        }
    }

    fn expect(
        &mut self,
        what: &str,
        (named, address, len): (Named, u64, usize),
        wanted: Result<(), PointerFault>,
    ) -> Result<(), String> {
        let answer = self.ask(named, address, len);
        match answer == wanted {
            true => Ok(()),
            false => Err(format!(
                "{what}, {len} bytes at {address:#x}: expected {wanted:?}, the answer is {answer:?}; {}",
                self.attributes(address)
            )),
        }
    }

    /// What the driver says about an address.
    fn attributes(&self, address: u64) -> String {
        const NAMES: [(i32, &str); 10] = [
            (1, "context"),
            (2, "memory type"),
            (4, "host pointer"),
            (8, "managed"),
            (9, "device"),
            (11, "range start"),
            (12, "range size"),
            (13, "mapped"),
            (16, "access"),
            (19, "mapping base"),
        ];
        let user = self.bench.user().expect("there is one");
        let mut said = Vec::new();
        for (number, name) in NAMES {
            let mut value = 0_u64;
            // SAFETY: a number of the driver's own; no attribute of these is longer than the place.
            let answer = user.inside(|| unsafe {
                let attribute = std::mem::transmute::<i32, sys::CUpointer_attribute>(number);
                let result =
                    sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address);
                check("cuPointerGetAttribute", result)
            });
            said.push(match answer {
                Ok(()) => format!("{name} {value:#x}"),
                Err(_) => format!("{name} refused"),
            });
        }
        said.join(", ")
    }
}

/// Bytes written there by jobs of the worker, and read by jobs, are those.
fn moves(bench: &Bench, address: u64, len: usize) -> Result<(), String> {
    // SAFETY: the callers' memory, which stays until they return.
    let region =
        unsafe { Region::from_address(Some(&bench.gpu), address as usize, len, Arc::new(())) };
    let region = region.map_err(text)?;
    let bytes = Random::new().bytes(len);
    let from = bench.region_of(MemoryKind::Host, &bytes)?;
    let to = bench.region(MemoryKind::Host, len)?;
    let copy = |from: &Region, to: &Region| Work::Copy {
        from: from.all(),
        to: to.all(),
    };
    bench.run(copy(&from, &region), None)?;
    same_bytes(&bench.user()?.read(address, len)?, &bytes)?;
    bench.run(copy(&region, &to), None)?;
    let mut arrived = vec![0; len];
    to.read_to(0, &mut arrived).map_err(text)?;
    same_bytes(&arrived, &bytes)
}

/// Addresses that the driver is asked about: each kind of memory is moved rightly or refused with
/// its reason.
pub(crate) fn pointers(bench: &Bench) -> Outcome {
    use Named::{Gpu, Host};
    let user = bench.user()?;
    let device = bench.gpu.ordinal();
    let unknown = || Err(PointerFault::Unknown { device });
    let not_mapped = || Err(PointerFault::NotMapped);
    let too_long = |known| Err(PointerFault::TooLong { known });
    let mut asked = Asked { bench, count: 0 };

    let len = 3 << 20;
    let address = user.alloc(len)?;
    asked.expect("allocated", (Gpu, address, len), Ok(()))?;
    asked.expect("inside", (Gpu, address + 77, 1000), Ok(()))?;
    asked.expect("the end", (Gpu, address + len as u64 - 1, 1), Ok(()))?;
    asked.expect("longer", (Gpu, address, len + 1), too_long(len))?;
    asked.expect("named as host memory", (Host, address, len), not_mapped())?;
    moves(bench, address, len)?;
    user.free(address)?;
    settle()?;
    asked.expect("freed", (Gpu, address, 1), unknown())?;

    for wild in [0, 64, 0x1_2345_6000, 0x7FFF_FFFF_F000, u64::MAX - 4095] {
        asked.expect("wild", (Gpu, wild, 1), unknown())?;
        asked.expect("wild", (Host, wild, 1), not_mapped())?;
    }
    let local = 0_u8;
    let on_stack = (&raw const local).addr() as u64;
    asked.expect("the stack", (Gpu, on_stack, 1), unknown())?;
    asked.expect("the stack", (Host, on_stack, 1), Ok(()))?;

    let pinned = Region::pinned(&bench.gpu, 9000).map_err(text)?;
    let address = pinned.all().address();
    asked.expect("pinned", (Gpu, address, 9000), Err(PointerFault::OfHost))?;
    asked.expect("pinned", (Host, address, 9000), Ok(()))?;

    let managed = user.managed(MANAGED)?;
    asked.expect("managed", (Gpu, managed, MANAGED), Ok(()))?;
    asked.expect("managed", (Host, managed, MANAGED), Ok(()))?;
    moves(bench, managed, MANAGED)?;
    user.free(managed)?;

    let pooled = user.pooled(len)?;
    asked.expect("of the driver's pool", (Gpu, pooled, len), Ok(()))?;
    moves(bench, pooled, len)?;

    mapped_in_parts(bench, user, &mut asked)?;
    of_another_context(user, &mut asked)?;
    Ok(format!("{} addresses", asked.count))
}

/// Two parts that can be used, one without a right to it, and one with nothing there.
fn mapped_in_parts(bench: &Bench, user: &User, asked: &mut Asked<'_>) -> Result<(), String> {
    let device = bench.gpu.ordinal();
    let (address, part) = user.reserve(4)?;
    let at = |index: usize| address + (index * part) as u64;
    let unknown = Err(PointerFault::Unknown { device });
    asked.expect("reserved", (Named::Gpu, address, part), unknown.clone())?;
    asked.expect(
        "reserved",
        (Named::Host, address, 1),
        Err(PointerFault::NotMapped),
    )?;
    for index in 0..3 {
        user.map(at(index), part)?;
    }
    user.allow(address, 2 * part)?;
    for (what, start, len, wanted) in [
        ("one part", 0, part, Ok(())),
        ("two parts", 0, 2 * part, Ok(())),
        ("across", part - 100, 200, Ok(())),
        (
            "without a right",
            2 * part,
            1,
            Err(PointerFault::NoAccess { device }),
        ),
        (
            "into that",
            0,
            2 * part + 1,
            Err(PointerFault::NoAccess { device }),
        ),
        ("not mapped", 3 * part, 1, unknown),
    ] {
        asked.expect(what, (Named::Gpu, address + start as u64, len), wanted)?;
    }
    user.allow(at(2), part)?;
    let known = 3 * part;
    let long = Err(PointerFault::TooLong { known });
    asked.expect("into nothing", (Named::Gpu, address, known + 1), long)?;
    moves(bench, address + 1, 3 * part - 1)
}

fn of_another_context(user: &User, asked: &mut Asked<'_>) -> Result<(), String> {
    let device = asked.bench.gpu.ordinal();
    let mut context: CUcontext = ptr::null_mut();
    let mut address = 0;
    // SAFETY: the pointers are valid for one handle and one address; what was current before comes
    // back.
    let made = user.inside(|| unsafe {
        let mut ordinal = 0;
        check(
            "cuDeviceGet",
            sys::cuDeviceGet(&raw mut ordinal, device as i32),
        )?;
        check(
            "cuCtxCreate",
            sys::cuCtxCreate_v2(&raw mut context, 0, ordinal),
        )?;
        check("cuMemAlloc", sys::cuMemAlloc_v2(&raw mut address, 4096))?;
        let mut popped = ptr::null_mut();
        check("cuCtxPopCurrent", sys::cuCtxPopCurrent_v2(&raw mut popped))
    });
    made?;
    let refused = Err(PointerFault::OfAnotherContext { device });
    let outcome = asked.expect("another context's", (Named::Gpu, address, 4096), refused);
    // SAFETY: made above, with all that is in it.
    user.inside(|| check("cuCtxDestroy", unsafe { sys::cuCtxDestroy_v2(context) }))?;
    outcome
}

//! Regions over the memory of Python objects.

use std::sync::Arc;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tcpx::{Gpu, Region};

use crate::error::{self, raise};
use crate::held::{Held, Owner};

/// What a transfer does with the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

/// Where an object's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BytesPlace {
    Host,
    Cuda(u32),
}

/// The memory of a transfer.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) region: Region,
    /// The bytes are on a GPU, whose stream counts.
    pub(crate) on_gpu: bool,
    /// The GPU of a torch tensor: torch's current stream of that is what its work is on.
    pub(crate) torch_gpu: Option<u32>,
}

/// The bytes of `object`, which stays alive until no transfer needs them.
///
/// Takes a torch tensor, an object of the buffer protocol (bytes, numpy array, memoryview), any
/// object with `__dlpack__`, or a tuple `(address, bytes, device)`.
pub(crate) fn memory(
    object: &Bound<'_, PyAny>,
    access: Use,
    gpu: Option<&Gpu>,
) -> PyResult<Memory> {
    // SAFETY: asks an object about its type, with the interpreter's lock.
    if unsafe { pyo3::ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
        return host_buffer(PyUntypedBuffer::get(object)?, access);
    }
    if let Ok(tuple) = object.cast::<PyTuple>() {
        return raw(tuple, gpu);
    }
    if is_torch(object)? {
        return torch(object, gpu);
    }
    if object.hasattr("__dlpack__")? {
        return dlpack(object, access, gpu);
    }
    Err(PyTypeError::new_err(format!(
        "expected a tensor, an array, a buffer or (address, bytes, device); {} is none of them",
        object.get_type().qualname()?
    )))
}

/// A tensor of torch, or of a class made from that, in a program that uses torch.
fn is_torch(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let modules = object.py().import("sys")?.getattr("modules")?;
    let class = modules
        .get_item("torch")
        .and_then(|torch| torch.getattr("Tensor"));
    class.map_or(Ok(false), |class| object.is_instance(&class))
}

fn torch(tensor: &Bound<'_, PyAny>, gpu: Option<&Gpu>) -> PyResult<Memory> {
    if !tensor.call_method0("is_contiguous")?.extract::<bool>()? {
        return Err(not_contiguous("tensor", "tensor.contiguous()"));
    }
    let device = tensor.getattr("device")?;
    let kind: String = device.getattr("type")?.extract()?;
    let place = match kind.as_str() {
        "cpu" => BytesPlace::Host,
        "cuda" => BytesPlace::Cuda(
            device
                .getattr("index")?
                .extract::<Option<u32>>()?
                .unwrap_or(0),
        ),
        other => return Err(wrong_device(other)),
    };
    let address: usize = tensor.call_method0("data_ptr")?.extract()?;
    let bytes: usize = tensor.getattr("nbytes")?.extract()?;
    // The tensor may be given another storage meanwhile.
    let storage = tensor.call_method0("untyped_storage")?;
    let region = region(place, address, bytes, Held::Object(storage.unbind()), gpu)?;
    let torch_gpu = match place {
        BytesPlace::Host => None,
        BytesPlace::Cuda(number) => Some(number),
    };
    Ok(Memory {
        region,
        on_gpu: torch_gpu.is_some(),
        torch_gpu,
    })
}

fn host_buffer(buffer: PyUntypedBuffer, access: Use) -> PyResult<Memory> {
    if !buffer.is_c_contiguous() {
        return Err(not_contiguous("buffer", "numpy.ascontiguousarray(array)"));
    }
    if access == Use::Write && buffer.readonly() {
        return Err(error::unfit(
            "a read-only buffer cannot be written; give a writable one, such as a bytearray",
        ));
    }
    let (address, bytes) = (buffer.buf_ptr() as usize, buffer.len_bytes());
    let region = region(BytesPlace::Host, address, bytes, Held::Buffer(buffer), None)?;
    Ok(Memory {
        region,
        on_gpu: false,
        torch_gpu: None,
    })
}

/// `(address, bytes, device)`: the caller keeps the memory alive until the transfer has ended.
fn raw(tuple: &Bound<'_, PyTuple>, gpu: Option<&Gpu>) -> PyResult<Memory> {
    let parts: (usize, usize, Bound<'_, PyAny>) = tuple.extract().map_err(|_| {
        PyTypeError::new_err("memory as a tuple is (address, bytes, device), device \"cpu\", \"cuda:0\" or a GPU's number")
    })?;
    let (address, bytes, device) = parts;
    let place = if let Ok(number) = device.extract::<u32>() {
        BytesPlace::Cuda(number)
    } else {
        let name: String = device.str()?.extract()?;
        match name.split_once(':') {
            None if name == "cpu" => BytesPlace::Host,
            None if name == "cuda" => BytesPlace::Cuda(0),
            Some(("cuda", number)) => {
                BytesPlace::Cuda(number.parse().map_err(|_| wrong_device(&name))?)
            }
            _ => return Err(wrong_device(&name)),
        }
    };
    if address == 0 && bytes > 0 {
        return Err(error::setting("the address of the memory is null"));
    }
    let held = Held::Object(tuple.clone().into_any().unbind());
    Ok(Memory {
        region: region(place, address, bytes, held, gpu)?,
        on_gpu: matches!(place, BytesPlace::Cuda(_)),
        torch_gpu: None,
    })
}

mod dlpack_layout {
    //! `DLTensor` and its two owners, from `dlpack.h` (versions 0.8 and 1.x).

    use std::ffi::c_void;

    #[repr(C)]
    pub(super) struct Device {
        pub(super) kind: i32,
        pub(super) id: i32,
    }
    #[repr(C)]
    pub(super) struct Tensor {
        pub(super) data: *mut c_void,
        pub(super) device: Device,
        pub(super) ndim: i32,
        pub(super) dtype_code: u8,
        pub(super) dtype_bits: u8,
        pub(super) dtype_lanes: u16,
        pub(super) shape: *const i64,
        pub(super) strides: *const i64,
        pub(super) byte_offset: u64,
    }
    #[repr(C)]
    pub(super) struct Versioned {
        pub(super) major: u32,
        pub(super) minor: u32,
        pub(super) manager: *mut c_void,
        pub(super) deleter: *mut c_void,
        pub(super) flags: u64,
        pub(super) tensor: Tensor,
    }

    pub(super) const CPU: i32 = 1;
    pub(super) const CUDA: i32 = 2;
    pub(super) const CUDA_HOST: i32 = 3;
    pub(super) const READ_ONLY: u64 = 1;

    const _: () = assert!(size_of::<Tensor>() == 48);
    const _: () = assert!(size_of::<Versioned>() == 80);
    const _: () = assert!(std::mem::offset_of!(Versioned, tensor) == 32);
}

/// The capsule is kept, not consumed: its own destructor lets go of the tensor.
fn dlpack(object: &Bound<'_, PyAny>, access: Use, gpu: Option<&Gpu>) -> PyResult<Memory> {
    use dlpack_layout as layout;
    let py = object.py();
    let arguments = pyo3::types::PyDict::new(py);
    arguments.set_item("max_version", (1, 0))?;
    let capsule = match object.call_method("__dlpack__", (), Some(&arguments)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            object.call_method0("__dlpack__")?
        }
        answer => answer?,
    };
    let names = [c"dltensor_versioned", c"dltensor"];
    // SAFETY: asks the capsule API about an object of ours with a static name.
    let is_named = |name: &std::ffi::CStr| unsafe {
        pyo3::ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 1
    };
    let Some(name) = names.into_iter().find(|name| is_named(name)) else {
        return Err(PyTypeError::new_err(
            "__dlpack__ did not return a DLPack capsule",
        ));
    };
    // SAFETY: valid for this name, as was just asked.
    let pointer = unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) };
    let is_versioned = name == names[0];
    let (tensor, read_only) = if is_versioned {
        // SAFETY: a capsule of this name holds a DLManagedTensorVersioned, which lives as long as
        // the capsule (that is not marked as consumed); its first field says that its layout is the
        // one declared above.
        let managed = unsafe { &*pointer.cast::<layout::Versioned>() };
        if managed.major != 1 {
            return Err(error::unfit(&format!(
                "DLPack {}.{} is not known; 1.x is",
                managed.major, managed.minor
            )));
        }
        (&managed.tensor, managed.flags & layout::READ_ONLY != 0)
    } else {
        // SAFETY: a capsule of this name holds a DLManagedTensor, which begins with the tensor and
        // lives as long as the capsule.
        (unsafe { &*pointer.cast::<layout::Tensor>() }, false)
    };
    if access == Use::Write && read_only {
        return Err(error::unfit("a read-only tensor cannot be written"));
    }
    let place = match tensor.device.kind {
        layout::CPU | layout::CUDA_HOST => BytesPlace::Host,
        layout::CUDA => BytesPlace::Cuda(
            u32::try_from(tensor.device.id).map_err(|_| wrong_device("a negative GPU number"))?,
        ),
        other => return Err(wrong_device(&format!("DLPack device type {other}"))),
    };
    let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
    // SAFETY: DLPack promises `ndim` lengths behind `shape`, and as many behind `strides` unless it
    // is null.
    let (shape, strides) = unsafe {
        let shape = if ndim == 0 {
            &[][..]
        } else {
            std::slice::from_raw_parts(tensor.shape, ndim)
        };
        let strides = (!tensor.strides.is_null() && ndim > 0)
            .then(|| std::slice::from_raw_parts(tensor.strides, ndim));
        (shape, strides)
    };
    let mut elements: i64 = 1;
    for (at, length) in shape.iter().enumerate().rev() {
        if let Some(strides) = strides
            && *length > 1
            && strides[at] != elements
        {
            return Err(not_contiguous("tensor", "a contiguous copy"));
        }
        elements = elements
            .checked_mul(*length)
            .ok_or_else(|| error::setting("the tensor's shape overflows"))?;
    }
    let bits = u64::from(tensor.dtype_bits) * u64::from(tensor.dtype_lanes);
    let bytes = u64::try_from(elements)
        .ok()
        .and_then(|count| count.checked_mul(bits))
        .map(|bits| bits.div_ceil(8))
        .and_then(|bytes| usize::try_from(bytes).ok())
        .ok_or_else(|| error::setting("the tensor's shape overflows"))?;
    let address = (tensor.data as usize).wrapping_add(tensor.byte_offset as usize);
    Ok(Memory {
        region: region(place, address, bytes, Held::Object(capsule.unbind()), gpu)?,
        on_gpu: matches!(place, BytesPlace::Cuda(_)),
        torch_gpu: None,
    })
}

fn region(
    place: BytesPlace,
    address: usize,
    bytes: usize,
    held: Held,
    gpu: Option<&Gpu>,
) -> PyResult<Region> {
    if bytes == 0 {
        return Region::host(0).map_err(|error| raise(error.into()));
    }
    let gpu = match (place, gpu) {
        (BytesPlace::Host, _) => None,
        (BytesPlace::Cuda(ordinal), Some(gpu)) if gpu.ordinal() == ordinal => Some(gpu),
        (BytesPlace::Cuda(ordinal), Some(gpu)) => {
            return Err(error::setting(&format!(
                "the memory is on GPU {ordinal}, the connection moves that of GPU {}; open one with gpu={ordinal}",
                gpu.ordinal()
            )));
        }
        (BytesPlace::Cuda(ordinal), None) => {
            return Err(error::setting(&format!(
                "the memory is on GPU {ordinal}, the connection was opened for host memory; open it with gpu={ordinal}"
            )));
        }
    };
    let owner = Arc::new(Owner::new(held));
    // SAFETY: the object that the memory belongs to is held until the region's last reference has
    // ended, and says that these bytes are its own (or the caller does, for a raw address). A
    // read-only object is leased for reading alone. That Python code leaves the bytes alone
    // meanwhile is the documented duty of the caller, as with every buffer handed to the operating
    // system.
    let region = unsafe { Region::from_address(gpu, address, bytes, owner) };
    region.map_err(|error| raise(error.into()))
}

fn not_contiguous(what: &str, instead: &str) -> PyErr {
    error::unfit(&format!("the {what} is not contiguous; pass {instead}"))
}

fn wrong_device(device: &str) -> PyErr {
    error::setting(&format!(
        "memory on {device} cannot be moved; expected \"cpu\" or \"cuda:N\""
    ))
}

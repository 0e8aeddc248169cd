//! NIXL's C++ interface as Rust sees it: x86-64, libstdc++ with its present string ABI.
//!
//! Layouts are those of NIXL 1.0 to 1.5 (`src/api/cpp/backend`), read from its headers and checked
//! against released wheels. Strings, vectors and maps that cross the edge belong to C++, which
//! frees them, so their memory comes from the `operator new` of the libstdc++ that is loaded.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;
use std::sync::OnceLock;

/// `nixl_status_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Status(pub(crate) c_int);

impl Status {
    pub(crate) const IN_PROGRESS: Self = Self(1);
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const INVALID_PARAM: Self = Self(-2);
    pub(crate) const BACKEND: Self = Self(-3);
    pub(crate) const NOT_FOUND: Self = Self(-4);
    pub(crate) const MISMATCH: Self = Self(-5);
    pub(crate) const REPOST_ACTIVE: Self = Self(-7);
    pub(crate) const NOT_SUPPORTED: Self = Self(-9);
    pub(crate) const REMOTE_DISCONNECT: Self = Self(-10);
    pub(crate) const CANCELED: Self = Self(-11);
}

/// `nixl_mem_t`.
pub(crate) const DRAM: c_int = 0;
pub(crate) const VRAM: c_int = 1;
/// `nixl_xfer_op_t`.
pub(crate) const READ: c_int = 0;
pub(crate) const WRITE: c_int = 1;

/// What C++ allocates with, and hashes strings with.
struct Runtime {
    new: unsafe extern "C" fn(usize) -> *mut c_void,
    delete: unsafe extern "C" fn(*mut c_void),
    hash: unsafe extern "C" fn(*const c_void, usize, usize) -> usize,
}

static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// Finds the C++ runtime of this process; `false` if there is none.
pub(crate) fn find_runtime() -> bool {
    if RUNTIME.get().is_some() {
        return true;
    }
    // SAFETY: opens a library that is loaded already, or says that it is not.
    let library = unsafe {
        libc::dlopen(
            c"libstdc++.so.6".as_ptr(),
            libc::RTLD_NOW | libc::RTLD_NOLOAD,
        )
    };
    if library.is_null() {
        return false;
    }
    // SAFETY: asks an open library for a name.
    let symbol = |name: &std::ffi::CStr| unsafe { libc::dlsym(library, name.as_ptr()) };
    let (new, delete) = (symbol(c"_Znwm"), symbol(c"_ZdlPv"));
    let hash = symbol(c"_ZSt11_Hash_bytesPKvmm");
    if new.is_null() || delete.is_null() || hash.is_null() {
        return false;
    }
    // SAFETY: these are `operator new(unsigned long)`, `operator delete(void*)` and
    // `std::_Hash_bytes(void const*, unsigned long, unsigned long)`, by their mangled names.
    let runtime = unsafe {
        Runtime {
            new: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(usize) -> *mut c_void>(
                new,
            ),
            delete: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void)>(delete),
            hash: std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(*const c_void, usize, usize) -> usize,
            >(hash),
        }
    };
    RUNTIME.get_or_init(|| runtime);
    true
}

fn runtime() -> &'static Runtime {
    RUNTIME
        .get()
        .expect("nixl_plugin_init hands out nothing before the runtime was found")
}

fn allocate(bytes: usize) -> *mut u8 {
    // SAFETY: `operator new` takes any size. It throws when memory is out; the process ends then,
    // as with Rust's own allocator.
    unsafe { (runtime().new)(bytes) }.cast()
}

/// # Safety
/// `memory` came from [`allocate`] or from C++'s `operator new`, and nobody uses it any more.
unsafe fn release(memory: *mut u8) {
    // SAFETY: as the caller says.
    unsafe { (runtime().delete)(memory.cast()) }
}

/// `std::string`. Short text lies inside of it, so it must not be moved.
#[repr(C)]
pub(crate) struct StdString {
    data: *mut u8,
    len: usize,
    /// The text when it has at most 15 bytes, else the capacity in the first eight.
    inline: [u8; 16],
}

const _: () = assert!(size_of::<StdString>() == 32);

impl StdString {
    /// Makes a string at `place`.
    ///
    /// # Safety
    /// `place` is valid for a write of a string, and what was there needs no destruction.
    pub(crate) unsafe fn write(place: *mut Self, text: &[u8]) {
        // SAFETY: the fields are written in place, as the caller allows; the buffer has room for
        // the text and the terminator.
        unsafe {
            let inline = (&raw mut (*place).inline).cast::<u8>();
            let data = if text.len() <= 15 {
                inline
            } else {
                inline.cast::<usize>().write_unaligned(text.len());
                allocate(text.len() + 1)
            };
            data.copy_from_nonoverlapping(text.as_ptr(), text.len());
            data.add(text.len()).write(0);
            (*place).data = data;
            (*place).len = text.len();
        }
    }

    /// Replaces the text.
    ///
    /// # Safety
    /// `place` is a string that nobody else uses meanwhile.
    pub(crate) unsafe fn assign(place: *mut Self, text: &[u8]) {
        // SAFETY: as the caller says; the old text is given back first.
        unsafe {
            Self::destroy(place);
            Self::write(place, text);
        }
    }

    /// # Safety
    /// `place` is a string that nobody uses any more.
    unsafe fn destroy(place: *mut Self) {
        // SAFETY: as the caller says; only text outside of the string was allocated.
        unsafe {
            if (*place).data != (&raw mut (*place).inline).cast::<u8>() {
                release((*place).data);
            }
        }
    }

    /// Moves a string to raw memory.
    ///
    /// # Safety
    /// `from` is a string that is not used any more afterwards, and `to` is valid for a write.
    unsafe fn relocate(from: *mut Self, to: *mut Self) {
        // SAFETY: as the caller says; a text inside of the string is pointed at anew.
        unsafe {
            let is_inline = (*from).data == (&raw mut (*from).inline).cast::<u8>();
            to.copy_from_nonoverlapping(from, 1);
            if is_inline {
                (*to).data = (&raw mut (*to).inline).cast::<u8>();
            }
        }
    }

    /// The text.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: a string of C++ has as many bytes there for as long as it is not changed.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(self.bytes()).into_owned()
    }
}

/// `std::vector` of anything.
#[repr(C)]
pub(crate) struct StdVector<T> {
    begin: *mut T,
    end: *mut T,
    capacity: *mut T,
}

const _: () = assert!(size_of::<StdVector<u8>>() == 24);

impl StdVector<c_int> {
    /// A vector of numbers, which C++ frees.
    pub(crate) fn of(numbers: &[c_int]) -> Self {
        let begin = allocate(size_of_val(numbers)).cast::<c_int>();
        // SAFETY: there is room for as many, and for a pointer behind the last.
        unsafe {
            begin.copy_from_nonoverlapping(numbers.as_ptr(), numbers.len());
            let end = begin.add(numbers.len());
            Self {
                begin,
                end,
                capacity: end,
            }
        }
    }
}

impl<T> StdVector<T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.begin == self.end
    }

    fn len(&self) -> usize {
        (self.end as usize).saturating_sub(self.begin as usize) / size_of::<T>()
    }

    pub(crate) fn items(&self) -> &[T] {
        if self.is_empty() {
            return &[];
        }
        // SAFETY: a vector of C++ has as many items there for as long as it is not changed.
        unsafe { std::slice::from_raw_parts(self.begin, self.len()) }
    }

    /// Raw memory for one more item, which counts from now on; what must be relocated is by
    /// `relocate`.
    ///
    /// # Safety
    /// The caller writes the item before anybody reads the vector, which C++ made.
    unsafe fn grow(&mut self, relocate: unsafe fn(*mut T, *mut T)) -> *mut T {
        let len = self.len();
        if self.end == self.capacity {
            let room = (len * 2).max(4);
            let begin = allocate(room * size_of::<T>()).cast::<T>();
            for at in 0..len {
                // SAFETY: both lie within their arrays; the old items are not used any more.
                unsafe { relocate(self.begin.add(at), begin.add(at)) };
            }
            if !self.begin.is_null() {
                // SAFETY: the old array is C++'s, and its items have moved.
                unsafe { release(self.begin.cast()) };
            }
            // SAFETY: within the new array, or just behind it.
            unsafe {
                self.begin = begin;
                self.end = begin.add(len);
                self.capacity = begin.add(room);
            }
        }
        let place = self.end;
        // SAFETY: there is room for one more.
        self.end = unsafe { place.add(1) };
        place
    }
}

/// `std::pair<std::string, std::string>`.
#[repr(C)]
pub(crate) struct StringPair {
    first: StdString,
    second: StdString,
}

const _: () = assert!(size_of::<StringPair>() == 64);

impl StringPair {
    unsafe fn relocate(from: *mut Self, to: *mut Self) {
        // SAFETY: as for both strings.
        unsafe {
            StdString::relocate(&raw mut (*from).first, &raw mut (*to).first);
            StdString::relocate(&raw mut (*from).second, &raw mut (*to).second);
        }
    }
}

/// `notif_list_t`: who sent which message.
pub(crate) type NotifList = StdVector<StringPair>;

impl NotifList {
    pub(crate) fn push(&mut self, agent: &[u8], message: &[u8]) {
        // SAFETY: both strings are written before anybody reads the list.
        unsafe {
            let place = self.grow(StringPair::relocate);
            StdString::write(&raw mut (*place).first, agent);
            StdString::write(&raw mut (*place).second, message);
        }
    }
}

#[repr(C)]
struct MapNode {
    next: *mut Self,
    pair: StringPair,
    hash: usize,
}

const _: () = assert!(size_of::<MapNode>() == 80);

/// `std::unordered_map<std::string, std::string>`. It points at itself, so it must not be moved.
#[repr(C)]
pub(crate) struct StdMap {
    buckets: *mut *mut c_void,
    bucket_count: usize,
    first: *mut MapNode,
    len: usize,
    max_load_factor: f32,
    next_resize: usize,
    single_bucket: *mut c_void,
}

const _: () = assert!(size_of::<StdMap>() == 56);

impl StdMap {
    /// Makes a map at `place`, with the bucket inside of it.
    ///
    /// # Safety
    /// `place` is valid for a write of a map, and what was there needs no destruction.
    pub(crate) unsafe fn write(place: *mut Self, entries: &[(String, String)]) {
        // The seed of `std::hash<std::string>`.
        const SEED: usize = 0xc70f_6907;
        let mut first = std::ptr::null_mut::<MapNode>();
        for (key, value) in entries.iter().rev() {
            let node = allocate(size_of::<MapNode>()).cast::<MapNode>();
            // SAFETY: fresh memory for a node, all of whose fields are written; the hash reads the
            // key alone.
            unsafe {
                (*node).next = first;
                StdString::write(&raw mut (*node).pair.first, key.as_bytes());
                StdString::write(&raw mut (*node).pair.second, value.as_bytes());
                (*node).hash = (runtime().hash)(key.as_ptr().cast(), key.len(), SEED);
            }
            first = node;
        }
        // SAFETY: every field is written in place, as the caller allows. With one bucket, that
        // bucket holds the place before the first node, which is the field of that name.
        unsafe {
            (*place).buckets = &raw mut (*place).single_bucket;
            (*place).bucket_count = 1;
            (*place).first = first;
            (*place).len = entries.len();
            (*place).max_load_factor = 1.0;
            // What the map would have after growing to one bucket: the next insertion makes more.
            (*place).next_resize = 1;
            (*place).single_bucket = match first.is_null() {
                true => std::ptr::null_mut(),
                false => (&raw mut (*place).first).cast(),
            };
        }
    }

    /// # Safety
    /// `place` was made by [`StdMap::write`] and is not used any more.
    unsafe fn destroy(place: *mut Self) {
        // SAFETY: the nodes are those that `write` allocated; C++ was only given copies.
        unsafe {
            let mut node = (*place).first;
            while !node.is_null() {
                let next = (*node).next;
                StdString::destroy(&raw mut (*node).pair.first);
                StdString::destroy(&raw mut (*node).pair.second);
                release(node.cast());
                node = next;
            }
        }
    }

    pub(crate) fn entries(&self) -> Vec<(String, String)> {
        let mut entries = Vec::new();
        let mut node = self.first;
        while !node.is_null() && entries.len() < self.len {
            // SAFETY: the nodes of a map of C++ are alive while it is not changed.
            let here = unsafe { &*node };
            entries.push((here.pair.first.text(), here.pair.second.text()));
            node = here.next;
        }
        entries
    }
}

/// `nixlBackendInitParams`.
#[repr(C)]
pub(crate) struct InitParams {
    pub(crate) local_agent: StdString,
    pub(crate) kind: StdString,
    pub(crate) custom_params: *const StdMap,
    pub(crate) enable_progress_thread: bool,
    progress_delay: u64,
    sync_mode: c_int,
    enable_telemetry: bool,
}

const _: () = assert!(size_of::<InitParams>() == 96);
const _: () = assert!(offset_of!(InitParams, custom_params) == 64);
const _: () = assert!(offset_of!(InitParams, progress_delay) == 80);
const _: () = assert!(offset_of!(InitParams, enable_telemetry) == 92);

/// The fields of `nixlBackendEngine`, which the core reads. Ours follow behind.
#[repr(C)]
pub(crate) struct EngineBase {
    vtable: *const c_void,
    kind: StdString,
    params: StdMap,
    telemetry: StdVector<u8>,
    telemetry_lock: [u64; 5],
    init_failed: bool,
    agent: StdString,
    enable_telemetry: bool,
}

const _: () = assert!(size_of::<EngineBase>() == 208);
const _: () = assert!(offset_of!(EngineBase, params) == 40);
const _: () = assert!(offset_of!(EngineBase, telemetry) == 96);
const _: () = assert!(offset_of!(EngineBase, telemetry_lock) == 120);
const _: () = assert!(offset_of!(EngineBase, init_failed) == 160);
const _: () = assert!(offset_of!(EngineBase, agent) == 168);
const _: () = assert!(offset_of!(EngineBase, enable_telemetry) == 200);

impl EngineBase {
    /// Makes the base at `place`. Its mutex is all zeros, as glibc initialises one.
    ///
    /// # Safety
    /// `place` is valid for a write of a base, and stays where it is until [`EngineBase::destroy`].
    pub(crate) unsafe fn write(
        place: *mut Self,
        vtable: *const c_void,
        init: &InitParams,
        params: &[(String, String)],
    ) {
        // SAFETY: every field is written in place, as the caller allows.
        unsafe {
            place.cast::<u8>().write_bytes(0, size_of::<Self>());
            (*place).vtable = vtable;
            StdString::write(&raw mut (*place).kind, init.kind.bytes());
            StdMap::write(&raw mut (*place).params, params);
            StdString::write(&raw mut (*place).agent, init.local_agent.bytes());
        }
    }

    /// # Safety
    /// `place` was made by [`EngineBase::write`] and is not used any more.
    pub(crate) unsafe fn destroy(place: *mut Self) {
        // SAFETY: as the caller says.
        unsafe {
            StdString::destroy(&raw mut (*place).kind);
            StdMap::destroy(&raw mut (*place).params);
            StdString::destroy(&raw mut (*place).agent);
            if !(*place).telemetry.begin.is_null() {
                release((*place).telemetry.begin);
            }
        }
    }
}

/// `nixlBasicDesc`: memory by address.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct BasicDesc {
    pub(crate) address: usize,
    pub(crate) len: usize,
    pub(crate) device: u64,
}

/// `nixlMetaDesc`, with the metadata that we handed out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MetaDesc {
    pub(crate) basic: BasicDesc,
    pub(crate) metadata: *const c_void,
}

/// `nixlBlobDesc`, with bytes beside.
#[repr(C)]
pub(crate) struct BlobDesc {
    pub(crate) basic: BasicDesc,
    pub(crate) blob: StdString,
}

/// `nixlDescList`.
#[repr(C)]
pub(crate) struct DescList<T> {
    vtable: *const c_void,
    pub(crate) memory: c_int,
    items: StdVector<T>,
}

impl<T> DescList<T> {
    pub(crate) fn items(&self) -> &[T] {
        self.items.items()
    }
}

const _: () = assert!(size_of::<BasicDesc>() == 24);
const _: () = assert!(size_of::<MetaDesc>() == 32);
const _: () = assert!(size_of::<BlobDesc>() == 56);
const _: () = assert!(size_of::<DescList<MetaDesc>>() == 40);
const _: () = assert!(offset_of!(DescList<MetaDesc>, items) == 16);

/// `nixl_opt_b_args_t`.
#[repr(C)]
pub(crate) struct OptionalArgs {
    pub(crate) notification: StdString,
    pub(crate) has_notification: bool,
    custom: StdString,
}

const _: () = assert!(size_of::<OptionalArgs>() == 72);
const _: () = assert!(offset_of!(OptionalArgs, custom) == 40);

/// `std::optional` of a map: an answer of `queryMem`.
#[repr(C)]
pub(crate) struct QueryAnswer {
    map: StdMap,
    is_some: bool,
}

const _: () = assert!(size_of::<QueryAnswer>() == 64);

impl QueryAnswer {
    unsafe fn relocate(from: *mut Self, to: *mut Self) {
        // SAFETY: only answers without entries are made here; such a map is made anew at its place.
        unsafe {
            to.copy_from_nonoverlapping(from, 1);
            if (*to).is_some {
                (*to).map.buckets = &raw mut (*to).map.single_bucket;
            }
        }
    }
}

impl StdVector<QueryAnswer> {
    /// Adds an answer: the memory is there, or not. The vector holds no others than such.
    pub(crate) fn answer(&mut self, is_there: bool) {
        // SAFETY: every field is written before anybody reads the vector.
        unsafe {
            let place = self.grow(QueryAnswer::relocate);
            StdMap::write(&raw mut (*place).map, &[]);
            (*place).is_some = is_there;
        }
    }
}

/// `nixlBackendPlugin`.
#[repr(C)]
pub(crate) struct Plugin {
    pub(crate) api_version: c_int,
    pub(crate) create_engine: unsafe extern "C" fn(*const InitParams) -> *mut c_void,
    pub(crate) destroy_engine: unsafe extern "C" fn(*mut c_void),
    pub(crate) name: unsafe extern "C" fn() -> *const c_char,
    pub(crate) version: unsafe extern "C" fn() -> *const c_char,
    /// Returns a map by value: on x86-64 the caller passes where it goes.
    pub(crate) options: unsafe extern "C" fn(*mut StdMap) -> *mut StdMap,
    pub(crate) memories: unsafe extern "C" fn() -> StdVector<c_int>,
}

const _: () = assert!(size_of::<Plugin>() == 56);

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::MaybeUninit;

    /// The runtime of C++, loaded for these tests; `false` on a host that has none.
    fn runtime_is_there() -> bool {
        // SAFETY: loads the system's library.
        unsafe { libc::dlopen(c"libstdc++.so.6".as_ptr(), libc::RTLD_NOW) };
        let there = find_runtime();
        if !there {
            println!("skipped: C++ strings: no libstdc++.so.6 on this host");
        }
        there
    }

    #[test]
    fn strings_of_any_length_are_read_back() {
        if !runtime_is_there() {
            return;
        }
        for len in [0, 1, 15, 16, 17, 4096] {
            let text = vec![b'x'; len];
            let mut place = MaybeUninit::<StdString>::uninit();
            let mut other = MaybeUninit::<StdString>::uninit();
            // SAFETY: each place holds a string before it is read, and is destroyed once.
            unsafe {
                StdString::write(place.as_mut_ptr(), &text);
                StdString::relocate(place.as_mut_ptr(), other.as_mut_ptr());
                assert_eq!(other.assume_init_ref().bytes(), text);
                StdString::assign(other.as_mut_ptr(), b"short");
                assert_eq!(other.assume_init_ref().bytes(), b"short");
                StdString::destroy(other.as_mut_ptr());
            }
        }
    }

    #[test]
    fn a_list_grows_and_keeps_short_and_long_text() {
        if !runtime_is_there() {
            return;
        }
        let mut list = NotifList {
            begin: std::ptr::null_mut(),
            end: std::ptr::null_mut(),
            capacity: std::ptr::null_mut(),
        };
        let message = |at: usize| vec![b'm'; at * 3];
        for at in 0..40 {
            list.push(format!("agent {at}").as_bytes(), &message(at));
        }
        for (at, pair) in list.items().iter().enumerate() {
            assert_eq!(pair.first.text(), format!("agent {at}"));
            assert_eq!(pair.second.bytes(), message(at));
        }
        for at in 0..40 {
            // SAFETY: each is destroyed once, and not used afterwards.
            unsafe {
                StdString::destroy(&raw mut (*list.begin.add(at)).first);
                StdString::destroy(&raw mut (*list.begin.add(at)).second);
            }
        }
        // SAFETY: the array's items are gone.
        unsafe { release(list.begin.cast()) };
    }

    #[test]
    fn a_map_keeps_its_entries() {
        if !runtime_is_there() {
            return;
        }
        let entries = [
            ("port".to_owned(), "0".to_owned()),
            ("a longer name of a key".to_owned(), String::new()),
        ];
        let mut place = MaybeUninit::<StdMap>::uninit();
        // SAFETY: the place holds a map before it is read, and is destroyed once.
        unsafe {
            StdMap::write(place.as_mut_ptr(), &entries);
            assert_eq!(place.assume_init_ref().entries(), entries);
            StdMap::destroy(place.as_mut_ptr());
        }
    }
}

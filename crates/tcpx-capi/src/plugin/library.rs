//! The plugin of the process: loading it, counting and describing its devices.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Mutex;

use nccl_net::{DeviceOffload, LoadOptions, Plugin};
use tcpx_memory::lock;

use crate::engine::text::needed;
use crate::error::{Failure, Outcome, guard, guarded};
use crate::plugin::codes::TCPX_NOT_LOADED;
use crate::plugin::log;
use crate::plugin::types::tcpx_net_properties;

const PATH_VARIABLE: &str = "UCCL_TCPX_PLUGIN_PATH";
const DEFAULT_PATH: &str = "/usr/local/tcpx/lib64/libnccl-net-tcpx.so";
/// Different strings that properties may bring; each lives for ever.
const MAX_STRINGS: usize = 4096;

#[derive(Debug)]
struct Loaded {
    path: PathBuf,
    plugin: Plugin,
}

/// Held while a plugin is loaded and started: a second loader waits for the first.
static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);

/// Loads a network plugin and starts it: the newest table of ncclNet v12 to v5 that the file has.
/// `path` may be NULL: then UCCL_TCPX_PLUGIN_PATH names the file, or else it is
/// /usr/local/tcpx/lib64/libnccl-net-tcpx.so.
///
/// A process has one plugin, for ever: loading the same file again succeeds and does nothing,
/// another file is TCPX_INVALID_USAGE. The plugin reads its environment variables here, so set
/// them before. Some plugins end the process if they find no GPU, and some raise SIGPIPE when a
/// peer has gone: ignore that signal.
///
/// # Safety
/// `path` is NULL or a NUL-terminated string. The file is run as code.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_load_plugin(path: *const c_char) -> c_int {
    guard("tcpx_load_plugin", || {
        let path = if path.is_null() {
            default_path()
        } else {
            // SAFETY: by the caller's promise.
            let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
            PathBuf::from(OsStr::from_bytes(bytes))
        };
        load(path).map(|_| ())
    })
}

fn default_path() -> PathBuf {
    std::env::var_os(PATH_VARIABLE)
        .filter(|path| !path.is_empty())
        .unwrap_or_else(|| DEFAULT_PATH.into())
        .into()
}

fn load(path: PathBuf) -> Outcome<Plugin> {
    log::from_environment();
    // A panic while loading leaves `None`: the next call tries again.
    let mut loaded = lock(&LOADED);
    if let Some(loaded) = &*loaded {
        if loaded.path == path {
            return Ok(loaded.plugin.clone());
        }
        return Err(Failure::usage(format!(
            "{} is loaded: a process has one plugin; use it, or start another process for {}",
            loaded.path.display(),
            path.display()
        )));
    }
    let plugin = Plugin::load(LoadOptions::new(&path).with_observer(log::call_ended))?;
    plugin.init()?;
    let devices = plugin.devices()?;
    log::info(&format!(
        "{} ({}, table {}), ndev {devices}",
        path.display(),
        plugin.name(),
        plugin.version()
    ));
    *loaded = Some(Loaded {
        path,
        plugin: plugin.clone(),
    });
    Ok(plugin)
}

/// The plugin that was loaded.
pub(crate) fn plugin() -> Outcome<Plugin> {
    let loaded = lock(&LOADED);
    match &*loaded {
        Some(loaded) => Ok(loaded.plugin.clone()),
        None => Err(Failure::new(
            TCPX_NOT_LOADED,
            "no plugin is loaded: call tcpx_load_plugin or tcpx_get_device_count first",
        )),
    }
}

/// A device number that a caller in C gave.
pub(crate) fn device(dev: c_int) -> Outcome<usize> {
    usize::try_from(dev)
        .map_err(|_| Failure::argument(format!("dev is {dev}: devices are counted from 0")))
}

/// Number of the plugin's devices, or a negative number, which is the result code times -1.
/// Loads the plugin as tcpx_load_plugin(NULL) does if none is loaded.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_get_device_count() -> c_int {
    let answer = guarded("tcpx_get_device_count", || {
        let plugin = match plugin() {
            Ok(plugin) => plugin,
            Err(_) => load(default_path())?,
        };
        let count = plugin.devices()?;
        // nccl-net has bounded it.
        Ok(c_int::try_from(count).unwrap_or(c_int::MAX))
    });
    answer.unwrap_or_else(|code| -code)
}

/// Describes device `dev`, counted from 0.
///
/// # Safety
/// `props` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_get_properties(dev: c_int, props: *mut tcpx_net_properties) -> c_int {
    guard("tcpx_get_properties", || {
        needed("props", props)?;
        let properties = plugin()?.properties(device(dev)?)?;
        let (net_device_type, net_device_version) = match properties.offload {
            DeviceOffload::None => (0, 0),
            DeviceOffload::Unpack { version } => (1, version),
            DeviceOffload::Other { kind, version } => (kind, version),
        };
        let filled = tcpx_net_properties {
            name: interned(&properties.name)?.as_ptr(),
            pci_path: match &properties.pci_path {
                Some(path) => interned(path)?.as_ptr(),
                None => std::ptr::null(),
            },
            guid: properties.guid,
            ptr_support: properties.pointer_support.0,
            speed: properties.speed_mbps,
            port: properties.port,
            latency: properties.latency_us,
            max_comms: properties.max_comms,
            max_recvs: properties.max_recvs,
            net_device_type,
            net_device_version,
        };
        // SAFETY: by the caller's promise.
        unsafe { props.write(filled) };
        Ok(())
    })
}

/// The string, at an address that stays.
fn interned(text: &str) -> Outcome<&'static CStr> {
    static STRINGS: Mutex<BTreeSet<&'static CStr>> = Mutex::new(BTreeSet::new());
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    let mut strings = lock(&STRINGS);
    if let Some(known) = strings.get(text.as_c_str()) {
        return Ok(known);
    }
    if strings.len() >= MAX_STRINGS {
        return Err(Failure::new(
            crate::plugin::codes::TCPX_PLUGIN_FAULT,
            "the plugin describes its devices by another name each time: keep the first answer",
        ));
    }
    let kept: &'static CStr = Box::leak(text.into_boxed_c_str());
    strings.insert(kept);
    Ok(kept)
}

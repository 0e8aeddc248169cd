//! Loading and starting a plugin: foreign code from the file's first constructor on.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nccl_net::{LoadOptions, NoAnswer, Plugin, bounded};
use tcpx_lanes::lock;

use super::set_up::{PANICKED, Started, THREAD};
use super::{PluginMemory, PluginOptions, log_call};
use crate::error::NetworkError;

/// Threads inside a file's constructors that nobody waits for any more.
static STUCK_LOADS: AtomicUsize = AtomicUsize::new(0);

/// Whether a plugin's constructor holds the dynamic linker, after a load that was given up.
///
/// The linker's lock is then held for good: loading another library waits for it, and so does the
/// orderly end of the process, which runs every library's destructors. See [`leave_process`].
pub fn is_linker_stuck() -> bool {
    STUCK_LOADS.load(Ordering::SeqCst) > 0
}

/// Ends the process at once, without destructors: the way out when [`is_linker_stuck`].
pub fn leave_process(code: u8) -> ! {
    // SAFETY: ends the process; nothing of it runs after.
    unsafe { libc::_exit(i32::from(code)) }
}

/// What a start is at.
#[derive(Debug, Clone)]
struct Step(Arc<Mutex<&'static str>>);

impl Step {
    const LOADING: &str = "loading";
    const LOADING_ALONE: &str = "loading, with nobody who waits";

    fn set(&self, call: &'static str) {
        let mut now = lock(&self.0);
        if *now == Self::LOADING_ALONE {
            // It came back after all.
            STUCK_LOADS.fetch_sub(1, Ordering::SeqCst);
        }
        *now = call;
    }

    fn now(&self) -> &'static str {
        *lock(&self.0)
    }

    /// Nobody waits any more; gives the step.
    fn give_up(&self) -> &'static str {
        let mut now = lock(&self.0);
        let call = *now;
        if call == Self::LOADING {
            STUCK_LOADS.fetch_add(1, Ordering::SeqCst);
            *now = Self::LOADING_ALONE;
        }
        call
    }
}

/// Loads and starts a plugin on a thread made for that, and waits for it until `limit` has passed.
pub(super) fn start(options: PluginOptions, limit: Duration) -> Result<Started, NetworkError> {
    let network = options.path.display().to_string();
    let step = Step(Arc::new(Mutex::new(Step::LOADING)));
    let progress = step.clone();
    let answer = bounded(THREAD, limit, move || steps(options, &progress), drop);
    let failed = |call, cause: String| NetworkError::Plugin {
        network: network.clone(),
        call,
        cause,
    };
    match answer {
        Ok(started) => started,
        Err(NoAnswer::NoThread(error)) => {
            Err(failed("starting a thread for set-up", error.to_string()))
        }
        Err(NoAnswer::Panicked) => Err(failed(step.now(), PANICKED.to_owned())),
        Err(NoAnswer::Stuck) => Err(NetworkError::PluginStuck {
            call: step.give_up(),
            network,
            waited: limit,
        }),
    }
}

fn steps(options: PluginOptions, step: &Step) -> Result<Started, NetworkError> {
    let network = options.path.display().to_string();
    let failed = |call: &'static str| {
        let network = network.clone();
        move |cause: String| NetworkError::Plugin {
            network,
            call,
            cause,
        }
    };
    let loaded = Plugin::load(LoadOptions {
        path: options.path,
        abi: options.abi,
        observer: Some(Arc::new(log_call)),
    });
    step.set("init");
    let plugin = loaded.map_err(|error| failed(Step::LOADING)(error.to_string()))?;
    let _entered = options
        .memory
        .enter()
        .map_err(|error| failed("init")(error.to_string()))?;
    plugin
        .init()
        .map_err(|error| failed("init")(error.to_string()))?;
    step.set("devices");
    let devices = plugin
        .devices()
        .map_err(|error| failed("devices")(error.to_string()))?;
    tracing::info!(plugin = plugin.name(), version = ?plugin.version(), devices, "plugin started");
    step.set("getProperties");
    let properties = plugin
        .properties(options.device)
        .map_err(|error| failed("getProperties")(error.to_string()))?;
    if matches!(options.memory, PluginMemory::Gpu(_)) && !properties.pointer_support.cuda() {
        tracing::info!(plugin = plugin.name(), "the plugin takes host memory only");
    }
    Ok(Started {
        plugin,
        device: options.device,
        properties,
        memory: options.memory,
        setup: Mutex::new(()),
    })
}

//! The process that loads the plugin and starts it. It may hang, crash or be ended by the plugin:
//! another watches it.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::OnceLock;

use nccl_net::{LoadOptions, Plugin};

use super::events::{Event, InUse, device, of_host, of_load};
use crate::error::Error;
use crate::plugin_check::PluginPartArgs;

/// Where events go: not to an output that the plugin prints on, closes or gives away.
static EVENTS: OnceLock<File> = OnceLock::new();

/// Starts the plugin and asks for its devices; every outcome is an event.
pub(crate) fn run(args: &PluginPartArgs) {
    // Whoever watches is gone: so is the reason to go on, even inside a call that hangs.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    // The watching process reads the other end of this standard input.
    if let Ok(events) = std::io::stdin().as_fd().try_clone_to_owned() {
        let _ = EVENTS.set(events.into());
    }
    report_event(&start(args).map_or_else(Event::from, |()| Event::Passed));
    // A plugin's destructors may wait for its threads; the one who watches ends this process then.
}

/// Tells an event at once.
fn report_event(event: &Event) {
    if let (Some(mut events), Ok(line)) = (EVENTS.get(), serde_json::to_string(event)) {
        let _ = events.write_all(format!("{line}\n").as_bytes());
    }
}

fn report_step(step: impl Into<String>) {
    report_event(&Event::Doing { step: step.into() });
}

fn start(args: &PluginPartArgs) -> Result<(), Error> {
    let mut options = LoadOptions::new(&args.path);
    options.abi = args.abi;
    report_step("loading the file");
    let plugin = Plugin::load(options).map_err(|error| of_load(&error))?;
    let in_use = |missing_functions| {
        Event::Loaded(InUse {
            version: plugin.version().number(),
            name: plugin.name().to_owned(),
            missing_functions,
        })
    };
    report_event(&in_use(None));
    report_step("init");
    plugin.init().map_err(of_host)?;
    // A plugin's start may change the name.
    report_event(&in_use(Some(plugin.missing_functions().map_err(of_host)?)));
    report_step("devices");
    let count = plugin.devices().map_err(of_host)?;
    report_step("getProperties");
    let properties = (0..count)
        .map(|device| plugin.properties(device))
        .collect::<Result<Vec<_>, _>>()
        .map_err(of_host)?;
    report_event(&Event::Devices(properties.iter().map(device).collect()));
    match count {
        0 => Err(Error::failed(
            "the plugin has no devices",
            "it found no interface that it can use: look at its interface variables and its log",
        )),
        _ => Ok(()),
    }
}

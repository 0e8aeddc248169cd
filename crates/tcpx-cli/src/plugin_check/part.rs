//! The process that loads the plugin and drives it. It may hang, crash or be ended by the plugin: another watches it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use nccl_net::{AbiVersion, CallReport, LoadOptions, Plugin, ResultCode};
use tcpx_memory::lock;

use super::events::{Count, Device, Event, InUse, of_host, of_load};
use super::self_test;
use crate::args::plugin::PluginPartArgs;
use crate::error::Error;

/// Where events go: not to an output that the plugin prints on, closes or gives away.
static EVENTS: OnceLock<File> = OnceLock::new();

type Counts = Arc<Mutex<BTreeMap<String, Count>>>;

/// Drives the plugin to its end; every outcome is an event.
pub(crate) fn run(args: &PluginPartArgs) {
    // Whoever watches is gone: so is the reason to go on, even inside a call that hangs.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    // The watching process reads the other end of this standard input.
    if let Ok(events) = std::io::stdin().as_fd().try_clone_to_owned() {
        let _ = EVENTS.set(events.into());
    }
    let counts = Counts::default();
    let end = drive(args, &counts).err();
    let counts = lock(&counts);
    tell(&Event::Calls(counts.clone()));
    // Some calls give something back, and have nobody to take their error.
    let failed = counts.iter().find(|(_, count)| count.failed > 0);
    let end = end.or_else(|| {
        let (call, count) = failed?;
        Some(Error::failed(
            format!("{call} failed {} of {} times", count.failed, count.calls),
            "every byte arrived, but what the plugin holds may stay with it: see its log",
        ))
    });
    drop(counts);
    tell(&end.map_or(Event::Passed, Event::from));
    // A plugin's destructors may wait for its threads; the one who watches ends this process then.
}

/// Tells an event at once.
pub(super) fn tell(event: &Event) {
    if let (Some(mut events), Ok(line)) = (EVENTS.get(), event.to_line()) {
        let _ = events.write_all(format!("{line}\n").as_bytes());
    }
}

pub(super) fn doing(step: impl Into<String>) {
    tell(&Event::Doing { step: step.into() });
}

fn drive(args: &PluginPartArgs, counts: &Counts) -> Result<(), Error> {
    let counts = Arc::clone(counts);
    let observer = move |report: &CallReport| {
        let mut counts = lock(&counts);
        let count = counts.entry(report.call.to_owned()).or_default();
        count.calls += 1;
        count.failed += u64::from(report.rc != ResultCode::Success);
    };
    let mut options = LoadOptions::new(&args.path).with_observer(observer);
    options.abi = args.abi.and_then(|number| {
        let mut all = AbiVersion::ALL.into_iter();
        all.find(|version| version.number() == u32::from(number))
    });
    doing("loading the file");
    let plugin = Plugin::load(options).map_err(|error| of_load(&error))?;
    let in_use = |missing_functions| {
        Event::Loaded(InUse {
            version: plugin.version().number(),
            name: plugin.name().to_owned(),
            missing_functions,
        })
    };
    tell(&in_use(None));
    doing("init");
    plugin.init().map_err(of_host)?;
    // A plugin's start may change the name.
    tell(&in_use(Some(plugin.missing_functions().map_err(of_host)?)));
    doing("devices");
    let count = plugin.devices().map_err(of_host)?;
    doing("getProperties");
    let properties = (0..count)
        .map(|device| plugin.properties(device))
        .collect::<Result<Vec<_>, _>>()
        .map_err(of_host)?;
    tell(&Event::Devices(
        properties.iter().map(Device::new).collect(),
    ));
    let Some(properties) = properties.get(args.device) else {
        let hint = match count {
            0 => {
                "it found no interface that it can use: look at its interface variables and its log"
            }
            _ => "give --plugin-device a smaller number",
        };
        let what = format!("the plugin has no device {}: it has {count}", args.device);
        return Err(Error::failed(what, hint));
    };
    let limit = Duration::from_millis(args.timeout_ms);
    self_test::run(&plugin, args.device, properties, limit)
}

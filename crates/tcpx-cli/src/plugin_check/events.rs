//! What the process that starts the plugin tells the one that watches it: lines of JSON.

use nccl_net::{DeviceOffload, HostError, LoadError, Properties};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::Error;

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Event {
    /// A step begins; the next event is due within the step's time.
    Doing { step: String },
    /// The table in use.
    Loaded(InUse),
    /// Every device, as `docs/plugin-check.md` describes it.
    Devices(Vec<Value>),
    /// The end, in failure.
    Failed { what: String, hint: String },
    /// The end, in success.
    Passed,
}

/// The table in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InUse {
    pub(crate) version: u32,
    pub(crate) name: String,
    /// Functions that are null after `init`; `None` before it.
    pub(crate) missing_functions: Option<Vec<String>>,
}

impl From<Error> for Event {
    /// With the marks that name checks.
    fn from(error: Error) -> Self {
        let (what, hint) = match error {
            Error::Failed { what, hint } => (what, hint),
            other => (other.what(), other.hint()),
        };
        Self::Failed { what, hint }
    }
}

/// What a failure of the plugin host means, apart from what to do.
pub(super) fn of_host(error: HostError) -> Error {
    let HostError::Call(call) = &error else {
        return split(&error.to_string(), ": ");
    };
    let check = call
        .check()
        .map_or_else(String::new, |id| format!(" [{id}]"));
    let what = format!("{} returned {}", call.call, call.rc);
    Error::failed(what, format!("{}{check}", call.hint))
}

pub(super) fn of_load(error: &LoadError) -> Error {
    let text = error.to_string();
    split(&text, if text.contains("; ") { "; " } else { ": " })
}

fn split(text: &str, between: &str) -> Error {
    let (what, hint) = text.rsplit_once(between).unwrap_or((text, ""));
    Error::failed(what, hint)
}

impl InUse {
    /// What it lacks, for a person.
    pub(crate) fn without(&self) -> String {
        match self.missing_functions.as_deref() {
            None | Some([]) => String::new(),
            Some(missing) => format!(" without {}", missing.join(", ")),
        }
    }
}

/// A device of the plugin: null where the table's version has no such property.
pub(super) fn device(properties: &Properties) -> Value {
    let pointers = properties.pointer_support;
    let mut memory = vec![
        (pointers.host(), "host"),
        (pointers.cuda(), "CUDA"),
        (pointers.dma_buf(), "dma-buf"),
    ];
    memory.retain(|(taken, _)| *taken);
    let memory: Vec<&str> = memory.into_iter().map(|(_, kind)| kind).collect();
    json!({
        "name": properties.name,
        "speed_mbps": properties.speed_mbps,
        "memory": memory,
        "offload": match properties.offload {
            DeviceOffload::None => "none".to_owned(),
            DeviceOffload::Unpack { version } => format!("unpack v{version}"),
            DeviceOffload::Other { kind, version } => format!("unknown kind {kind} v{version}"),
        },
        "pci_path": properties.pci_path,
        "guid": properties.guid,
        "port": properties.port,
        // What is no number becomes null.
        "latency_us": properties.latency_us,
        "max_comms": properties.max_comms,
        "max_recvs": properties.max_recvs,
        "max_p2p_bytes": properties.max_p2p_bytes,
        "max_coll_bytes": properties.max_coll_bytes,
        "max_multi_request_size": properties.max_multi_request_size,
        "reg_is_global": properties.reg_is_global,
        "force_flush": properties.force_flush,
        "virtual_devices": properties.virtual_devices,
        "rail_id": properties.rail_id,
        "plane_id": properties.plane_id,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_survives_its_line_whatever_the_plugin_reports() {
        for (latency_us, told) in [(f32::NAN, None), (f32::INFINITY, None), (1.5, Some(1.5))] {
            let device = device(&Properties {
                name: "eth0\n\u{1b}[2J".into(),
                latency_us,
                ..Properties::default()
            });
            assert_eq!(device["latency_us"].as_f64(), told);
            let event = Event::Devices(vec![device]);
            let line = serde_json::to_string(&event).expect("JSON");
            assert!(!line.contains('\n'));
            assert_eq!(
                serde_json::from_str::<Event>(&line).expect("an event"),
                event
            );
        }
    }

    #[test]
    fn what_to_do_is_told_apart_from_what_happened() {
        let error = LoadError::NoFile {
            path: "/x.so".into(),
        };
        let Error::Failed { what, hint } = of_load(&error) else {
            panic!("a failure");
        };
        assert!(
            what.contains("/x.so") && hint.contains("install"),
            "{what} {hint}"
        );
    }
}

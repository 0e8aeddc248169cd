//! Values that a person has set and that stop Google's plugin.

use super::interfaces::admitted;
use super::settings::{
    CHUNK, CONTROL_INTERFACE, DATA_INTERFACES, DMA_BUF, ENABLE, NCCL_INTERFACE, STEERING,
    STEERING_WAIT,
};
use crate::host::Host;

/// Why `value` of the variable `name` cannot work on `host`; `None` when nothing is known against it.
pub(crate) fn trouble(host: &dyn Host, name: &str, value: &str) -> Option<String> {
    let number = value.trim().parse::<i64>().ok();
    match name {
        DATA_INTERFACES | CONTROL_INTERFACE | NCCL_INTERFACE => {
            let all = host.interfaces().ok()?;
            if admitted(value, &all).iter().any(|one| one.up) {
                return None;
            }
            let names: Vec<&str> = all.iter().map(|one| one.name.as_str()).collect();
            Some(format!(
                "no interface that is up matches; this host has {}",
                names.join(", ")
            ))
        }
        CHUNK if number.is_none_or(|bytes| bytes <= 0) => {
            Some("it must be a number of bytes above 0: with 0 no payload ever moves".into())
        }
        STEERING_WAIT if number.is_none_or(|wait| wait <= 0) => Some(
            "the plugin ignores it and waits 5 seconds for every connection: give at least 1"
                .into(),
        ),
        STEERING if number != Some(3) => Some("the plugin refuses every value but 3".into()),
        ENABLE if number == Some(0) => Some("0 has the plugin refuse to start".into()),
        DMA_BUF if number == Some(0) => {
            Some("0 has the plugin refuse to register GPU memory".into())
        }
        _ => None,
    }
}

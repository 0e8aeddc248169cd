//! Variables of NCCL that are set for the user, where the user left them unset.

use std::ffi::{CString, OsString, c_char};
use std::sync::atomic::{AtomicPtr, Ordering};

use nccl_net::export::Log;

/// A variable, its value, and why.
type Choice = (&'static str, &'static str, &'static str);

/// NCCL reads these after it started the network, in the same call, once in a process.
pub(crate) const ALWAYS: [Choice; 1] = [(
    "NCCL_P2P_NET_CHUNKSIZE",
    "524288",
    "messages of 128 KiB, the default, keep NCCL's thread busier than the network",
)];
/// As above, where the plugin takes CUDA pointers.
pub(crate) const WITH_CUDA_POINTERS: [Choice; 1] = [(
    "NCCL_NET_GDR_LEVEL",
    "SYS",
    "the copy worker reaches the GPU however far the interface is, and NCCL gives CUDA pointers to near ones only",
)];

/// Sets what the user left unset, and says so.
pub(crate) fn choose(log: &Log, choices: &[Choice], lookup: impl Fn(&str) -> Option<OsString>) {
    let mut added = Vec::new();
    for (name, value, why) in choices {
        match lookup(name) {
            Some(set) => log.info(&format!(
                "{name}={} stays as it is set",
                set.to_string_lossy()
            )),
            None => {
                log.info(&format!("set {name}={value}: {why}"));
                added.extend(CString::new(format!("{name}={value}")));
            }
        }
    }
    add(added);
}

/// Adds entries to the environment while other threads may read it.
///
/// `setenv` may free the array that a `getenv` of another thread is walking. Here a longer copy of
/// the array is published by one store and nothing is ever freed: a reader sees the old array or
/// the new one. Only a `setenv` of another thread in the same moment could be lost, and NCCL's
/// start is where a program makes none.
fn add(entries: Vec<CString>) {
    if entries.is_empty() {
        return;
    }
    // SAFETY: the address of the C library's variable, which is a pointer for as long as we run.
    let environ = unsafe { AtomicPtr::<*mut c_char>::from_ptr((&raw mut libc::environ).cast()) };
    let mut all: Vec<*mut c_char> = Vec::new();
    let mut at = environ.load(Ordering::Acquire);
    if !at.is_null() {
        loop {
            // SAFETY: the array ends with a NULL entry, and we have not passed it.
            let entry = unsafe { at.read() };
            if entry.is_null() {
                break;
            }
            all.push(entry);
            at = at.wrapping_add(1);
        }
    }
    all.extend(entries.into_iter().map(CString::into_raw));
    all.push(std::ptr::null_mut());
    environ.store(all.leak().as_mut_ptr(), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_added_variable_is_there_and_the_others_stay() {
        let before = std::env::vars_os().count();
        add(vec![c"ADDED_BY_A_TEST=yes".to_owned()]);
        assert_eq!(std::env::var("ADDED_BY_A_TEST").as_deref(), Ok("yes"));
        assert_eq!(std::env::vars_os().count(), before + 1);
    }

    #[test]
    fn what_the_user_set_is_left_alone() {
        let log = Log::new(nccl_net::export::HostLogger::default(), c"TCPX");
        for (name, value, why) in [ALWAYS, WITH_CUDA_POINTERS].concat() {
            choose(&log, &[(name, value, why)], |_| Some("7".into()));
            assert_ne!(std::env::var(name).as_deref(), Ok(value));
        }
    }
}

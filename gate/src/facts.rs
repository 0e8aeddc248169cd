//! What a process has and has used, and what becomes of samples.

use anyhow::{Context, Result};

use crate::case::{Facts, Figures};

/// Of this process, its threads included.
pub(crate) fn facts() -> Result<Facts> {
    let memory = std::fs::read_to_string("/proc/self/statm")?;
    let resident: f64 = memory
        .split_whitespace()
        .nth(1)
        .context("/proc/self/statm is short")?
        .parse()?;
    let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Ok(Facts {
        cpu_seconds: cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
        memory: resident * rustix::param::page_size() as f64,
        descriptors: std::fs::read_dir("/proc/self/fd")?.count() as f64,
    })
}

/// The median and the 99th percentile of samples, in microseconds.
pub(crate) fn percentiles(samples: &mut [f64]) -> Figures {
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let index = (share * samples.len().saturating_sub(1) as f64).round();
        samples.get(index as usize).copied().unwrap_or(f64::NAN)
    };
    [("p50", at(0.5)), ("p99", at(0.99))].into()
}

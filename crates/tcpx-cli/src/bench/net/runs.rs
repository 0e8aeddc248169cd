//! One JSON file for each measurement, in the shape that `cargo xtask bench-collect` reads.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use serde_json::json;

use super::case::{Case, Contender};
use super::measure::Sample;
use crate::error::Error;

/// Most files of one case and contender in a folder.
const MOST: u32 = 10_000;

/// Writes `FOLDER/CASE.WHO.N.json` with the first N that is free.
pub(super) fn write(
    folder: &Path,
    case: &Case,
    contender: Contender,
    sample: &Sample,
) -> Result<(), Error> {
    let who = contender.name().replace(", ", "-");
    let mut value = json!({
        "case": case.name,
        "who": who,
        "gb_per_second": sample.rate,
        "cpu_seconds_per_gb": sample.cpu[0] + sample.cpu[1],
        "cpu_seconds_per_gb_each": sample.cpu,
        "verified": true,
    });
    if let Some(latency) = &sample.latency {
        value["latency_us"] = json!({ "p50": latency.p50, "p99": latency.p99 });
    }
    if let Some(tcp) = sample.tcp {
        value["tcp_bytes_per_payload_byte"] = json!(tcp);
    }
    let failed = |path: &Path, source: io::Error| Error::Io {
        doing: "write",
        path: path.to_owned(),
        source,
    };
    std::fs::create_dir_all(folder).map_err(|source| failed(folder, source))?;
    for number in 1..=MOST {
        let path = folder.join(format!("{}.{who}.{number}.json", case.name));
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => {
                return opened
                    .and_then(|mut file| writeln!(file, "{value}"))
                    .map_err(|source| failed(&path, source));
            }
        }
    }
    Err(failed(folder, io::ErrorKind::AlreadyExists.into()))
}

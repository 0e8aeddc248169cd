//! GPU memory exported as a dma-buf: its bounds, and unpacking from a pool that a card could fill.

use std::os::fd::{AsFd, AsRawFd};

use tcpx_memory::{DmaBuf, DmaBufError, Region, UnpackMethod};
use tcpx_wire::Fragment;

use crate::support::{Bench, Outcome, Random, text};

const POOL: usize = 32 << 20;
const PACKET: usize = 1448;
const PAGE: usize = 4096;

/// What the kernel says about a dma-buf: its length, and who exported it.
fn described(buffer: &DmaBuf) -> Result<(usize, String), String> {
    let fd = buffer.as_fd().as_raw_fd();
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).map_err(text)?;
    let field = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim().to_owned())
            .ok_or_else(|| format!("no {name} in {info:?}"))
    };
    Ok((field("size:")?.parse().map_err(text)?, field("exp_name:")?))
}

pub(crate) fn exported(bench: &Bench) -> Outcome {
    let gpu = &bench.gpu;
    let descriptors = || std::fs::read_dir("/proc/self/fd").map(Iterator::count);
    let flush = gpu.needs_flush().map_err(text)?;
    gpu.flush_device_writes().map_err(text)?;

    let mut random = Random::new();
    let bytes = random.bytes(POOL);
    let buffer = DmaBuf::cuda(gpu, POOL).map_err(text)?;
    let (size, exporter) = described(&buffer)?;
    if size != POOL {
        return Err(format!("{POOL} bytes exported as {size}"));
    }
    buffer.region().write_from(0, &bytes).map_err(text)?;
    // A packet to a page, in the order of a card that took pages as they came.
    let mut pages: Vec<usize> = (0..POOL / PAGE).collect();
    random.shuffle(&mut pages);
    let list: Vec<Fragment> = pages
        .iter()
        .enumerate()
        .map(|(index, page)| Fragment {
            source_offset: (page * PAGE) as u64,
            length: PACKET as u32,
            destination_offset: (index * PACKET) as u64,
        })
        .collect();
    let to = bench.region(gpu.kind(), list.len() * PACKET + 64)?;
    for method in UnpackMethod::ALL {
        for part in list.chunks(2000) {
            bench
                .unpack((buffer.region(), &bytes), (&to, 3), method, part)
                .map_err(|error| format!("method {method}: {error}"))?;
        }
    }

    let odd = Region::cuda(gpu, 2 * PAGE + 1).map_err(text)?;
    match DmaBuf::export(&odd) {
        Err(DmaBufError::NotWholePages { .. }) => {}
        other => return Err(format!("half a page was not refused: {other:?}")),
    }
    match DmaBuf::cuda(gpu, 1) {
        Ok(small) if described(&small)?.0 == small.len() => {}
        other => return Err(format!("one byte is not a granule: {other:?}")),
    }

    let before = descriptors().map_err(text)?;
    for _ in 0..200 {
        let one = DmaBuf::cuda(gpu, POOL).map_err(text)?;
        drop(one.bounce_pool().map_err(text)?);
    }
    let after = descriptors().map_err(text)?;
    if before != after {
        return Err(format!(
            "{before} descriptors before 200 exports, {after} after"
        ));
    }
    Ok(format!(
        "{size} bytes exported by {exporter}, {} fragments by each method, needs a flush: {flush}",
        list.len()
    ))
}

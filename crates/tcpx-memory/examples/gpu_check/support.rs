//! What the checks share: a worker, random numbers, comparison.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tcpx_memory::{
    BouncePool, CompletionSink, CopyWorker, Descriptors, Fence, Gpu, Job, MemoryError, MemoryKind,
    Region, RegionSlice, UnpackMethod, Work,
};
use tcpx_wire::{Fragment, Limits, ScatterList};

use crate::user::User;

/// What a check found: a summary, or what differs.
pub(crate) type Outcome = Result<String, String>;

/// Longest wait for one job: `GPU_CHECK_LIMIT` seconds, else 10.
pub(crate) fn limit() -> Duration {
    Duration::from_secs(number("GPU_CHECK_LIMIT").unwrap_or(10))
}

/// A number from the environment.
pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Memory of earlier checks must be freed before a kernel runs: the driver may hold up everything
/// while it frees.
pub(crate) fn settle() -> Result<(), String> {
    if Region::wait_for_frees(limit()) {
        Ok(())
    } else {
        Err("earlier memory was not freed in time".to_owned())
    }
}

pub(crate) const POISON: u8 = 0xA5;

/// The GPU and its worker.
pub(crate) struct Bench {
    pub(crate) gpu: Gpu,
    pub(crate) worker: Arc<CopyWorker>,
    pub(crate) user: OnceLock<User>,
}

struct Channel(Sender<(u64, Result<u64, MemoryError>)>);

impl CompletionSink for Channel {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        // A check that has given up listens no more.
        self.0.send((token, result)).ok();
    }
}

/// Jobs under way.
pub(crate) struct Jobs<'bench> {
    bench: &'bench Bench,
    sink: Arc<Channel>,
    ended: Receiver<(u64, Result<u64, MemoryError>)>,
}

impl Jobs<'_> {
    /// Submits a job.
    pub(crate) fn submit(
        &self,
        token: u64,
        work: Work,
        fence: Option<Fence>,
    ) -> Result<(), String> {
        let sink = Arc::<Channel>::clone(&self.sink);
        let job = Job {
            work,
            fence,
            sink,
            token,
        };
        self.bench
            .worker
            .submit(job)
            .map_err(|refused| format!("job {token} refused: {refused}"))
    }

    /// The next job to end.
    pub(crate) fn next(&self) -> Result<(u64, Result<u64, MemoryError>), String> {
        let limit = limit();
        self.ended.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                format!("no job ended within {limit:?}; GPU_CHECK_LIMIT gives more seconds")
            }
            RecvTimeoutError::Disconnected => "the worker dropped the job".to_owned(),
        })
    }
}

impl Bench {
    /// A program of its own on the same GPU.
    pub(crate) fn user(&self) -> Result<&User, String> {
        if self.user.get().is_none() {
            self.user.set(User::create(&self.gpu)?).ok();
        }
        self.user.get().ok_or_else(|| "no user".to_owned())
    }

    pub(crate) fn open() -> Result<Self, String> {
        let gpu = Gpu::open(0).map_err(text)?;
        let worker = CopyWorker::for_gpu(&gpu).map_err(text)?;
        Ok(Self {
            gpu,
            worker,
            user: OnceLock::new(),
        })
    }

    pub(crate) fn jobs(&self) -> Jobs<'_> {
        let (sender, ended) = mpsc::channel();
        Jobs {
            bench: self,
            sink: Arc::new(Channel(sender)),
            ended,
        }
    }

    /// One job from submission to its end.
    pub(crate) fn run(&self, work: Work, fence: Option<Fence>) -> Result<u64, String> {
        let jobs = self.jobs();
        jobs.submit(1, work, fence)?;
        let (_, result) = jobs.next()?;
        result.map_err(text)
    }

    pub(crate) fn region(&self, kind: MemoryKind, len: usize) -> Result<Region, String> {
        match kind {
            MemoryKind::Host => Region::host(len),
            MemoryKind::Pinned => Region::pinned(&self.gpu, len),
            MemoryKind::Cuda { .. } => Region::cuda(&self.gpu, len),
        }
        .map_err(text)
    }

    /// A region with this content.
    pub(crate) fn region_of(&self, kind: MemoryKind, bytes: &[u8]) -> Result<Region, String> {
        let region = self.region(kind, bytes.len())?;
        region.write_from(0, bytes).map_err(text)?;
        Ok(region)
    }

    pub(crate) fn kinds(&self) -> [MemoryKind; 3] {
        [MemoryKind::Host, MemoryKind::Pinned, self.gpu.kind()]
    }

    /// Unpacks into a poisoned destination and compares every byte of it.
    pub(crate) fn unpack(
        &self,
        (pool, bytes): (&Region, &[u8]),
        to: (&Region, usize),
        with: UnpackMethod,
        list: &[Fragment],
    ) -> Result<(), String> {
        let (region, start) = to;
        let mut expected = vec![POISON; region.len()];
        region.write_from(0, &expected).map_err(text)?;
        for fragment in list {
            let (from, length) = (fragment.source_offset as usize, fragment.length as usize);
            let at = start + fragment.destination_offset as usize;
            expected[at..at + length].copy_from_slice(&bytes[from..from + length]);
        }
        let to = region.slice(start..).map_err(text)?;
        let work = unpack_work(&BouncePool::from(pool.clone()), to, with, list)?;
        let total: u64 = list.iter().map(|fragment| u64::from(fragment.length)).sum();
        let moved = self.run(work, None)?;
        if moved != total {
            return Err(format!("the result is {moved} bytes instead of {total}"));
        }
        same(region, &expected)
    }
}

/// An unpack job for a list.
pub(crate) fn unpack_work(
    pool: &BouncePool,
    to: RegionSlice,
    with: UnpackMethod,
    list: &[Fragment],
) -> Result<Work, String> {
    let mut scatter = ScatterList::new();
    list.iter().for_each(|fragment| scatter.push(*fragment));
    let limits = Limits {
        pool_bytes: pool.len() as u64,
        destination_bytes: to.len() as u64,
        received_bytes: list.iter().map(|fragment| u64::from(fragment.length)).sum(),
    };
    let mut descriptors = Descriptors::new();
    descriptors.build(&scatter, limits).map_err(text)?;
    Ok(Work::Unpack {
        pool: pool.clone(),
        descriptors: Arc::new(descriptors),
        to,
        with,
    })
}

/// Compares a region's content and says where it first differs, and how often.
pub(crate) fn same(region: &Region, expected: &[u8]) -> Result<(), String> {
    let mut content = vec![0; expected.len()];
    region.read_to(0, &mut content).map_err(text)?;
    same_bytes(&content, expected).map_err(|error| format!("{}: {error}", region.kind()))
}

/// Compares bytes and says where they first differ, and how often.
pub(crate) fn same_bytes(content: &[u8], expected: &[u8]) -> Result<(), String> {
    if content == expected {
        return Ok(());
    }
    let differs = |(at, (is, should)): (usize, (&u8, &u8))| (is != should).then_some(at);
    let places: Vec<usize> = content
        .iter()
        .zip(expected)
        .enumerate()
        .filter_map(differs)
        .collect();
    let (first, last) = (
        places.first().copied().unwrap_or(0),
        places.last().copied().unwrap_or(0),
    );
    let end = (first + 8).min(content.len());
    Err(format!(
        "{} of {} bytes differ, {first} to {last}; at {first} is {:02x?} instead of {:02x?}",
        places.len(),
        content.len(),
        &content[first..end],
        &expected[first..end],
    ))
}

pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Fresh random numbers; the seed is printed so that a failure can be repeated with it.
pub(crate) struct Random(u64);

impl Random {
    /// Seeded by `GPU_CHECK_SEED`, else by the clock.
    pub(crate) fn new() -> Self {
        static SEED: OnceLock<u64> = OnceLock::new();
        let seed = *SEED.get_or_init(|| {
            let seed = number("GPU_CHECK_SEED").unwrap_or_else(|| {
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                now.map_or(1, |now| now.as_nanos() as u64)
            });
            println!("GPU_CHECK_SEED={seed}");
            seed
        });
        Self(seed | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    pub(crate) fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// Random bytes that are never the poison, so that a byte left out shows.
    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        bytes
            .iter_mut()
            .filter(|byte| **byte == POISON)
            .for_each(|byte| *byte = 0);
        bytes
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

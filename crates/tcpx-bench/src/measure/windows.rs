//! Messages that the measuring end alone moves: puts into windows of the other end, gets from them.

use std::time::Duration;

use tcpx::request::PreparedBatch;
use tcpx::{Region, Rights, Transfer, Window, WindowKey};

use crate::Error;
use crate::end::{End, Part, slice, timed};
use crate::orders::Op;

/// How long the owner may take to let go of a window when all is over.
const LETTING_GO: Duration = Duration::from_secs(10);

impl End<'_> {
    /// Opens what the other end writes, or reads; one window for each message in flight.
    pub(crate) fn expose(&self) -> Result<Vec<Window>, Error> {
        self.prepare()?;
        let (regions, rights): (&[Region], _) = match self.run.op {
            Op::Get => (&self.buffers.sources, Rights::Get),
            Op::Put | Op::Send => (&self.buffers.sinks, Rights::Put),
        };
        let regions = regions.iter().take(self.run.depth.into());
        let open = |region| {
            let whole = slice(region, self.run.bytes)?;
            Ok(self.connection.expose(whole, rights)?)
        };
        regions.map(open).collect()
    }

    /// All is over: closes the windows, and compares what came.
    pub(crate) fn let_go(&self, windows: Vec<Window>) -> Result<(), Error> {
        for window in windows {
            window.revoke(LETTING_GO)?;
        }
        match self.run.op {
            Op::Put => self.compare(),
            Op::Send | Op::Get => Ok(()),
        }
    }

    /// The measuring end's part.
    pub(crate) fn move_all(&self, keys: &[Vec<u8>]) -> Result<Part, Error> {
        let keys: Result<Vec<_>, _> = keys.iter().map(|key| WindowKey::from_bytes(key)).collect();
        let keys = keys.unwrap_or_default();
        if keys.len() != usize::from(self.run.depth) {
            return Err(Error::unexpected(
                "keys of the other end's windows",
                format!("{} keys", keys.len()),
            ));
        }
        let batches: Vec<PreparedBatch> = match self.run.piece {
            0 => Vec::new(),
            _ => (0..keys.len())
                .map(|at| self.batch(at, &keys[at]))
                .collect::<Result<_, _>>()?,
        };
        // As many windows as messages in flight: none is used twice at a time.
        let start = |index: u32| {
            let at = index as usize % keys.len();
            match batches.get(at) {
                Some(batch) => Ok(batch.start()?),
                None => self.whole(at, &keys[at]),
            }
        };
        let part = timed(|| self.keep_in_flight(start))?;
        if self.run.op == Op::Get {
            self.compare()?;
        }
        Ok(part)
    }

    fn whole(&self, at: usize, key: &WindowKey) -> Result<Transfer, Error> {
        let batch = self.connection.batch();
        let (sinks, sources) = (&self.buffers.sinks, &self.buffers.sources);
        Ok(match self.run.op {
            Op::Get => batch.get(slice(&sinks[at], self.run.bytes)?, key, 0),
            Op::Put | Op::Send => batch.put(slice(&sources[at], self.run.bytes)?, key, 0),
        }
        .start()?)
    }

    fn batch(&self, at: usize, key: &WindowKey) -> Result<PreparedBatch, Error> {
        let own = match self.run.op {
            Op::Get => &self.buffers.sinks,
            Op::Put | Op::Send => &self.buffers.sources,
        };
        let whole = slice(&own[at], self.run.bytes)?;
        let mut batch = self.connection.batch();
        for start in starts(self.run.bytes, self.run.piece) {
            let end = (start + self.run.piece).min(self.run.bytes);
            let piece = whole
                .slice(start as usize..end as usize)
                .map_err(Error::memory("take a piece"))?;
            batch = match self.run.op {
                Op::Get => batch.get(piece, key, start),
                Op::Put | Op::Send => batch.put(piece, key, start),
            };
        }
        Ok(batch.prepare()?)
    }
}

/// Where the pieces of a message begin, in the order of their batch: neighbours in it are far from
/// each other, and no two distances alike.
fn starts(bytes: u64, piece: u64) -> Vec<u64> {
    let mut starts: Vec<u64> = (0..bytes.div_ceil(piece)).map(|at| at * piece).collect();
    starts.sort_by_key(|start| {
        let mixed = (start / piece).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    });
    starts
}

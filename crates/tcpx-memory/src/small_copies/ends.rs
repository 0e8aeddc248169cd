//! How the end of a small copy is seen.
//!
//! A stream writes a number to a word of pinned memory behind each copy. That is seen sooner than
//! an event, and takes no call of the driver, which is asked only now and then, as it alone knows
//! of errors.

use std::sync::atomic::{AtomicU32, Ordering};

use super::SLOTS;
use crate::driver::sys;
use crate::error::CudaError;
use crate::gpu::{Current, Gpu, MappedHost, is_at_rest};

/// Bytes between two words, so that the GPU's writes do not take a line from others.
const WORD_BYTES: usize = 128;
/// Looks at a word before the driver is asked.
const POLLS: u32 = 256;

/// One word for each slot.
#[derive(Clone, Copy)]
pub(super) struct EndWords {
    words: MappedHost,
    signs: [Sign; SLOTS],
}

#[derive(Clone, Copy, Default)]
struct Sign {
    /// What the word says when the last copy has ended; the next one has another number.
    number: u32,
    /// Looks at the word since the driver was asked.
    looks: u32,
}

impl EndWords {
    /// Bytes of zeroed pinned memory that the words take.
    pub(super) const BYTES: usize = SLOTS * WORD_BYTES;

    /// `words` is where [`Self::BYTES`] lie that belong to them alone, for good.
    pub(super) fn new(words: MappedHost) -> Self {
        let signs = Default::default();
        Self { words, signs }
    }

    /// Has the slot show the end of the stream's work so far; the context is current.
    ///
    /// # Errors
    /// The driver's: streams of some GPUs cannot write words.
    pub(super) fn mark(
        &mut self,
        gpu: &Gpu,
        slot: usize,
        stream: sys::CUstream,
    ) -> Result<(), CudaError> {
        let api = gpu.api();
        let write = api
            .cuStreamWriteValue32_v2
            .ok_or(CudaError::MissingSymbol {
                name: "cuStreamWriteValue32_v2",
                needs: "11.7",
            })?;
        let (at, number) = self.next(slot);
        // SAFETY: the word stays, by the promise to `new`. With no flags the write comes behind all
        // that the stream did before, as the CPU sees it too.
        let code = unsafe { write(stream, at, number, 0) };
        api.check("cuStreamWriteValue32", code)
    }

    /// The word that will show the slot's next end, for the GPU, and what it must become then.
    pub(super) fn next(&mut self, slot: usize) -> (u64, u32) {
        let sign = &mut self.signs[slot];
        sign.number = sign.number.wrapping_add(1);
        sign.looks = 0;
        (self.words.at(slot * WORD_BYTES).device, sign.number)
    }

    /// Whether the slot shows an end, as far as that is seen without the driver.
    pub(super) fn shows(&self, slot: usize) -> bool {
        let word = self.words.at(slot * WORD_BYTES).host;
        // SAFETY: the word is aligned and ours, by the promise to `new`; the GPU alone writes it,
        // whole.
        let word = unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) };
        word.load(Ordering::Acquire) == self.signs[slot].number
    }

    /// Whether all that came before the slot's mark on `stream` has ended.
    pub(super) fn has_come(
        &mut self,
        gpu: &Gpu,
        slot: usize,
        stream: sys::CUstream,
    ) -> Result<bool, CudaError> {
        if self.shows(slot) {
            return Ok(true);
        }
        let sign = &mut self.signs[slot];
        sign.looks += 1;
        if sign.looks < POLLS {
            return Ok(false);
        }
        sign.looks = 0;
        let _current = Current::enter(gpu)?;
        is_at_rest(gpu.api(), stream)
    }
}

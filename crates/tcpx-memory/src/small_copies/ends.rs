//! How the end of a small copy is seen.
//!
//! A stream writes a number to a word of pinned memory behind each copy. That is seen sooner than an event,
//! and takes no call of the driver, which is asked only now and then, as it alone knows of errors. Where
//! streams cannot write words, events are polled instead.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use super::SLOTS;
use crate::driver::sys;
use crate::error::CudaError;
use crate::fence::Event;
use crate::gpu::{Current, Gpu, is_at_rest};

/// Bytes between two words, so that the GPU's writes do not take a line from others.
const WORD_BYTES: usize = 128;
/// Looks at a word before the driver is asked.
const POLLS: u32 = 256;

/// One sign for each slot; see the module's documentation.
pub(super) struct Ends {
    gpu: Gpu,
    signs: Vec<Sign>,
    /// Where the words lie, for the CPU and for the GPU; `None` if events are polled.
    words: Option<(NonNull<u8>, u64)>,
}

struct Sign {
    event: Event,
    /// What the word says when the last copy has ended; the next one has another number.
    number: u32,
    /// Looks at the word since the driver was asked.
    looks: u32,
}

impl Ends {
    /// Bytes of zeroed pinned memory that the words take.
    pub(super) const BYTES: usize = SLOTS * WORD_BYTES;

    /// Makes the signs; `words` is where [`Self::BYTES`] lie that belong to them alone, for as long as any
    /// stream has a mark before it. The context is current.
    pub(super) fn new(
        gpu: &Gpu,
        words: (NonNull<u8>, u64),
        stream: sys::CUstream,
    ) -> Result<Self, CudaError> {
        let mut ends = Self {
            gpu: gpu.clone(),
            signs: Vec::with_capacity(SLOTS),
            words: Some(words),
        };
        for _ in 0..SLOTS {
            let event = Event::create(gpu.api())?;
            ends.signs.push(Sign {
                event,
                number: 0,
                looks: 0,
            });
        }
        // A driver or a GPU that cannot write words says so at the first.
        if let Err(error) = ends.write_word((words.1, 0), stream) {
            tracing::debug!(%error, "small copies are followed by events");
            ends.words = None;
        }
        Ok(ends)
    }

    /// Has the slot show the end of the stream's work so far; the context is current.
    pub(super) fn mark(&mut self, slot: usize, stream: sys::CUstream) -> Result<(), CudaError> {
        match self.next(slot) {
            Some(word) => self.write_word(word, stream),
            None => self.signs[slot].event.record(self.gpu.api(), stream),
        }
    }

    /// The word that will show the slot's next end, for the GPU, and what it must become then; `None` where
    /// events are looked at.
    pub(super) fn next(&mut self, slot: usize) -> Option<(u64, u32)> {
        let (_, device) = self.words?;
        let sign = &mut self.signs[slot];
        sign.number = sign.number.wrapping_add(1);
        sign.looks = 0;
        Some((device + (slot * WORD_BYTES) as u64, sign.number))
    }

    /// Has the stream write a number to a slot's word.
    fn write_word(&self, (at, number): (u64, u32), stream: sys::CUstream) -> Result<(), CudaError> {
        let api = self.gpu.api();
        let write = api
            .cuStreamWriteValue32_v2
            .ok_or(CudaError::MissingSymbol {
                name: "cuStreamWriteValue32_v2",
                needs: "11.7",
            })?;
        // SAFETY: the word stays until the stream has passed this, by the promise to `new`. With no flags
        // the write comes behind all that the stream did before, as the CPU sees it too.
        let code = unsafe { write(stream, at, number, 0) };
        api.check("cuStreamWriteValue32", code)
    }

    /// Whether the slot shows an end, as far as that is seen without the driver.
    pub(super) fn shows(&self, slot: usize) -> bool {
        let Some((words, _)) = self.words else {
            return false;
        };
        let word = words.as_ptr().wrapping_add(slot * WORD_BYTES);
        // SAFETY: the word is aligned and ours, by the promise to `new`; the GPU alone writes it, whole.
        let word = unsafe { AtomicU32::from_ptr(word.cast()) };
        word.load(Ordering::Acquire) == self.signs[slot].number
    }

    /// Whether all that came before the slot's mark on `stream` has ended.
    pub(super) fn has_come(
        &mut self,
        slot: usize,
        stream: sys::CUstream,
    ) -> Result<bool, CudaError> {
        if self.shows(slot) {
            return Ok(true);
        }
        let api = self.gpu.api();
        let sign = &mut self.signs[slot];
        if self.words.is_none() {
            let _current = Current::enter(&self.gpu)?;
            return sign.event.is_ready(api);
        }
        sign.looks += 1;
        if sign.looks < POLLS {
            return Ok(false);
        }
        sign.looks = 0;
        let _current = Current::enter(&self.gpu)?;
        is_at_rest(api, stream)
    }

    /// Whether ends are only seen by asking the driver.
    pub(super) fn must_ask(&self) -> bool {
        self.words.is_none()
    }

    #[cfg(test)]
    pub(super) fn look_at_events(&mut self) {
        self.words = None;
    }
}

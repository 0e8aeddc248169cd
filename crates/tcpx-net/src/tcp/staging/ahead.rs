//! What is copied of sends that the peer has yet to grant: pieces as long as their chunks will probably be,
//! from the first on. A chunk that comes takes the place of its piece over; where one finds none, the
//! chunks were cut otherwise, or all pieces were given back. No copies and no system calls here.

#[cfg(test)]
mod tests;

/// Sends that pieces are copied of at a time.
const SENDS: usize = 4;
/// Pieces of a send.
const PIECES: usize = 8;

/// `S`: what a send is read from. `T`: a place that a piece is copied to.
#[derive(Debug)]
pub(super) struct Ahead<S, T> {
    sends: Vec<Send<S, T>>,
    /// Copies under way whose places chunks have taken over: their numbers, and the slots of the chunks.
    taken_over: Vec<(u32, u16)>,
    next_number: u32,
    /// Sends that have ended since this was last asked for.
    ended: Vec<u64>,
}

#[derive(Debug)]
struct Send<S, T> {
    token: u64,
    transfer: u64,
    /// `None` once no further piece is to be begun.
    source: Option<S>,
    bytes: u64,
    piece_bytes: u64,
    /// Pieces begun so far.
    begun: usize,
    pieces: Vec<Piece<T>>,
}

#[derive(Debug)]
struct Piece<T> {
    number: u32,
    offset: u64,
    length: u64,
    place: T,
    is_copied: bool,
    /// Given back: its place is free once the copy has ended.
    is_over: bool,
}

/// A piece that can be begun.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Next<'a, S> {
    pub(super) token: u64,
    pub(super) source: &'a S,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// What a chunk that came has found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found<T> {
    /// Its bytes are here.
    Copied(T),
    /// Its bytes will be here once the copy has ended.
    Copying(T),
    /// Nothing. These places are free.
    Nothing(Vec<T>),
}

/// What the end of a copy means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CopyEnd<T> {
    /// The chunk in this slot has its bytes, or the copy's error.
    Chunk(u16),
    /// The place is free.
    Free(T),
    /// It is kept for its chunk.
    Kept,
}

impl<S, T> Default for Ahead<S, T> {
    fn default() -> Self {
        Self {
            sends: Vec::new(),
            taken_over: Vec::new(),
            next_number: 0,
            ended: Vec::new(),
        }
    }
}

impl<S, T> Ahead<S, T> {
    /// A send that pieces may be begun of; `false` if there are too many. Call [`Self::has_begun`] afterwards.
    pub(super) fn offer(
        &mut self,
        token: u64,
        transfer: u64,
        source: S,
        bytes: u64,
        piece_bytes: u64,
    ) -> bool {
        let fits = self.sends.len() < SENDS && piece_bytes > 0;
        if fits {
            self.sends.push(Send {
                token,
                transfer,
                source: Some(source),
                bytes,
                piece_bytes,
                begun: 0,
                pieces: Vec::new(),
            });
        }
        fits
    }

    /// Whether a piece of the send was begun; it is taken back otherwise.
    pub(super) fn has_begun(&mut self, token: u64) -> bool {
        let before = self.sends.len();
        self.sends
            .retain(|send| send.token != token || send.begun > 0);
        self.sends.len() == before
    }

    /// The next piece.
    pub(super) fn next(&self) -> Option<Next<'_, S>> {
        self.sends.iter().find_map(|send| {
            let source = send.source.as_ref()?;
            let offset = send.piece_bytes.checked_mul(send.begun as u64)?;
            let left = send.bytes.checked_sub(offset)?;
            (left > 0 && send.begun < PIECES).then(|| Next {
                token: send.token,
                source,
                offset,
                length: left.min(send.piece_bytes),
            })
        })
    }

    /// The copy of the [`next`](Self::next) piece begins; its number.
    pub(super) fn begin(&mut self, place: T) -> Option<u32> {
        let Next {
            token,
            offset,
            length,
            ..
        } = self.next()?;
        let number = self.next_number;
        self.next_number = number.wrapping_add(1);
        let send = self.sends.iter_mut().find(|send| send.token == token)?;
        send.begun += 1;
        send.pieces.push(Piece {
            number,
            offset,
            length,
            place,
            is_copied: false,
            is_over: false,
        });
        Some(number)
    }

    /// A chunk has come, for this slot: the transfer is granted, and no further piece is begun.
    pub(super) fn find(&mut self, transfer: u64, offset: u64, length: u64, slot: u16) -> Found<T> {
        let ours = |send: &Send<S, T>| send.transfer == transfer;
        let Some(at) = self.sends.iter().position(ours) else {
            return Found::Nothing(Vec::new());
        };
        let send = &mut self.sends[at];
        send.source = None;
        let fits =
            |piece: &Piece<T>| piece.offset == offset && piece.length == length && !piece.is_over;
        let found = match send.pieces.iter().position(fits) {
            Some(piece) => {
                let piece = send.pieces.swap_remove(piece);
                if piece.is_copied {
                    Found::Copied(piece.place)
                } else {
                    self.taken_over.push((piece.number, slot));
                    Found::Copying(piece.place)
                }
            }
            // Chunks come in order, so none that comes later has a piece.
            None => Found::Nothing(send.give_back()),
        };
        self.end_if_empty(at);
        found
    }

    /// A copy has ended, well or not.
    pub(super) fn copy_ended(&mut self, number: u32, well: bool) -> CopyEnd<T> {
        let held = |(held, _): &(u32, u16)| *held == number;
        if let Some(at) = self.taken_over.iter().position(held) {
            return CopyEnd::Chunk(self.taken_over.swap_remove(at).1);
        }
        let place = self.sends.iter().enumerate().find_map(|(at, send)| {
            let held = |piece: &Piece<T>| piece.number == number;
            Some((at, send.pieces.iter().position(held)?))
        });
        let Some((at, index)) = place else {
            return CopyEnd::Kept;
        };
        let send = &mut self.sends[at];
        let piece = &mut send.pieces[index];
        if well && !piece.is_over {
            piece.is_copied = true;
            return CopyEnd::Kept;
        }
        if !well {
            // Its chunk is copied again, and its error told.
            send.source = None;
        }
        let piece = send.pieces.swap_remove(index);
        self.end_if_empty(at);
        CopyEnd::Free(piece.place)
    }

    /// Nobody wants this send any more: `None` if it is none of these, else the places that are free, and
    /// whether copies of it still run; if not, it has ended, and that is not told again.
    pub(super) fn cancel(&mut self, token: u64) -> Option<(Vec<T>, bool)> {
        if self.ended.contains(&token) {
            return Some((Vec::new(), true));
        }
        let at = self.sends.iter().position(|send| send.token == token)?;
        let places = self.sends[at].give_back();
        let is_copying = !self.sends[at].pieces.is_empty();
        if !is_copying {
            self.sends.swap_remove(at);
        }
        Some((places, is_copying))
    }

    /// Gives back all that no chunk has taken over; the places that are free.
    pub(super) fn give_back(&mut self) -> Vec<T> {
        let places = self.sends.iter_mut().flat_map(Send::give_back).collect();
        for at in (0..self.sends.len()).rev() {
            self.end_if_empty(at);
        }
        places
    }

    /// The sends that have ended.
    pub(super) fn take_ended(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.ended)
    }

    pub(super) fn has_ended_some(&self) -> bool {
        !self.ended.is_empty()
    }

    fn end_if_empty(&mut self, at: usize) {
        if self.sends[at].pieces.is_empty() {
            self.ended.push(self.sends.swap_remove(at).token);
        }
    }
}

impl<S, T> Send<S, T> {
    fn give_back(&mut self) -> Vec<T> {
        self.source = None;
        let mut places = Vec::new();
        for at in (0..self.pieces.len()).rev() {
            if self.pieces[at].is_copied {
                places.push(self.pieces.swap_remove(at).place);
            } else {
                self.pieces[at].is_over = true;
            }
        }
        places
    }
}

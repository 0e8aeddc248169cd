//! Lists of pieces: one operation that covers many places in windows of the peer.
//!
//! A list is a series of runs: pieces of one length in one window, a stride apart. Its pieces in
//! their order are the bytes of the operation. It travels in parts, each of which is read by itself
//! but for the windows that parts before it named, and costs a few bytes for each run: offsets
//! count from the end of the run before.

use std::collections::HashMap;

use thiserror::Error;
use zeroize::Zeroize;

use crate::session::MAX_TRANSFER_BYTES;
use crate::window::{Place, WindowSecret};

/// Most pieces of a list, and of all lists that a side keeps for its peer.
pub const MAX_PIECES: u32 = 1 << 20;
/// Most bytes of a part.
pub const MAX_PART_BYTES: usize = 64 * 1024;
/// Most bytes of a run in a part: flags, five numbers, a secret.
const MAX_RUN_BYTES: usize = 1 + 6 * 10 + WindowSecret::BYTES;

/// The run names another window than the one before.
const WINDOW: u8 = 1;
/// It has pieces of another length.
const LENGTH: u8 = 2;
/// It has more than one piece.
const STRIDED: u8 = 4;

/// Pieces of one length in one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceRun {
    /// Which of the [windows](PieceList::windows) of its list.
    pub window: u32,
    /// First byte of the first piece, from the start of the window.
    pub offset: u64,
    /// Bytes of each piece; at least 1.
    pub length: u64,
    /// From the start of one piece to that of the next; at least `length`.
    pub stride: u64,
    /// Pieces; at least 1.
    pub count: u32,
}

impl PieceRun {
    /// One behind its last byte; `None` where that is beyond any window.
    pub(crate) fn end(&self) -> Option<u64> {
        let last = self.stride.checked_mul(u64::from(self.count) - 1)?;
        let last = self.offset.checked_add(last)?;
        last.checked_add(self.length)
    }

    /// Where its pieces begin.
    pub fn offsets(&self) -> impl Iterator<Item = u64> {
        let Self { offset, stride, .. } = *self;
        // None of them wraps: the end of the last piece does not.
        (0..u64::from(self.count)).map(move |at| offset + at * stride)
    }
}

/// Many places in windows, checked so far as that is possible without the windows: no piece is
/// empty or wraps, those of a run do not overlap, and there are not too many.
#[derive(Clone, Debug, Default)]
pub struct PieceList {
    windows: Vec<(u64, WindowSecret)>,
    /// One behind the last byte of each.
    ends: Vec<u64>,
    runs: Vec<PieceRun>,
    pieces: u32,
    bytes: u64,
    /// Where each window is that a piece was pushed for.
    pushed: HashMap<u64, u32>,
}

impl Drop for PieceList {
    fn drop(&mut self) {
        self.windows
            .iter_mut()
            .for_each(|(_, secret)| secret.zeroize());
    }
}

/// Made in whichever way.
impl PartialEq for PieceList {
    fn eq(&self, other: &Self) -> bool {
        (&self.windows, &self.runs) == (&other.windows, &other.runs)
    }
}

impl Eq for PieceList {}

impl PieceList {
    /// The windows that it names, and what proves that it may.
    pub fn windows(&self) -> &[(u64, WindowSecret)] {
        &self.windows
    }

    /// What it covers of each window at most: the window, what proves that it may, and one behind
    /// the last byte.
    pub(crate) fn ends(&self) -> impl Iterator<Item = (u64, WindowSecret, u64)> {
        let windows = self.windows.iter().zip(&self.ends);
        windows.map(|((window, secret), end)| (*window, *secret, *end))
    }

    /// Its pieces, in their order.
    pub fn runs(&self) -> &[PieceRun] {
        &self.runs
    }

    /// Where they begin, and how long they are.
    pub fn places(&self) -> impl Iterator<Item = (Place, u64)> {
        self.runs.iter().flat_map(|run| {
            let (window, secret) = self.windows[run.window as usize];
            let at = move |offset| Place {
                window,
                secret,
                offset,
            };
            run.offsets().map(move |offset| (at(offset), run.length))
        })
    }

    /// How many pieces there are.
    pub fn pieces(&self) -> u32 {
        self.pieces
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether a piece lies in this window.
    pub fn names(&self, window: u64) -> bool {
        self.windows.iter().any(|(named, _)| *named == window)
    }

    /// Appends a piece, to the run before where it fits there.
    ///
    /// # Errors
    /// The piece is empty or wraps, or there are too many.
    pub fn push(&mut self, place: &Place, length: u64) -> Result<(), PieceListError> {
        let named = (place.window, place.secret);
        let last = self.runs.last();
        let window = match last.map(|run| run.window) {
            Some(last) if self.windows[last as usize] == named => last,
            _ => {
                let pushed = self.pushed.get(&place.window).copied();
                match pushed.filter(|at| self.windows[*at as usize] == named) {
                    Some(at) => at,
                    None => {
                        let added = self.add_window(named);
                        self.pushed.insert(place.window, added);
                        added
                    }
                }
            }
        };
        let piece = PieceRun {
            window,
            offset: place.offset,
            length,
            stride: length,
            count: 1,
        };
        let bytes = self.check(&piece)?;
        self.reach(&piece);
        if let Some(last) = self.runs.last_mut().filter(|last| last.window == window) {
            if last.count == 1 && last.offset + last.length == piece.offset {
                last.length += length;
                last.stride = last.length;
                self.bytes = bytes;
                return Ok(());
            }
            let passed = last.stride.checked_mul(last.count.into());
            let next = passed.and_then(|passed| passed.checked_add(last.offset));
            let follows = last.count > 1 && next == Some(piece.offset);
            let begins = last.count == 1 && piece.offset > last.offset + last.length;
            if last.length == length && (follows || begins) {
                if begins {
                    last.stride = piece.offset - last.offset;
                }
                last.count += 1;
                self.pieces += 1;
                self.bytes = bytes;
                return Ok(());
            }
        }
        self.add(piece, bytes);
        Ok(())
    }

    fn add_window(&mut self, named: (u64, WindowSecret)) -> u32 {
        self.windows.push(named);
        self.ends.push(0);
        self.windows.len() as u32 - 1
    }

    /// Bytes of the list with this run.
    fn check(&self, run: &PieceRun) -> Result<u64, PieceListError> {
        if run.length == 0 || run.count == 0 || run.stride < run.length || run.end().is_none() {
            return Err(PieceListError::Run);
        }
        let bytes = run.length.checked_mul(run.count.into());
        let bytes = bytes.and_then(|more| self.bytes.checked_add(more));
        let pieces = self.pieces.checked_add(run.count);
        match (bytes, pieces) {
            (Some(bytes), Some(pieces)) if bytes <= MAX_TRANSFER_BYTES && pieces <= MAX_PIECES => {
                Ok(bytes)
            }
            _ => Err(PieceListError::TooMany),
        }
    }

    /// Notes how far into its window a run goes; it was checked.
    fn reach(&mut self, run: &PieceRun) {
        let end = &mut self.ends[run.window as usize];
        *end = (*end).max(run.end().unwrap_or(u64::MAX));
    }

    fn add(&mut self, run: PieceRun, bytes: u64) {
        self.pieces += run.count;
        self.bytes = bytes;
        self.runs.push(run);
    }

    /// Its parts for the peer, at least one.
    pub fn parts(&self) -> Vec<Vec<u8>> {
        let mut parts = Vec::new();
        let mut part = Vec::new();
        let (mut before, mut named) = (None, 0);
        for run in &self.runs {
            if part.len() + MAX_RUN_BYTES > MAX_PART_BYTES {
                parts.push(std::mem::take(&mut part));
                before = None;
            }
            self.write(run, before, &mut named, &mut part);
            before = Some(run);
        }
        parts.push(part);
        parts
    }

    fn write(
        &self,
        run: &PieceRun,
        before: Option<&PieceRun>,
        named: &mut u32,
        part: &mut Vec<u8>,
    ) {
        let other_window = before.is_none_or(|before| before.window != run.window);
        let other_length = before.is_none_or(|before| before.length != run.length);
        let flag = |is: bool, flag: u8| if is { flag } else { 0 };
        part.push(
            flag(other_window, WINDOW) | flag(other_length, LENGTH) | flag(run.count > 1, STRIDED),
        );
        if other_window {
            push_number(part, run.window.into());
            if run.window == *named {
                let (window, secret) = &self.windows[run.window as usize];
                push_number(part, *window);
                part.extend_from_slice(secret.as_bytes());
                *named += 1;
            }
        }
        if other_length {
            push_number(part, run.length);
        }
        let from = before.and_then(PieceRun::end).unwrap_or(0);
        let distance = run.offset.wrapping_sub(from).cast_signed();
        push_number(part, ((distance << 1) ^ (distance >> 63)).cast_unsigned());
        if run.count > 1 {
            push_number(part, run.stride);
            push_number(part, run.count.into());
        }
    }

    /// Appends the next part of a list of the peer.
    ///
    /// # Errors
    /// The bytes are no part. What was read before it stays.
    pub fn read_part(&mut self, part: &[u8]) -> Result<(), PieceListError> {
        let mut rest = part;
        let mut before: Option<PieceRun> = None;
        while let Some(flags) = take::<1>(&mut rest) {
            let [flags] = flags;
            if flags & !(WINDOW | LENGTH | STRIDED) != 0 {
                return Err(PieceListError::Run);
            }
            let number = |rest: &mut &[u8]| take_number(rest).ok_or(PieceListError::Run);
            let window = match flags & WINDOW {
                0 => before.ok_or(PieceListError::Run)?.window,
                _ => self.read_window(&mut rest)?,
            };
            let length = match flags & LENGTH {
                0 => before.ok_or(PieceListError::Run)?.length,
                _ => number(&mut rest)?,
            };
            let from = before.as_ref().and_then(PieceRun::end).unwrap_or(0);
            let distance = number(&mut rest)?;
            let distance = (distance >> 1) ^ (distance & 1).wrapping_neg();
            let (stride, count) = match flags & STRIDED {
                0 => (length, 1),
                _ => (number(&mut rest)?, number(&mut rest)?),
            };
            // One piece has no stride: there is one way to say a run.
            if flags & STRIDED != 0 && count < 2 {
                return Err(PieceListError::Run);
            }
            let run = PieceRun {
                window,
                offset: from.wrapping_add(distance),
                length,
                stride,
                count: u32::try_from(count).map_err(|_| PieceListError::TooMany)?,
            };
            let bytes = self.check(&run)?;
            self.reach(&run);
            self.add(run, bytes);
            before = Some(run);
        }
        Ok(())
    }

    fn read_window(&mut self, rest: &mut &[u8]) -> Result<u32, PieceListError> {
        let window = take_number(rest).and_then(|window| u32::try_from(window).ok());
        let window = window.ok_or(PieceListError::Run)?;
        if (window as usize) < self.windows.len() {
            return Ok(window);
        }
        if window as usize != self.windows.len() {
            return Err(PieceListError::Run);
        }
        let id = take_number(rest).ok_or(PieceListError::Run)?;
        let secret = take(rest).ok_or(PieceListError::Run)?;
        Ok(self.add_window((id, WindowSecret::from_bytes(secret))))
    }
}

/// Seven bits a byte, the lowest first.
fn push_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn take_number(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for at in 0..10 {
        let [byte] = take(rest)?;
        let bits = u64::from(byte & 0x7f);
        if at == 9 && bits > 1 {
            return None;
        }
        number |= bits << (7 * at);
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

fn take<const BYTES: usize>(rest: &mut &[u8]) -> Option<[u8; BYTES]> {
    let (taken, left) = rest.split_first_chunk()?;
    *rest = left;
    Some(*taken)
}

/// Pieces that cannot be.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PieceListError {
    /// A run is cut, has no bytes, overlaps itself or wraps.
    #[error("piece list: a run is none; every piece has bytes, and a stride is at least a piece")]
    Run,
    /// Too many pieces or bytes.
    #[error("piece list: more than {MAX_PIECES} pieces or {MAX_TRANSFER_BYTES} bytes; use several")]
    TooMany,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn place(window: u64, offset: u64) -> Place {
        Place {
            window,
            secret: WindowSecret::from_bytes([window as u8; 16]),
            offset,
        }
    }

    fn list(pieces: &[(u64, u64, u64)]) -> PieceList {
        let mut list = PieceList::default();
        for (window, offset, length) in pieces {
            list.push(&place(*window, *offset), *length).unwrap();
        }
        list
    }

    /// Window, offset and length of every piece, neighbours in one.
    fn pieces(list: &PieceList) -> Vec<(u64, u64, u64)> {
        let mut pieces: Vec<(u64, u64, u64)> = Vec::new();
        for run in list.runs() {
            for offset in run.offsets() {
                let window = list.windows()[run.window as usize].0;
                match pieces.last_mut() {
                    Some(last) if last.0 == window && last.1 + last.2 == offset => {
                        last.2 += run.length;
                    }
                    _ => pieces.push((window, offset, run.length)),
                }
            }
        }
        pieces
    }

    fn read(parts: &[Vec<u8>]) -> Result<PieceList, PieceListError> {
        let mut list = PieceList::default();
        parts.iter().try_for_each(|part| list.read_part(part))?;
        Ok(list)
    }

    #[test]
    fn even_distances_become_strides_and_neighbours_one_piece() {
        let strided: Vec<_> = (0..1000).map(|at| (3, at * 8192, 4096)).collect();
        let one = list(&strided);
        assert_eq!((one.runs().len(), one.pieces()), (1, 1000));
        assert!(one.parts()[0].len() < 40);
        let dense: Vec<_> = (0..1000).map(|at| (3, at * 4096, 4096)).collect();
        assert_eq!(
            (list(&dense).pieces(), list(&dense).bytes()),
            (1, 4_096_000)
        );
    }

    #[test]
    fn shuffled_pieces_cost_a_few_bytes_each() {
        let shuffled: Vec<_> = (0..81_920u64)
            .map(|at| (0, at * 40_503 % 81_920 * 4096, 4096))
            .collect();
        let one = list(&shuffled);
        let parts = one.parts();
        let bytes: usize = parts.iter().map(Vec::len).sum();
        assert!(bytes < 81_920 * 7, "{bytes} bytes");
        assert!(parts.iter().all(|part| part.len() <= MAX_PART_BYTES));
        assert_eq!(read(&parts), Ok(one));
    }

    #[test]
    fn a_window_is_named_once_however_pieces_alternate() {
        let mut list = PieceList::default();
        for at in 0..3 {
            for window in 0..20_000 {
                list.push(&place(window, at * 100), 8).unwrap();
            }
        }
        assert_eq!((list.windows().len(), list.runs().len()), (20_000, 60_000));
        let other_key = Place {
            secret: WindowSecret::from_bytes([9; 16]),
            ..place(3, 0)
        };
        list.push(&other_key, 8).unwrap();
        assert_eq!(list.windows().len(), 20_001);
    }

    fn run(flags: u8, numbers: &[u64]) -> Vec<u8> {
        let mut bytes = vec![flags | WINDOW | LENGTH, 0, 9];
        bytes.extend([7; 16]);
        for number in numbers {
            push_number(&mut bytes, *number);
        }
        bytes
    }

    #[test]
    fn no_piece_follows_beyond_the_last_offset() {
        let apart = list(&[(0, 0, 8), (0, 1 << 63, 8), (0, 0, 8)]);
        assert_eq!((apart.runs().len(), apart.pieces()), (2, 3));
        assert_eq!(read(&apart.parts()), Ok(apart));
    }

    #[test]
    fn hostile_strides_are_refused() {
        let strided = |length, offset: u64, stride, count| {
            read(&[run(STRIDED, &[length, offset << 1, stride, count])]).map(|list| list.pieces())
        };
        assert_eq!(strided(4, 0, 4, 1 << 20), Ok(1 << 20));
        for (length, offset, stride, count) in [
            (0, 0, 4, 2),
            (4, 0, 3, 2),
            (4, 0, 0, 2),
            (4, 0, 4, 0),
            (4, 0, u64::MAX, 3),
            (4, 0, 1 << 62, 5),
            (u64::MAX, 0, u64::MAX, 2),
            (4, (1 << 63) - 2, u64::MAX / 2, 2),
        ] {
            let refused = strided(length, offset, stride, count);
            assert_eq!(
                refused,
                Err(PieceListError::Run),
                "{length} {offset} {stride} {count}"
            );
        }
        for (length, count) in [(4, (1 << 20) + 1), (4, u64::MAX), (1 << 40, 1 << 10)] {
            assert_eq!(
                strided(length, 0, length, count),
                Err(PieceListError::TooMany)
            );
        }
        assert_eq!(read(&[vec![0, 0]]), Err(PieceListError::Run), "no window");
        assert_eq!(
            read(&[vec![WINDOW | LENGTH, 1, 9]]),
            Err(PieceListError::Run)
        );
        let mut many = vec![run(0, &[1, 0])];
        many.extend([run(STRIDED, &[1, 0, 1, 1 << 20])[..1].to_vec()]);
        assert_eq!(read(&many), Err(PieceListError::Run), "cut");
    }

    #[test]
    fn the_most_pieces_are_counted_over_all_parts() {
        let part = run(STRIDED, &[1, 0, 2, 1 << 19]);
        let again = [&[WINDOW | LENGTH | STRIDED, 0][..], &part[19..]].concat();
        assert_eq!(
            read(&[part.clone(), again.clone()]).map(|all| all.pieces()),
            Ok(MAX_PIECES)
        );
        assert_eq!(
            read(&[part, again.clone(), again]),
            Err(PieceListError::TooMany)
        );
    }

    proptest! {
        #[test]
        fn what_is_pushed_is_what_is_read(
            wanted in prop::collection::vec((0u64..3, 0u64..64, 1u64..5), 0..200),
        ) {
            let made = list(&wanted);
            let read = read(&made.parts()).unwrap();
            prop_assert_eq!(&read, &made);
            let mut joined: Vec<(u64, u64, u64)> = Vec::new();
            for (window, offset, length) in wanted {
                match joined.last_mut() {
                    Some(last) if last.0 == window && last.1 + last.2 == offset => last.2 += length,
                    _ => joined.push((window, offset, length)),
                }
            }
            prop_assert_eq!(pieces(&made), joined);
        }

        #[test]
        fn any_bytes_are_read_or_refused(part in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut list = PieceList::default();
            if list.read_part(&part).is_ok() {
                prop_assert!(list.pieces() <= MAX_PIECES);
                let again = read(&list.parts()).unwrap();
                prop_assert_eq!(again, list);
            }
        }
    }
}

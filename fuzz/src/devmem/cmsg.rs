//! Control messages of a device-memory receive, read a second time in the plainest way.

use std::collections::BTreeSet;

use tcpx_devmem::cmsg::{
    Added, BadControl, Binding, CmsgError, DeviceFragment, Dialect, GatherError, Gathered,
    HostPiece, Piece, Received,
};
use tcpx_devmem::tokens::{Returned, TokenError, TokenSet};

/// A receive as a hostile kernel would report it.
#[derive(Clone, Debug)]
pub struct Input {
    pub google: bool,
    pub truncated: bool,
    pub received: usize,
    pub iovec: usize,
    pub pool: u64,
    pub dmabuf: u32,
    pub control: Vec<u8>,
}

/// Input: how (u8: bit 0 Google's dialect, bit 1 truncated, bit 2 takes the records' true sum as
/// received), received u32, iovec u32, pool u64, dma-buf u32, then the control bytes.
pub fn run(data: &[u8]) {
    let Some((head, control)) = data.split_first_chunk::<21>() else {
        return;
    };
    let mut input = Input {
        google: head[0] & 1 == 1,
        truncated: head[0] & 2 == 2,
        received: number(&head[1..5]) as usize,
        iovec: number(&head[5..9]) as usize,
        pool: number(&head[9..17]) as u64,
        dmabuf: number(&head[17..21]) as u32,
        control: control.to_vec(),
    };
    if head[0] & 4 == 4 {
        input.received = sum(&input).min(1 << 40) as usize;
    }
    check(&input);
}

/// What a naive reader makes of it: pieces, and the number of the rule that was broken.
///
/// A piece is (type, offset in pool or iovec, length, token, dma-buf).
type Naive = (Vec<(char, u128, u128, u32, Option<u32>)>, Option<u8>);

/// Asserts that the parser, the gatherer and the token set do what the naive reader does.
pub fn check(input: &Input) {
    let binding = if input.google {
        Binding::Google {
            pool_bytes: input.pool,
        }
    } else {
        Binding::Mainline {
            pool_bytes: input.pool,
            dmabuf_id: input.dmabuf,
        }
    };
    let received = Received {
        bytes: input.received,
        iovec_bytes: input.iovec,
        control: &input.control,
        truncated: input.truncated,
    };

    let mut pieces = Vec::new();
    let mut broken = None;
    let mut iterator = received.pieces(binding);
    for piece in iterator.by_ref() {
        assert!(broken.is_none(), "something came after an error");
        match piece {
            Ok(piece) => pieces.push(plain(piece)),
            Err(error) => broken = Some(rule(&error)),
        }
    }
    assert!(iterator.next().is_none());
    let expected = naive(input);
    assert_eq!((pieces, broken), expected, "{input:?}");
    assert_eq!(broken.is_none(), accepts(input));

    gather(input, received, binding, &expected);
}

/// The same receive three times after each other, then all tokens back.
fn gather(input: &Input, received: Received<'_>, binding: Binding, expected: &Naive) {
    let mut gathered = Gathered::new();
    let mut tokens = TokenSet::new();
    let (mut destination, mut host_at) = (0u64, 77u64);
    let mut handed_out = BTreeSet::new();
    for round in 0..3u32 {
        let before = gathered.clone();
        // The second time every token comes again.
        if round == 2 {
            give_back(&mut tokens, &mut handed_out, binding.dialect());
        }
        let twice = expected
            .0
            .iter()
            .filter(|piece| piece.0 == 'd')
            .any(|piece| !handed_out.insert(piece.3));
        match gathered.add(received, binding, host_at, &mut tokens) {
            Ok(Added { device, host }) => {
                assert!(expected.1.is_none() && !twice);
                assert_eq!(device + host, input.received as u64);
                let (mut list, mut pieces) = (Vec::new(), Vec::new());
                for &(kind, offset, length, ..) in &expected.0 {
                    if kind == 'd' {
                        list.push((offset as u64, length as u32, destination));
                    } else {
                        pieces.push(HostPiece {
                            host_offset: host_at + offset as u64,
                            length: length as u64,
                            destination_offset: destination,
                        });
                    }
                    destination += length as u64;
                }
                let added = &gathered.list()[before.list().len()..];
                let added: Vec<_> = added
                    .iter()
                    .map(|piece| (piece.source_offset, piece.length, piece.destination_offset))
                    .collect();
                assert_eq!(added, list);
                assert_eq!(gathered.host_pieces()[before.host_pieces().len()..], pieces);
                assert_eq!(gathered.bytes(), destination);
                host_at += host;
            }
            Err(GatherError::Token(TokenError::Twice { .. })) => {
                assert!(twice);
                assert_eq!(gathered, before);
            }
            Err(GatherError::Control(error)) => {
                assert_eq!(Some(rule(&error)), expected.1);
                assert_eq!(gathered, before);
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Whether the naive reader finds nothing wrong.
pub fn accepts(input: &Input) -> bool {
    naive(input).1.is_none()
}

/// A model of the kernel that frees what it knows, at first only some of it.
fn give_back(tokens: &mut TokenSet, known: &mut BTreeSet<u32>, dialect: Dialect) {
    assert_eq!(tokens.fragments(), known.len() as u64);
    let mut limit = 3;
    while let Some(batch) = tokens.batch(dialect) {
        assert!(batch.as_bytes().len() <= 128 * 8 && batch.fragments() <= 1024);
        if dialect == Dialect::Google {
            limit = u32::MAX;
        }
        let (mut sent, mut freed) = (0, 0);
        for range in batch.as_bytes().chunks(8) {
            let (start, count) = (number(&range[..4]), number(&range[4..]));
            for token in start..start + count {
                sent += 1;
                if freed < limit && known.remove(&(token as u32)) {
                    freed += 1;
                }
            }
        }
        assert_eq!(sent, batch.fragments());
        let answer = if dialect == Dialect::Google { 0 } else { freed };
        match batch.answered(answer as i32) {
            Ok(Returned::All) => {}
            Ok(Returned::Part { left }) => {
                assert!(left > 0);
                limit = u32::MAX;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(known.is_empty() && tokens.is_empty() && tokens.fragments() == 0);
}

fn plain(piece: Piece) -> (char, u128, u128, u32, Option<u32>) {
    match piece {
        Piece::Device(DeviceFragment {
            pool_offset,
            length,
            token,
            dmabuf_id,
        }) => ('d', pool_offset.into(), length.into(), token, dmabuf_id),
        Piece::Linear {
            iovec_offset,
            length,
        } => ('l', iovec_offset.into(), length.into(), 0, None),
        Piece::Plain { length } => ('p', 0, length.into(), 0, None),
    }
}

/// A number for each rule.
fn rule(error: &CmsgError) -> u8 {
    match error {
        CmsgError::Truncated { .. } => 1,
        CmsgError::MoreThanOffered { .. } => 2,
        CmsgError::Messages(BadControl::HeaderCut { .. }) => 3,
        CmsgError::Messages(BadControl::Length { .. }) => 4,
        CmsgError::OtherDialect { .. } => 5,
        CmsgError::RecordBytes { .. } => 6,
        CmsgError::Flags { .. } => 7,
        CmsgError::UnknownDmabuf { .. } => 8,
        CmsgError::OutsidePool { .. } => 9,
        CmsgError::MoreThanReceived { .. } => 10,
        CmsgError::LessThanReceived { .. } => 11,
        other => panic!("{other:?} has no number"),
    }
}

fn naive(input: &Input) -> Naive {
    let mut pieces = Vec::new();
    if input.truncated {
        return (pieces, Some(1));
    }
    if input.received > input.iovec {
        return (pieces, Some(2));
    }
    let (messages, fault) = messages(&input.control);
    let (device, linear, size) = if input.google {
        (99, 98, 12)
    } else {
        (79, 78, 24)
    };
    let (mut total, mut in_iovec) = (0u128, 0u128);
    let mut records = 0;
    for (level, kind, payload) in messages {
        if level != 1 || ![78, 79, 98, 99].contains(&kind) {
            continue;
        }
        if kind != device && kind != linear {
            return (pieces, Some(5));
        }
        if payload.len() != size {
            return (pieces, Some(6));
        }
        let wide = if input.google { 4 } else { 8 };
        let offset = number(&payload[..wide]);
        let length = number(&payload[wide..wide + 4]);
        let token = number(&payload[wide + 4..wide + 8]) as u32;
        let id = (!input.google).then(|| number(&payload[16..20]) as u32);
        if !input.google && payload[20..24] != [0; 4] {
            return (pieces, Some(7));
        }
        if kind == device {
            if id.is_some_and(|id| id != input.dmabuf) {
                return (pieces, Some(8));
            }
            if offset + length > u128::from(input.pool) {
                return (pieces, Some(9));
            }
        }
        total += length;
        if total > input.received as u128 {
            return (pieces, Some(10));
        }
        records += 1;
        if kind == device {
            pieces.push(('d', offset, length, token, id));
        } else {
            pieces.push(('l', in_iovec, length, 0, None));
            in_iovec += length;
        }
    }
    if fault.is_some() {
        return (pieces, fault);
    }
    if records == 0 && input.received > 0 {
        pieces.push(('p', 0, input.received as u128, 0, None));
    } else if total != input.received as u128 {
        return (pieces, Some(11));
    }
    (pieces, None)
}

/// Level, type and payload.
type Message<'a> = (i128, i128, &'a [u8]);

/// Each message up to the first broken one, and the rule that it broke.
fn messages(control: &[u8]) -> (Vec<Message<'_>>, Option<u8>) {
    let mut found = Vec::new();
    let mut at = 0;
    while at < control.len() {
        let rest = &control[at..];
        if rest.len() < 16 {
            return (found, Some(3));
        }
        let length = number(&rest[..8]);
        if length < 16 || length > rest.len() as u128 {
            return (found, Some(4));
        }
        let signed = |word: &[u8]| i128::from(number(word) as u32 as i32);
        found.push((
            signed(&rest[8..12]),
            signed(&rest[12..16]),
            &rest[16..length as usize],
        ));
        at += length as usize;
        while at % 8 != 0 {
            at += 1;
        }
    }
    (found, None)
}

/// Bytes of all records, or 0 where something is broken.
fn sum(input: &Input) -> u128 {
    let unlimited = Input {
        received: usize::MAX,
        iovec: usize::MAX,
        ..input.clone()
    };
    match naive(&unlimited) {
        (pieces, Some(11)) => pieces.iter().map(|piece| piece.2).sum(),
        _ => 0,
    }
}

/// An unsigned integer in this machine's byte order.
fn number(bytes: &[u8]) -> u128 {
    let digit = |at: usize| u128::from(bytes[at]);
    let little = (0..bytes.len())
        .rev()
        .fold(0, |sum, at| sum << 8 | digit(at));
    let big = (0..bytes.len()).fold(0, |sum, at| sum << 8 | digit(at));
    if cfg!(target_endian = "little") {
        little
    } else {
        big
    }
}

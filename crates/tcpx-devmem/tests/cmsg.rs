//! Receives of both dialects, whole and damaged, against a reader that is slow and obvious.

use proptest::collection::vec;
use proptest::prelude::*;

#[path = "../../../fuzz/src/devmem/cmsg.rs"]
#[expect(
    unreachable_pub,
    reason = "the same source is a module of the fuzz crate"
)]
mod oracle;

use oracle::Input;

/// One control message, in words that know nothing of the parser.
#[derive(Clone, Debug)]
enum Message {
    Device {
        offset: u64,
        size: u32,
        token: u32,
        dmabuf: u32,
        flags: u32,
    },
    Linear {
        size: u32,
    },
    Other {
        level: i32,
        kind: i32,
        payload: Vec<u8>,
    },
}

fn encode(google: bool, messages: &[Message]) -> Vec<u8> {
    let mut control = Vec::new();
    for message in messages {
        let (level, kind, payload) = match message {
            Message::Device {
                offset,
                size,
                token,
                dmabuf,
                flags,
            } if google => {
                let _ = (dmabuf, flags);
                (
                    1,
                    99,
                    [*offset as u32, *size, *token]
                        .map(u32::to_ne_bytes)
                        .concat(),
                )
            }
            Message::Device {
                offset,
                size,
                token,
                dmabuf,
                flags,
            } => {
                let rest = [*size, *token, *dmabuf, *flags].map(u32::to_ne_bytes);
                (
                    1,
                    79,
                    [&offset.to_ne_bytes()[..], rest.as_flattened()].concat(),
                )
            }
            Message::Linear { size } if google => {
                (1, 98, [0, *size, 0].map(u32::to_ne_bytes).concat())
            }
            Message::Linear { size } => {
                (1, 78, [0, 0, *size, 0, 0, 0].map(u32::to_ne_bytes).concat())
            }
            Message::Other {
                level,
                kind,
                payload,
            } => (*level, *kind, payload.clone()),
        };
        control.extend((payload.len() + 16).to_ne_bytes());
        control.extend(i32::to_ne_bytes(level));
        control.extend(i32::to_ne_bytes(kind));
        control.extend(payload);
        control.resize(control.len().next_multiple_of(8), 0);
    }
    control
}

const POOL: u64 = 1 << 24;
const DMABUF: u32 = 5;

fn device(clean: bool) -> BoxedStrategy<Message> {
    let token = if clean {
        any::<u32>().boxed()
    } else {
        (0..40u32).boxed()
    };
    let odd = if clean { 0 } else { 1 };
    (
        0..POOL - 5000,
        prop_oneof![Just(1448u32), Just(4096), 1..5000u32],
        token,
        prop_oneof![40 => Just(DMABUF), odd => Just(6)],
        prop_oneof![40 => Just(0u32), odd => any::<u32>()],
        prop_oneof![40 => Just(0u64), odd => Just(POOL), odd => any::<u64>()],
    )
        .prop_map(
            |(offset, size, token, dmabuf, flags, far)| Message::Device {
                offset: offset.saturating_add(far),
                size,
                token,
                dmabuf,
                flags,
            },
        )
        .boxed()
}

fn messages(clean: bool) -> impl Strategy<Value = Vec<Message>> {
    let kinds = if clean {
        vec![2, 35]
    } else {
        vec![2, 35, 78, 79, 98, 99]
    };
    let other = (
        prop_oneof![10 => Just(6), 10 => Just(41), 1 => Just(1)],
        prop::sample::select(kinds),
        vec(any::<u8>(), 0..40),
    )
        .prop_map(|(level, kind, payload)| Message::Other {
            level,
            kind,
            payload,
        });
    let message = prop_oneof![
        12 => device(clean),
        3 => (1..2000u32).prop_map(|size| Message::Linear { size }),
        2 => other,
    ];
    vec(message, 0..60)
}

fn total(messages: &[Message]) -> usize {
    messages
        .iter()
        .map(|message| match message {
            Message::Device { size, .. } | Message::Linear { size } => *size as usize,
            Message::Other { .. } => 0,
        })
        .sum()
}

fn input(google: bool, messages: &[Message], received: usize) -> Input {
    Input {
        google,
        truncated: false,
        received,
        iovec: 1 << 24,
        pool: POOL,
        dmabuf: DMABUF,
        control: encode(google, messages),
    }
}

proptest! {
    #[test]
    fn whole_receives_read_as_the_obvious_reader_does(
        google: bool,
        messages in messages(true),
        plain in 0usize..100_000,
    ) {
        let bytes = match total(&messages) {
            0 => plain,
            described => described,
        };
        let input = input(google, &messages, bytes);
        prop_assert!(oracle::accepts(&input), "the generator made a broken receive");
        oracle::check(&input);
    }

    #[test]
    fn damaged_receives_fail_as_the_obvious_reader_does(
        google: bool,
        messages in messages(false),
        truncated in prop::bool::weighted(0.05),
        slip in prop_oneof![4 => Just(0isize), 1 => -3..3isize],
        iovec in prop_oneof![9 => Just(1usize << 24), 1 => 0..10_000usize],
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 0..2),
        cut in prop_oneof![3 => Just(0usize), 1 => 0..60usize],
    ) {
        let received = total(&messages).saturating_add_signed(slip);
        let mut input = Input { truncated, iovec, ..input(google, &messages, received) };
        for (at, byte) in damage {
            if !input.control.is_empty() {
                let at = at.index(input.control.len());
                input.control[at] = byte;
            }
        }
        input.control.truncate(input.control.len().saturating_sub(cut));
        oracle::check(&input);
    }

    #[test]
    fn any_bytes_are_read_to_an_end(data in vec(any::<u8>(), 0..400)) {
        oracle::run(&data);
    }
}

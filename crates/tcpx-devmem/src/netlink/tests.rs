use proptest::prelude::*;

use super::*;

/// A message as the kernel would send it.
fn message(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((16 + body.len() as u32).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend(7u32.to_ne_bytes());
    bytes.extend(body);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Attributes, taken from a request that has only them.
fn encoded(fill: impl FnOnce(Request) -> Request) -> Vec<u8> {
    fill(Request::new(0, 0)).encode(0)[20..].to_vec()
}

#[test]
fn a_request_reads_back_as_the_attributes_that_went_in() {
    let request = Request::new(34, 13)
        .u32(1, 9)
        .nested(2, |queue| queue.u32(1, 3).u32(3, 0))
        .u8(5, 200)
        .text(4, "dm1");
    let bytes = request.encode(77);
    let found: Vec<_> = messages(&bytes).collect::<Result<_, _>>().unwrap();
    let [
        Message {
            sequence: 77,
            answer:
                Answer::Object {
                    family: 34,
                    command: 13,
                    attributes: inside,
                },
        },
    ] = found[..]
    else {
        panic!("{found:?}");
    };
    let found: Vec<_> = attributes(inside).collect::<Result<_, _>>().unwrap();
    assert_eq!(
        found.iter().map(|one| one.kind).collect::<Vec<_>>(),
        [1, 2, 5, 4]
    );
    assert_eq!(found[0].u32().unwrap(), 9);
    assert_eq!(
        (found[2].u8().unwrap(), found[3].text()),
        (200, Some("dm1"))
    );
    let queue: Vec<_> = attributes(found[1].bytes)
        .map(|one| one.unwrap().u32().unwrap())
        .collect();
    assert_eq!(queue, [3, 0]);
    assert_eq!(&bytes[..4], (bytes.len() as u32).to_ne_bytes());
}

#[test]
fn an_error_carries_the_words_of_the_kernel() {
    let words = encoded(|request| request.text(1, "hds-thresh is not zero").u32(2, 8));
    let number = (-22i32).to_ne_bytes();
    let request = Request::new(34, 13).u8(1, 9).encode(5);
    let capped = [&number[..], &request[..16], &words].concat();
    let whole = [&number[..], &request, &words].concat();
    for (flags, body) in [(0x300, capped), (0x200, whole)] {
        let bytes = message(2, flags, 5, &body);
        let answer = messages(&bytes).next().unwrap().unwrap().answer;
        let expected = Answer::End {
            errno: 22,
            words: Some("hds-thresh is not zero"),
        };
        assert_eq!(answer, expected, "flags {flags:#x}");
    }
}

#[test]
fn an_acknowledgement_is_an_end_without_an_error() {
    let body = [&0i32.to_ne_bytes()[..], &[0; 16]].concat();
    let acknowledged = message(2, 0x100, 3, &body);
    let dumped = message(3, 0, 3, &0i32.to_ne_bytes());
    let bare = message(3, 0, 3, &[]);
    for bytes in [acknowledged, dumped, bare] {
        let answer = messages(&bytes).next().unwrap().unwrap().answer;
        assert_eq!(
            answer,
            Answer::End {
                errno: 0,
                words: None
            }
        );
    }
}

#[test]
fn a_dump_that_fails_has_its_words_behind_the_number() {
    let words = encoded(|request| request.text(1, "no"));
    let body = [&(-19i32).to_ne_bytes()[..], &words].concat();
    let bytes = message(3, 0x200, 3, &body);
    let answer = messages(&bytes).next().unwrap().unwrap().answer;
    assert_eq!(
        answer,
        Answer::End {
            errno: 19,
            words: Some("no")
        }
    );
}

#[test]
fn a_length_that_cannot_be_ends_the_messages() {
    let good = message(34, 0, 1, &[1, 1, 0, 0]);
    for length in [0u32, 15, 1000, u32::MAX] {
        let mut bytes = [&good[..], &good].concat();
        bytes[good.len()..][..4].copy_from_slice(&length.to_ne_bytes());
        let found: Vec<_> = messages(&bytes).collect();
        assert_eq!(found.len(), 2);
        assert!(found[0].is_ok() && found[1].is_err(), "{found:?}");
    }
}

#[test]
fn an_attribute_of_another_size_is_an_error_that_names_it() {
    let bytes = encoded(|request| request.u8(4, 1));
    let refused = attributes(&bytes)
        .next()
        .unwrap()
        .unwrap()
        .u32()
        .unwrap_err();
    let words = refused.to_string();
    assert!(words.contains('4') && words.contains('1'), "{words}");
}

proptest! {
    #[test]
    fn any_bytes_are_messages_or_one_error_at_the_end(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let found: Vec<_> = messages(&bytes).collect();
        let errors = found.iter().filter(|one| one.is_err()).count();
        prop_assert!(errors == 0 || (errors == 1 && found.last().unwrap().is_err()));
        for message in found.into_iter().flatten() {
            if let Answer::Object { attributes: inside, .. } = message.answer {
                prop_assert!(attributes(inside).count() <= inside.len() / 4 + 1);
            }
        }
    }

    #[test]
    fn an_answer_with_some_bytes_changed_never_panics(
        changes in prop::collection::vec((0usize..80, any::<u8>()), 1..4),
    ) {
        let words = encoded(|request| request.text(1, "tcp-data-split is disabled"));
        let body = [&(-22i32).to_ne_bytes()[..], &[0; 16], &words].concat();
        let mut bytes = message(2, 0x300, 5, &body);
        for (at, value) in changes {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        let _ = messages(&bytes).collect::<Vec<_>>();
    }
}

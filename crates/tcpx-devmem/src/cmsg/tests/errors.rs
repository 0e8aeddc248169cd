//! Every way in which a receive must not be believed, by name.

use super::*;

#[test]
fn a_truncated_control_buffer_names_itself() {
    let control = device(0, 4, 1);
    let received = Received {
        truncated: true,
        ..received(4, &control)
    };
    let mut pieces = received.pieces(MAINLINE);
    assert_eq!(
        pieces.next(),
        Some(Err(CmsgError::Truncated {
            control_bytes: 40,
            received: 4
        }))
    );
    assert_eq!(pieces.next(), None);
}

#[test]
fn a_record_of_the_wrong_size_is_named() {
    for (kind, name) in [(79, RecordKind::Device), (78, RecordKind::Linear)] {
        for arrived in [0, 12, 16, 23, 25, 32] {
            let control = [device(0, 1, 1), message(1, kind, &vec![0; arrived])].concat();
            assert_eq!(
                read(9, &control, MAINLINE),
                Err(CmsgError::RecordBytes {
                    record: 1,
                    kind: name,
                    expected: 24,
                    arrived
                })
            );
        }
    }
    assert_eq!(
        read(9, &message(1, 99, &[0; 16]), GOOGLE),
        Err(CmsgError::RecordBytes {
            record: 0,
            kind: RecordKind::Device,
            expected: 12,
            arrived: 16
        })
    );
}

#[test]
fn a_header_that_lies_about_its_length_is_named() {
    for arrived in [0, 1, 15, 41, 1 << 32, u64::MAX - 7, u64::MAX] {
        let mut control = [device(0, 1, 1), device(0, 1, 2)].concat();
        control[40..48].copy_from_slice(&arrived.to_ne_bytes());
        assert_eq!(
            read(2, &control, MAINLINE),
            Err(CmsgError::Messages(BadControl::Length {
                message: 1,
                offset: 40,
                most: 40,
                arrived
            }))
        );
    }
}

#[test]
fn a_header_that_is_cut_off_is_named() {
    for arrived in 1..16 {
        let mut control = device(0, 1, 1);
        control.extend(vec![0; arrived]);
        assert_eq!(
            read(1, &control, MAINLINE),
            Err(CmsgError::Messages(BadControl::HeaderCut {
                message: 1,
                offset: 40,
                arrived
            }))
        );
    }
}

#[test]
fn a_fragment_outside_the_pool_is_named() {
    for (pool_offset, length) in [
        ((1 << 20) - 3, 4),
        (1 << 20, 1),
        (u64::MAX, 1),
        (1 << 63, 0),
    ] {
        let control = device(pool_offset, length, 1);
        assert_eq!(
            read(4, &control, MAINLINE),
            Err(CmsgError::OutsidePool {
                record: 0,
                pool_offset,
                length,
                pool_bytes: 1 << 20
            })
        );
    }
    assert!(read(4, &device((1 << 20) - 4, 4, 1), MAINLINE).is_ok());
    assert!(matches!(
        read(4, &google(99, [u32::MAX, 4, 1]), GOOGLE),
        Err(CmsgError::OutsidePool { .. })
    ));
}

#[test]
fn an_unknown_dmabuf_is_named() {
    let control = mainline(79, 0, [4, 1, 8, 0]);
    assert_eq!(
        read(4, &control, MAINLINE),
        Err(CmsgError::UnknownDmabuf {
            record: 0,
            expected: 7,
            arrived: 8
        })
    );
}

#[test]
fn an_unknown_flag_is_named() {
    for (kind, name) in [(79, RecordKind::Device), (78, RecordKind::Linear)] {
        let control = mainline(kind, 0, [4, 1, 7, 0x10]);
        assert_eq!(
            read(4, &control, MAINLINE),
            Err(CmsgError::Flags {
                record: 0,
                kind: name,
                arrived: 0x10
            })
        );
    }
}

#[test]
fn a_record_of_the_other_dialect_is_never_plain_data() {
    for kind in [98, 99] {
        assert_eq!(
            read(4, &google(kind, [0, 4, 1]), MAINLINE),
            Err(CmsgError::OtherDialect {
                message: 0,
                device: 79,
                linear: 78,
                arrived: kind
            })
        );
    }
    let control = [message(41, 1, &[]), device(0, 4, 1)].concat();
    assert_eq!(
        read(4, &control, GOOGLE),
        Err(CmsgError::OtherDialect {
            message: 1,
            device: 99,
            linear: 98,
            arrived: 79
        })
    );
}

#[test]
fn records_of_more_than_was_received_are_named() {
    let control = [device(0, 4, 1), linear(4)].concat();
    assert_eq!(
        read(7, &control, MAINLINE),
        Err(CmsgError::MoreThanReceived {
            record: 1,
            kind: RecordKind::Linear,
            described: 8,
            received: 7
        })
    );
    assert!(matches!(
        read(0, &control, MAINLINE),
        Err(CmsgError::MoreThanReceived { record: 0, .. })
    ));
}

#[test]
fn records_of_less_than_was_received_are_named() {
    let control = [device(0, 4, 1), linear(4)].concat();
    assert_eq!(
        read(9, &control, MAINLINE),
        Err(CmsgError::LessThanReceived {
            records: 2,
            described: 8,
            received: 9
        })
    );
    // Records without bytes are records: the rest is not plain.
    assert_eq!(
        read(9, &linear(0), MAINLINE),
        Err(CmsgError::LessThanReceived {
            records: 1,
            described: 0,
            received: 9
        })
    );
}

#[test]
fn a_receive_of_more_than_the_iovec_is_named() {
    let received = Received {
        iovec_bytes: 8,
        ..received(9, &[])
    };
    assert_eq!(
        received.pieces(MAINLINE).next(),
        Some(Err(CmsgError::MoreThanOffered {
            iovec_bytes: 8,
            received: 9
        }))
    );
}

#[test]
fn each_error_ends_with_what_to_do() {
    let errors = [
        read(1, &[0; 3], MAINLINE).unwrap_err(),
        read(1, &[0; 16], MAINLINE).unwrap_err(),
        read(1, &device(0, 2, 1), MAINLINE).unwrap_err(),
        read(3, &device(0, 2, 1), MAINLINE).unwrap_err(),
        read(1, &device(0, 2, 1), GOOGLE).unwrap_err(),
        read(1, &device(u64::MAX, 1, 1), MAINLINE).unwrap_err(),
    ];
    for error in errors {
        assert!(error.to_string().contains("; "), "{error}");
        assert!(error.to_string().contains("close the channel"), "{error}");
    }
}

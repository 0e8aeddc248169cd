use crate::cmsg::{Dialect, SOL_SOCKET};
use tcpx_lanes::control_messages::cmsg_len;
use tcpx_memory::Region;

use super::*;

const POOL: u64 = 1 << 20;
const ID: u32 = 3;

fn inflow(pool: u64) -> Inflow {
    let region = Region::host(pool as usize).unwrap();
    let target = Target {
        pool: Arc::new(BouncePool::new(region.all())),
        dmabuf_id: ID,
        usage: PoolUse::of(pool),
    };
    Inflow::new(Some(target), LandingRing::new().unwrap())
}

/// Control messages of fragments (offset, size, token), linear where the token is 0.
fn records(fragments: &[(u64, u32, u32)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (offset, size, token) in fragments {
        let kind = if *token == 0 {
            Dialect::Mainline.linear_type()
        } else {
            Dialect::Mainline.device_type()
        };
        bytes.extend_from_slice(&cmsg_len(24).to_ne_bytes());
        bytes.extend_from_slice(&SOL_SOCKET.to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&offset.to_ne_bytes());
        for word in [*size, *token, ID, 0] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
    }
    bytes
}

/// One receive of these fragments.
fn receive(inflow: &mut Inflow, fragments: &[(u64, u32, u32)]) -> Vec<Completion> {
    let offer = inflow.offer(usize::MAX).expect("something is posted");
    let bytes = fragments.iter().map(|(_, size, _)| *size as usize).sum();
    assert!(bytes <= offer.slice.len(), "the test keeps to the offer");
    let mut out = Vec::new();
    let came = inflow.arrived(&offer, bytes, &records(fragments), false, &mut out);
    assert_eq!(came.unwrap(), Came::Expected);
    out
}

/// Kind, token, ticket and destinations.
type Shape = (&'static str, u64, u64, Vec<(u64, u32)>);

/// What was reported.
fn shape(out: &[Completion]) -> Vec<Shape> {
    let spans = |list: &ScatterList| {
        let span = |f: &Fragment| (f.destination_offset, f.length);
        list.iter().map(span).collect::<Vec<_>>()
    };
    let one = |one: &Completion| match one {
        Completion::Part {
            token,
            list,
            ticket,
            ..
        } => ("part", *token, ticket.0, spans(list)),
        Completion::Received {
            token,
            payload: Payload::Scattered { list, ticket, .. },
        } => ("end", *token, ticket.0, spans(list)),
        other => panic!("{other:?}"),
    };
    out.iter().map(one).collect()
}

#[test]
fn chunks_end_in_the_order_of_their_posting() {
    let mut inflow = inflow(POOL);
    inflow.post(10, 0, 3000);
    inflow.post(11, 1, 100);
    assert_eq!(
        shape(&receive(&mut inflow, &[(0, 1448, 1), (4096, 1448, 2)])),
        []
    );
    // The rest of the first chunk is 104 bytes: no more is offered, so no fragment is of two
    // chunks.
    assert_eq!(inflow.offer(usize::MAX).unwrap().slice.len(), 104);
    let ended = receive(&mut inflow, &[(8192, 104, 3)]);
    let spans = vec![(0, 1448), (1448, 1448), (2896, 104)];
    assert_eq!(shape(&ended), [("end", 10, 1, spans)]);
    let ended = receive(&mut inflow, &[(8296, 100, 4)]);
    assert_eq!(shape(&ended), [("end", 11, 2, vec![(0, 100)])]);
    assert!(inflow.offer(1).is_none());
    assert_eq!(inflow.stats().bytes_received, 3100);
}

#[test]
fn linear_bytes_are_a_part_of_their_own_and_end_the_chunk() {
    let mut inflow = inflow(POOL);
    inflow.post(1, 0, 300);
    let ended = receive(&mut inflow, &[(0, 100, 1), (0, 50, 0), (500, 150, 2)]);
    assert_eq!(
        shape(&ended),
        [
            ("part", 1, 1, vec![(0, 100), (150, 150)]),
            ("end", 1, 2, vec![(100, 50)])
        ]
    );
}

#[test]
fn tickets_come_back_in_order_and_once() {
    let mut inflow = inflow(POOL);
    for token in 0..2 {
        inflow.post(token, token, 10);
    }
    receive(&mut inflow, &[(0, 10, 7)]);
    receive(&mut inflow, &[(0, 10, 8)]);
    let expected = |oldest| Err(ConsumeError::Order { expected: oldest });
    assert_eq!(inflow.consume(Ticket(2)), expected(Some(1)));
    assert_eq!(inflow.consume(Ticket(1)), Ok(()));
    assert_eq!(inflow.consume(Ticket(1)), expected(Some(2)));
    assert_eq!(inflow.consume(Ticket(2)), Ok(()));
    assert_eq!(inflow.consume(Ticket(3)), expected(None));
    assert_eq!(inflow.consume(Ticket(0)), expected(None));
    assert!(inflow.returns().ranges().eq(std::iter::once(7..9)));
}

#[test]
fn a_chunk_too_large_for_the_pool_goes_in_parts() {
    let page = rustix::param::page_size() as u64;
    let mut inflow = inflow(16 * page);
    inflow.post(5, 0, 100);
    let mut reported = Vec::new();
    for token in 1..=9u32 {
        let at = u64::from(token) * page;
        reported.extend(shape(&receive(&mut inflow, &[(at, 10, token)])));
    }
    // At a quarter of the pool, and then with each receive, as long as nothing comes back.
    let spans: Vec<_> = (0..4).map(|one| (one * 10, 10)).collect();
    assert_eq!(reported[0], ("part", 5, 1, spans));
    assert_eq!(reported[1], ("part", 5, 2, vec![(40, 10)]));
    for ticket in 1..=6 {
        inflow.consume(Ticket(ticket)).unwrap();
    }
    assert_eq!(inflow.target().unwrap().usage.pinned(), 0);
    assert!(!inflow.reads_pool());
    let last = receive(&mut inflow, &[(0, 10, 1)]);
    assert_eq!(shape(&last), [("end", 5, 7, vec![(90, 10)])]);
}

#[test]
fn an_unbelievable_receive_takes_nothing() {
    let mut inflow = inflow(POOL);
    inflow.post(1, 0, 100);
    receive(&mut inflow, &[(0, 10, 1)]);
    let offer = inflow.offer(usize::MAX).unwrap();
    let mut out = Vec::new();
    for (bytes, control) in [
        (20, records(&[(0, 10, 2)])),
        (10, records(&[(POOL, 10, 2)])),
        (10, vec![1; 40]),
    ] {
        let refused = inflow.arrived(&offer, bytes, &control, false, &mut out);
        assert!(refused.is_err(), "{bytes} bytes");
    }
    assert_eq!((inflow.stats().bytes_received, out.len()), (10, 0));
    let page = rustix::param::page_size() as u64;
    assert_eq!(inflow.target().unwrap().usage.pinned(), page);
    assert_eq!(inflow.close(), [1]);
    assert_eq!(inflow.target().unwrap().usage.pinned(), 0);
}

#[test]
fn long_plain_runs_differ_from_unsplit_packets() {
    let mut inflow = inflow(POOL);
    let mut out = Vec::new();
    let mut plain = |inflow: &mut Inflow, bytes| {
        inflow.post(1, 0, bytes as u64);
        let offer = inflow.offer(usize::MAX).unwrap();
        let came = inflow.arrived(&offer, bytes, &[], false, &mut out);
        came.unwrap()
    };
    assert_eq!(plain(&mut inflow, 20), Came::Expected);
    assert_eq!(plain(&mut inflow, PLAIN_RUN as usize - 21), Came::Expected);
    inflow.post(2, 0, 10);
    receive(&mut inflow, &[(0, 10, 1)]);
    assert_eq!(plain(&mut inflow, PLAIN_RUN as usize - 1), Came::Expected);
    assert_eq!(plain(&mut inflow, 1), Came::Plain);
    assert_eq!(shape(&out)[0], ("end", 1, 1, vec![(0, 20)]));
}

//! A comm's own connection that breaks while both processes live: it comes back, and nothing is
//! lost, twice or late.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

use std::ptr;

use tcpx_tests::child::{self, ENCRYPTED, KEY, LANES, LOOPBACK, NO_LANES};
use tcpx_tests::nccl_link::{
    self, ANY, HOST, Link, MIB, PAIR, content, good, relayed, started, until,
};
use tcpx_tests::nccl_part::{Calls, Opaque};
use tcpx_tests::proxy::Fault;

/// Without lanes longer messages are not retained.
const SIZES: [usize; 6] = [8, 0, 4096, 16_384, 1, 10_000];

#[test]
fn a_reset_comm_loses_nothing_through_any_table() {
    child::run(&[LOOPBACK, NO_LANES], || {
        for version in 6..=12 {
            let (table, context) = started(version);
            // In a record, in a payload, and between two messages.
            for after in [10, 9_000, 0] {
                let (link, proxy) = relayed(&*table, context);
                link.transfer(8, 8);
                match after {
                    0 => proxy.reset(ANY),
                    after => proxy.break_line(ANY, proxy.carried(ANY) + after, Fault::Reset),
                }
                for size in SIZES {
                    link.transfer(size, size.max(1));
                }
                // A dial that a busy machine does not answer within a second is made again.
                assert!(proxy.opened(ANY) > PAIR, "v{version}, {after}");
                link.close();
            }
            assert_eq!(table.finalize(context), 0);
        }
    });
}

/// Moves messages one behind the other, eight at a time, each from memory that is overwritten once
/// its send is done; how many bits came other than they were sent.
fn stream(link: &Link<'_>, messages: usize, size_of: impl Fn(usize) -> usize) -> u64 {
    const DEPTH: usize = 8;
    let table = link.table;
    let room = (0..messages).map(&size_of).max().unwrap();
    let wanted = content(room + messages);
    let mut data = vec![0; room * DEPTH];
    let mut target = vec![0; room * DEPTH];
    let (_, from) = table.reg_mr(link.send, &mut data, HOST);
    let (_, to) = table.reg_mr(link.receive, &mut target, HOST);
    let none: Opaque = ptr::null_mut();
    let (mut sends, mut receives) = ([none; DEPTH], [none; DEPTH]);
    let (mut sent, mut posted, mut got, mut changed) = (0, 0, 0, 0);
    until("all messages", || {
        let place = posted % DEPTH;
        if posted < messages && receives[place].is_null() {
            let at = target[place * room..].as_mut_ptr();
            let request = good(table.irecv(link.receive, at, room, to, ptr::null_mut()));
            receives[place] = request;
            posted += usize::from(!request.is_null());
        }
        let place = sent % DEPTH;
        if sent < messages && sends[place].is_null() {
            let size = size_of(sent);
            let memory = &mut data[place * room..][..size];
            memory.copy_from_slice(&wanted[sent..sent + size]);
            let request = good(table.isend(link.send, memory.as_mut_ptr(), size, from));
            sends[place] = request;
            sent += usize::from(!request.is_null());
        }
        for (place, request) in sends.iter_mut().enumerate() {
            if !request.is_null() {
                let (rc, done, _) = table.test(*request);
                assert_eq!(rc, 0, "a send, after {got} messages");
                if done == 1 {
                    *request = ptr::null_mut();
                    data[place * room..][..room].fill(0xee);
                }
            }
        }
        let place = got % DEPTH;
        if !receives[place].is_null() {
            let (rc, done, size) = table.test(receives[place]);
            assert_eq!(rc, 0, "receive {got}");
            if done == 1 {
                let size = usize::try_from(size).unwrap();
                assert_eq!(size, size_of(got), "message {got}");
                let pairs = target[place * room..].iter().zip(&wanted[got..got + size]);
                changed += pairs
                    .map(|(one, other)| u64::from((one ^ other).count_ones()))
                    .sum::<u64>();
                receives[place] = ptr::null_mut();
                got += 1;
            }
        }
        got == messages && sends.iter().all(|request| request.is_null())
    });
    assert_eq!(table.dereg_mr(link.send, from), 0);
    assert_eq!(table.dereg_mr(link.receive, to), 0);
    changed
}

/// Streams while every connection is reset after so many bytes.
fn under_resets(messages: usize, size_of: impl Fn(usize) -> usize) {
    let (table, context) = started(12);
    let (link, proxy) = relayed(&*table, context);
    nccl_link::under_resets(&proxy, 700_000, || {
        assert_eq!(stream(&link, messages, size_of), 0);
    });
    assert!(proxy.opened(ANY) > 7 + PAIR);
    link.close();
}

#[test]
fn connections_reset_again_cost_speed_and_no_message() {
    child::run(&[LOOPBACK, NO_LANES], || {
        under_resets(1600, |number| number * 7919 % 16_385)
    });
}

#[test]
fn resets_of_connections_and_lanes_cost_no_message() {
    child::run(&[LOOPBACK, LANES], || {
        under_resets(400, |number| number * 104_729 % 400_000)
    });
}

#[test]
fn sealed_connections_and_lanes_that_are_reset_cost_no_message() {
    let [key, encrypts] = ENCRYPTED;
    child::run(&[LOOPBACK, LANES, key, encrypts], || {
        under_resets(400, |number| number * 104_729 % 400_000)
    });
}

#[test]
fn connections_with_a_key_that_are_reset_cost_no_message() {
    child::run(&[LOOPBACK, NO_LANES, KEY], || {
        under_resets(1600, |number| number * 7919 % 16_385)
    });
}

#[test]
fn resets_of_lanes_with_a_key_cost_no_message() {
    child::run(&[LOOPBACK, LANES, KEY], || {
        under_resets(400, |number| number * 104_729 % 400_000)
    });
}

/// Streams while a bit behind each `every` bytes changes on the way of all that its connections
/// carry: how many did, how many came so with messages, and how many connections and lanes had
/// brought what nobody had sealed.
fn flips(every: u64, messages: usize, size_of: impl Fn(usize) -> usize) -> [u64; 3] {
    let (table, context) = started(12);
    let (link, proxy) = relayed(&*table, context);
    proxy.flip([every..every + 1, 0..0]);
    let changed = stream(&link, messages, size_of);
    let flipped = proxy.flipped();
    let own = std::process::id();
    let mut processes = tcpx_status::processes().found.into_iter();
    let (_, socket) = processes.find(|(pid, _)| *pid == own).unwrap();
    let forged = tcpx_status::ask_process(own, &socket)
        .unwrap()
        .totals
        .lanes_forged;
    link.close();
    [flipped, changed, forged]
}

/// The same where none may come with a message.
fn under_flips(messages: usize, size_of: impl Fn(usize) -> usize) {
    let [flipped, changed, forged] = flips(400_000, messages, size_of);
    assert!(
        flipped > 8 && changed == 0 && forged > 4,
        "{flipped}, {forged}"
    );
}

#[test]
fn changed_bits_cost_keyed_connections_and_no_message() {
    child::run(&[LOOPBACK, NO_LANES, KEY], || {
        under_flips(25_600, |number| number * 7919 % 1024)
    });
}

#[test]
fn changed_bits_in_control_cost_lanes_and_no_message() {
    child::run(
        &[LOOPBACK, LANES, KEY, ("TCPX_NET_INLINE_BYTES", "4096")],
        || {
            // All sizes are right, and what lies bare has no more than the bits that were changed
            // there. Rarer than records are long, which must come whole: else nothing would.
            let [flipped, changed, forged] =
                flips(20_000, 3200, |number| 4097 + number * 7919 % 3000);
            assert!(changed > 0 && forged > 4, "{flipped}, {changed}, {forged}");
            assert!(
                changed + forged <= flipped,
                "{flipped}, {changed}, {forged}"
            );
        },
    );
}

#[test]
fn changed_bits_cost_sealed_connections_and_no_message() {
    let [key, encrypts] = ENCRYPTED;
    child::run(&[LOOPBACK, NO_LANES, key, encrypts], || {
        under_flips(1600, |number| number * 7919 % 16_385)
    });
}

#[test]
fn changed_bits_cost_sealed_lanes_and_no_message() {
    let [key, encrypts] = ENCRYPTED;
    child::run(&[LOOPBACK, LANES, key, encrypts], || {
        under_flips(400, |number| number * 104_729 % 400_000)
    });
}

/// Whether who listens on the way finds what stands in front of messages and of their parts on
/// lanes, and what they hold.
fn is_heard() -> [bool; 3] {
    let (table, context) = started(12);
    let (link, proxy) = relayed(&*table, context);
    link.warm();
    proxy.listen();
    let size_of = |number: usize| [100, 3000, 40_000, 400_000][number % 4];
    assert_eq!(stream(&link, 60, size_of), 0);
    let heard = proxy.heard();
    link.close();
    let holds = |part: &[u8]| heard.windows(part.len()).any(|bytes| bytes == part);
    // Content is random, repeated in blocks that each begin with their number.
    let heads = [holds(b"TxMs\0\0\0\0"), holds(b"TCPC\x02\0\0\0")];
    [heads[0], heads[1], repeats(&heard)]
}

/// Whether a part comes twice, as messages are cut out of the same content.
fn repeats(bytes: &[u8]) -> bool {
    let mut seen = std::collections::HashSet::new();
    bytes.windows(16).any(|part| !seen.insert(part))
}

#[test]
fn who_listens_on_the_way_learns_nothing_of_what_ranks_encrypt() {
    let [key, encrypts] = ENCRYPTED;
    child::run(&[LOOPBACK, LANES, key, encrypts], || {
        assert_eq!(is_heard(), [false; 3]);
    });
}

#[test]
fn a_listener_on_the_way_of_keyed_ranks_sees_payload() {
    child::run(&[LOOPBACK, LANES, KEY], || {
        assert_eq!(is_heard(), [false, false, true]);
    });
}

#[test]
fn a_listener_on_the_way_sees_all_that_is_clear() {
    child::run(&[LOOPBACK, LANES], || {
        assert_eq!(is_heard(), [true; 3]);
    });
}

#[test]
fn a_connection_that_brings_nothing_any_more_is_replaced() {
    child::run(&[LOOPBACK, NO_LANES], || {
        let (table, context) = started(12);
        for fault in [Fault::Stall, Fault::Swallow] {
            let (link, proxy) = relayed(&*table, context);
            proxy.break_line(ANY, 100_000, fault);
            for size in SIZES.into_iter().cycle().take(48) {
                link.transfer(size, size.max(1));
            }
            assert!(proxy.opened(ANY) > PAIR);
            // What it had comes late.
            proxy.wake(ANY);
            for size in SIZES {
                link.transfer(size, size.max(1));
            }
            link.close();
        }
    });
}

#[test]
fn what_was_sent_comes_though_its_host_calls_no_more() {
    child::run(&[LOOPBACK, NO_LANES], || {
        let (table, context) = started(12);
        let (link, proxy) = relayed(&*table, context);
        link.transfer(8, 8);
        let stalled = proxy.carried(ANY) + 1000;
        proxy.break_line(ANY, stalled, Fault::Stall);
        // Together they are more than the relay passes on before it looks at its orders.
        const COUNT: usize = 8;
        const LEN: usize = 16_000;
        let wanted = content(COUNT * LEN);
        let (mut data, mut target) = (wanted.clone(), vec![0; COUNT * LEN]);
        let (_, from) = table.reg_mr(link.send, &mut data, HOST);
        let (_, to) = table.reg_mr(link.receive, &mut target, HOST);
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for place in (0..COUNT * LEN).step_by(LEN) {
            let at = target[place..].as_mut_ptr();
            receives.push(table.irecv(link.receive, at, LEN, to, ptr::null_mut()).1);
            sends.push(
                table
                    .isend(link.send, data[place..].as_mut_ptr(), LEN, from)
                    .1,
            );
        }
        for sent in sends {
            assert_eq!(link.finish(sent), LEN);
        }
        assert_eq!(table.dereg_mr(link.send, from), 0);
        data.fill(0xee);
        let (rc, done, _) = table.test(receives[COUNT - 1]);
        assert_eq!((rc, done), (0, 0), "the relay holds it back");
        proxy.reset(ANY);
        for received in receives {
            assert_eq!(link.finish(received), LEN);
        }
        assert!(target == wanted);
        link.close();
    });
}

#[test]
fn a_sender_hears_of_reads_without_its_receivers_calls() {
    let long = ("TCPX_NET_INLINE_BYTES", "1048576");
    child::run(&[LOOPBACK, LANES, long], || {
        const LEN: usize = 100_000;
        let (table, context) = started(12);
        let (link, proxy) = relayed(&*table, context);
        link.transfer(8, 8);
        let wanted = content(LEN);
        let (mut data, mut target) = (wanted.clone(), vec![0; LEN]);
        let (_, from) = table.reg_mr(link.send, &mut data, HOST);
        let (_, to) = table.reg_mr(link.receive, &mut target, HOST);
        let carried = || proxy.carried(ANY);
        for _ in 0..10 {
            target.fill(0xee);
            let (before, at) = (carried(), target.as_mut_ptr());
            let (_, received) = table.irecv(link.receive, at, LEN, to, ptr::null_mut());
            let (_, sent) = table.isend(link.send, data.as_mut_ptr(), LEN, from);
            until("the relay to pass it on", || {
                let (rc, done, _) = table.test(sent);
                assert_eq!((rc, done), (0, 0), "nobody has read it");
                carried() >= before + LEN as u64
            });
            let opened = proxy.opened(ANY);
            proxy.reset(ANY);
            until("another connection", || proxy.opened(ANY) > opened);
            // All of it is here, and its receiver can tell nobody.
            assert_eq!(link.finish(received), LEN);
            assert!(target == wanted);
            assert_eq!(link.finish(sent), LEN);
        }
        link.close();
    });
}

/// A message that is written whole to a relay that holds it back, which then resets the connection;
/// what becomes of the send and of the receive.
fn long_message(table: &dyn Calls, context: Opaque, fault: Fault) -> [Result<usize, ()>; 2] {
    const LEN: usize = 300_000;
    let (link, proxy) = relayed(table, context);
    let (mut data, mut target) = (content(LEN), vec![0; LEN]);
    let (_, from) = table.reg_mr(link.send, &mut data, HOST);
    let (_, to) = table.reg_mr(link.receive, &mut target, HOST);
    link.transfer(8, 8);
    let stalled = proxy.carried(ANY) + 10_000;
    proxy.break_last(ANY, stalled, fault);
    let at = target.as_mut_ptr();
    let (_, received) = table.irecv(link.receive, at, LEN, to, ptr::null_mut());
    let (_, sent) = table.isend(link.send, data.as_mut_ptr(), LEN, from);
    let mut ends = [None, None];
    let mut is_reset = false;
    until("an end of both", || {
        for (request, end) in [sent, received].into_iter().zip(&mut ends) {
            if end.is_none() {
                *end = match table.test(request) {
                    (0, 1, size) => Some(Ok(usize::try_from(size).unwrap())),
                    (0, ..) => None,
                    _ => Some(Err(())),
                };
            }
        }
        // It is all in buffers of the kernel's.
        if !is_reset && proxy.carried(ANY) >= stalled {
            is_reset = true;
            proxy.reset(ANY);
        }
        ends.iter().all(Option::is_some)
    });
    if ends == [Some(Ok(LEN)); 2] {
        assert!(target == data);
    }
    link.close();
    ends.map(Option::unwrap)
}

#[test]
fn a_long_message_waits_for_its_receiver_and_is_sent_again() {
    child::run(&[LOOPBACK, LANES], || {
        let (table, context) = started(12);
        // The first long one of a comm takes no lanes.
        let ends = long_message(&*table, context, Fault::Stall);
        assert_eq!(ends, [Ok(300_000), Ok(300_000)]);
    });
}

#[test]
fn a_message_not_to_be_sent_again_fails_at_both_ends() {
    child::run(&[LOOPBACK, NO_LANES], || {
        let (table, context) = started(12);
        // Buffers of the kernel's take all of it at once, as a rule; what they do not take is still
        // there.
        match long_message(&*table, context, Fault::Stall) {
            [_, Err(())] | [Ok(300_000), Ok(300_000)] => {}
            ends => panic!("{ends:?}"),
        }
    });
}

#[test]
fn a_receiver_closing_while_cut_off_is_an_error() {
    child::run(&[LOOPBACK, NO_LANES], || {
        let (table, context) = started(12);
        // Another comm, so that the process's door stays.
        let stays = Link::new(&*table, context);
        let (link, proxy) = relayed(&*table, context);
        link.transfer(8, 8);
        proxy.reset(ANY);
        assert_eq!(table.close_recv(link.receive), 0);
        let mut data = content(MIB / 16);
        let (_, from) = table.reg_mr(link.send, &mut data, HOST);
        until("an error", || {
            let (rc, sent) = table.isend(link.send, data.as_mut_ptr(), data.len(), from);
            rc != 0 || !sent.is_null() && table.test(sent).0 != 0
        });
        assert_eq!(table.close_send(link.send), 0);
        stays.close();
    });
}

#[test]
fn a_sender_closing_while_cut_off_brings_what_it_sent() {
    child::run(&[LOOPBACK, NO_LANES], || {
        let (table, context) = started(12);
        for comes_back in [true, false] {
            let (link, proxy) = relayed(&*table, context);
            link.transfer(8, 8);
            let stalled = proxy.carried(ANY) + 1000;
            proxy.break_line(ANY, stalled, Fault::Stall);
            let (mut data, mut target) = (content(5000), vec![0; 5000]);
            let (_, from) = table.reg_mr(link.send, &mut data, HOST);
            let (_, to) = table.reg_mr(link.receive, &mut target, HOST);
            let at = target.as_mut_ptr();
            let (_, received) = table.irecv(link.receive, at, 5000, to, ptr::null_mut());
            let (_, sent) = table.isend(link.send, data.as_mut_ptr(), 5000, from);
            assert_eq!(link.finish(sent), 5000);
            if !comes_back {
                proxy.refuse(ANY);
                proxy.reset(ANY);
                // Neither waits for the other without an end.
                link.close();
                continue;
            }
            proxy.reset(ANY);
            std::thread::scope(|scope| {
                let received = Request(&*table, received);
                let receiver = scope.spawn(move || received.end());
                // The host calls nothing in between, so it may not know that the connection is
                // away.
                until("the monitor", || proxy.opened(ANY) > PAIR);
                assert_eq!(table.close_send(link.send), 0);
                assert!(receiver.join().unwrap());
            });
            assert!(target == data);
            assert_eq!(table.close_recv(link.receive), 0);
        }
    });
}

/// A request that another thread tests.
struct Request<'a>(&'a dyn Calls, Opaque);

// SAFETY: a table's calls may come from any thread, and only one has this request.
unsafe impl Send for Request<'_> {}

impl Request<'_> {
    /// Tests it until it ends; whether that is a success.
    fn end(self) -> bool {
        let mut end = false;
        until("the end of a request", || {
            let (rc, done, _) = self.0.test(self.1);
            end = rc == 0;
            rc != 0 || done == 1
        });
        end
    }
}

//! Receivers that post late, behind links that work or are down meanwhile: what a sender was told
//! is sent arrives, and the comm goes on.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

use std::path::{Path, PathBuf};
use std::ptr;
use std::time::{Duration, Instant};

use tcpx_tests::child::{self, ENCRYPTED, LANES, LOOPBACK, NO_LANES};
use tcpx_tests::namespaces::{Hosts, skips};
use tcpx_tests::nccl_link::{
    ANY, HOST, Link, MIB, PAIR, accepted, connected, content, good, handle_in, leave_handle,
    listening, relayed, started, until, until_calmly,
};
use tcpx_tests::nccl_messages::{receive_all, send_all};
use tcpx_tests::nccl_part::{Calls, Opaque};

/// Longer than a lane may stall while its peer is heard, so that silence alone would be taken for a
/// broken way.
const LATE: Duration = Duration::from_secs(5);

/// Sizes of messages, on both sides of each limit, and how many of each are sent.
const MESSAGES: [(usize, usize); 9] = [
    (1, 40),
    (0, 20),
    (4096, 40),
    (16_385, 40),
    (65_536, 40),
    (65_537, 12),
    (300_000, 12),
    (2 * MIB, 3),
    (16 * MIB, 1),
];

/// Messages of one size from one comm to another, each from memory that is overwritten once its
/// send is done.
struct Stream<'a> {
    link: Link<'a>,
    size: usize,
    messages: usize,
    wanted: Vec<u8>,
    data: Vec<u8>,
    target: Vec<u8>,
    from: Opaque,
    to: Opaque,
    /// Those that are under way, the oldest first, by number.
    sends: Vec<(usize, Opaque)>,
    posted: usize,
    sent: usize,
    receive: Opaque,
    received: usize,
}

impl<'a> Stream<'a> {
    fn new(link: Link<'a>, size: usize, messages: usize) -> Self {
        let wanted = content(size * messages);
        let mut data = wanted.clone();
        let mut target = vec![0; size + 1];
        let (_, from) = link.table.reg_mr(link.send, &mut data, HOST);
        let (_, to) = link.table.reg_mr(link.receive, &mut target, HOST);
        Self {
            link,
            size,
            messages,
            wanted,
            data,
            target,
            from,
            to,
            sends: Vec::new(),
            posted: 0,
            sent: 0,
            receive: ptr::null_mut(),
            received: 0,
        }
    }

    /// The sender's part.
    fn send(&mut self) {
        let table = self.link.table;
        if self.posted < self.messages {
            let at = self.data[self.posted * self.size..].as_mut_ptr();
            let (rc, request) = table.isend(self.link.send, at, self.size, self.from);
            assert_eq!(rc, 0, "{self}");
            if !request.is_null() {
                self.sends.push((self.posted, request));
                self.posted += 1;
            }
        }
        while let Some((number, request)) = self.sends.first().copied() {
            let (rc, done, _) = table.test(request);
            assert_eq!(rc, 0, "{self}");
            if done == 0 {
                break;
            }
            self.data[number * self.size..][..self.size].fill(0xee);
            self.sends.remove(0);
            self.sent += 1;
        }
    }

    /// The receiver's part.
    fn receive(&mut self) {
        let table = self.link.table;
        if self.receive.is_null() && self.received < self.messages {
            let (at, room) = (self.target.as_mut_ptr(), self.target.len());
            let none = ptr::null_mut();
            let (rc, request) = table.irecv(self.link.receive, at, room, self.to, none);
            assert_eq!(rc, 0, "{self}");
            self.receive = request;
        }
        if !self.receive.is_null() {
            let (rc, done, size) = table.test(self.receive);
            assert_eq!(rc, 0, "{self}");
            if done == 1 {
                assert_eq!(usize::try_from(size).unwrap(), self.size, "{self}");
                let wanted = &self.wanted[self.received * self.size..][..self.size];
                assert!(self.target[..self.size] == *wanted, "{self}");
                self.receive = ptr::null_mut();
                self.received += 1;
            }
        }
    }

    fn is_over(&self) -> bool {
        self.received == self.messages && self.sent == self.messages
    }
}

impl std::fmt::Display for Stream<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            size,
            messages,
            posted,
            sent,
            received,
            ..
        } = self;
        write!(
            f,
            "{messages} messages of {size} bytes: {posted} posted, {sent} sent, {received} received"
        )
    }
}

/// Everything is sent, as far as it can be, to receivers that post nothing for so long and then
/// all.
fn is_late(late: Duration, tables: &[(Box<dyn Calls>, Opaque)]) {
    let mut streams: Vec<_> = tables
        .iter()
        .flat_map(|(table, context)| {
            MESSAGES
                .map(|(size, messages)| Stream::new(Link::new(&**table, *context), size, messages))
        })
        .collect();
    let start = Instant::now();
    while start.elapsed() < late {
        streams.iter_mut().for_each(Stream::send);
        // Time for those who look after the connections.
        std::thread::sleep(Duration::from_millis(1));
    }
    until("all messages", || {
        for stream in &mut streams {
            stream.send();
            stream.receive();
        }
        streams.iter().all(Stream::is_over)
    });
    streams.into_iter().for_each(|stream| stream.link.close());
}

fn all_tables() -> Vec<(Box<dyn Calls>, Opaque)> {
    (6..=12).map(started).collect()
}

#[test]
fn a_receiver_that_posts_late_without_lanes_gets_all() {
    child::run(&[LOOPBACK, NO_LANES], || {
        is_late(LATE, &all_tables());
    });
}

#[test]
fn a_receiver_that_posts_late_with_lanes_gets_all() {
    child::run(&[LOOPBACK, LANES], || {
        is_late(LATE, &all_tables());
    });
}

#[test]
fn a_receiver_that_posts_late_gets_all_that_is_sealed() {
    let [key, encrypts] = ENCRYPTED;
    child::run(&[LOOPBACK, NO_LANES, key, encrypts], || {
        is_late(LATE, &[started(12)]);
    });
}

/// Longest message that is retained without lanes.
const RETAINED: usize = 16 << 10;

/// As [`is_late`], where all connections are reset again and again meanwhile.
fn is_late_under_resets(late: Duration, longest: usize) {
    const RESETS: u32 = 10;
    let (table, context) = started(12);
    let messages = MESSAGES.into_iter().filter(|(size, _)| *size <= longest);
    let mut streams: Vec<_> = messages
        .map(|(size, messages)| {
            let (link, proxy) = relayed(&*table, context);
            (Stream::new(link, size, messages), proxy)
        })
        .collect();
    let start = Instant::now();
    let mut resets = 0;
    while start.elapsed() < late {
        streams.iter_mut().for_each(|(stream, _)| stream.send());
        // For the first time when hardly anything was said.
        if start.elapsed() >= late * resets / RESETS {
            resets += 1;
            for (_, proxy) in &streams {
                proxy.reset(ANY);
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    until("all messages", || {
        for (stream, _) in &mut streams {
            stream.send();
            stream.receive();
        }
        streams.iter().all(|(stream, _)| stream.is_over())
    });
    for (stream, proxy) in streams {
        assert!(proxy.opened(ANY) > PAIR, "{stream}");
        stream.link.close();
    }
}

#[test]
fn a_receiver_that_is_late_gets_all_though_connections_break() {
    child::run(&[LOOPBACK, NO_LANES], || {
        is_late_under_resets(LATE, RETAINED);
    });
}

#[test]
fn a_receiver_that_is_late_gets_all_though_lanes_break() {
    child::run(&[LOOPBACK, LANES], || {
        is_late_under_resets(LATE, usize::MAX);
    });
}

#[test]
#[ignore = "long: run with --ignored"]
fn a_receiver_that_is_a_minute_late_gets_all_though_all_breaks() {
    child::run(&[LOOPBACK, LANES], || {
        is_late_under_resets(Duration::from_secs(60), usize::MAX);
    });
}

#[test]
#[ignore = "long: run with --ignored"]
fn a_receiver_that_posts_a_minute_late_gets_all() {
    child::run(&[LOOPBACK, NO_LANES], || {
        is_late(Duration::from_secs(60), &all_tables());
    });
}

const FOLDER: &str = "TCPX_TEST_FOLDER";
/// How long the link is down.
const DOWN: Duration = Duration::from_secs(20);

fn folder() -> PathBuf {
    std::env::var_os(FOLDER).unwrap().into()
}

/// Each case has a comm and a thread of its own: how many messages of what size, and whether their
/// receiver is late.
fn in_each_case(end: impl Fn(&dyn Calls, Opaque, usize, (usize, usize), bool) + Sync) {
    let (_, context) = started(12);
    let context = context as usize;
    std::thread::scope(|scope| {
        for number in 0..2 * MESSAGES.len() {
            let end = &end;
            scope.spawn(move || {
                let (table, _) = started(12);
                let messages = MESSAGES[number / 2];
                end(
                    &*table,
                    context as Opaque,
                    number,
                    messages,
                    number % 2 == 1,
                );
            });
        }
    });
}

/// The receiver's process, on the other host.
fn receive_each() {
    in_each_case(|table, context, number, messages, is_late| {
        let (listen, handle) = listening(table, context);
        leave_handle(&folder().join(number.to_string()), &handle);
        let receive = accepted(table, listen);
        let is_there = |name: &str| folder().join(name).exists();
        receive_all(table, receive, messages, |_| {
            is_there("the link is down") && !is_late || is_there("the link is up")
        });
    });
}

/// The sender's.
fn send_each() {
    in_each_case(|table, context, number, (size, messages), _| {
        let handle = handle_in(&folder().join(number.to_string()));
        let send = connected(table, context, handle);
        std::fs::write(folder().join(format!("{number} is there")), "").unwrap();
        send_all(table, send, size, messages);
        assert_eq!(table.close_send(send), 0);
    });
}

/// Everything is sent while the link is down, to receivers that read and to others that are late.
fn arrives_behind_an_outage(test: &str, name: &str, lanes: (&str, &str)) {
    if child::is_child("receive") {
        return receive_each();
    }
    if child::is_child("send") {
        return send_each();
    }
    if skips(test) {
        return;
    }
    let hosts = Hosts::new(name, &[1000]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let environment = [
        ("NCCL_SOCKET_IFNAME", "nic0"),
        lanes,
        (FOLDER, folder.path().to_str().unwrap()),
    ];
    let start = |on_a, role| hosts.start_part(on_a, (test, role), &environment).unwrap();
    let ends = [start(false, "receive"), start(true, "send")];
    let say = |what: &str| std::fs::write(folder.path().join(what), "").unwrap();
    let is_there = |number: usize| Path::exists(&folder.path().join(format!("{number} is there")));
    until_calmly("all comms", || (0..2 * MESSAGES.len()).all(is_there));
    hosts.cut(0).unwrap();
    say("the link is down");
    // The outage is what is tested.
    std::thread::sleep(DOWN);
    hosts.restore_link(0).unwrap();
    say("the link is up");
    for end in ends {
        assert!(end.end().unwrap().success());
    }
}

#[test]
#[ignore = "long: run with --ignored"]
fn all_arrives_behind_a_link_that_was_down_without_lanes() {
    let test = "all_arrives_behind_a_link_that_was_down_without_lanes";
    arrives_behind_an_outage(test, "down", NO_LANES);
}

#[test]
#[ignore = "long: run with --ignored"]
fn all_arrives_behind_a_link_that_was_down_with_lanes() {
    let test = "all_arrives_behind_a_link_that_was_down_with_lanes";
    arrives_behind_an_outage(test, "down-lanes", LANES);
}

/// One message through a comm, whose bytes are these.
fn one(table: &dyn Calls, comm: Opaque, bytes: &mut [u8], is_send: bool) {
    let memory = good(table.reg_mr(comm, bytes, HOST));
    let (at, len) = (bytes.as_mut_ptr(), bytes.len());
    let mut request: Opaque = ptr::null_mut();
    until_calmly("a message", || {
        if request.is_null() {
            request = match is_send {
                true => good(table.isend(comm, at, len, memory)),
                false => good(table.irecv(comm, at, len, memory, ptr::null_mut())),
            };
        }
        let (rc, done, _) = match request.is_null() {
            true => (0, 0, 0),
            false => table.test(request),
        };
        assert_eq!(rc, 0);
        done == 1
    });
    assert_eq!(table.dereg_mr(comm, memory), 0);
}

/// Some messages of different sizes to or from each comm.
fn some(table: &dyn Calls, comms: &[Opaque], is_send: bool) {
    for comm in comms {
        for len in [8, 100_000, MIB] {
            let wanted = vec![7; len];
            let mut bytes = if is_send {
                wanted.clone()
            } else {
                vec![0; len]
            };
            one(table, *comm, &mut bytes, is_send);
            assert!(bytes == wanted, "{len} bytes");
        }
    }
}

/// Connections of a process to the one on the other host, or from it.
fn ends(table: &dyn Calls, context: Opaque, count: usize, is_send: bool) -> Vec<Opaque> {
    let file = |number: usize| folder().join(number.to_string());
    let end = |number| match is_send {
        true => connected(table, context, handle_in(&file(number))),
        false => {
            let (listen, handle) = listening(table, context);
            leave_handle(&file(number), &handle);
            accepted(table, listen)
        }
    };
    (0..count).map(end).collect()
}

/// Comms that are used, rest through an outage, and are used again.
fn rests(is_send: bool) {
    let (table, context) = started(12);
    let comms = ends(&*table, context, 4, is_send);
    some(&*table, &comms, is_send);
    std::fs::write(folder().join(format!("{is_send} rests")), "").unwrap();
    until_calmly("the link", || folder().join("the link is up").exists());
    some(&*table, &comms, is_send);
    close(&*table, comms, is_send);
}

fn close(table: &dyn Calls, comms: Vec<Opaque>, is_send: bool) {
    for comm in comms {
        let closed = match is_send {
            true => table.close_send(comm),
            false => table.close_recv(comm),
        };
        assert_eq!(closed, 0);
    }
}

/// Comms rest while their hosts do not reach each other.
fn rest_through(test: &str, hosts: impl FnOnce() -> Hosts, outage: impl FnOnce(&Hosts)) {
    if child::is_child("rests, receives") {
        return rests(false);
    }
    if child::is_child("rests, sends") {
        return rests(true);
    }
    if skips(test) {
        return;
    }
    let (hosts, folder) = (hosts(), tempfile::tempdir().unwrap());
    let environment = [
        ("NCCL_SOCKET_IFNAME", "nic0"),
        LANES,
        (FOLDER, folder.path().to_str().unwrap()),
    ];
    let start = |on_a, role| hosts.start_part(on_a, (test, role), &environment).unwrap();
    let ends = [start(false, "rests, receives"), start(true, "rests, sends")];
    until_calmly("rest", || {
        let rests = |is_send: bool| folder.path().join(format!("{is_send} rests")).exists();
        rests(true) && rests(false)
    });
    outage(&hosts);
    std::fs::write(folder.path().join("the link is up"), "").unwrap();
    for end in ends {
        assert!(end.end().unwrap().success());
    }
}

#[test]
#[ignore = "long: run with --ignored"]
fn comms_that_rest_outlive_fifty_seconds_without_a_link() {
    let test = "comms_that_rest_outlive_fifty_seconds_without_a_link";
    let hosts = || Hosts::new("rest", &[1000]).unwrap();
    rest_through(test, hosts, |hosts| {
        hosts.cut(0).unwrap();
        // The outage is what is tested.
        std::thread::sleep(Duration::from_secs(50));
        hosts.restore_link(0).unwrap();
    });
}

#[test]
#[ignore = "long: run with --ignored"]
fn comms_that_rest_outlive_ninety_seconds_of_lost_packets() {
    let test = "comms_that_rest_outlive_ninety_seconds_of_lost_packets";
    let hosts = || Hosts::flat("rest-lost", 1).unwrap();
    rest_through(test, hosts, |hosts| {
        hosts.unplug(0).unwrap();
        // The outage is what is tested.
        std::thread::sleep(Duration::from_secs(90));
        hosts.plug(0).unwrap();
    });
}

/// A rank with many comms, in the folder that it shares with its peer.
fn many(is_send: bool) {
    let (table, context) = started(12);
    let comms = ends(&*table, context, 64, is_send);
    some(&*table, &comms, is_send);
    close(&*table, comms, is_send);
}

#[test]
#[ignore = "long: run with --ignored"]
fn sixteen_ranks_of_sixty_four_comms_share_a_host() {
    let test = "sixteen_ranks_of_sixty_four_comms_share_a_host";
    if child::is_child("many, receives") {
        return many(false);
    }
    if child::is_child("many, sends") {
        return many(true);
    }
    let folders: Vec<_> = (0..8).map(|_| tempfile::tempdir().unwrap()).collect();
    let start = |folder: &tempfile::TempDir, role| {
        let folder = (FOLDER, folder.path().to_str().unwrap());
        child::start(test, role, &[LOOPBACK, LANES, folder])
    };
    let ranks = folders
        .iter()
        .flat_map(|folder| ["many, receives", "many, sends"].map(|role| start(folder, role)));
    let ranks: Vec<_> = ranks.collect();
    ranks.into_iter().for_each(|rank| rank.succeeds());
}

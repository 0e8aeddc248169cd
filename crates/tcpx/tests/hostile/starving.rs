//! Peers that ask for as much work as they can: other connections of the process go on beside them.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tcpx::{Auth, Connection, Endpoint, Region, Rights, WindowKey};
use tcpx_wire::Level;
use tcpx_wire::frame::{Extent, Frame};
use tcpx_wire::pieces::{MAX_PIECES, PieceList};

use crate::peer::Peer;
use crate::{LONG, key, local, pair, tcp};

/// A list of as many pieces as there may be, no two of them one run; the last one ends behind the window if it is `bad`.
fn long_list(key: &WindowKey, is_bad: bool) -> PieceList {
    let mut list = PieceList::default();
    let room = u64::from(MAX_PIECES) * 4;
    for at in 0..u64::from(MAX_PIECES) - 1 {
        let offset = (at * 3 + at % 2) % room;
        list.push(&key.at(offset), 1).expect("a piece");
    }
    let last = if is_bad { key.bytes } else { 0 };
    list.push(&key.at(last), 1).expect("a piece");
    list
}

fn tell(peer: &mut Peer, number: u64, list: &PieceList) -> Vec<u8> {
    let parts = list.parts();
    let mut bytes = Vec::new();
    for (at, part) in parts.iter().enumerate() {
        bytes.extend(peer.encode(&Frame::Pieces {
            list: number,
            last: at + 1 == parts.len(),
            part: part.clone(),
        }));
    }
    bytes
}

/// Gets that are refused for their last piece.
fn bad_gets(peer: &mut Peer, key: &WindowKey, mut write: impl FnMut(&mut Peer, Vec<u8>) -> bool) {
    let list = long_list(key, true);
    let told = tell(peer, 0, &list);
    let mut goes_on = write(peer, told);
    let mut requests = 0..;
    while goes_on {
        let mut bytes = Vec::new();
        for request in requests.by_ref().take(1000) {
            bytes.extend(peer.encode(&Frame::Get {
                request,
                from: Extent::Pieces(0),
                bytes: list.bytes(),
                level: Level::Placed,
            }));
        }
        goes_on = write(peer, bytes);
    }
}

/// Lists that nothing names.
fn lists(peer: &mut Peer, key: &WindowKey, mut write: impl FnMut(&mut Peer, Vec<u8>) -> bool) {
    let list = long_list(key, false);
    for number in 0.. {
        let mut bytes = tell(peer, number, &list);
        bytes.extend(peer.encode(&Frame::DropPieces { list: number }));
        if !write(peer, bytes) {
            return;
        }
    }
}

/// How long some gets take, which their owner's side serves on the thread that all connections share.
fn gets(user: &Connection, key: &WindowKey) -> Duration {
    let began = Instant::now();
    for _ in 0..50 {
        let to = Region::host(4096).expect("memory");
        let get = user.get(to.all(), key, 0).start().expect("room");
        get.wait().expect("an honest get");
    }
    began.elapsed()
}

#[test]
fn a_peer_that_asks_for_much_work_does_not_stop_others() {
    let options = tcp(Auth::Key(key()));
    let (owner, user) = pair(&options, &options);
    let memory = Region::host(4096).expect("memory");
    let window = owner.expose(memory.all(), Rights::Get).expect("open");
    let honest = window.key();
    let endpoint = Endpoint::listen(local(), options.clone()).expect("a free port");
    let address = endpoint.local_addr();
    type Write<'a> = &'a mut dyn FnMut(&mut Peer, Vec<u8>) -> bool;
    let floods: [fn(&mut Peer, &WindowKey, Write<'_>); 2] = [
        |peer, key, write| bad_gets(peer, key, write),
        |peer, key, write| lists(peer, key, write),
    ];
    for flood in floods {
        let auth = options.auth.clone();
        let connecting = thread::spawn(move || {
            let (mut peer, session) = Peer::connect(address, &auth);
            let lane = peer.set_up(address, &session);
            (peer, lane)
        });
        let theirs = endpoint.accept(LONG).expect("it has the key");
        let (mut peer, lane) = connecting.join().expect("no panic");
        let room = Region::host(MAX_PIECES as usize * 4).expect("memory");
        let open = theirs.expose(room.all(), Rights::Get).expect("open");
        let key = open.key();
        let alone = gets(&user, &honest);
        let [stop, flooded] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let (stopped, has_flooded) = (Arc::clone(&stop), Arc::clone(&flooded));
        let mut answers = peer.stream.try_clone().expect("a socket");
        let reading = thread::spawn(move || {
            // Its answers are read, as otherwise it would be cut off.
            let mut buffer = vec![0; 1 << 20];
            while answers.read(&mut buffer).is_ok_and(|read| read > 0) {}
        });
        let flooding = thread::spawn(move || {
            let mut first = true;
            flood(&mut peer, &key, &mut |peer, bytes| {
                let written = peer.stream.write_all(&bytes).is_ok();
                has_flooded.store(!first, Ordering::Relaxed);
                first = false;
                written && !stopped.load(Ordering::Relaxed)
            });
            peer.stream
                .shutdown(std::net::Shutdown::Both)
                .expect("a socket");
        });
        while !flooded.load(Ordering::Relaxed) && !flooding.is_finished() {
            thread::yield_now();
        }
        let beside = gets(&user, &honest);
        stop.store(true, Ordering::Relaxed);
        flooding.join().expect("no panic");
        reading.join().expect("no panic");
        drop((lane, open, theirs));
        // A turn of the peer's connection took most of a second before each answer.
        let most = 20 * alone + Duration::from_secs(5);
        assert!(beside < most, "{alone:?} alone and {beside:?} beside it");
    }
}

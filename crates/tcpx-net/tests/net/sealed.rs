//! Lanes of peers with a key: what something between the hosts changes is found before it is
//! anywhere, and costs a lane.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tcpx_lanes::sealing::Protection;
use tcpx_memory::Region;
use tcpx_net::{Cancel, Completion, NetworkError, TcpOptions};
use tcpx_wire::chunk_header::ChunkHeader;
use tcpx_wire::lane_seal::{HEADER_BYTES, LaneKeys, TAG_BYTES, sealed_payload_bytes};

use crate::support::*;
use crate::transfers::exchange_over;

/// Bytes of a lane's handshake from the client, and from the server.
const HANDSHAKE: [usize; 2] = [88 + 18, 64];

/// One direction of a connection through a relay: its number among the connections, 0 from the
/// client and 1 from the server, and the bytes, which begin at this place. Whether the connection
/// goes on.
type Meddle = dyn Fn(usize, usize, usize, &mut [u8]) -> bool + Send + Sync;

/// Carries connections to `server`; they end with their peers.
fn relay(server: SocketAddr, meddle: Arc<Meddle>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for (number, client) in (0..).zip(listener.incoming()) {
            let (Ok(client), Ok(server)) = (client, TcpStream::connect(server)) else {
                return;
            };
            for (direction, from, to) in [(0, &client, &server), (1, &server, &client)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let meddle = Arc::clone(&meddle);
                std::thread::spawn(move || {
                    let (mut bytes, mut place) = (vec![0; 32 << 10], 0);
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        let some = &mut bytes[..count];
                        if !meddle(number, direction, place, some) || to.write_all(some).is_err() {
                            break;
                        }
                        place += count;
                    }
                    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                });
            }
        }
    });
    address
}

/// A number that looks random, of a seed.
fn mixed(seed: usize) -> usize {
    (seed as u64 ^ 0x5DEE_CE66).wrapping_mul(0x9e37_79b9_7f4a_7c15) as usize >> 20
}

#[test]
fn flipped_bits_never_make_a_wrong_success() {
    const FLIPS: usize = 30;
    let flips = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&flips);
    let meddle = move |number: usize, direction: usize, place: usize, bytes: &mut [u8]| {
        // Both directions of each connection: no way around that.
        let at = HANDSHAKE[direction] + mixed(2 * number + direction) % 300_000;
        let inside = (place..place + bytes.len()).contains(&at);
        if inside && counted.load(Ordering::Relaxed) < FLIPS {
            counted.fetch_add(1, Ordering::Relaxed);
            bytes[at - place] ^= 1 << (number % 8);
        }
        true
    };
    let mut pair = pair_through(
        3,
        TcpOptions::default(),
        TcpOptions::default(),
        Vec::new(),
        Protection::All,
        |server| relay(server, Arc::new(meddle)),
    );
    // Every byte is compared.
    let sizes: Vec<usize> = (0..60).map(|at| 1 + mixed(at) % (1 << 20)).collect();
    exchange_over(&mut pair, [sizes.clone(), sizes], &[0, 1, 2, 3]);
    let (client, server) = (pair.client.stats(), pair.server.stats());
    assert_eq!(flips.load(Ordering::Relaxed), FLIPS);
    let forged = client.lanes_forged + server.lanes_forged;
    assert!((1..=FLIPS as u64).contains(&forged), "{forged}");
    assert!(client.lanes_restored > 0, "{client:?}");
}

/// All chunks hold the same bytes, so that two records with one key and one number are the same.
#[test]
fn no_nonce_comes_twice_over_resends_and_redials() {
    const BYTES: usize = 100_000;
    const COUNT: u64 = 80;
    const CUTS: usize = 6;
    let heard: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let hears = Arc::clone(&heard);
    let meddle = move |number: usize, direction: usize, place: usize, bytes: &mut [u8]| {
        if direction == 1 {
            return true;
        }
        let mut heard = hears.lock().unwrap();
        if heard.len() <= number {
            heard.resize(number + 1, Vec::new());
        }
        heard[number].extend_from_slice(bytes);
        number >= CUTS || place + bytes.len() < 450_000 + number * 50_000
    };
    let mut pair = pair_through(
        2,
        TcpOptions::default(),
        TcpOptions::default(),
        Vec::new(),
        Protection::All,
        |server| relay(server, Arc::new(meddle)),
    );
    let source = Region::host(BYTES).unwrap();
    let destinations: Vec<_> = (0..COUNT).map(|_| guarded(BYTES)).collect();
    let (mut sent, mut closed, mut out) = (0, 0, Vec::new());
    while closed < COUNT {
        if sent < COUNT && sent < closed + 16 {
            open_window(&mut *pair.server, sent, destinations[sent as usize].clone());
            post_send(&mut *pair.client, sent, source.all());
            sent += 1;
            continue;
        }
        wait_any(&[&*pair.client, &*pair.server]);
        pair.client.poll(&mut out).unwrap();
        pair.server.poll(&mut out).unwrap();
        for one in out.drain(..) {
            match one {
                Completion::Placed { token, .. } => pair.client.placed(token - 1000).unwrap(),
                Completion::Closed { .. } => closed += 1,
                // A lane is dialled again.
                Completion::Sent { .. }
                | Completion::Begun { .. }
                | Completion::LaneMissing { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
    let stats = pair.client.stats();
    assert!(
        stats.lanes_restored >= 1 && stats.chunks_resent >= 1,
        "{stats:?}"
    );
    let (mut headers, mut payloads) = (HashSet::new(), HashSet::new());
    let (mut chunks, mut records) = (0, 0);
    for stream in heard.lock().unwrap().iter() {
        let stream = stream.get(HANDSHAKE[0]..).unwrap_or_default();
        // The last of a lane that was cut is not whole, and is the one that was sent again for
        // certain.
        for chunk in stream.chunks(HEADER_BYTES + sealed_payload_bytes(BYTES)) {
            let Some((header, payload)) = chunk.split_at_checked(HEADER_BYTES) else {
                continue;
            };
            // All headers begin alike.
            headers.insert(header[..5].to_vec());
            chunks += 1;
            for record in payload.chunks((64 << 10) + TAG_BYTES) {
                if let Some(begin) = record.get(..32) {
                    payloads.insert(begin.to_vec());
                    records += 1;
                }
            }
        }
    }
    assert!(chunks > COUNT as usize, "{chunks} chunks, none was resent");
    assert_eq!((headers.len(), payloads.len()), (chunks, records));
}

/// What the peer has sent ends the channel's only lane, is counted, and goes nowhere.
fn refused(protection: Protection, seal: impl FnOnce(LaneKeys) -> Vec<u8>) {
    let (mut raw, keys) = raw_peer_with(1, options(false), protection);
    let destination = guarded(100_000);
    open_window(&mut *raw.channel, 0, destination.clone());
    let bytes = seal(keys.into_iter().next().unwrap());
    (&raw.lanes[0]).write_all(&bytes).unwrap();
    wait_until(|| raw.channel.stats().lanes_forged == 1);
    drop(close(&mut *raw.channel));
    untouched(&destination);
}

#[test]
fn a_header_that_the_peer_did_not_seal_ends_the_lane() {
    for protection in [Protection::Headers, Protection::All] {
        // Another key, another direction's, no key, a flipped bit, a record that comes again.
        refused(protection, |_| {
            let (mut sealer, _) = LaneKeys::new([9; 32], [9; 32]).start();
            sealer.seal_header(&header(0, 100_000)).to_vec()
        });
        refused(protection, |_| {
            let mut plain = header(0, 100_000).to_vec();
            plain.resize(HEADER_BYTES, 0);
            plain
        });
        refused(protection, |keys| {
            let mut sealed = keys.start().0.seal_header(&header(0, 100_000));
            sealed[47] ^= 0x80;
            sealed.to_vec()
        });
    }
}

#[test]
fn payload_that_the_peer_did_not_seal_reaches_no_destination() {
    const RECORD: usize = 64 << 10;
    // In the first record and in its tag.
    for flipped in [0, RECORD / 2, RECORD - 1, RECORD, RECORD + TAG_BYTES - 1] {
        refused(Protection::All, |keys| {
            let (mut sealer, _) = keys.start();
            let mut bytes = sealer.seal_header(&header(0, 100_000)).to_vec();
            let payload = bytes.len();
            // All of the chunk comes: in the middle of one a lane is not woken for less than the
            // rest of it.
            for length in [RECORD, 100_000 - RECORD] {
                let mut record = vec![1; length];
                let tag = sealer.seal(&mut record);
                bytes.extend_from_slice(&record);
                bytes.extend_from_slice(&tag);
            }
            bytes[payload + flipped] ^= 1;
            bytes
        });
    }
}

#[test]
fn a_header_that_comes_again_ends_the_lane() {
    let (mut raw, keys) = raw_peer_with(1, options(false), Protection::Headers);
    let destination = guarded(100);
    open_window(&mut *raw.channel, 0, destination.clone());
    let (mut sealer, _) = keys.into_iter().next().unwrap().start();
    let mut bytes = sealer.seal_header(&header(0, 100)).to_vec();
    bytes.extend((0..100).map(|at| pattern(0, at)));
    for _ in 0..2 {
        (&raw.lanes[0]).write_all(&bytes).unwrap();
    }
    let (error, _) = breakage(&mut *raw.channel);
    for words in ["record 1 ", "not what the peer sealed"] {
        assert!(error.to_string().contains(words), "{error}");
    }
    drop(close(&mut *raw.channel));
    check(&destination, 0);
}

#[test]
fn a_chunk_of_a_window_that_closed_is_opened_and_dropped() {
    let (mut raw, keys) = raw_peer_with(1, options(false), Protection::All);
    let (first, second) = (guarded(300_000), guarded(300));
    open_window(&mut *raw.channel, 0, first.clone());
    open_window(&mut *raw.channel, 1, second.clone());
    let (mut sealer, _) = keys.into_iter().next().unwrap().start();
    let mut chunk = |header: &[u8; ChunkHeader::BYTES], window, bytes: usize| {
        let mut sent = sealer.seal_header(header).to_vec();
        for start in (0..bytes).step_by(64 << 10) {
            let end = bytes.min(start + (64 << 10));
            let mut record: Vec<u8> = (start..end).map(|at| pattern(window, at)).collect();
            let tag = sealer.seal(&mut record);
            sent.extend_from_slice(&record);
            sent.extend_from_slice(&tag);
        }
        sent
    };
    let bytes = chunk(&header(0, 300_000), 0, 300_000);
    let mut lane = &raw.lanes[0];
    // It is taken, and its first record is there: of what was sent less than 128 KiB may wait in
    // the socket.
    lane.write_all(&bytes[..200_000]).unwrap();
    wait_until(|| raw.channel.stats().bytes_received >= 64 << 10);
    assert_eq!(raw.channel.cancel(1000), Cancel::Pending);
    assert_eq!(closed_token(&completions(&mut *raw.channel, 1)[0]), 1000);
    lane.write_all(&bytes[200_000..]).unwrap();
    lane.write_all(&chunk(&header(1, 300), 1, 300)).unwrap();
    assert_eq!(received(&mut *raw.channel, 1), [1001]);
    check(&second, 1);
    let stats = raw.channel.stats();
    assert_eq!(stats.bytes_received + stats.bytes_discarded, 300_000 + 300);
    assert!(stats.bytes_discarded >= 100_000, "{stats:?}");
}

#[test]
fn encryption_is_agreed_or_refused() {
    for (client, server) in [
        (Protection::All, Protection::Headers),
        (Protection::Headers, Protection::All),
    ] {
        let (ours, theirs) = outcomes(Protection::Headers, client, server);
        for (outcome, encrypts) in [(ours, client), (theirs, server)] {
            let error = outcome.unwrap_err();
            let expected = encrypts == Protection::All;
            assert!(
                matches!(error, NetworkError::EncryptionDiffers { ours, .. } if ours == expected),
                "{error}"
            );
        }
    }
    let (ours, theirs) = outcomes(Protection::None, Protection::All, Protection::All);
    for outcome in [ours, theirs] {
        assert_eq!(outcome.unwrap_err(), NetworkError::EncryptionNeedsKey);
    }
}

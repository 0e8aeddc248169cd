//! A peer with the key that speaks the protocol by hand.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use tcpx::Auth;
use tcpx_net::dial::dial_lane;
use tcpx_net::{Congestion, ControlStream, DialOptions, Way, begin_control, dial};
use tcpx_wire::Settings;
use tcpx_wire::frame::{Frame, encode};
use tcpx_wire::handshake::{Established, Session};
use tcpx_wire::record::{LENGTH_BYTES, Records, SESSION_OVER, sealed_bytes};

use crate::LONG;

pub(crate) struct Peer {
    pub(crate) stream: TcpStream,
    records: Records,
    sequence: u32,
}

impl Peer {
    pub(crate) fn connect(address: SocketAddr, auth: &Auth) -> (Self, Session) {
        let until = DialOptions::until(Instant::now() + LONG);
        let dialled = dial(address, auth, &until).expect("it listens");
        dialled.stream.set_nonblocking(false).expect("a socket");
        dialled
            .stream
            .set_write_timeout(Some(LONG))
            .expect("a socket");
        let stream = dialled.stream;
        let mut peer = Self {
            stream,
            records: dialled.records,
            sequence: 0,
        };
        // Before that the server may not know the session.
        let mut welcome = [0; sealed_bytes(1)];
        peer.stream.read_exact(&mut welcome).expect("a welcome");
        Established::read_welcome(&peer.open(&welcome)).expect("a welcome");
        let settings = Frame::from(Settings {
            network: "tcp".into(),
            channels: 1,
            chunk_bytes: 512 * 1024,
            send_window: 8,
            receive_window: 8,
            eager_limit: 16 * 1024,
            eager_credit: 256 * 1024,
            heartbeat_ms: 10_000,
            dead_after_ms: 60_000,
            limits: tcpx::Limits::default(),
            memory: "host".into(),
            software: "by hand".into(),
        });
        let settings = peer.encode(&settings);
        peer.stream.write_all(&settings).expect("it reads");
        (peer, dialled.session)
    }

    /// A frame as it goes over the connection.
    pub(crate) fn encode(&mut self, frame: &Frame) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode(frame, self.sequence, &mut bytes).expect("a legal frame");
        self.sequence = self.sequence.wrapping_add(1);
        let (mut rest, mut sealed) = (bytes.as_slice(), Vec::new());
        while !rest.is_empty() {
            let count = self.records.seal(rest, &mut sealed);
            rest = &rest[count..];
        }
        sealed
    }

    /// What these bytes sealed, which the other side has written behind its welcome.
    pub(crate) fn open(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        let mut opened = Vec::new();
        while let Some(length) = Records::length(bytes).expect("a record") {
            let (sealed, rest) = bytes[LENGTH_BYTES..].split_at(length);
            let mut out = vec![0; length];
            let count = self.records.open(sealed, &mut out).expect("a good record");
            opened.extend_from_slice(&out[..count]);
            bytes = rest;
        }
        opened
    }

    pub(crate) fn send(&mut self, frame: &Frame) {
        let bytes = self.encode(frame);
        self.stream.write_all(&bytes).expect("it reads");
    }

    /// The rest of the set-up, with one lane.
    pub(crate) fn set_up(&mut self, address: SocketAddr, session: &Session) -> TcpStream {
        self.send(&Frame::Setup {
            payload: b"TCPL\x03\x00\x01\x00\x01\x00\x00\x00".to_vec(),
        });
        let until = DialOptions::until(Instant::now() + LONG);
        let lane = dial_lane(Way::to(address), session, 0, 1, &until)
            .expect("a lane")
            .stream;
        self.send(&Frame::Ready);
        lane
    }
}

/// Asks to go on with a session that has failed; what the other side says before it closes the
/// connection.
pub(crate) fn resume(address: SocketAddr, session: &Session) -> String {
    let way = Way {
        local: None,
        interface: None,
        peer: address,
    };
    let again = begin_control(vec![way], session, &Congestion::Automatic, Instant::now());
    let joined = again.run().expect("an answer").join().expect("a socket");
    let mut again = ControlStream::from(joined);
    again.stream.set_nonblocking(false).expect("a socket");
    let limit = Some(LONG);
    again.stream.set_read_timeout(limit).expect("a socket");
    let mut sealed = Vec::new();
    again.stream.read_to_end(&mut sealed).expect("an end");
    let mut opened = vec![0; sealed.len()];
    let record = &sealed[LENGTH_BYTES..];
    let count = again.records.open(record, &mut opened).expect("a record");
    let (position, reason) = opened[..count].split_at(8);
    assert_eq!(position, SESSION_OVER.to_le_bytes());
    String::from_utf8(reason.to_vec()).expect("text")
}

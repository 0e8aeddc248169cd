//! A client that knows `docs/wire-protocol/` and nothing of this project's code: what its pages say
//! is enough to connect with a key, to send over the control connection and over a lane, and to go
//! on over another control connection.

#![expect(clippy::unwrap_used, reason = "helpers fail the test that calls them")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use curve25519_dalek::montgomery::MontgomeryPoint;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use ring::hmac;
use tcpx::{Auth, Endpoint, Key, Options, Region, TcpNetwork};

/// Far more than anything here takes, also on a busy machine.
const LONG: Duration = Duration::from_secs(60);

fn mac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), &parts.concat());
    tag.as_ref().try_into().unwrap()
}

fn sha256(parts: &[&[u8]]) -> [u8; 32] {
    digest(&SHA256, &parts.concat())
        .as_ref()
        .try_into()
        .unwrap()
}

/// HKDF-Expand.
fn expand(key: &[u8], information: &[u8], bytes: usize) -> Vec<u8> {
    let (mut out, mut block) = (Vec::new(), Vec::new());
    for number in 1.. {
        block = mac(key, &[&block, information, &[number]]).to_vec();
        out.extend(&block);
        if out.len() >= bytes {
            break;
        }
    }
    out.truncate(bytes);
    out
}

fn crc32c(bytes: &[u8]) -> u32 {
    let shifted = |crc: u32| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
    let byte = |crc, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), |crc, _| shifted(crc));
    !bytes.iter().fold(!0, byte)
}

fn random<const BYTES: usize>() -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).unwrap();
    bytes
}

/// One direction of a connection: the records that its secret seals.
struct Direction {
    key: LessSafeKey,
    records: u64,
}

impl Direction {
    fn new(secret: &[u8]) -> Self {
        let key = expand(secret, b"tcpx lane key", 32);
        let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &key).unwrap());
        Self { key, records: 0 }
    }

    fn nonce(&mut self) -> Nonce {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.records.to_be_bytes());
        self.records += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    fn seal(&mut self, plain: &[u8]) -> Vec<u8> {
        let (nonce, mut bytes) = (self.nonce(), plain.to_vec());
        self.key
            .seal_in_place_append_tag(nonce, Aad::empty(), &mut bytes)
            .unwrap();
        bytes
    }

    fn open(&mut self, mut sealed: Vec<u8>) -> Vec<u8> {
        let nonce = self.nonce();
        let plain = self.key.open_in_place(nonce, Aad::empty(), &mut sealed);
        plain.expect("a record of the peer").to_vec()
    }
}

/// The 32 bytes that begin every handshake.
fn beginning(purpose: u8, lane: u16) -> Vec<u8> {
    let mut bytes = b"TCPX\r\n\x1a\n\x03\x00\x03\x00".to_vec();
    bytes.extend([purpose, 1]);
    bytes.extend(lane.to_le_bytes());
    bytes.resize(32, 0);
    bytes
}

fn read<const BYTES: usize>(from: &mut TcpStream) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    from.read_exact(&mut bytes).expect("the peer goes on");
    bytes
}

/// Noise, as far as a client of `NKpsk2` needs it.
struct Noise {
    hash: [u8; 32],
    chain: [u8; 32],
    key: [u8; 32],
}

impl Noise {
    fn mix_hash(&mut self, bytes: &[u8]) {
        self.hash = sha256(&[&self.hash, bytes]);
    }

    /// The chaining key and what follows it.
    fn derive(&mut self, input: &[u8], bytes: usize) -> Vec<u8> {
        let secret = mac(&self.chain, &[input]);
        let out = expand(&secret, b"", 32 + bytes);
        self.chain.copy_from_slice(&out[..32]);
        out[32..].to_vec()
    }

    fn mix_key(&mut self, input: &[u8]) {
        self.key = self.derive(input, 32).try_into().unwrap();
    }

    fn cipher(&self) -> (LessSafeKey, Nonce) {
        let key = UnboundKey::new(&AES_256_GCM, &self.key).unwrap();
        (LessSafeKey::new(key), Nonce::assume_unique_for_key([0; 12]))
    }
}

/// A client's key, from its text.
fn parse(text: &str) -> ([u8; 32], [u8; 16]) {
    let (mut bits, mut held, mut bytes) = (0_u64, 0, Vec::new());
    for one in text.bytes() {
        let value = match one {
            b'A'..=b'Z' => one - b'A',
            _ => one - b'2' + 26,
        };
        bits = bits << 5 | u64::from(value);
        held += 5;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    let (key, check) = bytes.split_at(48);
    assert_eq!(check[..4], sha256(&[b"tcpx client key", key])[..4]);
    let (public, psk) = key.split_at(32);
    (public.try_into().unwrap(), psk.try_into().unwrap())
}

struct Client {
    address: SocketAddr,
    stream: TcpStream,
    session: [u8; 16],
    secret: [u8; 32],
    out: Direction,
    back: Direction,
    frames: u32,
    /// Bytes of frames that were sent and read, and those that no whole frame has been made of.
    sent: u64,
    read: u64,
    rest: Vec<u8>,
}

impl Client {
    fn connect(address: SocketAddr, key: &str) -> Self {
        let (server, psk) = parse(key);
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let name = *b"Noise_NKpsk2_25519_AESGCM_SHA256";
        let mut noise = Noise {
            hash: name,
            chain: name,
            key: [0; 32],
        };
        let mut hello = beginning(0, 0);
        noise.mix_hash(&hello);
        noise.mix_hash(&server);
        let ours: [u8; 32] = random();
        let public = MontgomeryPoint::mul_base_clamped(ours).to_bytes();
        let shared = |with: [u8; 32]| MontgomeryPoint(with).mul_clamped(ours).to_bytes();
        noise.mix_hash(&public);
        noise.mix_key(&public);
        noise.mix_key(&shared(server));
        let id = expand(&mac(b"tcpx client key", &[&psk]), b"id", 16);
        let (cipher, nonce) = noise.cipher();
        let mut sealed = id;
        cipher
            .seal_in_place_append_tag(nonce, Aad::from(noise.hash), &mut sealed)
            .unwrap();
        noise.mix_hash(&sealed);
        hello.extend(public);
        hello.extend(&sealed);
        let mark = mac(&server, &[&hello]);
        hello.extend(&mark[..16]);
        assert_eq!(hello.len(), 112);
        stream.write_all(&hello).unwrap();
        let answer: [u8; 143] = read(&mut stream);
        assert_eq!(answer[12], 0, "status");
        let theirs: [u8; 32] = answer[32..64].try_into().unwrap();
        noise.mix_hash(&theirs);
        noise.mix_key(&theirs);
        noise.mix_key(&shared(theirs));
        let both = noise.derive(&[&psk[..], &[0; 16]].concat(), 64);
        noise.mix_hash(&both[..32]);
        noise.key.copy_from_slice(&both[32..]);
        let (cipher, nonce) = noise.cipher();
        let mut sealed = answer[64..].to_vec();
        let payload = cipher.open_in_place(nonce, Aad::from(noise.hash), &mut sealed);
        let payload = payload.expect("the server has the key").to_vec();
        assert_eq!(
            payload[48..52],
            answer[8..12],
            "the versions that it speaks"
        );
        let secrets = expand(&mac(&noise.chain, &[]), b"", 64);
        let mut client = Self {
            address,
            stream,
            session: payload[..16].try_into().unwrap(),
            secret: payload[16..48].try_into().unwrap(),
            out: Direction::new(&secrets[..32]),
            back: Direction::new(&secrets[32..]),
            frames: 0,
            sent: 0,
            read: 0,
            rest: Vec::new(),
        };
        client.write_record(&[]);
        assert_eq!(client.read_record(), [0], "welcome");
        client
    }

    fn write_record(&mut self, plain: &[u8]) {
        let sealed = self.out.seal(plain);
        let length = sealed.len() as u16;
        let head = [length.to_le_bytes(), (!length).to_le_bytes()].concat();
        self.stream.write_all(&[head, sealed].concat()).unwrap();
    }

    fn read_record(&mut self) -> Vec<u8> {
        let [a, b, c, d] = read(&mut self.stream);
        let length = u16::from_le_bytes([a, b]);
        assert_eq!(length, !u16::from_le_bytes([c, d]));
        let mut sealed = vec![0; length.into()];
        self.stream.read_exact(&mut sealed).unwrap();
        self.back.open(sealed)
    }

    /// A frame; of an eager one so many bytes are fields, and the others payload.
    fn frame(&mut self, kind: u8, body: &[u8], fields: Option<usize>) {
        let mut head = vec![0x58, 0x54, kind, fields.unwrap_or(0) as u8];
        head.extend((body.len() as u32).to_le_bytes());
        head.extend(self.frames.to_le_bytes());
        let checked = [&head, &[0; 4][..], &body[..fields.unwrap_or(body.len())]].concat();
        head.extend(crc32c(&checked).to_le_bytes());
        let frame = [&head, body].concat();
        self.frames += 1;
        self.sent += frame.len() as u64;
        self.write_record(&frame);
    }

    /// The body of the next frame of this kind.
    fn next(&mut self, wanted: u8) -> Vec<u8> {
        loop {
            while self.rest.len() < 16 || self.rest.len() < 16 + self.length() {
                let more = self.read_record();
                self.rest.extend(more);
            }
            let rest = self.rest.split_off(16 + self.length());
            let frame = std::mem::replace(&mut self.rest, rest);
            self.read += frame.len() as u64;
            assert_eq!(frame[..2], [0x58, 0x54]);
            if frame[2] == wanted {
                return frame[16..].to_vec();
            }
        }
    }

    fn length(&self) -> usize {
        u32::from_le_bytes(self.rest[4..8].try_into().unwrap()) as usize
    }

    fn set_up(&mut self) {
        let text = |text: &str| [&(text.len() as u16).to_le_bytes(), text.as_bytes()].concat();
        let mut settings = text("tcp");
        settings.extend(1_u16.to_le_bytes());
        settings.extend((512_u32 * 1024).to_le_bytes());
        settings.extend([8, 0, 8, 0]);
        let limits = [4096, 4096, 64, 1024, 1024, 65_536, 1 << 20, 65_536];
        for number in [16_384_u32, 262_144, 10_000, 60_000]
            .into_iter()
            .chain(limits)
        {
            settings.extend(number.to_le_bytes());
        }
        settings.extend([text("host"), text("by the page")].concat());
        self.frame(1, &settings, None);
        // One lane, which a person asked for.
        self.frame(2, b"TCPL\x03\x00\x01\x00\x01\x00\x00\x00", None);
    }

    /// Opens a connection of the session: a lane, or with purpose 2 another control connection.
    fn open(&self, purpose: u8) -> (TcpStream, Direction, Direction) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut hello = beginning(purpose, 0);
        hello.extend([1, 0, 0, 0, 0, 0, 0, 0]);
        hello.extend(self.session);
        hello.extend(random::<32>());
        let mark = mac(&self.secret, &[&hello]);
        hello.extend(&mark[..16]);
        assert_eq!(hello.len(), 104);
        stream.write_all(&hello).unwrap();
        let answer: [u8; 80] = read(&mut stream);
        assert_eq!(answer[12], 0, "status");
        let key = mac(&self.secret, &[&hello, &answer[..64]]);
        let derived = expand(&key, b"tcpx lane", 96);
        assert_eq!(answer[64..], derived[..16], "the server's proof");
        stream.write_all(&derived[16..32]).unwrap();
        let [out, back] = [32, 64].map(|at| Direction::new(&derived[at..at + 32]));
        (stream, out, back)
    }

    /// A message with the frame that asks.
    fn send(&mut self, transfer: u64, tag: u64, number: u64, payload: &[u8]) {
        let mut fields = transfer.to_le_bytes().to_vec();
        // Level placed, to a receive.
        fields.extend([1, 0]);
        fields.extend([tag.to_le_bytes(), number.to_le_bytes()].concat());
        fields.extend(crc32c(payload).to_le_bytes());
        let length = fields.len();
        self.frame(7, &[&fields, payload].concat(), Some(length));
        let done = self.next(8);
        assert_eq!(done, transfer.to_le_bytes());
    }
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

#[test]
fn the_page_of_the_protocol_is_enough_for_a_client() {
    let key = Key::generate(&mut |bytes| getrandom::fill(bytes).unwrap());
    let mut options = Options::new(Arc::new(TcpNetwork::default()), Auth::Key(key.clone()));
    options.dead_after = 10 * LONG;
    let endpoint = Endpoint::listen(([127, 0, 0, 1], 0).into(), options).unwrap();
    let address = endpoint.local_addr();
    let accepting = thread::spawn(move || endpoint.accept(LONG).map(|one| (endpoint, one)));
    let mut client = Client::connect(address, &key.client_key().to_text());
    client.set_up();
    client.next(3);
    let (mut lane, mut out, _) = client.open(1);
    client.frame(3, &[], None);
    let (endpoint, server) = accepting.join().unwrap().expect("the client is set up");

    // Over the control connection.
    let small = Region::host(100).unwrap();
    let received = server.receive(small.all(), 7).start().unwrap();
    client.send(0, 7, 0, b"said by the page");
    assert_eq!(received.wait().unwrap().bytes, 16);

    // Over the lane, into the window of a receive.
    let message: Vec<u8> = (0..1_000_003_u32).map(|at| (at % 251) as u8).collect();
    let large = Region::host(message.len()).unwrap();
    let received = server.receive(large.all(), 8).start().unwrap();
    let posted = client.next(19);
    assert_eq!(
        [0, 8, 16].map(|at| number(&posted, at)),
        [8, 0, message.len() as u64]
    );
    let chunk_bytes = u32::from_le_bytes(posted[24..28].try_into().unwrap()) as usize;
    let window = number(&posted, 28);
    assert_eq!(posted.len(), 37, "chunks of one length");
    for (at, payload) in message.chunks(chunk_bytes).enumerate() {
        let mut head = b"TCPC\x02\x00\x00\x00".to_vec();
        for one in [
            at as u64,
            window,
            (at * chunk_bytes) as u64,
            message.len() as u64,
        ] {
            head.extend(one.to_le_bytes());
        }
        head.extend((payload.len() as u32).to_le_bytes());
        head.extend(crc32c(&head).to_le_bytes());
        lane.write_all(&out.seal(&head)).unwrap();
        lane.write_all(payload).unwrap();
    }
    assert_eq!(received.wait().unwrap().bytes, message.len() as u64);
    let mut there = vec![0; message.len()];
    large.read_to(0, &mut there).unwrap();
    assert!(there == message);
    assert_eq!(number(&client.next(10), 0), 1 << 63 | window, "placed");

    // Over another control connection.
    let (stream, out, back) = client.open(2);
    (client.stream, client.out, client.back) = (stream, out, back);
    client.rest.clear();
    client.write_record(&client.read.to_le_bytes());
    let read = client.read_record();
    assert_eq!(number(&read, 0), client.sent, "all had arrived");
    let received = server.receive(small.all(), 7).start().unwrap();
    client.send(1, 7, 1, b"and again");
    assert_eq!(received.wait().unwrap().bytes, 9);
    let closing = thread::spawn(move || server.close(LONG));
    client.next(16);
    client.frame(17, &[], None);
    closing.join().unwrap().expect("an orderly goodbye");
    drop(endpoint);
}

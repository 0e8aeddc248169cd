//! A process that has no file descriptor left for whoever asks for its metrics. In a binary of its
//! own, because the limit is the whole process's.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType, connect, socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

/// Far more than anything here takes.
const LONG: Duration = Duration::from_secs(60);

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn a_server_without_descriptors_rests_and_recovers() {
    let address = tcpx_status::serve_metrics("127.0.0.1:0").unwrap();
    let client = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let limits = getrlimit(Resource::Nofile);
    let few = Rlimit {
        current: Some(128),
        ..limits
    };
    setrlimit(Resource::Nofile, few).unwrap();
    let hoard: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    connect(&client, &address).unwrap();
    let mut client = TcpStream::from(client);
    client.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let (shorter, used) = (Duration::from_millis(400), cpu_time());
    client.set_read_timeout(Some(shorter)).unwrap();
    let error = client.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock, "it was served");
    let used = cpu_time() - used;
    assert!(
        used < shorter / 10,
        "the server spins: {used:?} in {shorter:?}"
    );
    drop(hoard);
    client.set_read_timeout(Some(LONG)).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 200 OK\r\n"), "{answer}");
}

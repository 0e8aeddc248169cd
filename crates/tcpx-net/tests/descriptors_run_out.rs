//! The listener when the process has no file descriptor left. In a binary of its own, because the
//! limit is the whole process's.

use std::fs::File;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use socket2::{Domain, Socket, Type};
use tcpx_net::{Auth, Congestion, DialOptions, ListenOptions, Listener, dial};

#[test]
fn a_listener_without_descriptors_rests_and_recovers() {
    let address = SocketAddr::from(([127, 0, 0, 1], 0));
    let auth = Auth::Insecure;
    let listener = Listener::bind(ListenOptions {
        address,
        auth: auth.clone(),
        one_time: false,
        congestion: Congestion::Automatic,
    })
    .unwrap();
    let address = listener.local_addr();
    let early = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let limits = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(128),
            ..limits
        },
    )
    .unwrap();
    let hoard: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();

    early.connect(&address.into()).unwrap();
    let mut early = TcpStream::from(early);
    early
        .set_read_timeout(Some(Duration::from_millis(400)))
        .unwrap();
    let used = cpu_time();
    let error = early.read(&mut [0]).unwrap_err();
    assert_eq!(
        error.kind(),
        std::io::ErrorKind::WouldBlock,
        "it was served after all"
    );
    let used = cpu_time() - used;
    assert!(
        used < Duration::from_millis(200),
        "the acceptor spins: {used:?} in 400 ms"
    );

    drop(hoard);
    let deadline = Instant::now() + Duration::from_secs(60);
    let dialled = dial(address, &auth, &DialOptions::until(deadline)).unwrap();
    assert_eq!(listener.accept(deadline).unwrap().session, dialled.session);
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

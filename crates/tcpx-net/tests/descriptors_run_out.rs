//! The listener when the process has no file descriptor left. In a binary of its own, because the
//! limit is the whole process's.

use std::fs::File;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use socket2::{Domain, Socket, Type};
use tcpx_net::{
    Auth, Congestion, DialOptions, Exchange, ListenOptions, Listener, Meanwhile, NetworkError, dial,
};

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
    let deadline = Instant::now() + Duration::from_secs(60);
    let _session = dial(address, &auth, &DialOptions::until(deadline)).unwrap();
    let accepted = listener.accept(deadline).unwrap();
    let (begun, begins) = channel();
    let lanes = std::thread::spawn(move || {
        let taken = accepted.lanes.take(&mut Told(begun), deadline);
        taken.map(|lane| lane.is_some())
    });
    begins.recv().unwrap();
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
        used < Duration::from_millis(40),
        "the acceptor spins: {used:?} in 400 ms"
    );

    // Whoever waits for lanes hears that, and not that its peer was slow.
    let error = lanes.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("limit on descriptors"), "{error}");

    drop(hoard);
    let deadline = Instant::now() + Duration::from_secs(60);
    let dialled = dial(address, &auth, &DialOptions::until(deadline)).unwrap();
    assert_eq!(listener.accept(deadline).unwrap().session, dialled.session);
}

/// Says when it is first waited for.
struct Told(Sender<()>);

impl Exchange for Told {
    fn exchange(&mut self, _: &[u8], _: &mut dyn Meanwhile) -> Result<Vec<u8>, NetworkError> {
        unreachable!("no round")
    }

    fn wait(&mut self, mut polled: Vec<PollFd<'_>>, until: Instant) -> Result<(), NetworkError> {
        // Nobody hears it but once.
        let _ = self.0.send(());
        let left = until.saturating_duration_since(Instant::now());
        let _ = poll(&mut polled, Some(&left.try_into().expect("no age")));
        Ok(())
    }
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

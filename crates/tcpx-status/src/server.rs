//! The thread that answers, and where its socket lies.

use std::collections::VecDeque;
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::http::{LONGEST_REQUEST, Route, answer, head_bytes, route};
use crate::metrics::{CONTENT_TYPE, openmetrics};
use crate::registry::collect;

/// Longest time that a request may take to arrive, and that its answer may take to leave.
const REQUEST_LIMIT: Duration = Duration::from_secs(1);

/// How long the listening sockets are left alone after the system had no descriptor for a client.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// Clients at a time; one more takes the place of the one that came first.
const MOST_CLIENTS: usize = 64;

/// Libraries of ours that one process has loaded, each with a socket of its own.
const MOST_LIBRARIES: u32 = 16;

static FOLLOWER: OnceLock<fn(RawFd, bool)> = OnceLock::new();

/// Has `follow` told of every socket that listens from now on, when it is there and before it goes:
/// a fork's child may have to let go of it. Whoever asks first is told.
pub fn follow_listeners(follow: fn(RawFd, bool)) {
    let _ = FOLLOWER.set(follow);
}

/// A socket that listens, of which whoever asked is told.
#[derive(Debug)]
pub(crate) struct Followed<L: AsRawFd>(L);

impl<L: AsRawFd> Followed<L> {
    pub(crate) fn new(listener: L) -> Self {
        if let Some(follow) = FOLLOWER.get() {
            follow(listener.as_raw_fd(), true);
        }
        Self(listener)
    }
}

impl<L: AsRawFd> Drop for Followed<L> {
    fn drop(&mut self) {
        if let Some(follow) = FOLLOWER.get() {
            follow(self.0.as_raw_fd(), false);
        }
    }
}

impl<L: AsRawFd> Deref for Followed<L> {
    type Target = L;

    fn deref(&self) -> &L {
        &self.0
    }
}

impl<L: AsRawFd + AsFd> AsFd for Followed<L> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A port for metrics.
pub(crate) type Port = Arc<Followed<TcpListener>>;

/// The thread; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    orders: Arc<Orders>,
    path: Option<PathBuf>,
}

/// What the thread is told.
#[derive(Debug)]
struct Orders {
    wake: OwnedFd,
    /// `None` tells the thread to end.
    listeners: Mutex<Option<Listeners>>,
}

#[derive(Clone, Debug, Default)]
struct Listeners {
    local: Option<Arc<Followed<UnixListener>>>,
    metrics: Option<Port>,
}

impl Server {
    /// Starts the thread, with a local socket in the first of these folders that takes it. Where
    /// none does, whoever asks for metrics is answered all the same.
    pub(crate) fn start(folders: &[PathBuf], metrics: Option<Port>) -> io::Result<Self> {
        let (mut local, mut path) = (None, None);
        match listen(folders) {
            Ok((listener, at)) => {
                (local, path) = (Some(Arc::new(Followed::new(listener))), Some(at));
            }
            Err(_) if folders.is_empty() => {}
            Err(error) if metrics.is_none() => return Err(error),
            Err(error) => tracing::warn!(
                %error,
                "`tcpx status` does not see this process: set XDG_RUNTIME_DIR to a folder that this user may write"
            ),
        }
        let orders = Arc::new(Orders {
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            listeners: Mutex::new(Some(Listeners { local, metrics })),
        });
        let server = Self {
            orders: Arc::clone(&orders),
            path,
        };
        std::thread::Builder::new()
            .name("tcpx-status".to_owned())
            .spawn(move || orders.run())?;
        Ok(server)
    }

    /// Has the thread serve metrics here.
    pub(crate) fn renew(&self, metrics: Option<Port>) {
        let at = |port: &Option<Port>| port.as_ref().map(Arc::as_ptr);
        if let Some(listeners) = &mut *self.orders.lock()
            && at(&listeners.metrics) != at(&metrics)
        {
            listeners.metrics = metrics;
            self.orders.signal();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // What is left behind is found stale.
            let _ = fs::remove_file(path);
        }
        *self.orders.lock() = None;
        self.orders.signal();
    }
}

impl Orders {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Listeners>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn signal(&self) {
        // A full counter means that a wake-up is already pending.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn run(&self) {
        let mut clients = Clients::default();
        // Until when nobody is accepted.
        let mut rests: Option<Instant> = None;
        loop {
            let Some(listeners) = self.lock().clone() else {
                return;
            };
            rests.take_if(|until| *until <= Instant::now());
            let mut polled = vec![PollFd::new(&self.wake, PollFlags::IN)];
            if rests.is_none() {
                let (local, metrics) = (listeners.local.iter(), listeners.metrics.iter());
                polled.extend(local.map(|one| PollFd::new(one, PollFlags::IN)));
                polled.extend(metrics.map(|one| PollFd::new(one, PollFlags::IN)));
            }
            polled.extend(clients.0.iter().map(Client::polled));
            // Interrupted or not, everything is looked at.
            let _ = poll(&mut polled, clients.soonest(rests).as_ref());
            drop(polled);
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
            if rests.is_none() && clients.accept(&listeners).is_err() {
                rests = Some(Instant::now() + EXHAUSTED_PAUSE);
            }
            clients.0.retain_mut(|client| match client.advance() {
                Ok(stays) => stays,
                Err(error) => {
                    tracing::debug!(%error, "a request for the status was not answered");
                    false
                }
            });
        }
    }
}

/// Whoever has connected, in that order.
#[derive(Default)]
struct Clients(VecDeque<Client>);

impl Clients {
    /// Takes all that have come.
    ///
    /// # Errors
    /// The system has no descriptor for one.
    fn accept(&mut self, listeners: &Listeners) -> io::Result<()> {
        let (local, metrics) = (&listeners.local, &listeners.metrics);
        while let Some(local) = local
            && let Some((stream, _)) = unless_none_comes(local.accept())?
        {
            self.enter(stream.into(), true);
        }
        while let Some(metrics) = metrics
            && let Some((stream, _)) = unless_none_comes(metrics.accept())?
        {
            self.enter(stream.into(), false);
        }
        Ok(())
    }

    fn enter(&mut self, stream: OwnedFd, is_local: bool) {
        // `accept` may hand the listener's flag on, or not.
        if rustix::io::ioctl_fionbio(&stream, true).is_err() {
            return;
        }
        if self.0.len() == MOST_CLIENTS {
            self.0.pop_front();
        }
        self.0.push_back(Client {
            stream: stream.into(),
            is_local,
            request: Vec::new(),
            answer: Vec::new(),
            written: 0,
            until: Instant::now() + REQUEST_LIMIT,
        });
    }

    /// How long until the first of them has had its time, or others are accepted again.
    fn soonest(&self, rests: Option<Instant>) -> Option<Timespec> {
        let clients = self.0.iter().map(|client| client.until);
        let until = clients.chain(rests).min()?;
        let left = until.saturating_duration_since(Instant::now());
        // Rounded up: nobody is looked at too early again and again.
        (left + Duration::from_millis(1)).try_into().ok()
    }
}

fn unless_none_comes<T>(accepted: io::Result<T>) -> io::Result<Option<T>> {
    match accepted {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        accepted => accepted.map(Some),
    }
}

/// One request and its answer. Whoever is slow or goes away gets none.
struct Client {
    /// Of either kind: it is read and written, and no signal comes where the other end is gone.
    stream: UnixStream,
    is_local: bool,
    request: Vec<u8>,
    /// Empty until the request is there.
    answer: Vec<u8>,
    written: usize,
    /// For the request, and then for the answer.
    until: Instant,
}

impl Client {
    fn polled(&self) -> PollFd<'_> {
        let wanted = match self.answer.is_empty() {
            true => PollFlags::IN,
            false => PollFlags::OUT,
        };
        PollFd::new(&self.stream, wanted)
    }

    /// Does what can be done now; whether something is left.
    fn advance(&mut self) -> io::Result<bool> {
        match self.try_advance() {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                match Instant::now() < self.until {
                    true => Ok(true),
                    false => Err(io::ErrorKind::TimedOut.into()),
                }
            }
            done => done.map(|()| false),
        }
    }

    fn try_advance(&mut self) -> io::Result<()> {
        while self.answer.is_empty() {
            let seen = self.request.len();
            let mut more = [0; LONGEST_REQUEST];
            match self.stream.read(&mut more[seen..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.request.extend_from_slice(&more[seen..seen + count]),
            }
            if let Some(asked) = route(&self.request, seen) {
                self.answer = respond(asked, self.is_local);
                if self.request.starts_with(b"HEAD ") {
                    self.answer.truncate(head_bytes(&self.answer));
                }
                self.until = Instant::now() + REQUEST_LIMIT;
            }
        }
        while self.written < self.answer.len() {
            self.written += self.stream.write(&self.answer[self.written..])?;
        }
        Ok(())
    }
}

/// Only the process's own user may see its peers; who reaches a port sees the metrics alone.
fn respond(asked: Route, is_local: bool) -> Vec<u8> {
    let plain = "text/plain; charset=utf-8";
    match asked {
        Route::Status if is_local => match collect().map(|report| serde_json::to_string(&report)) {
            Some(Ok(text)) => answer("200 OK", "application/json", &text),
            _ => answer("500 Internal Server Error", plain, "no report\n"),
        },
        Route::Metrics => match collect() {
            Some(report) => answer("200 OK", CONTENT_TYPE, &openmetrics(&report)),
            None => answer("500 Internal Server Error", plain, "no report\n"),
        },
        Route::Status | Route::NotFound => answer("404 Not Found", plain, "ask for /metrics\n"),
        Route::NotAllowed => answer("405 Method Not Allowed", plain, "GET or HEAD alone\n"),
        Route::Malformed => answer("400 Bad Request", plain, "no request of HTTP\n"),
    }
}

/// The local socket, in the first folder that takes it.
fn listen(folders: &[PathBuf]) -> io::Result<(UnixListener, PathBuf)> {
    let mut last = io::Error::other("there is no folder for it");
    for folder in folders {
        match listen_in(folder) {
            Ok(done) => return Ok(done),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn listen_in(folder: &Path) -> io::Result<(UnixListener, PathBuf)> {
    let made = DirBuilder::new().mode(0o700).create(folder);
    if let Err(error) = made
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(error);
    }
    let own = rustix::process::geteuid().as_raw();
    if !is_private(folder, own) {
        return Err(io::Error::other("its folder is open to others"));
    }
    let pid = std::process::id();
    for number in 1..=MOST_LIBRARIES {
        let path = match number {
            1 => folder.join(format!("{pid}.sock")),
            _ => folder.join(format!("{pid}.{number}.sock")),
        };
        match UnixStream::connect(&path).map_err(|error| error.kind()) {
            // It is a library's of ours that this process has loaded beside this one.
            Ok(_) | Err(io::ErrorKind::WouldBlock) => continue,
            // It is of a process that had this number before.
            Err(io::ErrorKind::ConnectionRefused) => fs::remove_file(&path)?,
            Err(_) => {}
        }
        match UnixListener::bind(&path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => continue,
            Err(error) => return Err(error),
            Ok(listener) => {
                fs::set_permissions(&path, Permissions::from_mode(0o600))?;
                listener.set_nonblocking(true)?;
                return Ok((listener, path));
            }
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

/// The process of a socket, by the socket's name.
pub(crate) fn process_of(socket: &Path) -> Option<u32> {
    let name = socket.file_name()?.to_str()?.strip_suffix(".sock")?;
    let number = name.split_once('.').map_or(name, |(number, _)| number);
    number.parse().ok()
}

/// A folder of user `owner` that nobody else may enter.
pub(crate) fn is_private(folder: &Path, owner: u32) -> bool {
    fs::symlink_metadata(folder).is_ok_and(|metadata| {
        metadata.is_dir() && metadata.uid() == owner && metadata.mode() & 0o077 == 0
    })
}

/// Where this user's processes have their sockets, the preferred folder first.
pub(crate) fn own_folders() -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let runtime = runtime.filter(|path| path.is_absolute());
    let runtime = runtime.map(|path| path.join("tcpx"));
    runtime.into_iter().chain([temporary(user)]).collect()
}

fn temporary(user: u32) -> PathBuf {
    PathBuf::from(format!("/tmp/tcpx-{user}"))
}

/// Folders that may hold sockets of processes that this user may ask: its own, and for root
/// everybody's.
pub fn folders() -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let mut folders = own_folders();
    folders.push(PathBuf::from(format!("/run/user/{user}/tcpx")));
    if user == 0 {
        let entries = |parent: &str| fs::read_dir(parent).into_iter().flatten().flatten();
        folders.extend(entries("/run/user").map(|entry| entry.path().join("tcpx")));
        let is_ours = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let number = name.strip_prefix("tcpx-");
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        };
        folders.extend(entries("/tmp").map(|entry| entry.path()).filter(is_ours));
    }
    folders.sort();
    folders.dedup();
    folders
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpStream};

    use super::*;

    /// A server of metrics, with these folders for its local socket.
    fn metrics(folders: &[PathBuf]) -> (Server, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let port = Arc::new(Followed::new(listener));
        (Server::start(folders, Some(port)).unwrap(), address)
    }

    fn ask_metrics(address: SocketAddr, method: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "{method} /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn clients_that_say_nothing_delay_nobody() {
        let (_server, address) = metrics(&[]);
        let silent = |_| TcpStream::connect(address).unwrap();
        let silent: Vec<_> = (0..2 * MOST_CLIENTS).map(silent).collect();
        let started = Instant::now();
        assert!(ask_metrics(address, "GET").ends_with("# EOF\n"));
        // One after the other they would have taken their second each.
        assert!(started.elapsed() < REQUEST_LIMIT * MOST_CLIENTS as u32);
        for mut stream in silent {
            assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)));
        }
    }

    /// As where a program loads the NCCL plugin and the one for NIXL.
    #[test]
    fn each_library_of_a_process_has_a_socket_that_is_found() {
        let folder = std::env::temp_dir().join(format!("tcpx-two-{}", std::process::id()));
        let folders = std::slice::from_ref(&folder);
        let pid = std::process::id();
        DirBuilder::new().mode(0o700).create(&folder).unwrap();
        let stale = UnixListener::bind(folder.join(format!("{pid}.sock"))).unwrap();
        drop(stale);
        let servers = [(); 2].map(|()| Server::start(folders, None).unwrap());
        let paths = servers
            .each_ref()
            .map(|server| server.path.clone().unwrap());
        assert_ne!(paths[0], paths[1]);
        for path in &paths {
            assert_eq!(process_of(path), Some(pid));
            assert!(crate::ask_process(pid, path).is_ok());
        }
        drop(servers);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "nothing is left");
        fs::remove_dir(folder).unwrap();
        assert_eq!(process_of(Path::new("/x/notes.txt")), None);
        assert_eq!(process_of(Path::new("/x/a.1.sock")), None);
    }

    #[test]
    fn a_head_is_that_of_the_whole_answer() {
        let (_server, address) = metrics(&[]);
        let head = ask_metrics(address, "HEAD");
        assert!(head.starts_with("HTTP/1.0 200 OK\r\n"), "{head}");
        assert!(
            head.contains("Content-Length: ") && head.ends_with("\r\n\r\n"),
            "{head}"
        );
    }

    #[test]
    fn metrics_are_served_where_no_folder_takes_the_local_socket() {
        let nowhere = [PathBuf::from("/proc/nowhere/tcpx")];
        let (server, address) = metrics(&nowhere);
        assert!(server.path.is_none());
        assert!(ask_metrics(address, "GET").starts_with("HTTP/1.0 200 OK\r\n"));
        assert!(Server::start(&nowhere, None).is_err());
    }
}

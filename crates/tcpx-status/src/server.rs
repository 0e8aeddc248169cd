//! The thread that answers, and where its socket lies.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::http::{LONGEST_REQUEST, Route, answer, route};
use crate::metrics::{CONTENT_TYPE, openmetrics};
use crate::registry::collect;

/// Longest time that a request may take to arrive, and that its answer may take to leave.
const PATIENCE: Duration = Duration::from_secs(1);

static FOLLOWER: OnceLock<fn(RawFd, bool)> = OnceLock::new();

/// Has `follow` told of every socket that listens from now on, when it is there and before it goes: a fork's child may
/// have to let go of it. Whoever asks first is told.
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
    /// Opens the local socket, if it is `wanted`, and starts the thread.
    pub(crate) fn start(wanted: bool, metrics: Option<Port>) -> io::Result<Self> {
        let (mut local, mut path) = (None, None);
        if wanted {
            let (listener, at) = listen()?;
            (local, path) = (Some(Arc::new(Followed::new(listener))), Some(at));
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
        loop {
            let Some(listeners) = self.lock().clone() else {
                return;
            };
            let mut polled = vec![PollFd::new(&self.wake, PollFlags::IN)];
            polled.extend(
                listeners
                    .local
                    .iter()
                    .map(|one| PollFd::new(one, PollFlags::IN)),
            );
            polled.extend(
                listeners
                    .metrics
                    .iter()
                    .map(|one| PollFd::new(one, PollFlags::IN)),
            );
            // Interrupted or not, everything is looked at.
            let _ = poll(&mut polled, None);
            drop(polled);
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
            if let Some((stream, _)) = listeners.local.and_then(|local| local.accept().ok()) {
                serve(stream, true);
            }
            if let Some((stream, _)) = listeners.metrics.and_then(|port| port.accept().ok()) {
                serve(stream, false);
            }
        }
    }
}

/// What a client is connected by.
trait Stream: Read + Write + AsFd {
    fn bound(&self, span: Duration) -> io::Result<()>;
}

impl Stream for UnixStream {
    fn bound(&self, span: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(span))?;
        self.set_write_timeout(Some(span))
    }
}

impl Stream for TcpStream {
    fn bound(&self, span: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(span))?;
        self.set_write_timeout(Some(span))
    }
}

/// Answers one request. Whoever is slow or goes away gets none.
fn serve(mut stream: impl Stream, is_local: bool) {
    if let Err(error) = try_serve(&mut stream, is_local) {
        tracing::debug!(%error, "a request for the status was not answered");
    }
}

fn try_serve(stream: &mut impl Stream, is_local: bool) -> io::Result<()> {
    // `accept` may hand the listener's flag on.
    rustix::io::ioctl_fionbio(&*stream, false)?;
    let until = Instant::now() + PATIENCE;
    let mut request = [0; LONGEST_REQUEST];
    let (mut seen, mut length) = (0, 0);
    let asked = loop {
        if let Some(route) = route(&request[..length], seen) {
            break route;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.bound(left)?;
        seen = length;
        length += match stream.read(&mut request[length..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => count,
        };
    };
    stream.bound(PATIENCE)?;
    stream.write_all(&respond(asked, is_local))
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
        Route::NotAllowed => answer("405 Method Not Allowed", plain, "GET alone\n"),
        Route::Malformed => answer("400 Bad Request", plain, "no request of HTTP\n"),
    }
}

/// The local socket, in the first folder that takes it.
fn listen() -> io::Result<(UnixListener, PathBuf)> {
    let mut last = io::Error::other("there is no folder for it");
    for folder in own_folders() {
        match listen_in(&folder) {
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
    let path = folder.join(format!("{}.sock", std::process::id()));
    // Of a process that had this number before.
    let _ = fs::remove_file(&path);
    let listener = UnixListener::bind(&path)?;
    fs::set_permissions(&path, Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok((listener, path))
}

/// A folder of user `owner` that nobody else may enter.
pub(crate) fn is_private(folder: &Path, owner: u32) -> bool {
    fs::symlink_metadata(folder).is_ok_and(|metadata| {
        metadata.is_dir() && metadata.uid() == owner && metadata.mode() & 0o077 == 0
    })
}

/// Where this user's processes have their sockets, the preferred folder first.
fn own_folders() -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let runtime = runtime.filter(|path| path.is_absolute());
    let runtime = runtime.map(|path| path.join("tcpx"));
    runtime.into_iter().chain([temporary(user)]).collect()
}

fn temporary(user: u32) -> PathBuf {
    PathBuf::from(format!("/tmp/tcpx-{user}"))
}

/// Folders that may hold sockets of processes that this user may ask: its own, and for root everybody's.
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

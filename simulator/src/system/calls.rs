//! The functions of the C library that this program answers itself. Outside of a simulated system,
//! and for what is not simulated, they do what they always do.
//!
//! Each has the type and the rules of the function whose name it has (its manual page), so that
//! what is said there of its arguments is what its callers establish.
#![allow(clippy::missing_safety_doc, clippy::similar_names)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::mem::size_of;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use libc::{iovec, msghdr, nfds_t, pollfd, sockaddr, socklen_t, timespec};

use super::threads::{self, Wait, called, pass, wait};
use super::{MICRO, MILLI, Nanos, SECOND, System, raw, system};
use crate::tally;

/// What a look at the clock takes: enough that a thread which looks without a pause does so for
/// some hundred times at most.
const CLOCK: Nanos = MICRO;
/// What a call takes.
const CALL: Nanos = 300;
/// Where a thread looks again and again, so that it does not do so for ever.
const LOOK: Nanos = 5 * MICRO;

macro_rules! pass_on {
    ($number:expr $(, $argument:expr)*) => {{
        let mut all = [0usize; 6];
        let given = [$($argument as usize),*];
        all[..given.len()].copy_from_slice(&given);
        // SAFETY: the caller's arguments, as they are.
        raw::answer(unsafe { raw::call($number, all) })
    }};
}

/// Reads what the caller points at.
unsafe fn at<T: Copy>(pointer: *const T) -> Option<T> {
    // SAFETY: null, or what the caller says it is.
    unsafe { pointer.as_ref() }.copied()
}

fn nanos(span: timespec) -> Nanos {
    (span.tv_sec as Nanos)
        .saturating_mul(SECOND)
        .saturating_add(span.tv_nsec as Nanos)
}

fn spec(at: Nanos) -> timespec {
    timespec {
        tv_sec: (at / SECOND) as i64,
        tv_nsec: (at % SECOND) as i64,
    }
}

/// Descriptors may have become ready.
fn stir() {
    if let Some(system) = system() {
        system.stirs += 1;
    }
}

fn simulated(fd: c_int) -> Option<&'static mut System> {
    system().filter(|system| system.network.has(fd))
}

// Time.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, into: *mut timespec) -> c_int {
    called(CLOCK);
    match system() {
        None => pass_on!(libc::SYS_clock_gettime, clock, into) as c_int,
        Some(system) => {
            let offset = if clock == libc::CLOCK_REALTIME {
                1_700_000_000 * SECOND
            } else {
                0
            };
            // SAFETY: the caller's place for it.
            unsafe { *into = spec(system.now + offset) };
            0
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nanosleep(span: *const timespec, left: *mut timespec) -> c_int {
    // SAFETY: the caller's.
    match (system(), unsafe { at(span) }) {
        (Some(system), Some(span)) => {
            system.called(CALL);
            let until = system.now + nanos(span);
            wait(Wait::Time(until));
            0
        }
        _ => pass_on!(libc::SYS_nanosleep, span, left) as c_int,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_nanosleep(
    clock: libc::clockid_t,
    flags: c_int,
    span: *const timespec,
    left: *mut timespec,
) -> c_int {
    // SAFETY: the caller's.
    match (system(), unsafe { at(span) }) {
        (Some(system), Some(span)) => {
            system.called(CALL);
            let from = if flags & libc::TIMER_ABSTIME == 0 {
                system.now
            } else {
                0
            };
            wait(Wait::Time(from + nanos(span)));
            0
        }
        _ => {
            let result = pass_on!(libc::SYS_clock_nanosleep, clock, flags, span, left);
            result as c_int
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn sched_yield() -> c_int {
    match system() {
        None => pass_on!(libc::SYS_sched_yield) as c_int,
        Some(system) => {
            system.called(LOOK);
            wait(Wait::Nothing);
            0
        }
    }
}

// Threads.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    handle: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: the caller's.
    let made = unsafe { threads::spawn(handle, attributes, start, argument) };
    pass();
    made
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_join(handle: libc::pthread_t, result: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { threads::join(handle, result) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_setname_np(handle: libc::pthread_t, name: *const c_char) -> c_int {
    // SAFETY: the caller's name.
    threads::named(handle, unsafe { CStr::from_ptr(name) });
    0
}

/// Its arguments beyond the number are read as registers, which is how variable ones are given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let real = || pass_on!(number, a, b, c, d, e, f) as c_long;
    let Some(system) = system() else {
        return real();
    };
    match number {
        libc::SYS_futex => {
            let operation = b as c_int & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
            match operation {
                libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET => {
                    system.called(CALL);
                    // SAFETY: the word that the caller waits for.
                    let word = unsafe { &*(a as *const std::sync::atomic::AtomicU32) };
                    if word.load(std::sync::atomic::Ordering::SeqCst) != c as u32 {
                        return raw::fail(libc::EAGAIN) as c_long;
                    }
                    // SAFETY: null or a span of time.
                    let until = unsafe { at(d as *const timespec) }.map(nanos);
                    let (until, bits) = match operation {
                        libc::FUTEX_WAIT => (until.map(|span| system.now + span), u32::MAX),
                        _ => (until, f as u32),
                    };
                    match wait(Wait::Futex {
                        word: a,
                        bits,
                        until,
                    }) {
                        true => raw::fail(libc::ETIMEDOUT) as c_long,
                        false => 0,
                    }
                }
                libc::FUTEX_WAKE | libc::FUTEX_WAKE_BITSET => {
                    let bits = if operation == libc::FUTEX_WAKE {
                        u32::MAX
                    } else {
                        f as u32
                    };
                    let woken = threads::wake(a, c, bits);
                    called(CALL);
                    woken as c_long
                }
                _ => real(),
            }
        }
        libc::SYS_getrandom => {
            // SAFETY: the caller's buffer.
            unsafe { getrandom(a as *mut c_void, b, c as c_uint) as c_long }
        }
        _ => real(),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(into: *mut c_void, length: usize, flags: c_uint) -> isize {
    match system() {
        None => pass_on!(libc::SYS_getrandom, into, length, flags),
        Some(system) => {
            // SAFETY: the caller's buffer.
            let bytes = unsafe { std::slice::from_raw_parts_mut(into.cast::<u8>(), length) };
            system.random.fill(bytes);
            length as isize
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sched_getaffinity(
    process: libc::pid_t,
    length: usize,
    into: *mut libc::cpu_set_t,
) -> c_int {
    match system() {
        // The C library's answers 0 where the kernel's tells a length.
        None => pass_on!(libc::SYS_sched_getaffinity, process, length, into).min(0) as c_int,
        Some(system) => {
            // SAFETY: the caller's set.
            unsafe {
                std::ptr::write_bytes(into.cast::<u8>(), 0, length);
                (0..system.settings.cores).for_each(|core| libc::CPU_SET(core, &mut *into));
            }
            0
        }
    }
}

/// A limit on this process's share of the cores is none of the simulated system.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: the caller's path.
    let name = unsafe { CStr::from_ptr(path) };
    if system().is_some() && name.to_bytes().starts_with(b"/proc/self/cgroup") {
        return raw::fail(libc::ENOENT) as c_int;
    }
    pass_on!(libc::SYS_open, path, flags, mode) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getifaddrs(into: *mut *mut libc::ifaddrs) -> c_int {
    // SAFETY: the caller's place for it. No interface is a list without entries.
    unsafe { *into = std::ptr::null_mut() };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn freeifaddrs(_list: *mut libc::ifaddrs) {}

// Readiness.

fn wait_ready(fds: Vec<pollfd>, until: Option<Nanos>) -> bool {
    !wait(Wait::Descriptors { fds, until })
}

unsafe fn polled(fds: *mut pollfd, count: nfds_t, span: Option<Nanos>) -> c_int {
    let Some(system) = system() else {
        let span = span.map(spec);
        let span = span.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        return pass_on!(libc::SYS_ppoll, fds, count, span, 0usize, 0usize) as c_int;
    };
    // SAFETY: the caller's.
    let all = match count {
        0 => &mut [][..],
        _ => unsafe { std::slice::from_raw_parts_mut(fds, count as usize) },
    };
    let until = span.map(|span| system.now.saturating_add(span));
    match span {
        Some(0) => called(LOOK),
        _ => {
            called(CALL);
            wait_ready(all.to_vec(), until);
        }
    }
    raw::answer(raw::poll(all)) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, millis: c_int) -> c_int {
    let span = u64::try_from(millis).ok().map(|millis| millis * MILLI);
    // SAFETY: the caller's.
    unsafe { polled(fds, count, span) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    span: *const timespec,
    _mask: *const libc::sigset_t,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { polled(fds, count, at(span).map(nanos)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_ctl(
    poller: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut libc::epoll_event,
) -> c_int {
    stir();
    pass_on!(libc::SYS_epoll_ctl, poller, operation, fd, event) as c_int
}

unsafe fn epolled(
    poller: c_int,
    into: *mut libc::epoll_event,
    most: c_int,
    span: Option<Nanos>,
) -> c_int {
    let look = || {
        pass_on!(
            libc::SYS_epoll_pwait,
            poller,
            into,
            most,
            0usize,
            0usize,
            8usize
        ) as c_int
    };
    let Some(system) = system() else {
        let millis = span.map_or(-1, |span| span.div_ceil(MILLI) as c_int);
        return pass_on!(
            libc::SYS_epoll_pwait,
            poller,
            into,
            most,
            millis,
            0usize,
            8usize
        ) as c_int;
    };
    let until = span.map(|span| system.now.saturating_add(span));
    match span {
        Some(0) => called(LOOK),
        _ => {
            called(CALL);
            loop {
                let fds = vec![pollfd {
                    fd: poller,
                    events: libc::POLLIN,
                    revents: 0,
                }];
                let in_time = wait_ready(fds, until);
                let found = look();
                // What made it readable may be gone.
                if found != 0 || !in_time {
                    return found;
                }
            }
        }
    }
    look()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_wait(
    poller: c_int,
    into: *mut libc::epoll_event,
    most: c_int,
    millis: c_int,
) -> c_int {
    let span = u64::try_from(millis).ok().map(|millis| millis * MILLI);
    // SAFETY: the caller's.
    unsafe { epolled(poller, into, most, span) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait(
    poller: c_int,
    into: *mut libc::epoll_event,
    most: c_int,
    millis: c_int,
    _mask: *const libc::sigset_t,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { epoll_wait(poller, into, most, millis) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait2(
    poller: c_int,
    into: *mut libc::epoll_event,
    most: c_int,
    span: *const timespec,
    _mask: *const libc::sigset_t,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { epolled(poller, into, most, at(span).map(nanos)) }
}

// Sockets.

unsafe fn address(from: *const sockaddr) -> Option<SocketAddr> {
    // SAFETY: the caller's address has the length of its family.
    unsafe {
        match c_int::from((*from).sa_family) {
            libc::AF_INET => {
                let from = from.cast::<libc::sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(from.sin_addr.s_addr));
                Some(SocketAddr::from((ip, u16::from_be(from.sin_port))))
            }
            libc::AF_INET6 => {
                let from = from.cast::<libc::sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(from.sin6_addr.s6_addr);
                Some(SocketAddr::from((ip, u16::from_be(from.sin6_port))))
            }
            _ => None,
        }
    }
}

unsafe fn give_address(given: SocketAddr, v6: bool, into: *mut sockaddr, length: *mut socklen_t) {
    if into.is_null() {
        return;
    }
    let given = match (given, v6) {
        (SocketAddr::V4(v4), true) => {
            SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0).into()
        }
        (given, _) => given,
    };
    // SAFETY: the caller's place holds any address, as those of all callers here do.
    unsafe {
        match given {
            SocketAddr::V4(v4) => {
                let mut out: libc::sockaddr_in = std::mem::zeroed();
                out.sin_family = libc::AF_INET as u16;
                out.sin_port = v4.port().to_be();
                out.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
                into.cast::<libc::sockaddr_in>().write_unaligned(out);
                *length = size_of::<libc::sockaddr_in>() as socklen_t;
            }
            SocketAddr::V6(v6) => {
                let mut out: libc::sockaddr_in6 = std::mem::zeroed();
                out.sin6_family = libc::AF_INET6 as u16;
                out.sin6_port = v6.port().to_be();
                out.sin6_addr.s6_addr = v6.ip().octets();
                into.cast::<libc::sockaddr_in6>().write_unaligned(out);
                *length = size_of::<libc::sockaddr_in6>() as socklen_t;
            }
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int {
    let is_tcp =
        matches!(family, libc::AF_INET | libc::AF_INET6) && kind & 0xF == libc::SOCK_STREAM;
    match system().filter(|_| is_tcp) {
        None => pass_on!(libc::SYS_socket, family, kind, protocol) as c_int,
        Some(system) => match system.network.make(family == libc::AF_INET6) {
            Ok(fd) => fd,
            Err(error) => raw::fail(error) as c_int,
        },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn bind(fd: c_int, to: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: the caller's address.
    match (simulated(fd), unsafe { address(to) }) {
        (Some(system), Some(to)) => {
            system.network.bind(fd, to);
            0
        }
        _ => pass_on!(libc::SYS_bind, fd, to, length) as c_int,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    match simulated(fd) {
        None => pass_on!(libc::SYS_listen, fd, backlog) as c_int,
        Some(system) => {
            system.network.listen(fd);
            0
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, to: *const sockaddr, length: socklen_t) -> c_int {
    called(CALL);
    stir();
    let Some(system) = simulated(fd) else {
        return pass_on!(libc::SYS_connect, fd, to, length) as c_int;
    };
    // SAFETY: the caller's address.
    let Some(to) = (unsafe { address(to) }) else {
        // Of no family: the connection is dropped.
        system.network.abort(fd, system.now, &mut system.random);
        return 0;
    };
    match system.network.connect(fd, to, system.now) {
        Ok(()) => 0,
        Err(error) => raw::fail(error) as c_int,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    from: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> c_int {
    called(CALL);
    let Some(system) = simulated(fd) else {
        return pass_on!(libc::SYS_accept4, fd, from, length, flags) as c_int;
    };
    match system.network.accept(fd) {
        Ok(accepted) => {
            let v6 = system.network.is_v6(accepted);
            if let Some(peer) = system.network.peer(accepted) {
                // SAFETY: the caller's place for it.
                unsafe { give_address(peer, v6, from, length) };
            }
            accepted
        }
        Err(error) => raw::fail(error) as c_int,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept(fd: c_int, from: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: the caller's.
    unsafe { accept4(fd, from, length, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockname(
    fd: c_int,
    into: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    let Some(system) = simulated(fd) else {
        return pass_on!(libc::SYS_getsockname, fd, into, length) as c_int;
    };
    let v6 = system.network.is_v6(fd);
    if let Some(local) = system.network.local(fd) {
        // SAFETY: the caller's place for it.
        unsafe { give_address(local, v6, into, length) };
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getpeername(
    fd: c_int,
    into: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    let Some(system) = simulated(fd) else {
        return pass_on!(libc::SYS_getpeername, fd, into, length) as c_int;
    };
    let v6 = system.network.is_v6(fd);
    match system.network.peer(fd) {
        Some(peer) => {
            // SAFETY: the caller's place for it.
            unsafe { give_address(peer, v6, into, length) };
            0
        }
        None => raw::fail(libc::ENOTCONN) as c_int,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    into: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    let real = || pass_on!(libc::SYS_getsockopt, fd, level, name, into, length) as c_int;
    let Some(system) = simulated(fd) else {
        return real();
    };
    let give = |bytes: &[u8]| {
        // SAFETY: the caller's place of that length.
        unsafe {
            let count = bytes.len().min(*length as usize);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), into.cast(), count);
            *length = count as socklen_t;
        }
        0
    };
    match (level, name) {
        (libc::IPPROTO_TCP, libc::TCP_INFO) => match system.network.info(fd, system.now) {
            // SAFETY: a structure of numbers is bytes.
            Some(info) => give(unsafe {
                std::slice::from_raw_parts((&raw const info).cast(), size_of::<libc::tcp_info>())
            }),
            None => raw::fail(libc::ENOTCONN) as c_int,
        },
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => give(b"cubic\0"),
        (libc::SOL_SOCKET, libc::SO_ERROR) => {
            let error = system.network.take_error(fd).unwrap_or(0);
            give(&error.to_ne_bytes())
        }
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => {
            let family = if system.network.is_v6(fd) {
                libc::AF_INET6
            } else {
                libc::AF_INET
            };
            give(&family.to_ne_bytes())
        }
        (libc::SOL_SOCKET, _) => real(),
        _ => give(&0i32.to_ne_bytes()),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    let Some(system) = simulated(fd) else {
        return pass_on!(libc::SYS_setsockopt, fd, level, name, value, length) as c_int;
    };
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => {
            // SAFETY: its value is an int.
            let asked = unsafe { value.cast::<c_int>().read_unaligned() };
            let bytes = system.network.send_buffer(asked as usize) as c_int;
            let bytes = &raw const bytes;
            pass_on!(libc::SYS_setsockopt, fd, level, name, bytes, length) as c_int
        }
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            // SAFETY: its value is this structure.
            let linger = unsafe { value.cast::<libc::linger>().read_unaligned() };
            if linger.l_onoff != 0 && linger.l_linger == 0 {
                system.network.set_resets_at_close(fd);
            }
            0
        }
        _ => 0,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    stir();
    if let Some(system) = simulated(fd) {
        system.network.shutdown(fd, how);
    }
    pass_on!(libc::SYS_shutdown, fd, how) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    stir();
    match simulated(fd) {
        None => pass_on!(libc::SYS_close, fd) as c_int,
        Some(system) => {
            let unread = raw::unread(fd);
            raw::close(fd);
            system
                .network
                .close(fd, unread, system.now, &mut system.random);
            0
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    let result = pass_on!(libc::SYS_fcntl, fd, command, argument) as c_int;
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC)
        && result >= 0
        && let Some(system) = simulated(fd)
    {
        system.network.copied(fd, result);
    }
    result
}

/// What became of bytes that were given to a socket.
fn gave(fd: c_int, result: isize) -> isize {
    stir();
    if let Some(system) = simulated(fd) {
        match usize::try_from(result) {
            Ok(bytes) => {
                system.idle_calls = 0;
                system.network.was_given(fd, bytes, system.now);
            }
            Err(_) if result == -(libc::EPIPE as isize) => {
                if let Some(error) = system.network.take_error(fd) {
                    return raw::fail(error);
                }
            }
            Err(_) => {}
        }
    }
    raw::answer(result)
}

/// What became of bytes that were to be read.
fn got(fd: c_int, result: isize) -> isize {
    took(fd, result, false)
}

/// As [`got`]; `drops`: whoever took them has not seen them.
fn took(fd: c_int, result: isize, drops: bool) -> isize {
    if let Some(system) = simulated(fd) {
        match result {
            1.. => {
                system.idle_calls = 0;
                let bytes = result as usize;
                let network = &mut system.network;
                network.was_read(fd, bytes, drops);
            }
            0 => {
                if let Some(error) = system.network.take_error(fd) {
                    return raw::fail(error);
                }
            }
            _ => {}
        }
    }
    raw::answer(result)
}

fn never_waits(fd: c_int, flags: c_int) -> usize {
    let flags = match simulated(fd) {
        Some(_) => flags | libc::MSG_DONTWAIT,
        None => flags,
    };
    flags as usize
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(
    fd: c_int,
    from: *const c_void,
    length: usize,
    flags: c_int,
) -> isize {
    called(CALL);
    let flags = never_waits(fd, flags);
    // SAFETY: the caller's.
    gave(fd, unsafe {
        raw::call(
            libc::SYS_sendto,
            [fd as usize, from as usize, length, flags, 0, 0],
        )
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize {
    called(CALL);
    let flags = never_waits(fd, flags);
    // SAFETY: the caller's.
    gave(fd, unsafe {
        raw::call(
            libc::SYS_sendmsg,
            [fd as usize, message as usize, flags, 0, 0, 0],
        )
    })
}

/// What a thread reads is not there at once.
fn reads() {
    called(CALL);
    if let Some(system) = system() {
        system.read_held_up();
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recv(fd: c_int, into: *mut c_void, length: usize, flags: c_int) -> isize {
    reads();
    if flags & libc::MSG_TRUNC != 0 && into.is_null() && simulated(fd).is_some() {
        // TCP drops bytes so; a local socket does not.
        let mut dropped = vec![0; length];
        return took(fd, raw::read(fd, &mut dropped), true);
    }
    let peeks = flags & libc::MSG_PEEK != 0;
    let flags = never_waits(fd, flags);
    // SAFETY: the caller's.
    let result = unsafe {
        raw::call(
            libc::SYS_recvfrom,
            [fd as usize, into as usize, length, flags, 0, 0],
        )
    };
    match peeks && result > 0 {
        true => result,
        false => got(fd, result),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    into: *mut c_void,
    length: usize,
    flags: c_int,
    from: *mut sockaddr,
    from_length: *mut socklen_t,
) -> isize {
    if simulated(fd).is_some() {
        // SAFETY: the caller's. A stream names no sender.
        return unsafe { recv(fd, into, length, flags) };
    }
    pass_on!(
        libc::SYS_recvfrom,
        fd,
        into,
        length,
        flags,
        from,
        from_length
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> isize {
    reads();
    if flags & libc::MSG_ERRQUEUE != 0 && simulated(fd).is_some() {
        return raw::fail(libc::EAGAIN);
    }
    let flags = never_waits(fd, flags);
    // SAFETY: the caller's.
    got(fd, unsafe {
        raw::call(
            libc::SYS_recvmsg,
            [fd as usize, message as usize, flags, 0, 0, 0],
        )
    })
}

/// Bytes that no call cuts up: the proof in front of a peer's table.
const PROOF: usize = 32;

/// Copies some of what was asked for; other threads may come first, and before the caller looks at
/// what it got.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn process_vm_readv(
    process: libc::pid_t,
    local: *const iovec,
    locals: c_ulong,
    remote: *const iovec,
    remotes: c_ulong,
    flags: c_ulong,
) -> isize {
    called(CALL);
    let mut cut = Vec::new();
    if let Some(system) = system() {
        system.idle_calls = 0;
        tally::saw("payload read where it lies");
        system.read_late();
    }
    if let Some(system) = system() {
        if system.random.one_in(4) {
            // SAFETY: the caller's places.
            let all = unsafe { std::slice::from_raw_parts(local, locals as usize) };
            let first = all.iter().copied().find(|one| one.iov_len > 0);
            cut.extend(first.filter(|one| one.iov_len > PROOF));
        }
        for one in &mut cut {
            one.iov_len = 1 + system.random.index(one.iov_len - 1);
        }
    }
    let (local, locals) = match &cut[..] {
        [] => (local, locals),
        cut => (cut.as_ptr(), cut.len() as c_ulong),
    };
    let number = libc::SYS_process_vm_readv;
    let read = pass_on!(number, process, local, locals, remote, remotes, flags);
    called(CALL);
    read
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, into: *mut c_void, length: usize) -> isize {
    reads();
    // SAFETY: the caller's.
    got(fd, unsafe {
        raw::call(
            libc::SYS_read,
            [fd as usize, into as usize, length, 0, 0, 0],
        )
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, from: *const c_void, length: usize) -> isize {
    // SAFETY: the caller's.
    let result = unsafe {
        raw::call(
            libc::SYS_write,
            [fd as usize, from as usize, length, 0, 0, 0],
        )
    };
    stir();
    // Whoever is woken by it may come first.
    called(CALL);
    gave(fd, result)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, from: *const iovec, count: c_int) -> isize {
    called(CALL);
    // SAFETY: the caller's.
    gave(fd, unsafe {
        raw::call(
            libc::SYS_writev,
            [fd as usize, from as usize, count as usize, 0, 0, 0],
        )
    })
}

thread_local! {
    /// Memory whose pages this thread has given to a pipe, which it empties next.
    static LOADED: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmsplice(
    pipe: c_int,
    from: *const iovec,
    count: usize,
    flags: c_uint,
) -> isize {
    let loaded = pass_on!(libc::SYS_vmsplice, pipe, from, count, flags);
    // SAFETY: the caller's.
    if let (Some(range), Ok(bytes)) = (unsafe { at(from) }, usize::try_from(loaded)) {
        LOADED.set(Some((range.iov_base as usize, bytes)));
    }
    loaded
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn splice(
    from: c_int,
    from_offset: *mut i64,
    to: c_int,
    to_offset: *mut i64,
    length: usize,
    flags: c_uint,
) -> isize {
    called(CALL);
    if let Some(system) = simulated(to) {
        system
            .network
            .is_loaded(from, || LOADED.take().filter(|(_, bytes)| *bytes > 0));
    }
    // SAFETY: the caller's.
    let moved = gave(to, unsafe {
        raw::call(
            libc::SYS_splice,
            [
                from as usize,
                from_offset as usize,
                to as usize,
                to_offset as usize,
                length,
                flags as usize,
            ],
        )
    });
    if let (Some(system), Ok(bytes)) = (simulated(to), usize::try_from(moved)) {
        system.network.was_lent(from, to, bytes);
    }
    moved
}

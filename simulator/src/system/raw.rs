//! Calls of the kernel itself, past the symbols that this program answers.

use std::arch::asm;

/// Makes a system call; a negative answer is an error number.
///
/// # Safety
/// As for the call itself.
pub unsafe fn call(number: i64, a: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: the kernel's calling convention; what the call does is the caller's duty.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
            in("r10") a[3], in("r8") a[4], in("r9") a[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

/// As the C library answers: -1, and the number where callers look for it.
pub fn answer(result: isize) -> isize {
    if result >= 0 {
        return result;
    }
    set_errno(-result as i32);
    -1
}

pub fn set_errno(number: i32) {
    // SAFETY: the C library's place for this thread.
    unsafe { *libc::__errno_location() = number };
}

/// Fails a call.
pub fn fail(number: i32) -> isize {
    set_errno(number);
    -1
}

pub fn read(fd: i32, into: &mut [u8]) -> isize {
    // SAFETY: the buffer lives for the call.
    unsafe {
        call(
            libc::SYS_recvfrom,
            [
                fd as usize,
                into.as_mut_ptr() as usize,
                into.len(),
                libc::MSG_DONTWAIT as usize,
                0,
                0,
            ],
        )
    }
}

/// Reads this process's own memory; false where there is none.
pub fn read_memory(start: usize, into: &mut [u8]) -> bool {
    let iov_len = into.len();
    let of = |start: usize| libc::iovec {
        iov_base: start as *mut libc::c_void,
        iov_len,
    };
    let (here, there) = (of(into.as_mut_ptr() as usize), of(start));
    // SAFETY: the buffer lives for the call; memory that is not there is an error.
    let count = unsafe {
        call(
            libc::SYS_process_vm_readv,
            [
                libc::getpid() as usize,
                &raw const here as usize,
                1,
                &raw const there as usize,
                1,
                0,
            ],
        )
    };
    count == into.len() as isize
}

pub fn write(fd: i32, from: &[u8]) -> isize {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the buffer lives for the call.
    unsafe {
        call(
            libc::SYS_sendto,
            [
                fd as usize,
                from.as_ptr() as usize,
                from.len(),
                flags as usize,
                0,
                0,
            ],
        )
    }
}

pub fn close(fd: i32) {
    // SAFETY: the descriptor is the caller's.
    unsafe { call(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) };
}

pub fn shutdown(fd: i32, how: i32) {
    // SAFETY: no memory is involved.
    unsafe { call(libc::SYS_shutdown, [fd as usize, how as usize, 0, 0, 0, 0]) };
}

/// Which of these are ready now.
pub fn poll(fds: &mut [libc::pollfd]) -> isize {
    let none = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: both live for the call.
    unsafe {
        call(
            libc::SYS_ppoll,
            [
                fds.as_mut_ptr() as usize,
                fds.len(),
                &raw const none as usize,
                0,
                0,
                0,
            ],
        )
    }
}

/// Bytes that wait to be read.
pub fn unread(fd: i32) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the answer is an int.
    unsafe {
        call(
            libc::SYS_ioctl,
            [
                fd as usize,
                libc::FIONREAD as usize,
                &raw mut bytes as usize,
                0,
                0,
                0,
            ],
        )
    };
    usize::try_from(bytes).unwrap_or(0)
}

/// Two connected ends, non-blocking.
pub fn pair() -> Option<[i32; 2]> {
    let mut ends = [0i32; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the answer is two ints.
    let made = unsafe {
        call(
            libc::SYS_socketpair,
            [
                libc::AF_UNIX as usize,
                kind as usize,
                0,
                ends.as_mut_ptr() as usize,
                0,
                0,
            ],
        )
    };
    (made == 0).then_some(ends)
}

pub fn futex_wait(word: &std::sync::atomic::AtomicU32, expected: u32) {
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word lives for the call.
    unsafe {
        call(
            libc::SYS_futex,
            [
                word.as_ptr() as usize,
                op as usize,
                expected as usize,
                0,
                0,
                0,
            ],
        )
    };
}

pub fn futex_wake(word: &std::sync::atomic::AtomicU32) {
    let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word lives for the call.
    unsafe {
        call(
            libc::SYS_futex,
            [word.as_ptr() as usize, op as usize, 1, 0, 0, 0],
        )
    };
}

/// Ends the process.
pub fn exit(status: i32) -> ! {
    loop {
        // SAFETY: it does not return.
        unsafe { call(libc::SYS_exit_group, [status as usize, 0, 0, 0, 0, 0]) };
    }
}

pub fn print(text: &str) {
    // SAFETY: the text lives for the call.
    unsafe {
        call(
            libc::SYS_write,
            [2, text.as_ptr() as usize, text.len(), 0, 0, 0],
        )
    };
}

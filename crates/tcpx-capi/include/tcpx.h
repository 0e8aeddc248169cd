/* tcpx.h: move host and GPU memory between hosts over plain TCP. Link with -ltcpx.
 *
 * Made by `cargo xtask header` from crates/tcpx-capi. Edit the sources, not this. The historic calls
 * over ncclNet plugins are in tcpx_plugin.h; a program may use both.
 *
 * Results. Calls return 0 (TCPX_OK) or a negative TCPX_ code, unless they say otherwise; what a pointer
 * argument should receive is there after 0 alone. After a failure tcpx_error_text() says for this thread
 * what is wrong, tcpx_error_advice(code) what to do; how a transfer failed is told by every wait for
 * it. No call ends the process.
 *
 * Order of calls. tcpx_endpoint_listen on one side; its key and address to the other by any means;
 * tcpx_connect there and tcpx_endpoint_accept here; a region for the memory on each side. Then
 * tcpx_send and tcpx_receive with the same tag, or tcpx_expose here, the window's key to the other side,
 * and tcpx_put and tcpx_get there. Each gives a transfer at once, which ends exactly once: wait for
 * it, then release it. At the end tcpx_connection_close, tcpx_region_release, tcpx_endpoint_close.
 *
 * Threads. Every call may be made from any thread, on any handle, at once. The library calls no function
 * of the program but those given to tcpx_region_wrap. Calls that take a time do not wait longer, but
 * where they say so. Names of hosts are looked up for as long as the system takes for that.
 *
 * Forks. In the child of a fork that came after the first call of this library every call is
 * TCPX_ERR_FORKED, and changes nothing; the parent is not disturbed.
 *
 * Wrong use. A handle that has ended, was never given out or is of another kind is TCPX_ERR_HANDLE, a
 * NULL that must not be one is TCPX_ERR_ARGUMENT, as often as you like. What cannot be checked is
 * memory: pointers to fill must be writable, and the bytes of a transfer must be left alone until it
 * has ended.
 *
 * Structures. Fill each with zeros before you set fields: `tcpx_options options = {0};`, in C++
 * `tcpx_options options = {};`.
 *
 * Texts and bytes out. `buffer` has room for `room` bytes; `*needed_bytes`, which may be NULL, receives how
 * many there are, with the NUL of a text. If they do not fit, the call is TCPX_ERR_ARGUMENT and writes
 * nothing else: call it with NULL and 0 to learn the size.
 */

#ifndef TCPX_H
#define TCPX_H

#include <stddef.h>
#include <stdint.h>

/* Handles are opaque: numbers that libtcpx looks up at each call, not addresses. NULL is none. */

/** A listening endpoint. */
typedef struct tcpx_endpoint tcpx_endpoint;
/** A connection to one peer. */
typedef struct tcpx_connection tcpx_connection;
/** Memory that transfers read and write. */
typedef struct tcpx_region tcpx_region;
/** Memory that is open to the peer. */
typedef struct tcpx_window tcpx_window;
/** A send, receive, put, get, batch or notification that was started. */
typedef struct tcpx_transfer tcpx_transfer;
/** Where transfers leave their completions. */
typedef struct tcpx_queue tcpx_queue;

/**
 * Version of the header: its first number.
 */
#define TCPX_VERSION_MAJOR 0

/**
 * The second one.
 */
#define TCPX_VERSION_MINOR 2

/**
 * The third one.
 */
#define TCPX_VERSION_PATCH 0

/**
 * Number of the binary interface, which the library's file name ends with (libtcpx.so.0). New
 * calls and new names for reserved fields leave it as it is; anything that a compiled program
 * could notice changes it.
 */
#define TCPX_ABI 0

/**
 * Done.
 */
#define TCPX_OK 0

/**
 * Nothing has failed: the time given to this call ran out before what it waited for came.
 */
#define TCPX_AGAIN (-1)

/**
 * No connection came about: nobody listens there, another key, another network or version.
 */
#define TCPX_ERR_CONNECT (-2)

/**
 * A deadline has passed; what it bounded has ended.
 */
#define TCPX_ERR_TIMED_OUT (-3)

/**
 * The connection ended amid its work.
 */
#define TCPX_ERR_CONNECTION_LOST (-4)

/**
 * One side closed the connection in order.
 */
#define TCPX_ERR_CLOSED (-5)

/**
 * This program cancelled the transfer.
 */
#define TCPX_ERR_CANCELLED (-6)

/**
 * The receive is smaller than the send; nothing was written. Both sides end with this.
 */
#define TCPX_ERR_TOO_LARGE (-7)

/**
 * Source and destination differ.
 */
#define TCPX_ERR_CORRUPT (-8)

/**
 * One transfer failed or was refused; the connection may live on.
 */
#define TCPX_ERR_TRANSFER (-9)

/**
 * A setting, a key, or a piece of a window cannot work.
 */
#define TCPX_ERR_SETTING (-10)

/**
 * Memory is in use, cannot be reached, or cannot be had.
 */
#define TCPX_ERR_MEMORY (-11)

/**
 * The operating system refused something.
 */
#define TCPX_ERR_SYSTEM (-12)

/**
 * A defect of libtcpx.
 */
#define TCPX_ERR_DEFECT (-13)

/**
 * An argument is NULL, out of range or too small; nothing was done.
 */
#define TCPX_ERR_ARGUMENT (-32)

/**
 * A handle that libtcpx did not give out, of another kind, or one that has ended; nothing was
 * done.
 */
#define TCPX_ERR_HANDLE (-33)

/**
 * The call is not allowed now; nothing was done.
 */
#define TCPX_ERR_USAGE (-34)

/**
 * This process is a fork's child, and libtcpx was in use before the fork; nothing was done.
 */
#define TCPX_ERR_FORKED (-35)

/**
 * A time without end, where a call takes milliseconds.
 */
#define TCPX_FOREVER UINT32_MAX

/**
 * Most bytes of a key's text, its NUL included.
 */
#define TCPX_KEY_MAX 128

/**
 * Most bytes of a window's key.
 */
#define TCPX_WINDOW_KEY_MAX 96

/**
 * Most bytes of a notification.
 */
#define TCPX_NOTIFICATION_MAX 65536

/**
 * Memory of this process.
 */
#define TCPX_MEMORY_HOST 0

/**
 * Memory of a CUDA device.
 */
#define TCPX_MEMORY_CUDA 1

/**
 * Level: every byte is at its destination, and both sides know it. The default.
 */
#define TCPX_LEVEL_PLACED 0

/**
 * Level: the source may be reused.
 */
#define TCPX_LEVEL_SENT 1

/**
 * Level: as placed, and the checksums (CRC32C) of both ends were compared.
 */
#define TCPX_LEVEL_VERIFIED 2

/**
 * CUDA work that comes first: all of the context's default streams. The default. TCPX_ERR_MEMORY
 * while a stream that synchronises with them is being captured as a graph; the capture goes on.
 */
#define TCPX_AFTER_DEFAULT_STREAMS 0

/**
 * None: the bytes are ready.
 */
#define TCPX_AFTER_NOTHING 1

/**
 * What was submitted so far to the CUstream in `stream`. TCPX_ERR_MEMORY while that is being
 * captured as a graph; the capture goes on.
 */
#define TCPX_AFTER_STREAM 2

/**
 * The CUevent in `stream`, which was recorded outside of a capture and stays until the transfer
 * has ended.
 */
#define TCPX_AFTER_EVENT 3

/**
 * Progress by a thread that waits, and by the library's own at all other times.
 */
#define TCPX_PROGRESS_BACKGROUND 0

/**
 * Progress by the program alone: while it waits, tests, or calls tcpx_connection_progress. Without
 * that nothing arrives, but the connection stays. Not over plugins.
 */
#define TCPX_PROGRESS_MANUAL 1

/**
 * As the variable TCPX_LOCAL says; without it, where both processes are one user's and payload is
 * not encrypted.
 */
#define TCPX_LOCAL_DEFAULT 0

/**
 * Never: payload goes over TCP within the host too.
 */
#define TCPX_LOCAL_OFF 1

/**
 * With encryption too.
 */
#define TCPX_LOCAL_ON 2

/**
 * Right of a window: the peer may read.
 */
#define TCPX_RIGHT_GET 1

/**
 * Right of a window: the peer may write.
 */
#define TCPX_RIGHT_PUT 2

/**
 * A piece of a batch: write our memory into the peer's window.
 */
#define TCPX_PUT 1

/**
 * A piece of a batch: read the peer's window into our memory.
 */
#define TCPX_GET 2

/**
 * tcpx_error_delivered: the last failure was not about a transfer.
 */
#define TCPX_DELIVERED_NO_TRANSFER 0

/**
 * Not one byte of the destination was written.
 */
#define TCPX_DELIVERED_NONE 1

/**
 * Some bytes are placed; others may be written in part.
 */
#define TCPX_DELIVERED_PARTIAL 2

/**
 * Every byte is placed; what failed came after.
 */
#define TCPX_DELIVERED_ALL 3

/**
 * It cannot be known.
 */
#define TCPX_DELIVERED_UNKNOWN 4

/**
 * What this side takes of its peer at a time, each at most 2^20; 0: the default, which is many.
 * The peer keeps the rest, and begins that as others end: nothing fails for it, but a batch of
 * more pieces than fit at all.
 */
typedef struct tcpx_limits {
    /**
     * Puts into windows of this side.
     */
    uint32_t puts;
    /**
     * Notifications, those included that the program has not collected.
     */
    uint32_t notifications;
    /**
     * Gets from its windows.
     */
    uint32_t gets;
    /**
     * Sends for which no receive is there.
     */
    uint32_t asks;
    /**
     * Receives of the peer that wait for sends of this side.
     */
    uint32_t windows;
    /**
     * Tags whose sends it counts.
     */
    uint32_t tags;
    /**
     * Pieces of batches.
     */
    uint32_t pieces;
    /**
     * Windows that a batch names.
     */
    uint32_t list_windows;
} tcpx_limits;

/**
 * Settings of an endpoint or a connection. Fill it with zeros: every zero means the default.
 */
typedef struct tcpx_options {
    /**
     * The pre-shared key, as tcpx_endpoint_key and tcpx_key_generate give it. NULL: an endpoint
     * makes one; a connection needs one unless `insecure`.
     */
    const char *key;
    /**
     * Not 0: no key. Whoever reaches the port may connect.
     */
    int insecure;
    /**
     * Not 0: payload is encrypted, which both sides must ask for; control always is where there is
     * a key.
     */
    int encrypt;
    /**
     * What this side moves: TCPX_MEMORY_HOST, or TCPX_MEMORY_CUDA, which moves host memory too.
     */
    int memory;
    /**
     * The CUDA device, for TCPX_MEMORY_CUDA.
     */
    uint32_t device;
    /**
     * Lanes (TCP connections that carry payload), at most 65535; 0: automatic.
     */
    uint32_t lanes;
    /**
     * Most milliseconds for setting a connection up; 0: 10 s.
     */
    uint32_t connect_timeout_ms;
    /**
     * Milliseconds that each transfer may take in all, unless it sets its own; 0: no limit.
     */
    uint32_t timeout_ms;
    /**
     * Milliseconds that a transfer may stall, a receive that waits for its send included;
     * 0: `timeout_ms` if that is set, else 30 s.
     */
    uint32_t stall_ms;
    /**
     * Milliseconds of silence after which the peer counts as dead; 0: 10 s.
     */
    uint32_t dead_after_ms;
    /**
     * Not 0: an endpoint accepts one peer, then its key is spent.
     */
    int one_time;
    /**
     * A TCPX_PROGRESS_ number.
     */
    int progress;
    /**
     * A TCPX_LOCAL_ number: whether peers on this host read payload where it lies.
     */
    int local;
    /**
     * In place of `key`: a file that holds it. NULL: none.
     */
    const char *key_file;
    /**
     * What this side takes of its peer at a time.
     */
    struct tcpx_limits limits;
    /**
     * Zeros.
     */
    uint64_t reserved[3];
} tcpx_options;

/**
 * Counters of a connection, from its beginning.
 */
typedef struct tcpx_statistics {
    /**
     * Payload bytes handed to the network.
     */
    uint64_t bytes_sent;
    /**
     * Payload bytes taken from the network.
     */
    uint64_t bytes_received;
    /**
     * Chunks sent to their last byte.
     */
    uint64_t chunks_sent;
    /**
     * Chunks received to their last byte.
     */
    uint64_t chunks_received;
    /**
     * Chunks sent again because their lane died.
     */
    uint64_t chunks_resent;
    /**
     * Lanes that died.
     */
    uint64_t lanes_lost;
    /**
     * Lanes that came back.
     */
    uint64_t lanes_restored;
    /**
     * TCP connections of the data plane that are open now.
     */
    uint64_t streams;
    /**
     * Bytes of the control connection sent, which small messages travel on.
     */
    uint64_t control_bytes_sent;
    /**
     * The same, received.
     */
    uint64_t control_bytes_received;
    /**
     * Zeros.
     */
    uint64_t reserved[6];
} tcpx_statistics;

/**
 * Gives memory back to the program; see tcpx_region_wrap.
 */
typedef void (*tcpx_release_fn)(void *user);

/**
 * Settings of one transfer. Fill it with zeros: every zero means the default.
 */
typedef struct tcpx_transfer_options {
    /**
     * A TCPX_LEVEL_ number.
     */
    int level;
    /**
     * A TCPX_AFTER_ number, for CUDA memory.
     */
    int after;
    /**
     * The CUstream or CUevent of TCPX_AFTER_STREAM and TCPX_AFTER_EVENT.
     */
    void *stream;
    /**
     * Most milliseconds in all; 0: as the connection was opened with.
     */
    uint32_t timeout_ms;
    /**
     * Most milliseconds without progress; 0: `timeout_ms` if that is set, else as the connection
     * was opened with.
     */
    uint32_t stall_ms;
    /**
     * Put, get, batch: bytes for the peer's tcpx_notification once everything is in place. NULL:
     * none.
     */
    const void *notification;
    /**
     * How many, at most TCPX_NOTIFICATION_MAX; with `notification` not NULL it may be 0.
     */
    size_t notification_bytes;
    /**
     * Zeros.
     */
    uint64_t reserved[4];
} tcpx_transfer_options;

/**
 * A put or a get of a batch.
 */
typedef struct tcpx_piece {
    /**
     * TCPX_PUT or TCPX_GET.
     */
    int operation;
    /**
     * Zeros.
     */
    int reserved;
    /**
     * Our memory.
     */
    tcpx_region *region;
    /**
     * Where the piece begins in it.
     */
    size_t offset;
    /**
     * Its length.
     */
    size_t bytes;
    /**
     * The peer's window: what tcpx_window_key gave there.
     */
    const void *key;
    /**
     * Bytes of that.
     */
    size_t key_bytes;
    /**
     * Where the piece begins in the window.
     */
    uint64_t window_offset;
} tcpx_piece;

/**
 * A transfer that ended well.
 */
typedef struct tcpx_report {
    /**
     * Bytes moved; of a receive perhaps fewer than it has room for.
     */
    uint64_t bytes;
    /**
     * Nanoseconds from its start to its end.
     */
    uint64_t nanoseconds;
    /**
     * A TCPX_LEVEL_ number: what is known.
     */
    int level;
    /**
     * Whether `digest` holds something.
     */
    int has_digest;
    /**
     * CRC32C of the bytes, at level verified.
     */
    uint32_t digest;
    /**
     * Zeros.
     */
    uint32_t reserved0;
    /**
     * Zeros.
     */
    uint64_t reserved[4];
} tcpx_report;

/**
 * What a queue tells of a transfer.
 */
typedef struct tcpx_completion_entry {
    /**
     * As given to tcpx_transfer_queue.
     */
    uint64_t key;
    /**
     * TCPX_OK, or how it failed.
     */
    int code;
    /**
     * Zeros.
     */
    int reserved;
    /**
     * With TCPX_OK.
     */
    struct tcpx_report report;
} tcpx_completion_entry;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The library's version, "MAJOR.MINOR.PATCH"; valid for ever. Compare it with the header's.
 */
const char *tcpx_version(void);

/**
 * The library's TCPX_ABI. A program works with a library whose number is that of its header.
 */
int tcpx_abi(void);

/**
 * The name of a code without its prefix, such as "TIMED_OUT"; valid for ever, never NULL.
 */
const char *tcpx_error_name(int code);

/**
 * What to do about a code, in one line; valid for ever, never NULL. tcpx_error_text says what
 * happened.
 */
const char *tcpx_error_advice(int code);

/**
 * The code of the calling thread's last failure; 0 if none failed. TCPX_AGAIN counts as one.
 */
int tcpx_error_code(void);

/**
 * What went wrong in the last failing call of the calling thread, in one line that names the call;
 * "" if none failed. Never NULL. Valid until the next failure on the same thread.
 */
const char *tcpx_error_text(void);

/**
 * The check of `tcpx doctor` that explains the last failure, such as "TCPX-D037"; NULL if there is
 * none. Valid as the text is.
 */
const char *tcpx_error_check(void);

/**
 * What the destination of the transfer holds that the last failure was about: a TCPX_DELIVERED_
 * number. `bytes` may be NULL; it receives how many bytes are known to be placed.
 *
 * The caller's part:
 * `bytes` is NULL or can be written.
 */
int tcpx_error_delivered(uint64_t *bytes);

/**
 * Makes a key, at most TCPX_KEY_MAX bytes with the NUL. For programs that hand a key to both
 * sides; an endpoint without one makes its own.
 *
 * The caller's part:
 * `buffer` is NULL or has `room` bytes; `needed_bytes` is NULL or can be written.
 */
int tcpx_key_generate(char *buffer, size_t room, size_t *needed_bytes);

/**
 * Listens at `address`, "HOST:PORT"; port 0 takes a free one. `options` may be NULL.
 *
 * Keep the endpoint as long as the connections that it accepted: lanes that died come back to it.
 *
 * The caller's part:
 * `address` is NULL or a string; `options` is NULL or filled; `endpoint` is NULL or can be
 * written.
 */
int tcpx_endpoint_listen(const char *address,
                         const struct tcpx_options *options,
                         tcpx_endpoint **endpoint);

/**
 * Where an endpoint listens, "ADDRESS:PORT".
 *
 * The caller's part:
 * `buffer` is NULL or has `room` bytes; `needed_bytes` is NULL or can be written.
 */
int tcpx_endpoint_address(tcpx_endpoint *endpoint, char *buffer, size_t room, size_t *needed_bytes);

/**
 * The client's key: what the connecting side puts into tcpx_options.key, at most TCPX_KEY_MAX
 * bytes with the NUL. Whoever reads it can connect, and cannot listen with it. "" for an endpoint
 * without a key.
 *
 * The caller's part:
 * `buffer` is NULL or has `room` bytes; `needed_bytes` is NULL or can be written.
 */
int tcpx_endpoint_key(tcpx_endpoint *endpoint, char *buffer, size_t room, size_t *needed_bytes);

/**
 * Waits for the next connection with a peer; TCPX_AGAIN when there is none within `timeout_ms`.
 * What is being set up then is for the next call. Peers that cannot prove themselves are turned
 * away and do not end the wait. Any error but TCPX_ERR_HANDLE is about one peer: call it again.
 * tcpx_endpoint_close ends a wait.
 *
 * The caller's part:
 * `connection` is NULL or can be written.
 */
int tcpx_endpoint_accept(tcpx_endpoint *endpoint,
                         uint32_t timeout_ms,
                         tcpx_connection **connection);

/**
 * Connects to another endpoint with this one's settings and key; it may accept peers meanwhile.
 * Otherwise as tcpx_connect.
 *
 * The caller's part:
 * As for tcpx_connect.
 */
int tcpx_endpoint_connect(tcpx_endpoint *endpoint,
                          const char *address,
                          tcpx_connection **connection);

/**
 * Stops listening; waits in tcpx_endpoint_accept end with TCPX_ERR_HANDLE. Connections live on.
 */
int tcpx_endpoint_close(tcpx_endpoint *endpoint);

/**
 * Connects to a listening endpoint at `address`, "HOST:PORT"; every address of a name is tried.
 * `options` holds at least the endpoint's key. A connection that was lost is not restored: connect
 * again.
 *
 * The caller's part:
 * `address` is NULL or a string; `options` is NULL or filled; `connection` is NULL or can be
 * written.
 */
int tcpx_connect(const char *address,
                 const struct tcpx_options *options,
                 tcpx_connection **connection);

/**
 * The peer's address, "ADDRESS:PORT".
 *
 * The caller's part:
 * `buffer` is NULL or has `room` bytes; `needed_bytes` is NULL or can be written.
 */
int tcpx_connection_peer(tcpx_connection *connection,
                         char *buffer,
                         size_t room,
                         size_t *needed_bytes);

/**
 * Which path the bytes take, and why, in one line for a person.
 *
 * The caller's part:
 * `buffer` is NULL or has `room` bytes; `needed_bytes` is NULL or can be written.
 */
int tcpx_connection_path(tcpx_connection *connection,
                         char *buffer,
                         size_t room,
                         size_t *needed_bytes);

/**
 * The connection's counters.
 *
 * The caller's part:
 * `statistics` is NULL or can be written.
 */
int tcpx_connection_statistics(tcpx_connection *connection, struct tcpx_statistics *statistics);

/**
 * Makes all the progress that can be made now, without waiting, and says in `*more` whether there
 * may be more to do at once (1 or 0). For connections with TCPX_PROGRESS_MANUAL; others need it
 * not.
 *
 * The caller's part:
 * `more` is NULL or can be written.
 */
int tcpx_connection_progress(tcpx_connection *connection, int *more);

/**
 * A descriptor that is readable while tcpx_connection_progress finds something to do, for poll and
 * epoll: make progress until there is no more, then wait. It is the connection's: neither read nor
 * close it. Connections with TCPX_PROGRESS_MANUAL have one, until they end.
 *
 * The caller's part:
 * `descriptor` is NULL or can be written.
 */
int tcpx_connection_progress_descriptor(tcpx_connection *connection, int *descriptor);

/**
 * The peer's next notification, in the order in which they were completed: up to `room` bytes of
 * it at `buffer`, and how many it has in `*bytes`. TCPX_AGAIN when there is none within
 * `timeout_ms`. With too little room it is TCPX_ERR_ARGUMENT, and the notification stays the next
 * one; TCPX_NOTIFICATION_MAX bytes are always enough.
 *
 * The caller's part:
 * `buffer` is NULL or has `room` bytes; `bytes` is NULL or can be written.
 */
int tcpx_notification(tcpx_connection *connection,
                      uint32_t timeout_ms,
                      void *buffer,
                      size_t room,
                      size_t *bytes);

/**
 * Closes a connection: running transfers are finished first, as long as that takes within
 * `timeout_ms`, and the peer says goodbye too. Returns when both sides are done. What is left
 * after `timeout_ms` ends then. 0 leaves all that to the library, which takes five seconds at
 * most, and always succeeds.
 */
int tcpx_connection_close(tcpx_connection *connection, uint32_t timeout_ms);

/**
 * Allocates `bytes` bytes of host memory, page-aligned and all zero.
 *
 * The caller's part:
 * `region` is NULL or can be written.
 */
int tcpx_region_host(size_t bytes, tcpx_region **region);

/**
 * Allocates `bytes` bytes of memory on a CUDA device, in its primary context.
 *
 * The caller's part:
 * `region` is NULL or can be written.
 */
int tcpx_region_cuda(uint32_t device, size_t bytes, tcpx_region **region);

/**
 * Makes a region of `bytes` bytes at `data` that the program has allocated: host memory
 * (TCPX_MEMORY_HOST, `device` is ignored), or memory of a CUDA device (TCPX_MEMORY_CUDA), managed
 * memory and memory that is mapped in parts among it. Pinned host memory is host memory.
 * TCPX_ERR_MEMORY if that is not so: the driver is asked, and of host memory the kernel.
 *
 * `release` is called with `user`, once, when nothing of the library points at the memory any
 * more: after tcpx_region_release, and after every transfer and window there has ended. It is
 * called on a thread of the library that holds no lock, so it may call this library. NULL: the
 * memory stays for ever. If this call fails, `release` is not called.
 *
 * The caller's part:
 * The memory can be read and written until `release` is called, nobody frees it before, and no
 * other region covers it. `region` is NULL or can be written. `release` may be called on any
 * thread.
 */
int tcpx_region_wrap(void *data,
                     size_t bytes,
                     int memory,
                     uint32_t device,
                     tcpx_release_fn release,
                     void *user,
                     tcpx_region **region);

/**
 * Where a region lies, and its length: an address of this process for host memory, else of the
 * device. Each may be NULL. The program may use the memory through it whenever no transfer does,
 * and as long as the region is not released.
 *
 * The caller's part:
 * `address` and `bytes` are NULL or can be written.
 */
int tcpx_region_address(tcpx_region *region, void **address, size_t *bytes);

/**
 * Copies `bytes` bytes at `source` into the region from `offset` on. TCPX_ERR_MEMORY while a
 * transfer uses these bytes. For CUDA memory it waits for the work on the default streams.
 *
 * The caller's part:
 * The source can be read.
 */
int tcpx_region_write(tcpx_region *region, size_t offset, const void *source, size_t bytes);

/**
 * Copies `bytes` bytes from the region's `offset` to `destination`; otherwise as
 * tcpx_region_write.
 *
 * The caller's part:
 * The destination can be written.
 */
int tcpx_region_read(tcpx_region *region, size_t offset, void *destination, size_t bytes);

/**
 * Ends the handle. The memory stays until every transfer and window that uses it has ended.
 */
int tcpx_region_release(tcpx_region *region);

/**
 * Starts a send of `bytes` bytes from `offset` of a region; it meets the peer's receives of the
 * same tag in the order of both. Returns at once. `options` may be NULL.
 *
 * Until the transfer has ended nobody may write these bytes.
 *
 * The caller's part:
 * `options` is NULL or filled; `transfer` is NULL or can be written.
 */
int tcpx_send(tcpx_connection *connection,
              tcpx_region *region,
              size_t offset,
              size_t bytes,
              uint64_t tag,
              const struct tcpx_transfer_options *options,
              tcpx_transfer **transfer);

/**
 * Starts a receive into `bytes` bytes from `offset` of a region, at least as many as the matching
 * send has: the report says how many came. Returns at once. `options` may be NULL.
 *
 * Until the transfer has ended nobody may touch these bytes. A receive fails after 30 s without
 * its send, unless `stall_ms` or `timeout_ms` says otherwise.
 *
 * The caller's part:
 * `options` is NULL or filled; `transfer` is NULL or can be written.
 */
int tcpx_receive(tcpx_connection *connection,
                 tcpx_region *region,
                 size_t offset,
                 size_t bytes,
                 uint64_t tag,
                 const struct tcpx_transfer_options *options,
                 tcpx_transfer **transfer);

/**
 * Starts a write of `bytes` bytes from `offset` of a region into the peer's window, from
 * `window_offset` on. The peer's program takes no part; the transfer succeeds when every byte is
 * there. `key` is what tcpx_window_key gave at the peer. `options` may be NULL.
 *
 * The caller's part:
 * The key can be read; `options` is NULL or filled; `transfer` is NULL or can be written.
 */
int tcpx_put(tcpx_connection *connection,
             tcpx_region *region,
             size_t offset,
             size_t bytes,
             const void *key,
             size_t key_bytes,
             uint64_t window_offset,
             const struct tcpx_transfer_options *options,
             tcpx_transfer **transfer);

/**
 * Starts a read of `bytes` bytes from the peer's window, from `window_offset` on, into a region
 * from `offset` on. Otherwise as tcpx_put.
 *
 * The caller's part:
 * As for tcpx_put.
 */
int tcpx_get(tcpx_connection *connection,
             tcpx_region *region,
             size_t offset,
             size_t bytes,
             const void *key,
             size_t key_bytes,
             uint64_t window_offset,
             const struct tcpx_transfer_options *options,
             tcpx_transfer **transfer);

/**
 * Starts puts and gets that end together, as one transfer, in no order among them: with the first
 * error, if there is one. All of them are checked before the first byte moves.
 *
 * The caller's part:
 * `pieces` has `count` elements whose keys can be read; `options` is NULL or filled; `transfer` is
 * NULL or can be written.
 */
int tcpx_batch(tcpx_connection *connection,
               const struct tcpx_piece *pieces,
               size_t count,
               const struct tcpx_transfer_options *options,
               tcpx_transfer **transfer);

/**
 * Sends `bytes` bytes, at most TCPX_NOTIFICATION_MAX, that the peer's program gets from
 * tcpx_notification. The transfer ends when they wait there.
 *
 * The caller's part:
 * `bytes` bytes at `data` can be read; `transfer` is NULL or can be written.
 */
int tcpx_notify(tcpx_connection *connection,
                const void *data,
                size_t bytes,
                tcpx_transfer **transfer);

/**
 * Whether a transfer has ended: 1 in `*done` if so. Never blocks. An error means that the transfer
 * has failed with it. `report` may be NULL; it is filled when the transfer has succeeded.
 *
 * The caller's part:
 * `done` and `report` are NULL or can be written.
 */
int tcpx_transfer_test(tcpx_transfer *transfer, int *done, struct tcpx_report *report);

/**
 * Waits for the end of a transfer, at most `timeout_ms`: TCPX_AGAIN when it still runs then. With
 * TCPX_FOREVER the transfer's own deadlines bound the wait. Any other error is how it failed. The
 * answer stays the same however often it is asked for; `report` may be NULL.
 *
 * The caller's part:
 * `report` is NULL or can be written.
 */
int tcpx_transfer_wait(tcpx_transfer *transfer, uint32_t timeout_ms, struct tcpx_report *report);

/**
 * Has a queue told of the end of a transfer, under `key`: at once if it has ended. The handle
 * stays; released now, the transfer runs on, and only its completion tells how it ended. Once for
 * each transfer.
 */
int tcpx_transfer_queue(tcpx_transfer *transfer, tcpx_queue *queue, uint64_t key);

/**
 * Asks for an early end. The transfer still ends once: with TCPX_ERR_CANCELLED, or as it would
 * have if that came first.
 */
int tcpx_transfer_cancel(tcpx_transfer *transfer);

/**
 * Bytes placed so far, and bytes in all (0 until a receive has met its send). Each may be NULL.
 *
 * The caller's part:
 * `bytes_done` and `bytes_total` are NULL or can be written.
 */
int tcpx_transfer_progress(tcpx_transfer *transfer, uint64_t *bytes_done, uint64_t *bytes_total);

/**
 * Ends the handle. A transfer that runs is cancelled, unless it reports to a queue; its memory
 * stays in use until nothing points at it.
 */
int tcpx_transfer_release(tcpx_transfer *transfer);

/**
 * Makes a queue, for transfers of any number of connections.
 *
 * The caller's part:
 * `queue` is NULL or can be written.
 */
int tcpx_queue_new(tcpx_queue **queue);

/**
 * A descriptor that is readable while completions wait in the queue, for poll() and epoll. It
 * belongs to the queue: do not read or close it.
 *
 * The caller's part:
 * `descriptor` is NULL or can be written.
 */
int tcpx_queue_descriptor(tcpx_queue *queue, int *descriptor);

/**
 * Takes at most `room` completions, oldest first, and says in `*count` how many. Without one it
 * waits at most `timeout_ms`; then `*count` is 0, which is no error. The text of a failure is that
 * of tcpx_transfer_wait on the transfer, if its handle was kept.
 *
 * The caller's part:
 * `entries` has `room` elements; `count` is NULL or can be written.
 */
int tcpx_queue_poll(tcpx_queue *queue,
                    struct tcpx_completion_entry *entries,
                    size_t room,
                    uint32_t timeout_ms,
                    size_t *count);

/**
 * Ends a queue; its descriptor is closed once no transfer is left that reports to it. Completions
 * that nobody has taken are lost, transfers are not.
 */
int tcpx_queue_close(tcpx_queue *queue);

/**
 * Opens `bytes` bytes from `offset` of a region to the connection's peer, which may do there what
 * `rights` say: TCPX_RIGHT_GET, TCPX_RIGHT_PUT or both. The memory is in use only while a put or
 * get of the peer touches it.
 *
 * CUDA memory is outside of every stream's order here: have your work on it ended before you tell
 * the peer to begin.
 *
 * The caller's part:
 * `window` is NULL or can be written.
 */
int tcpx_expose(tcpx_connection *connection,
                tcpx_region *region,
                size_t offset,
                size_t bytes,
                int rights,
                tcpx_window **window);

/**
 * What lets the peer in: `*bytes` bytes at `buffer`, at most TCPX_WINDOW_KEY_MAX. Carry them over
 * by any means, such as a message; whoever holds them and this connection may use the window.
 *
 * The caller's part:
 * `buffer` is NULL or has `room` bytes; `bytes` is NULL or can be written.
 */
int tcpx_window_key(tcpx_window *window, void *buffer, size_t room, size_t *bytes);

/**
 * Closes a window and ends its handle: the peer starts nothing there any more, and what it has
 * under way ends early. Returns when nothing of the peer points at the memory; TCPX_ERR_TIMED_OUT
 * when that is not so within `timeout_ms`, and the window is closed all the same.
 */
int tcpx_window_revoke(tcpx_window *window, uint32_t timeout_ms);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* TCPX_H */

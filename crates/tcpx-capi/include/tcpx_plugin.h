/* tcpx_plugin.h: drive any ncclNet network plugin from C. Link with -ltcpx.
 *
 * Made by `cargo xtask header` from crates/tcpx-capi. Edit the sources, not this.
 *
 * Results. Every call returns TCPX_SUCCESS or another TCPX_ code, but for tcpx_get_device_count
 * (a count, or a code times -1), tcpx_strerror and tcpx_last_error. After a failure
 * tcpx_last_error() says for this thread what is wrong and what to do. No call ends the process,
 * except that the plugin is foreign code and may.
 *
 * Order of calls. tcpx_load_plugin; tcpx_listen on one side, its 128 bytes to the other;
 * tcpx_connect_v5 there, tcpx_accept_v5 here until it gives a comm; tcpx_reg_mr; tcpx_isend and
 * tcpx_irecv; tcpx_wait_request; tcpx_irecv_consumed for each receive; the closes.
 *
 * Threads. Every call may be made from any thread. Calls on one comm (its requests and memory
 * included) wait for each other; different comms are independent. A call that blocks inside the
 * plugin holds its comm, and nothing else. Closing a comm while another thread waits on it ends
 * that wait with TCPX_BAD_HANDLE. After fork() only the parent may use the library.
 *
 * Wrong use. A handle that was closed, finished, never given out or of another kind is
 * TCPX_BAD_HANDLE, NULL is TCPX_INVALID_ARGUMENT, as often as you like. What cannot be checked is
 * memory: pointers to fill must be writable, and registered memory must stay until its end.
 */

#ifndef TCPX_PLUGIN_H
#define TCPX_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

/* Handles are opaque: numbers that libtcpx looks up at each call, not addresses. NULL is none.
 * With TCPX_UNTYPED defined they are `void`, for sources written for the historic header. */
#ifdef TCPX_UNTYPED
typedef void tcpx_listen_comm;
typedef void tcpx_send_comm;
typedef void tcpx_recv_comm;
typedef void tcpx_memory;
typedef void tcpx_request;
#else
/** A listening comm: good for one accept. */
typedef struct tcpx_listen_comm tcpx_listen_comm;
/** The sending end of a connection. */
typedef struct tcpx_send_comm tcpx_send_comm;
/** The receiving end of a connection. */
typedef struct tcpx_recv_comm tcpx_recv_comm;
/** Memory registered on one comm. */
typedef struct tcpx_memory tcpx_memory;
/** A send or receive under way. */
typedef struct tcpx_request tcpx_request;
#endif

/**
 * Done; what a pointer argument should have received is there, or NULL for "not yet".
 */
#define TCPX_SUCCESS 0

/**
 * 1 to 7 are ncclResult_t: the plugin's answer as it stands. A CUDA call failed inside the plugin.
 */
#define TCPX_CUDA_ERROR 1

/**
 * A system call of the plugin failed, or the peer closed the connection.
 */
#define TCPX_SYSTEM_ERROR 2

/**
 * The plugin refused the call or failed inside.
 */
#define TCPX_INTERNAL_ERROR 3

/**
 * An argument is wrong: NULL, out of range, of another comm.
 */
#define TCPX_INVALID_ARGUMENT 4

/**
 * The call is not allowed now: twice, out of order, while requests are in flight.
 */
#define TCPX_INVALID_USAGE 5

/**
 * The plugin says that the peer failed.
 */
#define TCPX_REMOTE_ERROR 6

/**
 * The plugin says that the call is not finished; make it again.
 */
#define TCPX_IN_PROGRESS 7

/**
 * No plugin: call tcpx_load_plugin first.
 */
#define TCPX_NOT_LOADED 16

/**
 * The plugin file could not be loaded.
 */
#define TCPX_LOAD_FAILED 17

/**
 * A handle that this library did not give out, or that was closed or finished before.
 */
#define TCPX_BAD_HANDLE 18

/**
 * The time was over before the call was done: a request is still in flight, a comm not yet
 * connected or closed. Make the call again to go on waiting.
 */
#define TCPX_TIMEOUT 19

/**
 * The plugin reported something that cannot be. The comm takes no more requests: close it.
 */
#define TCPX_PLUGIN_FAULT 20

/**
 * A defect of this library. Close what the call was about.
 */
#define TCPX_PANIC 21

/**
 * Registration: host memory.
 */
#define TCPX_PTR_HOST 1

/**
 * Registration: CUDA device memory, or the host memory that a plugin takes for it.
 */
#define TCPX_PTR_CUDA 2

/**
 * Bytes of a connection handle.
 */
#define TCPX_HANDLE_BYTES 128

/**
 * A size that the plugin did not tell.
 */
#define TCPX_SIZE_UNKNOWN (-1)

/**
 * Most requests in flight, and most receives not consumed, on one comm.
 */
#define TCPX_MAX_REQUESTS 16

/**
 * Properties of a device of the plugin. Strings are valid for ever.
 */
typedef struct tcpx_net_properties {
    /**
     * Name, usually of the interface. Never NULL.
     */
    const char *name;
    /**
     * Path of the PCI device in sysfs; NULL if there is none.
     */
    const char *pci_path;
    /**
     * Identity of the NIC.
     */
    uint64_t guid;
    /**
     * TCPX_PTR_HOST and TCPX_PTR_CUDA, as bits.
     */
    int ptr_support;
    /**
     * Megabits a second.
     */
    int speed;
    /**
     * Port number.
     */
    int port;
    /**
     * Microseconds.
     */
    float latency;
    /**
     * Most comms.
     */
    int max_comms;
    /**
     * Most receives in one tcpx_irecv that the plugin would take; this library takes 1.
     */
    int max_recvs;
    /**
     * 0: receives land flat. 1: receives into device memory leave descriptors.
     */
    int net_device_type;
    /**
     * Version of the device queue's layout; 7 is the one in use.
     */
    int net_device_version;
} tcpx_net_properties;

/**
 * One piece of a received message: `len` bytes from `src_off` in the pool to `dst_off` in the
 * posted buffer.
 */
typedef struct tcpx_descriptor {
    /**
     * Offset in the pool, in bytes.
     */
    uint32_t src_off;
    /**
     * Bytes; at least 1.
     */
    uint32_t len;
    /**
     * Offset in the posted buffer, in bytes.
     */
    uint64_t dst_off;
} tcpx_descriptor;

/**
 * What became of a request.
 */
typedef struct tcpx_completion {
    /**
     * Bytes received or sent. TCPX_SIZE_UNKNOWN for a receive in place whose plugin does not say
     * (Google's never does): the peer must have told you.
     */
    int64_t size;
    /**
     * Pieces to move from the pool to the posted buffer; NULL when the bytes lie in place or there
     * are none. Valid until tcpx_irecv_consumed or the close of the comm.
     *
     * They are checked: inside the pool and inside the posted buffer, without overlap, `size`
     * bytes together, neighbours merged, in the order of `dst_off`.
     */
    const struct tcpx_descriptor *descriptors;
    /**
     * How many.
     */
    size_t count;
    /**
     * First byte of the pool, in device memory or in the host memory that stands in for it; NULL
     * beside no descriptors.
     */
    const void *pool;
    /**
     * Bytes of the pool.
     */
    size_t pool_bytes;
} tcpx_completion;

/**
 * What tcpx_listen writes and the peer's tcpx_connect_v5 reads. Carry the bytes as they are.
 */
typedef struct tcpx_handle {
    /**
     * Opaque.
     */
    uint8_t bytes[TCPX_HANDLE_BYTES];
} tcpx_handle;

/**
 * The plugin's device queue of a receive comm, for code that reads it on the GPU.
 */
typedef struct tcpx_device_handle {
    /**
     * 1: the queue with descriptors.
     */
    int net_device_type;
    /**
     * Version of its layout.
     */
    int net_device_version;
    /**
     * Device address of the plugin's structure.
     */
    void *handle;
    /**
     * Bytes there.
     */
    size_t size;
    /**
     * Not 0: tests must go on for the queue to advance.
     */
    int needs_proxy_progress;
} tcpx_device_handle;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * One phrase for a result code, for ever valid. Never NULL. tcpx_last_error says more.
 */
const char *tcpx_strerror(int code);

/**
 * What went wrong in the last failing call of the calling thread, and what to do; "" if none
 * failed. Never NULL. Valid until the next call of this library on the same thread.
 */
const char *tcpx_last_error(void);

/**
 * Loads a network plugin and starts it: the newest table of ncclNet v12 to v5 that the file has.
 * `path` may be NULL: then UCCL_TCPX_PLUGIN_PATH names the file, or else it is
 * /usr/local/tcpx/lib64/libnccl-net-tcpx.so.
 *
 * A process has one plugin, for ever: loading the same file again succeeds and does nothing,
 * another file is TCPX_INVALID_USAGE. The plugin reads its environment variables here, so set
 * them before. Some plugins end the process if they find no GPU, and some raise SIGPIPE when a
 * peer has gone: ignore that signal.
 *
 * The caller's part:
 * `path` is NULL or a NUL-terminated string. The file is run as code.
 */
int tcpx_load_plugin(const char *path);

/**
 * Number of the plugin's devices, or a negative number, which is the result code times -1.
 * Loads the plugin as tcpx_load_plugin(NULL) does if none is loaded.
 */
int tcpx_get_device_count(void);

/**
 * Describes device `dev`, counted from 0.
 *
 * The caller's part:
 * `props` is NULL or can be written.
 */
int tcpx_get_properties(int dev, struct tcpx_net_properties *props);

/**
 * Listens on device `dev`. Fills the 128 bytes at `handle` (a tcpx_handle), which the peer's
 * tcpx_connect_v5 needs; how they get there is yours. Does not block.
 *
 * The caller's part:
 * `handle` is NULL or 128 writable bytes, `listen_comm` NULL or writable.
 */
int tcpx_listen(int dev, void *handle, tcpx_listen_comm **listen_comm);

/**
 * Connects to a peer that listens, and gives a comm: one call is enough, before the peer accepts
 * or after. A plugin that needs longer than a moment goes on connecting while this program accepts
 * and registers memory: tcpx_reg_mr waits for it, and returns its error if there is one. NCCL
 * polls connects without an end; here each wait has one.
 *
 * Closing the comm gives a connect up that is not done. Plugins have no call for that: what they
 * hold for the attempt stays with them.
 *
 * `send_dev_handle` may be NULL; if not, it receives NULL: the sending side has no device queue.
 *
 * The caller's part:
 * `handle` is NULL or 128 readable bytes; the others are NULL or writable.
 */
int tcpx_connect_v5(int dev, void *handle, tcpx_send_comm **send_comm, void **send_dev_handle);

/**
 * Accepts the one connection of a listen comm. TCPX_SUCCESS with NULL in `*recv_comm` means not
 * yet: call again until there is a comm, an error, or your own deadline has passed (then close the
 * listen comm). Some plugins block here until the peer connects.
 *
 * `recv_dev_handle` may be NULL; if not, it receives the address of a tcpx_device_handle, the
 * plugin's device queue, valid until the comm is closed, or NULL if there is none.
 * tcpx_wait_request reads the queue for you.
 *
 * The caller's part:
 * The last two are NULL or writable.
 */
int tcpx_accept_v5(tcpx_listen_comm *listen_comm,
                   tcpx_recv_comm **recv_comm,
                   void **recv_dev_handle);

/**
 * Closes a send comm: its requests and registrations end with it, done or not. The peer may not
 * have received what is in flight, nor what is done; ask it before you close.
 *
 * A plugin that does not come back from it is waited for 5 seconds, then TCPX_TIMEOUT: the comm
 * can only be closed any more, the memory registered on it must stay, and this call waits again.
 * The same holds for the other closes.
 */
int tcpx_close_send(tcpx_send_comm *send_comm);

/**
 * Closes a receive comm: its requests, registrations, descriptors and its pool end with it.
 * Whatever unpacks on a GPU must have ended. Plugins take no memory back from a comm that is
 * closed with requests in flight: what they hold for its registrations then stays with them.
 *
 * The caller's part:
 * Nobody uses the comm's pool, descriptors or device handle any more.
 */
int tcpx_close_recv(tcpx_recv_comm *recv_comm);

/**
 * Closes a listen comm, accepted or not.
 */
int tcpx_close_listen(tcpx_listen_comm *listen_comm);

/**
 * Registers `size` bytes at `data` on a send or receive comm. `type` is TCPX_PTR_HOST or
 * TCPX_PTR_CUDA; CUDA memory must start at a multiple of 4096 bytes, with its context current.
 * A comm that is not connected yet is waited for, up to 10 seconds; then TCPX_TIMEOUT: call again
 * to go on waiting, or close the comm.
 *
 * The memory must stay as it is until tcpx_dereg_mr or the close of the comm has returned.
 * While a request is in flight nobody may write what it sends, or touch what it receives into.
 *
 * The caller's part:
 * As said; `mhandle` is NULL or can be written.
 */
int tcpx_reg_mr(void *comm, void *data, size_t size, int type, tcpx_memory **mhandle);

/**
 * Ends a registration. TCPX_INVALID_USAGE while a request needs the memory: one in flight, or a
 * receive that is not consumed. Closing the comm ends all its registrations.
 */
int tcpx_dereg_mr(void *comm, tcpx_memory *mhandle);

/**
 * Sends `size` bytes at `data`, which lie in `mhandle`'s memory. The peer's receives take sends in
 * the order of posting; `tag` is for logs. TCPX_SUCCESS with NULL in `*request` means no room now:
 * 16 requests are in flight or done and not yet tested; test the oldest, then post again. What the
 * plugin does not take yet is posted by the tests of the comm's requests, in order.
 *
 * The caller's part:
 * `request` is NULL or can be written. The bytes are not written until the request is done.
 */
int tcpx_isend(tcpx_send_comm *send_comm,
               void *data,
               int size,
               int tag,
               tcpx_memory *mhandle,
               tcpx_request **request);

/**
 * Receives at most `sizes[0]` bytes to `data[0]`, which lies in `mhandles[0]`'s memory; `n` must
 * be 1. A message larger than that makes some plugins write past the end: agree on sizes before.
 * TCPX_SUCCESS with NULL in `*request` means no room now: 16 receives are in flight or not
 * consumed; finish and consume the oldest, then post again. What the plugin does not take yet, as
 * some do before the peer's send, is posted by the tests of the comm's requests, in order.
 *
 * The caller's part:
 * The arrays are NULL or have one element; `request` is NULL or can be written. Nobody touches
 * the memory until the request is done.
 */
int tcpx_irecv(tcpx_recv_comm *recv_comm,
               int n,
               void **data,
               int *sizes,
               int *tags,
               tcpx_memory **mhandles,
               tcpx_request **request);

/**
 * Moves the comm on, and says whether a request is done: 1 in `*done`, once. `size` may be NULL;
 * with `*done == 1` it receives the bytes, or TCPX_SIZE_UNKNOWN.
 *
 * Any request of a comm may be tested, in any order: the library tests the plugin's oldest one and
 * keeps what it learns for the others. After `*done == 1` a send's handle has ended, and a receive
 * waits for tcpx_irecv_consumed; test neither again.
 *
 * An error means that the comm has failed. It stays so; close it.
 *
 * The caller's part:
 * `done` and `size` are NULL or can be written.
 */
int tcpx_test(tcpx_request *request, int *done, int *size);

/**
 * Tests a request until it is done, then never again, and tells size, descriptors and their
 * number. `completion` may be NULL. After TCPX_SUCCESS it is as after tcpx_test with `*done == 1`.
 *
 * After `timeout_ms` milliseconds TCPX_TIMEOUT: the request is still in flight and may be waited
 * for again; 0 tests once. The bound holds between calls of the plugin: one that hangs inside a
 * call holds this thread.
 *
 * The caller's part:
 * `completion` is NULL or can be written.
 */
int tcpx_wait_request(tcpx_request *request,
                      uint32_t timeout_ms,
                      struct tcpx_completion *completion);

/**
 * Size and descriptors of a receive that is done and not consumed, for programs that found it done
 * with tcpx_test.
 *
 * The caller's part:
 * `completion` is NULL or can be written.
 */
int tcpx_get_completion(tcpx_request *request, struct tcpx_completion *completion);

/**
 * Gives a receive back, after its bytes are unpacked: its pool space, its descriptors and its
 * handle. `n` must be 1. Every receive that is done needs it, whatever the memory and the plugin,
 * in the order of posting; out of order is TCPX_INVALID_USAGE and changes nothing.
 *
 * The caller's part:
 * Nobody reads the receive's pool space or descriptors any more.
 */
int tcpx_irecv_consumed(tcpx_recv_comm *recv_comm, int n, tcpx_request *request);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* TCPX_PLUGIN_H */

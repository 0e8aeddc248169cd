/* Types and calls that the parts of the double share. Symbols are hidden but for EXPORT. */
#ifndef TCPX_DOUBLE_H
#define TCPX_DOUBLE_H

#include <stdatomic.h>

#include "layouts.h"

#define EXPORT __attribute__((visibility("default")))

/* ---- what a test may look at ---- */

struct double_stats {
    _Atomic uint64_t consumes;
    _Atomic uint64_t max_in_flight;    /* posted and not freed, any comm */
    _Atomic uint64_t pool_low_water;   /* fewest free pages seen, any comm */
    _Atomic uint64_t pool_waits;       /* times that reception stood still for want of a page */
    _Atomic uint64_t second_accepts;   /* the real plugin aborts the process there */
    _Atomic uint64_t open_comms;       /* of any kind, listen comms included */
    _Atomic uint64_t registrations;    /* alive */
};
EXPORT extern struct double_stats tcpx_double_stats;

/* Bytes of the pools of receive comms that are accepted from now on. */
EXPORT void tcpx_double_set_pool_bytes(size_t bytes);
/* Where they lie. */
enum pool_place {
    NO_POOL,
    POOL_HOST,   /* host memory, which stands in for a GPU's */
    POOL_PINNED, /* host memory that the GPU reads */
    POOL_GPU     /* memory of the GPU whose context is current at connect and accept */
};
EXPORT void tcpx_double_set_pool_place(int place);
/* The calls of this driver, by name, take the place of those of libcuda.so.1. */
EXPORT void tcpx_double_set_driver(void *(*find)(const char *name));
/* Requests are handed out as the addresses of the private structure from now on, or not. Also with
 * TCPX_DOUBLE_SHOW_REQUESTS in the environment of init. */
EXPORT void tcpx_double_show_requests(int show);
/* The next receive that the lie can be told of is misreported, once. */
enum lie {
    LIE_NONE,
    LIE_COUNT_BEYOND,   /* one fragment more than a slot holds */
    LIE_COUNT_HUGE,     /* all bits set */
    LIE_COUNT_ZERO,     /* no fragments for a message that is not empty */
    LIE_OUTSIDE_POOL,   /* a fragment that reads behind the pool */
    LIE_OUTSIDE_TARGET, /* a fragment that wraps around the address space */
    LIE_SUM_SHORT,      /* a byte too few */
    LIE_SUM_LONG,       /* a byte too many */
    LIE_OVERLAP,        /* a byte twice, another never */
    LIE_DONE_EARLY,     /* done before a byte of it is here, as if the last completion came twice */
    LIE_SIZE_SHORT,     /* `test` reports a byte less than was posted */
    LIE_SIZE_LONG,      /* a byte more */
    LIE_SIZE_NEGATIVE
};
EXPORT void tcpx_double_lie_next(int lie);
/* In a process that a test starts, TCPX_DOUBLE_LIE is such a number and TCPX_DOUBLE_FAULT says
 * CALL=CODE or CALL=CODE@AFTER as for tcpx_double_fault, CALL a number. CALL 0 is the loading of
 * the file. */

/* After `after` more calls, each such call returns `code`; with HANG it does not return before
 * the next tcpx_double_fault. CALL_NONE ends that. */
enum call {
    CALL_NONE,
    CALL_DEVICES,
    CALL_PROPERTIES,
    CALL_LISTEN,
    CALL_CONNECT,
    CALL_ACCEPT,
    CALL_REG_MR,
    CALL_DEREG_MR,
    CALL_ISEND,
    CALL_IRECV,
    CALL_TEST,
    CALL_CONSUMED,
    CALL_CLOSE_SEND,
    CALL_CLOSE_RECV,
    CALL_CLOSE_LISTEN,
    CALL_INIT
};
#define HANG (-1)
EXPORT void tcpx_double_fault(int call, int code, unsigned after);
/* Whether a call hangs now. */
EXPORT int tcpx_double_hangs(void);

/* ---- own state ---- */

/* Wire format: this record, then `size` raw bytes. */
struct record {
    uint32_t magic;
    uint32_t size;
};
#define RECORD_MAGIC 0x74637864u

struct memory {
    char *data;
    size_t size;
    int type;
};

/* What one comm has of a GPU. */
struct gpu {
    struct gpu *next;
    enum pool_place pool;
    size_t bytes;    /* of the pool, or of what a sender copies at a time */
    void *context, *stream, *event;
    char *landing;   /* where sockets read and write */
    uint64_t base;   /* where the device reads what has landed */
    uint64_t handle; /* the device handle, in the GPU's memory */
    struct unpack_meta *meta;
};

struct pool {
    char *landing; /* where sockets write: the pool itself, but for one in GPU memory */
    uint32_t free_count;
    uint32_t page_count;
    uint32_t *free_pages;
    uint64_t random;
};

struct comm {
    int fd;
    bool receives;
    int error; /* sticky result code */
    /* oldest <= head <= tail. [oldest, head) is done and not consumed, [head, tail) in flight. */
    uint64_t oldest, head, tail;
    /* first request whose bytes are not all moved; head <= moving <= tail */
    uint64_t moving;
    struct request requests[SLOTS];
    struct record record;
    size_t record_done; /* bytes of the record that were moved */
    struct gpu *gpu; /* NULL where host memory stands in */
    /* send comms only: bytes that were copied from the GPU and not sent */
    char *staged_at;
    size_t staged;
    /* receive comms only */
    struct unpack_device_handle device; /* where host memory stands in */
    struct unpack_meta *meta;
    struct pool pool;
    uint32_t pages[SLOTS][ENTRIES]; /* pages that each queue slot holds */
    uint32_t page_counts[SLOTS];
    /* the fragment that is being filled; len 0 when there is none */
    struct load_meta fragment;
    uint32_t filled;
};

typedef void (*logger_fn)(int, unsigned long, const char *, int, const char *, ...);

extern logger_fn tcpx_double_logger;
extern _Atomic size_t tcpx_double_pool_bytes;
extern _Atomic enum pool_place tcpx_double_pool_place;

#define LOG(level, ...)                                                                           \
    do {                                                                                          \
        logger_fn log_line = tcpx_double_logger;                                                  \
        if (log_line)                                                                             \
            log_line(level, SUBSYSTEM_NET, __FILE__, __LINE__, __VA_ARGS__);                      \
    } while (0)

/* misbehave.c; call_fault gives the code that the call must return */
uint64_t lie_in_queue(struct comm *comm, struct unpack_slot *slot);
bool lie_early(struct comm *comm);
bool lie_size(const struct request *request, int *size);
int call_fault(int call);

/* gpu.c */
struct gpu *gpu_open(enum pool_place pool, size_t bytes);
void gpu_close(struct gpu *gpu);
int gpu_fill(struct gpu *gpu, const struct load_meta *fragment);
int gpu_wait(struct gpu *gpu);
char *gpu_staged(struct comm *comm, const struct request *request, size_t *len);

/* pool.c */
int pool_open(struct comm *comm, size_t bytes);
void pool_close(struct comm *comm);
void pool_give(struct pool *pool, uint32_t page);
bool fragment_open(struct comm *comm, struct request *request);
void fragment_finish(struct comm *comm, struct request *request);
void queue_publish(struct comm *comm, struct request *request);

/* connect.c */
int double_listen(int dev, void *handle, void **listen_comm);
int double_connect(int dev, void *handle, void **send_comm, struct device_handle **device);
int double_accept(void *listen_comm, void **recv_comm, struct device_handle **device);
int double_close(void *comm);
int double_close_listen(void *listen_comm);

/* transfer.c */
int double_isend(void *comm, void *data, int size, int tag, void *handle, void **request);
int double_irecv(void *comm, int n, void **data, int *sizes, int *tags, void **handles,
                 void **request);
int double_test(void *request, int *done, int *size);
int double_consumed(void *comm, int n, void *request);

#endif

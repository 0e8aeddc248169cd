/* A test double of Google's GPUDirectTCPX network plugin (ncclNet v7).
 *
 * It answers each call the way the real plugin was seen to answer, over real TCP sockets on the
 * loopback interface, without a GPU: memory registered as CUDA is host memory that stands in for
 * device memory and is received through a bounce pool and the device-unpack queue. Everything
 * runs in the caller's thread, inside `test`.
 *
 * Where the real plugin would crash, end the process or write past a buffer, the double answers
 * ncclInternalError instead and says so below: a test must be able to see the misuse.
 *
 * Environment (read by init):
 *   TCPX_DOUBLE_POOL_BYTES   bounce pool of each receive comm, default 2 MiB
 *   TCPX_DOUBLE_NO_CUDA      when set, registering CUDA memory fails
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { OK = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3 };
enum { PTR_HOST = 1, PTR_CUDA = 2 };
enum { LEVEL_WARN = 2, LEVEL_INFO = 3, SUBSYSTEM_NET = 16 };
enum { DEVICE_UNPACK = 1, UNPACK_VERSION = 7 };

#define SLOTS 16            /* requests of a comm, and slots of its queue */
#define ENTRIES 2048        /* fragments of a slot */
#define PAGE 4096u
#define MAX_QUEUED (4u << 20) /* bytes of one receive through the queue */
#define DEFAULT_POOL (2u << 20)
#define PROGRESS_BYTES (8u << 20) /* most bytes moved by one call of test */

/* ---- layouts that a host may look at ---- */

struct load_meta {
    uint32_t src_off;
    uint32_t len;
    uint64_t dst_off;
} __attribute__((aligned(16)));

struct unpack_meta {
    struct load_meta mem[SLOTS][ENTRIES];
    uint64_t cnt[SLOTS];
};

struct unpack_device_handle {
    struct unpack_meta *meta;
    void *bounce_buf;
    uint64_t head;
};

struct unpack_slot {
    bool active;
    uint64_t idx;
    struct load_meta *mem;
    uint64_t *cnt;
    uint64_t cnt_cache;
    size_t *fds_cnt;
    size_t *pgtok_cnts;
    int *fds;
    void *pgtoks;
};

struct request {
    void *comm;
    void *data;
    int op;
    int mem_type;
    int next_sock_id;
    int next_size;
    int offset;
    int size;
    int size_pending;
    int gpu_mem_fd;
    int gpu_mem_off;
    struct unpack_slot unpack_slot;
};

struct device_handle {
    int type;
    int version;
    void *handle;
    size_t size;
    int needs_proxy_progress;
};

_Static_assert(sizeof(struct load_meta) == 16, "load_meta");
_Static_assert(sizeof(struct unpack_meta) == 524416, "unpack_meta");
_Static_assert(offsetof(struct unpack_meta, cnt) == 524288, "unpack_meta.cnt");
_Static_assert(sizeof(struct unpack_device_handle) == 24, "unpack_device_handle");
_Static_assert(sizeof(struct unpack_slot) == 72, "unpack_slot");
_Static_assert(offsetof(struct unpack_slot, idx) == 8, "unpack_slot.idx");
_Static_assert(offsetof(struct unpack_slot, mem) == 16, "unpack_slot.mem");
_Static_assert(offsetof(struct unpack_slot, cnt) == 24, "unpack_slot.cnt");
_Static_assert(offsetof(struct unpack_slot, cnt_cache) == 32, "unpack_slot.cnt_cache");
_Static_assert(offsetof(struct unpack_slot, pgtoks) == 64, "unpack_slot.pgtoks");
_Static_assert(sizeof(struct request) == 128, "request");
_Static_assert(offsetof(struct request, op) == 16, "request.op");
_Static_assert(offsetof(struct request, size) == 36, "request.size");
_Static_assert(offsetof(struct request, unpack_slot) == 56, "request.unpack_slot");
_Static_assert(sizeof(struct device_handle) == 32, "device_handle");

struct properties {
    const char *name;
    const char *pci_path;
    uint64_t guid;
    int ptr_support;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    int device_type;
    int device_version;
};
_Static_assert(sizeof(struct properties) == 56, "properties v7");

/* The 128 bytes between listen and connect; 88 of them are in use. */
struct wire_handle {
    struct sockaddr_in address;
    char unused[64];
    struct connect_state *connect; /* of the process that connects: written into its copy */
};
_Static_assert(offsetof(struct wire_handle, connect) == 80, "handle.connect");
_Static_assert(sizeof(struct wire_handle) == 88, "handle");

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
EXPORT struct double_stats tcpx_double_stats = {.pool_low_water = UINT64_MAX};

/* Bytes of the pools of receive comms that are accepted from now on. */
EXPORT void tcpx_double_set_pool_bytes(size_t bytes);

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

struct pool {
    char *base;
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
    /* receive comms only */
    struct unpack_device_handle *device;
    struct pool pool;
    uint32_t pages[SLOTS][ENTRIES]; /* pages that each queue slot holds */
    uint32_t page_counts[SLOTS];
    /* the fragment that is being filled; len 0 when there is none */
    struct load_meta fragment;
    uint32_t filled;
};

struct listener {
    int fd;
    bool asked;
    bool accepted;
};

struct connect_state {
    struct connect_state *next;
    void *handle; /* the caller's buffer, by address */
    int fd;
};

typedef void (*logger_fn)(int, unsigned long, const char *, int, const char *, ...);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct connect_state *connects;
static logger_fn logger;
static bool initialised;
static bool no_cuda;
static _Atomic size_t pool_bytes = DEFAULT_POOL;
static _Atomic uint64_t seeds = 0x9e3779b97f4a7c15u;

#define LOG(level, ...)                                                                           \
    do {                                                                                          \
        if (logger)                                                                               \
            logger(level, SUBSYSTEM_NET, __FILE__, __LINE__, __VA_ARGS__);                        \
    } while (0)

void tcpx_double_set_pool_bytes(size_t bytes)
{
    pool_bytes = bytes < PAGE ? PAGE : bytes;
}

static uint64_t next_random(uint64_t *state)
{
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return *state = x;
}

static void raise_to(_Atomic uint64_t *mark, uint64_t value)
{
    uint64_t seen = *mark;
    while (value > seen && !atomic_compare_exchange_weak(mark, &seen, value))
        ;
}

static void lower_to(_Atomic uint64_t *mark, uint64_t value)
{
    uint64_t seen = *mark;
    while (value < seen && !atomic_compare_exchange_weak(mark, &seen, value))
        ;
}

/* ---- the bounce pool: pages go out in shuffled order ---- */

static int pool_open(struct pool *pool)
{
    size_t bytes = pool_bytes / PAGE * PAGE;
    pool->base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pool->base == MAP_FAILED)
        return SYSTEM_ERROR;
    pool->page_count = (uint32_t)(bytes / PAGE);
    pool->free_pages = malloc(pool->page_count * sizeof *pool->free_pages);
    if (!pool->free_pages) {
        munmap(pool->base, bytes);
        return SYSTEM_ERROR;
    }
    pool->random = atomic_fetch_add(&seeds, 0x632be59bd9b4e019u) | 1;
    for (uint32_t i = 0; i < pool->page_count; i++)
        pool->free_pages[i] = i;
    pool->free_count = pool->page_count;
    return OK;
}

static void pool_close(struct pool *pool)
{
    munmap(pool->base, (size_t)pool->page_count * PAGE);
    free(pool->free_pages);
}

/* A random free page; the caller has seen that there is one. */
static uint32_t pool_take(struct pool *pool)
{
    uint32_t at = (uint32_t)(next_random(&pool->random) % pool->free_count);
    uint32_t page = pool->free_pages[at];
    pool->free_pages[at] = pool->free_pages[--pool->free_count];
    lower_to(&tcpx_double_stats.pool_low_water, pool->free_count);
    return page;
}

static void pool_give(struct pool *pool, uint32_t page)
{
    pool->free_pages[pool->free_count++] = page;
}

/* ---- fragments ---- */

/* Lengths as networks make them: whole pages, TCP segments, odd pieces, single bytes. The message
 * must fit into the entries that are left, so the choice is free only while whole pages for the
 * rest would leave an entry over. */
static uint32_t fragment_length(struct pool *pool, uint32_t left, uint32_t entries_left)
{
    uint32_t need = (left + PAGE - 1) / PAGE;
    uint32_t len = PAGE;
    if (need < entries_left) {
        switch (next_random(&pool->random) % 8) {
        case 0:
        case 1:
        case 2:
            len = 1448;
            break;
        case 3:
        case 4:
            len = 1 + (uint32_t)(next_random(&pool->random) % PAGE);
            break;
        case 5:
            len = 1 + (uint32_t)(next_random(&pool->random) % 64);
            break;
        default:
            break;
        }
    }
    return len < left ? len : left;
}

/* Prepares the next fragment of a queued receive. False when the pool is empty. */
static bool fragment_open(struct comm *comm, struct request *request)
{
    uint64_t slot = request->unpack_slot.idx;
    struct pool *pool = &comm->pool;
    if (pool->free_count == 0) {
        tcpx_double_stats.pool_waits++;
        return false;
    }
    uint32_t used = comm->page_counts[slot];
    uint32_t len =
        fragment_length(pool, (uint32_t)request->size_pending, (uint32_t)ENTRIES - used);
    uint32_t slack = PAGE - len;
    uint32_t offset = slack ? (uint32_t)(next_random(&pool->random) % (slack + 1)) : 0;
    uint32_t page = pool_take(pool);
    comm->pages[slot][used] = page;
    comm->page_counts[slot] = used + 1;
    comm->fragment = (struct load_meta){
        .src_off = page * PAGE + offset, .len = len, .dst_off = (uint64_t)request->offset};
    comm->filled = 0;
    return true;
}

static void fragment_finish(struct comm *comm, struct request *request)
{
    struct unpack_slot *slot = &request->unpack_slot;
    slot->mem[slot->cnt_cache++] = comm->fragment;
    comm->fragment.len = 0;
}

/* Entries are in no order: a host must not rely on one. The count goes last. */
static void queue_publish(struct comm *comm, struct request *request)
{
    struct unpack_slot *slot = &request->unpack_slot;
    for (uint64_t i = slot->cnt_cache; i > 1; i--) {
        uint64_t j = next_random(&comm->pool.random) % i;
        struct load_meta swap = slot->mem[i - 1];
        slot->mem[i - 1] = slot->mem[j];
        slot->mem[j] = swap;
    }
    __atomic_store_n(slot->cnt, slot->cnt_cache, __ATOMIC_RELEASE);
    atomic_thread_fence(memory_order_seq_cst);
}

/* ---- moving bytes ---- */

/* One recv or send: bytes moved, 0 for "not now", -1 with comm->error set. */
static ssize_t move_bytes(struct comm *comm, void *data, size_t len)
{
    ssize_t n;
    do {
        n = comm->receives ? recv(comm->fd, data, len, MSG_DONTWAIT)
                           : send(comm->fd, data, len, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n > 0)
        return n;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return 0;
    comm->error = SYSTEM_ERROR; /* closed by the peer, or broken */
    return -1;
}

static struct request *request_at(struct comm *comm, uint64_t number)
{
    return &comm->requests[number % SLOTS];
}

/* Moves the record of the next message. True when it is complete and acceptable. */
static bool move_record(struct comm *comm, struct request *request)
{
    if (!comm->receives && comm->record_done == 0)
        comm->record = (struct record){RECORD_MAGIC, (uint32_t)request->size};
    while (comm->record_done < sizeof comm->record) {
        ssize_t n = move_bytes(comm, (char *)&comm->record + comm->record_done,
                               sizeof comm->record - comm->record_done);
        if (n <= 0)
            return false;
        comm->record_done += (size_t)n;
    }
    if (!comm->receives || request->unpack_slot.active)
        return true;
    uint32_t limit = (uint32_t)request->size;
    if (request->mem_type == PTR_CUDA && limit > MAX_QUEUED)
        limit = MAX_QUEUED;
    if (comm->record.magic != RECORD_MAGIC || comm->record.size > limit) {
        /* The real plugin writes past the end of the smaller receive. */
        LOG(LEVEL_WARN, "a message of %u bytes does not fit a receive of %u", comm->record.size,
            limit);
        comm->error = INTERNAL_ERROR;
        return false;
    }
    /* Every receive takes the next slot of the queue, whatever memory it goes to. */
    uint64_t idx = comm->moving % SLOTS;
    comm->device->meta->cnt[idx] = 0;
    comm->page_counts[idx] = 0;
    request->unpack_slot = (struct unpack_slot){.active = true,
                                                .idx = idx,
                                                .mem = comm->device->meta->mem[idx],
                                                .cnt = &comm->device->meta->cnt[idx]};
    request->size_pending = (int)comm->record.size;
    return true;
}

/* Moves payload of one request. True when nothing of it is left. */
static bool move_payload(struct comm *comm, struct request *request, size_t *budget)
{
    bool queued = comm->receives && request->mem_type == PTR_CUDA;
    while (request->size_pending > 0) {
        char *data = (char *)request->data + request->offset;
        size_t len = (size_t)request->size_pending;
        if (*budget == 0)
            return false;
        if (queued) {
            if (comm->fragment.len == 0 && !fragment_open(comm, request))
                return false;
            data = comm->pool.base + comm->fragment.src_off + comm->filled;
            len = comm->fragment.len - comm->filled;
        }
        ssize_t n = move_bytes(comm, data, len < *budget ? len : *budget);
        if (n <= 0)
            return false;
        *budget -= (size_t)n;
        request->offset += (int)n;
        request->size_pending -= (int)n;
        if (queued && (comm->filled += (uint32_t)n) == comm->fragment.len)
            fragment_finish(comm, request);
    }
    return true;
}

static void progress(struct comm *comm)
{
    size_t budget = PROGRESS_BYTES;
    while (!comm->error && comm->moving < comm->tail) {
        struct request *request = request_at(comm, comm->moving);
        if (!move_record(comm, request) || !move_payload(comm, request, &budget))
            return;
        if (comm->receives)
            queue_publish(comm, request);
        comm->record_done = 0;
        comm->moving++;
    }
}

/* ---- the table ---- */

static int double_init(logger_fn log)
{
    if (initialised)
        return INTERNAL_ERROR;
    const char *bytes = getenv("TCPX_DOUBLE_POOL_BYTES");
    if (bytes)
        tcpx_double_set_pool_bytes(strtoull(bytes, NULL, 0));
    no_cuda = getenv("TCPX_DOUBLE_NO_CUDA") != NULL;
    logger = log;
    initialised = true;
    LOG(LEVEL_INFO, "double of GPUDirectTCPX: %zu bytes of bounce pool a comm", (size_t)pool_bytes);
    return OK;
}

static int double_devices(int *count)
{
    *count = 1;
    return OK;
}

static int double_properties(int dev, struct properties *out)
{
    if (dev != 0)
        return INTERNAL_ERROR;
    *out = (struct properties){.name = "lo",
                               .pci_path = NULL,
                               .ptr_support = PTR_HOST | PTR_CUDA,
                               .speed = 10000,
                               .max_comms = 65536,
                               .max_recvs = 1,
                               .device_type = DEVICE_UNPACK,
                               .device_version = UNPACK_VERSION};
    return OK;
}

static int double_listen(int dev, void *handle, void **listen_comm)
{
    if (dev != 0)
        return INTERNAL_ERROR;
    struct listener *listener = calloc(1, sizeof *listener);
    struct wire_handle wire = {.address = {.sin_family = AF_INET}};
    socklen_t len = sizeof wire.address;
    wire.address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (!listener)
        return SYSTEM_ERROR;
    listener->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener->fd < 0 || bind(listener->fd, (struct sockaddr *)&wire.address, len) ||
        listen(listener->fd, 16) ||
        getsockname(listener->fd, (struct sockaddr *)&wire.address, &len)) {
        if (listener->fd >= 0)
            close(listener->fd);
        free(listener);
        return SYSTEM_ERROR;
    }
    memcpy(handle, &wire, sizeof wire);
    *listen_comm = listener;
    tcpx_double_stats.open_comms++;
    return OK;
}

static struct comm *comm_open(int fd, bool receives)
{
    struct comm *comm = calloc(1, sizeof *comm);
    int on = 1;
    if (!comm)
        return NULL;
    comm->fd = fd;
    comm->receives = receives;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (receives) {
        comm->device = calloc(1, sizeof *comm->device);
        struct unpack_meta *meta =
            mmap(NULL, sizeof *meta, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (!comm->device || meta == MAP_FAILED || pool_open(&comm->pool) != OK) {
            if (meta != MAP_FAILED)
                munmap(meta, sizeof *meta);
            free(comm->device);
            free(comm);
            return NULL;
        }
        *comm->device =
            (struct unpack_device_handle){.meta = meta, .bounce_buf = comm->pool.base, .head = -1};
    }
    tcpx_double_stats.open_comms++;
    return comm;
}

/* Takes the state that a handle points to out of the list, if it is one of ours and the buffer is
 * the one it was made for. */
static struct connect_state *connect_find(struct connect_state *wanted, void *handle)
{
    struct connect_state *found = NULL;
    pthread_mutex_lock(&lock);
    for (struct connect_state **at = &connects; *at; at = &(*at)->next) {
        if (*at == wanted && wanted->handle == handle) {
            found = wanted;
            *at = found->next;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void connect_keep(struct connect_state *state)
{
    pthread_mutex_lock(&lock);
    state->next = connects;
    connects = state;
    pthread_mutex_unlock(&lock);
}

static int connect_start(struct wire_handle *wire)
{
    struct connect_state *state = calloc(1, sizeof *state);
    if (!state)
        return SYSTEM_ERROR;
    state->handle = wire;
    state->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (state->fd < 0 ||
        (connect(state->fd, (struct sockaddr *)&wire->address, sizeof wire->address) &&
         errno != EINPROGRESS)) {
        if (state->fd >= 0)
            close(state->fd);
        free(state);
        return INTERNAL_ERROR;
    }
    wire->connect = state;
    connect_keep(state);
    return OK;
}

static int double_connect(int dev, void *handle, void **send_comm, struct device_handle **device)
{
    struct wire_handle *wire = handle;
    (void)device;
    *send_comm = NULL;
    if (dev != 0)
        return INTERNAL_ERROR;
    if (!wire->connect)
        return connect_start(wire); /* the first call never gives a comm */
    struct connect_state *state = connect_find(wire->connect, handle);
    if (!state)
        return INTERNAL_ERROR; /* another buffer: the real plugin follows a stray pointer */
    struct pollfd ready = {.fd = state->fd, .events = POLLOUT};
    if (poll(&ready, 1, 0) == 0) {
        connect_keep(state);
        return OK;
    }
    int error = 0;
    socklen_t len = sizeof error;
    struct comm *comm = NULL;
    if (!getsockopt(state->fd, SOL_SOCKET, SO_ERROR, &error, &len) && error == 0)
        comm = comm_open(state->fd, false);
    if (!comm)
        close(state->fd);
    free(state);
    wire->connect = NULL;
    *send_comm = comm;
    return comm ? OK : INTERNAL_ERROR;
}

static int double_accept(void *listen_comm, void **recv_comm, struct device_handle **device)
{
    struct listener *listener = listen_comm;
    *recv_comm = NULL;
    if (listener->accepted) {
        tcpx_double_stats.second_accepts++; /* the real plugin frees twice and aborts */
        return INTERNAL_ERROR;
    }
    if (!device || !*device)
        return INTERNAL_ERROR; /* the real plugin crashes at the first receive */
    if (!listener->asked) {
        listener->asked = true; /* the first call never gives a comm */
        return OK;
    }
    int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? OK : INTERNAL_ERROR;
    listener->accepted = true;
    struct comm *comm = comm_open(fd, true);
    if (!comm) {
        close(fd);
        return INTERNAL_ERROR;
    }
    **device = (struct device_handle){.type = DEVICE_UNPACK,
                                      .version = UNPACK_VERSION,
                                      .handle = comm->device,
                                      .size = sizeof *comm->device,
                                      .needs_proxy_progress = 1};
    *recv_comm = comm;
    return OK;
}

static int double_reg_mr(void *comm, void *data, int size, int type, void **handle)
{
    (void)comm;
    if (size < 0 || (type != PTR_HOST && type != PTR_CUDA))
        return INTERNAL_ERROR;
    if (type == PTR_CUDA && (no_cuda || (uintptr_t)data % PAGE != 0))
        return INTERNAL_ERROR;
    struct memory *memory = malloc(sizeof *memory);
    if (!memory)
        return SYSTEM_ERROR;
    *memory = (struct memory){data, (size_t)size, type};
    *handle = memory;
    tcpx_double_stats.registrations++;
    return OK;
}

static int double_dereg_mr(void *comm, void *handle)
{
    (void)comm;
    if (!handle)
        return INTERNAL_ERROR;
    free(handle);
    tcpx_double_stats.registrations--;
    return OK;
}

/* Queues a request. *out is left alone when there is no room, as the real plugin does. */
static int post(struct comm *comm, void *data, int size, struct memory *memory, void **out)
{
    if (!memory || size < 0)
        return INTERNAL_ERROR;
    /* The real plugin does not look whether the memory is the registered one. */
    uintptr_t start = (uintptr_t)data, base = (uintptr_t)memory->data;
    if (size > 0 && (start < base || start - base > memory->size ||
                     (size_t)size > memory->size - (start - base)))
        return INTERNAL_ERROR;
    if (comm->receives && memory->type == PTR_CUDA && (unsigned)size > MAX_QUEUED)
        return INTERNAL_ERROR;
    if (comm->tail - comm->oldest >= SLOTS)
        return INTERNAL_ERROR;
    struct request *request = request_at(comm, comm->tail);
    *request = (struct request){.comm = comm,
                                .data = data,
                                .op = comm->receives ? 1 : 2,
                                .mem_type = memory->type,
                                .size = size,
                                .size_pending = size,
                                .gpu_mem_fd = -1};
    comm->tail++;
    raise_to(&tcpx_double_stats.max_in_flight, comm->tail - comm->oldest);
    *out = request;
    return OK;
}

static int double_isend(void *comm, void *data, int size, int tag, void *handle, void **request)
{
    (void)tag;
    return ((struct comm *)comm)->receives ? INTERNAL_ERROR
                                           : post(comm, data, size, handle, request);
}

static int double_irecv(void *comm, int n, void **data, int *sizes, int *tags, void **handles,
                        void **request)
{
    (void)tags;
    if (n != 1 || !((struct comm *)comm)->receives)
        return INTERNAL_ERROR;
    return post(comm, data[0], sizes[0], handles[0], request);
}

static int double_iflush(void *comm, int n, void **data, int *sizes, void **handles,
                         void **request)
{
    (void)comm, (void)n, (void)data, (void)sizes, (void)handles, (void)request;
    return INTERNAL_ERROR; /* the real plugin follows the NULL that hosts pass here */
}

static int double_test(void *pointer, int *done, int *size)
{
    struct request *request = pointer;
    (void)size; /* never written */
    if (!request)
        return INTERNAL_ERROR;
    *done = 0;
    struct comm *comm = request->comm;
    if (comm->head < comm->tail && request != request_at(comm, comm->head)) {
        for (uint64_t n = comm->head; n < comm->tail; n++)
            if (request == request_at(comm, n))
                return INTERNAL_ERROR; /* in flight, not the head */
        return OK;                     /* finished: its memory waits or was reused */
    }
    if (comm->head == comm->tail)
        return OK;
    if (comm->receives && request->mem_type == PTR_HOST)
        LOG(LEVEL_WARN, "receive %p into host memory", pointer);
    progress(comm);
    if (comm->moving > comm->head) {
        comm->head++;
        if (!comm->receives)
            comm->oldest++;
        *done = 1;
        return OK;
    }
    return comm->error;
}

static int double_consumed(void *pointer, int n, void *request)
{
    struct comm *comm = pointer;
    if (n != 1 || !comm->receives || comm->oldest == comm->head ||
        request != request_at(comm, comm->oldest))
        return INTERNAL_ERROR;
    uint64_t slot = comm->oldest % SLOTS;
    for (uint32_t i = 0; i < comm->page_counts[slot]; i++)
        pool_give(&comm->pool, comm->pages[slot][i]);
    comm->page_counts[slot] = 0;
    comm->oldest++;
    tcpx_double_stats.consumes++;
    return OK;
}

static int double_get_device_mr(void *comm, void *handle, void **device)
{
    (void)comm, (void)handle, (void)device;
    return OK; /* and writes nothing */
}

static int double_close(void *pointer)
{
    struct comm *comm = pointer;
    if (!comm)
        return INTERNAL_ERROR;
    close(comm->fd);
    if (comm->receives) {
        pool_close(&comm->pool);
        munmap(comm->device->meta, sizeof *comm->device->meta);
        free(comm->device);
    }
    free(comm);
    tcpx_double_stats.open_comms--;
    return OK;
}

static int double_close_listen(void *pointer)
{
    struct listener *listener = pointer;
    if (!listener)
        return INTERNAL_ERROR;
    close(listener->fd);
    free(listener);
    tcpx_double_stats.open_comms--;
    return OK;
}

struct table {
    const char *name;
    int (*init)(logger_fn);
    int (*devices)(int *);
    int (*properties)(int, struct properties *);
    int (*listen)(int, void *, void **);
    int (*connect)(int, void *, void **, struct device_handle **);
    int (*accept)(void *, void **, struct device_handle **);
    int (*reg_mr)(void *, void *, int, int, void **);
    int (*reg_mr_dma_buf)(void *, void *, size_t, int, uint64_t, int, void **);
    int (*dereg_mr)(void *, void *);
    int (*isend)(void *, void *, int, int, void *, void **);
    int (*irecv)(void *, int, void **, int *, int *, void **, void **);
    int (*iflush)(void *, int, void **, int *, void **, void **);
    int (*test)(void *, int *, int *);
    int (*close_send)(void *);
    int (*close_recv)(void *);
    int (*close_listen)(void *);
    int (*get_device_mr)(void *, void *, void **);
    int (*consumed)(void *, int, void *);
};
_Static_assert(sizeof(struct table) == 152, "table v7");

EXPORT volatile struct table ncclNetPlugin_v7 = {
    .name = "GPUDirectTCPX_v7",
    .init = double_init,
    .devices = double_devices,
    .properties = double_properties,
    .listen = double_listen,
    .connect = double_connect,
    .accept = double_accept,
    .reg_mr = double_reg_mr,
    .reg_mr_dma_buf = NULL,
    .dereg_mr = double_dereg_mr,
    .isend = double_isend,
    .irecv = double_irecv,
    .iflush = double_iflush,
    .test = double_test,
    .close_send = double_close,
    .close_recv = double_close,
    .close_listen = double_close_listen,
    .get_device_mr = double_get_device_mr,
    .consumed = double_consumed,
};

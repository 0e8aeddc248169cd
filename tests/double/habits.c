/* A plugin in front of another one, with habits that real plugins have and the double has not. Before `init` its
 * table holds a name and `init` only, as a plugin's that chooses its network in `init`; then it holds the calls of the
 * plugin that the variable TCPX_HABITS_OF names, without those that a plugin may leave out.
 *
 * TCPX_HABITS lists more:
 *   receive-after-send   `irecv` gives no request until the peer has called `isend`
 *   connects-when-accepted   `connect` gives no comm before an accept of this process was tried
 *   closes-together      `closeSend` and `closeRecv` of one pair of comms return once both were called; across
 *                        processes, where the variable TCPX_HABITS_PAIRS names a file that they share
 *   closes-alone         two closes at the same time end the process
 *   no-pool              receives have a device queue and no bounce pool
 *   incomplete           `test` stays missing
 *   null-listen          `listen` succeeds without a comm
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "layouts.h"

#define EXPORT __attribute__((visibility("default")))

typedef void (*logger_fn)(int, unsigned long, const char *, int, const char *, ...);

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

static int habits_init(logger_fn log);
EXPORT struct table ncclNetPlugin_v7 = {.name = "not chosen yet", .init = habits_init};

static struct table inner;
static atomic_bool accepting;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned long sends, receives;

/* Which side of each pair of comms has been closed; a pair is named by where it listens. */
enum { PAIRS = 1 << 16, OPEN_COMMS = 4096, PAUSE_US = 100 };
enum side { SENDER, RECEIVER };
static atomic_char (*closed)[2];
static struct {
    void *comm;
    size_t pair;
} open_comms[OPEN_COMMS];

static bool has(const char *habit)
{
    const char *habits = getenv("TCPX_HABITS");
    return habits && strstr(habits, habit);
}

static int habits_isend(void *comm, void *data, int size, int tag, void *memory, void **request)
{
    int code = inner.isend(comm, data, size, tag, memory, request);
    pthread_mutex_lock(&lock);
    sends += code == OK && *request;
    pthread_mutex_unlock(&lock);
    return code;
}

static int habits_irecv(void *comm, int n, void **data, int *sizes, int *tags, void **memories,
                        void **request)
{
    pthread_mutex_lock(&lock);
    bool early = receives >= sends;
    receives += !early;
    pthread_mutex_unlock(&lock);
    *request = NULL;
    if (early)
        return OK;
    int code = inner.irecv(comm, n, data, sizes, tags, memories, request);
    pthread_mutex_lock(&lock);
    receives -= code != OK || !*request;
    pthread_mutex_unlock(&lock);
    return code;
}

/* The start of a handle, which a plugin does not write to after `listen`. */
static size_t pair_of(const unsigned char *handle)
{
    size_t hash = 5381;
    for (size_t at = 0; at < sizeof(struct sockaddr_in); at++)
        hash = hash * 33 + handle[at];
    return hash % PAIRS;
}

static void remember(void *comm, size_t pair)
{
    pthread_mutex_lock(&lock);
    for (size_t at = 0; at < OPEN_COMMS; at++) {
        if (!open_comms[at].comm) {
            open_comms[at].comm = comm;
            open_comms[at].pair = pair;
            pthread_mutex_unlock(&lock);
            return;
        }
    }
    abort();
}

static size_t forget(void *comm)
{
    pthread_mutex_lock(&lock);
    for (size_t at = 0; at < OPEN_COMMS; at++) {
        if (open_comms[at].comm == comm) {
            open_comms[at].comm = NULL;
            pthread_mutex_unlock(&lock);
            return open_comms[at].pair;
        }
    }
    abort();
}

static int habits_listen(int device, void *handle, void **comm)
{
    int code = inner.listen(device, handle, comm);
    if (code == OK) {
        size_t pair = pair_of(handle);
        closed[pair][SENDER] = closed[pair][RECEIVER] = 0;
        remember(*comm, pair);
    }
    return code;
}

static int null_listen(int device, void *handle, void **comm)
{
    (void)device, (void)handle;
    *comm = NULL;
    return OK;
}

static int habits_connect(int device, void *handle, void **comm, struct device_handle **unused)
{
    size_t pair = pair_of(handle);
    *comm = NULL;
    if (has("connects-when-accepted") && !accepting)
        return OK;
    int code = inner.connect(device, handle, comm, unused);
    if (code == OK && *comm && has("closes-together"))
        remember(*comm, pair);
    return code;
}

static int habits_accept(void *listener, void **comm, struct device_handle **device)
{
    accepting = true;
    int code = inner.accept(listener, comm, device);
    if (code != OK || !*comm)
        return code;
    if (has("no-pool"))
        ((struct unpack_device_handle *)(*device)->handle)->bounce_buf = NULL;
    if (has("closes-together")) {
        size_t pair = forget(listener);
        remember(listener, pair);
        remember(*comm, pair);
    }
    return code;
}

static int habits_close_listen(void *comm)
{
    forget(comm);
    return inner.close_listen(comm);
}

static void close_together(void *comm, enum side side)
{
    static atomic_int closing;
    size_t pair = forget(comm);
    if (atomic_fetch_add(&closing, 1) > 0 && has("closes-alone"))
        abort();
    closed[pair][side] = 1;
    while (!closed[pair][!side])
        usleep(PAUSE_US);
    atomic_fetch_sub(&closing, 1);
}

static int habits_close_send(void *comm)
{
    close_together(comm, SENDER);
    return inner.close_send(comm);
}

static int habits_close_recv(void *comm)
{
    close_together(comm, RECEIVER);
    return inner.close_recv(comm);
}

static bool share_pairs(void)
{
    const char *path = getenv("TCPX_HABITS_PAIRS");
    int file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (path && (file < 0 || ftruncate(file, sizeof(atomic_char[PAIRS][2]))))
        return false;
    int flags = MAP_SHARED | (path ? 0 : MAP_ANONYMOUS);
    void *shared = mmap(NULL, sizeof(atomic_char[PAIRS][2]), PROT_READ | PROT_WRITE, flags, file, 0);
    if (path)
        close(file);
    closed = shared;
    return shared != MAP_FAILED;
}

static int habits_init(logger_fn log)
{
    const char *path = getenv("TCPX_HABITS_OF");
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    const struct table *found = library ? dlsym(library, "ncclNetPlugin_v7") : NULL;
    if (!found)
        return SYSTEM_ERROR;
    int code = found->init(log);
    if (code != OK)
        return code;
    inner = *found;
    struct table *table = &ncclNetPlugin_v7;
    *table = inner;
    table->name = "chosen by init";
    table->init = habits_init;
    table->reg_mr_dma_buf = NULL;
    table->iflush = NULL;
    table->get_device_mr = NULL;
    if (has("receive-after-send")) {
        table->isend = habits_isend;
        table->irecv = habits_irecv;
    }
    if (has("closes-together")) {
        if (!share_pairs())
            return SYSTEM_ERROR;
        table->listen = habits_listen;
        table->close_send = habits_close_send;
        table->close_recv = habits_close_recv;
        table->close_listen = habits_close_listen;
    }
    if (has("connects-when-accepted") || has("closes-together"))
        table->connect = habits_connect;
    if (has("no-pool") || has("connects-when-accepted") || has("closes-together"))
        table->accept = habits_accept;
    if (has("incomplete"))
        table->test = NULL;
    if (has("null-listen"))
        table->listen = null_listen;
    return OK;
}

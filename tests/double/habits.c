/* A plugin in front of another one, with habits that real plugins have and the double has not. Before `init` its
 * table holds a name and `init` only, as a plugin's that chooses its network in `init`; then it holds the calls of the
 * plugin that the variable TCPX_HABITS_OF names, without those that a plugin may leave out.
 *
 * TCPX_HABITS lists more:
 *   receive-after-send   `irecv` gives no request until the peer has called `isend`
 *   closes-together      `closeSend` returns once `closeRecv` was called
 *   no-pool              receives have a device queue and no bounce pool
 *   incomplete           `test` stays missing
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

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
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static unsigned long sends, receives, closed_receivers, closed_senders;

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

static int habits_close_send(void *comm)
{
    pthread_mutex_lock(&lock);
    closed_senders++;
    while (closed_receivers < closed_senders)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return inner.close_send(comm);
}

static int habits_close_recv(void *comm)
{
    pthread_mutex_lock(&lock);
    closed_receivers++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return inner.close_recv(comm);
}

static int habits_accept(void *listener, void **comm, struct device_handle **device)
{
    int code = inner.accept(listener, comm, device);
    if (code == OK && *comm)
        ((struct unpack_device_handle *)(*device)->handle)->bounce_buf = NULL;
    return code;
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
        table->close_send = habits_close_send;
        table->close_recv = habits_close_recv;
    }
    if (has("no-pool"))
        table->accept = habits_accept;
    if (has("incomplete"))
        table->test = NULL;
    return OK;
}

/* Pools in memory of a GPU, and sends from there. What a comm has of a GPU is kept for later comms:
 * a free would wait for the kernels of the program. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "double.h"

enum { NON_BLOCKING = 1, NO_TIMING = 2, PORTABLE_AND_MAPPED = 3, NOT_READY = 600 };

/* Bytes that a sender copies from the GPU at a time. */
#define STAGED (1u << 20)
/* Made at once where none is kept: comms that come while others go shall not allocate. */
#define TOGETHER 4

/* The driver's calls, in the order of their names below. */
static struct {
    int (*current_context)(void **);
    int (*enter)(void *);
    int (*leave)(void **);
    int (*device_alloc)(uint64_t *, size_t);
    int (*host_alloc)(void **, size_t, unsigned);
    int (*copy)(uint64_t, uint64_t, size_t, void *);
    int (*stream_create)(void **, unsigned);
    int (*event_create)(void **, unsigned);
    int (*event_record)(void *, void *);
    int (*event_query)(void *);
} driver;
static const char *const names[] = {
    "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuMemAlloc_v2",
    "cuMemHostAlloc",  "cuMemcpyAsync",       "cuStreamCreate",     "cuEventCreate",
    "cuEventRecord",   "cuEventQuery",
};
_Static_assert(sizeof driver == sizeof names, "a call for each name");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct gpu *kept;
static void *(*find)(const char *);

void tcpx_double_set_driver(void *(*finder)(const char *))
{
    find = finder;
}

static void *find_in_library(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, name) : NULL;
}

static bool driver_load(void)
{
    static _Atomic bool loaded;
    if (loaded)
        return true;
    void *calls[sizeof names / sizeof *names];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(calls[i] = find ? find(names[i]) : find_in_library(names[i])))
            return false;
    memcpy(&driver, calls, sizeof driver);
    return loaded = true;
}

/* Starts a copy between any two kinds of memory. */
static int start_copy(struct gpu *gpu, uint64_t to, uint64_t from, size_t bytes)
{
    void *left;
    int code = driver.enter(gpu->context);
    if (code)
        return SYSTEM_ERROR;
    code = driver.copy(to, from, bytes, gpu->stream);
    driver.leave(&left);
    return code ? SYSTEM_ERROR : OK;
}

/* Waits until all copies have ended. */
int gpu_wait(struct gpu *gpu)
{
    void *left;
    int code = driver.enter(gpu->context);
    if (code)
        return SYSTEM_ERROR;
    code = driver.event_record(gpu->event, gpu->stream);
    if (!code)
        do
            code = driver.event_query(gpu->event);
        while (code == NOT_READY);
    driver.leave(&left);
    return code ? SYSTEM_ERROR : OK;
}

static bool allocate(struct gpu *gpu)
{
    void *meta = NULL, *landing = NULL;
    if (driver.stream_create(&gpu->stream, NON_BLOCKING) ||
        driver.event_create(&gpu->event, NO_TIMING) ||
        driver.host_alloc(&landing, gpu->bytes, PORTABLE_AND_MAPPED))
        return false;
    gpu->landing = landing;
    gpu->base = (uintptr_t)landing;
    if (gpu->pool == NO_POOL)
        return true;
    if (driver.host_alloc(&meta, sizeof *gpu->meta, PORTABLE_AND_MAPPED) ||
        driver.device_alloc(&gpu->handle, sizeof(struct unpack_device_handle)))
        return false;
    gpu->meta = meta;
    return gpu->pool == POOL_PINNED || !driver.device_alloc(&gpu->base, gpu->bytes);
}

/* Tells the device where queue and pool are. */
static int write_handle(struct gpu *gpu)
{
    struct unpack_device_handle handle = {
        .meta = gpu->meta, .bounce_buf = (void *)(uintptr_t)gpu->base, .head = UINT64_MAX};
    memset(gpu->meta, 0, sizeof *gpu->meta);
    memcpy(gpu->landing, &handle, sizeof handle);
    int code = start_copy(gpu, gpu->handle, (uintptr_t)gpu->landing, sizeof handle);
    return code ? code : gpu_wait(gpu);
}

static struct gpu *take_kept(enum pool_place pool, size_t bytes, void *context)
{
    struct gpu *found = NULL;
    pthread_mutex_lock(&lock);
    for (struct gpu **at = &kept; *at; at = &(*at)->next) {
        if ((*at)->pool == pool && (*at)->bytes == bytes && (*at)->context == context) {
            found = *at;
            *at = found->next;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

void gpu_close(struct gpu *gpu)
{
    pthread_mutex_lock(&lock);
    gpu->next = kept;
    kept = gpu;
    pthread_mutex_unlock(&lock);
}

struct gpu *gpu_open(enum pool_place pool, size_t bytes)
{
    void *context = NULL;
    if (pool == NO_POOL)
        bytes = STAGED;
    if (!driver_load() || driver.current_context(&context) || !context) {
        LOG(LEVEL_WARN, "%s", "a pool in memory of a GPU needs CUDA and a current context");
        return NULL;
    }
    struct gpu *gpu = take_kept(pool, bytes, context);
    for (int i = 0; !gpu && i < TOGETHER; i++) {
        struct gpu *made = calloc(1, sizeof *made);
        if (!made)
            return NULL;
        *made = (struct gpu){.pool = pool, .bytes = bytes, .context = context};
        if (!allocate(made)) {
            free(made); /* what the driver gave stays: a test fails here */
            return NULL;
        }
        gpu_close(made);
    }
    if (!gpu)
        gpu = take_kept(pool, bytes, context);
    if (gpu && pool != NO_POOL && write_handle(gpu) != OK) {
        gpu_close(gpu);
        return NULL;
    }
    return gpu;
}

/* A fragment has landed: starts its way into the pool, if that is another place. */
int gpu_fill(struct gpu *gpu, const struct load_meta *fragment)
{
    if (gpu->pool != POOL_GPU)
        return OK;
    uint64_t from = (uintptr_t)gpu->landing + fragment->src_off;
    return start_copy(gpu, gpu->base + fragment->src_off, from, fragment->len);
}

/* The next bytes of a send from the GPU, where a socket can read them; NULL on failure. */
char *gpu_staged(struct comm *comm, const struct request *request, size_t *len)
{
    struct gpu *gpu = comm->gpu;
    if (comm->staged == 0) {
        size_t bytes = *len < STAGED ? *len : STAGED;
        uint64_t from = (uintptr_t)request->data + (uint64_t)request->offset;
        if (start_copy(gpu, (uintptr_t)gpu->landing, from, bytes) || gpu_wait(gpu))
            return NULL;
        comm->staged = bytes;
        comm->staged_at = gpu->landing;
    }
    *len = comm->staged;
    return comm->staged_at;
}

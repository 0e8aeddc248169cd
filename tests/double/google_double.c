/* A test double of Google's GPUDirectTCPX network plugin (ncclNet v7).
 *
 * It answers each call the way the real plugin was seen to answer, over real TCP sockets on the
 * loopback interface. Memory registered as CUDA is received through a bounce pool and the
 * device-unpack queue; without a GPU it is host memory that stands in for device memory. Everything
 * runs in the caller's thread, inside `test`.
 *
 * Where the real plugin would crash, end the process or write past a buffer, the double answers
 * ncclInternalError instead and says so below: a test must be able to see the misuse.
 *
 * Environment (read by init):
 *   TCPX_DOUBLE_POOL_BYTES   bounce pool of each receive comm, default 2 MiB
 *   TCPX_DOUBLE_POOL         pinned or gpu: memory registered as CUDA is a GPU's, and the pool is host
 *                            memory that it reads, or its own; without, host memory stands in
 *   TCPX_DOUBLE_NO_CUDA      when set, registering CUDA memory fails
 *   TCPX_DOUBLE_SHOW_REQUESTS  when set, requests can be looked into
 */
#include <stdlib.h>
#include <string.h>

#include "double.h"

struct double_stats tcpx_double_stats = {.pool_low_water = UINT64_MAX};
logger_fn tcpx_double_logger;
_Atomic size_t tcpx_double_pool_bytes = DEFAULT_POOL;
_Atomic enum pool_place tcpx_double_pool_place = POOL_HOST;
static bool initialised;
static bool no_cuda;

void tcpx_double_set_pool_bytes(size_t bytes)
{
    tcpx_double_pool_bytes = bytes < PAGE ? PAGE : bytes;
}

void tcpx_double_set_pool_place(int place)
{
    tcpx_double_pool_place = (enum pool_place)place;
}

static int double_init(logger_fn log)
{
    if (initialised)
        return INTERNAL_ERROR;
    const char *bytes = getenv("TCPX_DOUBLE_POOL_BYTES"), *pool = getenv("TCPX_DOUBLE_POOL");
    if (bytes)
        tcpx_double_set_pool_bytes(strtoull(bytes, NULL, 0));
    if (pool && strcmp(pool, "pinned") && strcmp(pool, "gpu"))
        return INTERNAL_ERROR;
    if (pool)
        tcpx_double_pool_place = *pool == 'g' ? POOL_GPU : POOL_PINNED;
    no_cuda = getenv("TCPX_DOUBLE_NO_CUDA") != NULL;
    tcpx_double_show_requests(getenv("TCPX_DOUBLE_SHOW_REQUESTS") != NULL);
    tcpx_double_logger = log;
    initialised = true;
    LOG(LEVEL_INFO, "double of GPUDirectTCPX: %zu bytes of bounce pool a comm",
        (size_t)tcpx_double_pool_bytes);
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

static int double_get_device_mr(void *comm, void *handle, void **device)
{
    (void)comm, (void)handle, (void)device;
    return OK; /* and writes nothing */
}

static int double_iflush(void *comm, int n, void **data, int *sizes, void **handles,
                         void **request)
{
    (void)comm, (void)n, (void)data, (void)sizes, (void)handles, (void)request;
    return INTERNAL_ERROR; /* the real plugin follows the NULL that hosts pass here */
}

/* Every call may be told to fail or hang. */
#define GUARDED(call, name, parameters, arguments)                                                \
    static int guarded_##name parameters                                                          \
    {                                                                                             \
        int fault = call_fault(call);                                                             \
        return fault != OK ? fault : double_##name arguments;                                     \
    }
GUARDED(CALL_INIT, init, (logger_fn log), (log))
GUARDED(CALL_DEVICES, devices, (int *count), (count))
GUARDED(CALL_PROPERTIES, properties, (int dev, struct properties *out), (dev, out))
GUARDED(CALL_LISTEN, listen, (int dev, void *handle, void **comm), (dev, handle, comm))
GUARDED(CALL_CONNECT, connect,
        (int dev, void *handle, void **comm, struct device_handle **device),
        (dev, handle, comm, device))
GUARDED(CALL_ACCEPT, accept, (void *listener, void **comm, struct device_handle **device),
        (listener, comm, device))
GUARDED(CALL_REG_MR, reg_mr, (void *comm, void *data, int size, int type, void **handle),
        (comm, data, size, type, handle))
GUARDED(CALL_DEREG_MR, dereg_mr, (void *comm, void *handle), (comm, handle))
GUARDED(CALL_ISEND, isend,
        (void *comm, void *data, int size, int tag, void *handle, void **request),
        (comm, data, size, tag, handle, request))
GUARDED(CALL_IRECV, irecv,
        (void *comm, int n, void **data, int *sizes, int *tags, void **handles, void **request),
        (comm, n, data, sizes, tags, handles, request))
GUARDED(CALL_TEST, test, (void *request, int *done, int *size), (request, done, size))
GUARDED(CALL_CONSUMED, consumed, (void *comm, int n, void *request), (comm, n, request))

/* A comm that cannot be closed in order is gone all the same. */
#define CLOSING(call, name, close)                                                                \
    static int guarded_##name(void *comm)                                                         \
    {                                                                                             \
        int fault = call_fault(call), closed = close(comm);                                       \
        return fault != OK ? fault : closed;                                                      \
    }
CLOSING(CALL_CLOSE_SEND, close_send, double_close)
CLOSING(CALL_CLOSE_RECV, close_recv, double_close)
CLOSING(CALL_CLOSE_LISTEN, close_listen, double_close_listen)

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
    .init = guarded_init,
    .devices = guarded_devices,
    .properties = guarded_properties,
    .listen = guarded_listen,
    .connect = guarded_connect,
    .accept = guarded_accept,
    .reg_mr = guarded_reg_mr,
    .reg_mr_dma_buf = NULL,
    .dereg_mr = guarded_dereg_mr,
    .isend = guarded_isend,
    .irecv = guarded_irecv,
    .iflush = double_iflush,
    .test = guarded_test,
    .close_send = guarded_close_send,
    .close_recv = guarded_close_recv,
    .close_listen = guarded_close_listen,
    .get_device_mr = double_get_device_mr,
    .consumed = guarded_consumed,
};

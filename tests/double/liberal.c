/* A plugin over plain TCP that takes every liberty which the interface leaves: its table (v9) is empty but for `init`
 * until that fills it, and has no name, no `irecvConsumed` and nothing else that a host can do without; properties
 * without a name, a path, limits or a number for the latency; memory handles that are NULL; a connect that is polled
 * and keeps its state in the caller's handle; an accept that blocks; three requests a comm, then NULL; requests whose
 * addresses come again; no sizes from `test`; a receive only once bytes have come; closes that wait for the peer's.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { OK = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, REMOTE_ERROR = 6 };
enum { PTR_HOST = 1, REQUESTS = 3, POLLS = 3, INFO = 3, NET = 16 };

typedef void (*logger_fn)(int, unsigned long, const char *, int, const char *, ...);

struct properties {
    char *name, *pci_path;
    uint64_t guid;
    int ptr_support, reg_is_global, force_flush, speed, port;
    float latency;
    int max_comms, max_recvs, device_type, device_version;
    struct {
        int count, devices[4];
    } virtual;
    size_t max_p2p_bytes, max_coll_bytes;
};

struct table {
    const char *name;
    int (*init)(logger_fn);
    int (*devices)(int *);
    int (*properties)(int, struct properties *);
    int (*listen)(int, void *, void **);
    int (*connect)(int, void *, void **, void **);
    int (*accept)(void *, void **, void **);
    int (*reg_mr)(void *, void *, size_t, int, void **);
    int (*reg_mr_dma_buf)(void);
    int (*dereg_mr)(void *, void *);
    int (*isend)(void *, void *, size_t, int, void *, void **);
    int (*irecv)(void *, int, void **, size_t *, int *, void **, void **);
    int (*iflush)(void);
    int (*test)(void *, int *, int *);
    int (*close_send)(void *);
    int (*close_recv)(void *);
    int (*close_listen)(void *);
    int (*get_device_mr)(void);
    int (*consumed)(void);
    int (*make_v_device)(void);
};
_Static_assert(sizeof(struct table) == 160, "table v9");

static int liberal_init(logger_fn log);
EXPORT struct table ncclNetPlugin_v9 = {.init = liberal_init};

struct comm;

struct request {
    struct comm *comm;
    char *data;
    uint64_t len, moved, header, header_moved;
    bool done;
};

struct comm {
    int fd;
    bool receives;
    struct request requests[REQUESTS];
    unsigned first, count;
};

/* What lies in the caller's 128 bytes. */
struct handle {
    struct sockaddr_in address;
    int fd, polls;
};

static int liberal_devices(int *count)
{
    *count = 1;
    return OK;
}

static int liberal_properties(int device, struct properties *properties)
{
    (void)device;
    *properties = (struct properties){
        .ptr_support = PTR_HOST, .port = -1, .latency = NAN, .max_recvs = 1};
    return OK;
}

static int liberal_listen(int device, void *handle, void **comm)
{
    (void)device;
    struct handle mine = {.address = {.sin_family = AF_INET}, .fd = -1};
    socklen_t len = sizeof mine.address;
    mine.address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&mine.address, len) || listen(fd, 1) ||
        getsockname(fd, (struct sockaddr *)&mine.address, &len))
        return SYSTEM_ERROR;
    memset(handle, 0xee, 128);
    memcpy(handle, &mine, sizeof mine);
    *comm = (void *)(intptr_t)(fd + 1);
    return OK;
}

static struct comm *comm_of(int fd, bool receives)
{
    struct comm *comm = calloc(1, sizeof *comm);
    if (comm) {
        comm->fd = fd;
        comm->receives = receives;
        fcntl(fd, F_SETFL, O_NONBLOCK);
    }
    return comm;
}

static int liberal_connect(int device, void *opaque, void **comm, void **unused)
{
    (void)device;
    (void)unused;
    struct handle *handle = opaque;
    *comm = NULL;
    if (handle->polls++ == 0) {
        handle->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        struct sockaddr *address = (struct sockaddr *)&handle->address;
        return connect(handle->fd, address, sizeof handle->address) ? SYSTEM_ERROR : OK;
    }
    if (handle->polls <= POLLS)
        return OK;
    *comm = comm_of(handle->fd, false);
    return *comm ? OK : SYSTEM_ERROR;
}

static int liberal_accept(void *listener, void **comm, void **unused)
{
    (void)unused;
    int fd = accept4((int)(intptr_t)listener - 1, NULL, NULL, SOCK_CLOEXEC);
    *comm = fd < 0 ? NULL : comm_of(fd, true);
    return *comm ? OK : SYSTEM_ERROR;
}

static int liberal_reg_mr(void *comm, void *data, size_t size, int type, void **handle)
{
    (void)comm;
    (void)data;
    (void)size;
    *handle = NULL;
    return type == PTR_HOST ? OK : INTERNAL_ERROR;
}

static int liberal_dereg_mr(void *comm, void *handle)
{
    (void)comm;
    return handle ? INTERNAL_ERROR : OK;
}

static int post(struct comm *comm, void *data, size_t size, void **request)
{
    *request = NULL;
    if (comm->count == REQUESTS)
        return OK;
    struct request *next = &comm->requests[(comm->first + comm->count++) % REQUESTS];
    *next = (struct request){.comm = comm, .data = data, .len = size, .header = size};
    *request = next;
    return OK;
}

static int liberal_isend(void *comm, void *data, size_t size, int tag, void *memory, void **request)
{
    (void)tag;
    return memory ? INTERNAL_ERROR : post(comm, data, size, request);
}

static int liberal_irecv(void *opaque, int n, void **data, size_t *sizes, int *tags, void **memories,
                         void **request)
{
    (void)tags;
    struct comm *comm = opaque;
    char first;
    *request = NULL;
    if (n != 1 || memories[0])
        return INTERNAL_ERROR;
    if (!comm->count && recv(comm->fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) <= 0)
        return OK;
    return post(comm, data[0], sizes[0], request);
}

/* Moves up to `len` bytes; how many, or -1 with a result in `code`. */
static ssize_t move(struct comm *comm, void *data, size_t len, int *code)
{
    ssize_t moved = comm->receives ? recv(comm->fd, data, len, 0)
                                   : send(comm->fd, data, len, MSG_NOSIGNAL);
    if (moved > 0)
        return moved;
    *code = moved < 0 && errno == EAGAIN ? OK : REMOTE_ERROR;
    return -1;
}

/* Works on the oldest request. */
static int step(struct comm *comm)
{
    struct request *head = &comm->requests[comm->first];
    int code = OK;
    while (head->header_moved < sizeof head->header || head->moved < head->len) {
        bool in_header = head->header_moved < sizeof head->header;
        char *at = in_header ? (char *)&head->header + head->header_moved : head->data + head->moved;
        size_t left = in_header ? sizeof head->header - head->header_moved : head->len - head->moved;
        ssize_t moved = move(comm, at, left, &code);
        if (moved < 0)
            return code;
        *(in_header ? &head->header_moved : &head->moved) += (uint64_t)moved;
        if (in_header && head->header_moved == sizeof head->header) {
            if (head->header > head->len)
                return INTERNAL_ERROR;
            head->len = head->header;
        }
    }
    head->done = true;
    comm->first = (comm->first + 1) % REQUESTS;
    comm->count--;
    return OK;
}

static int liberal_test(void *opaque, int *done, int *size)
{
    (void)size;
    struct request *request = opaque;
    struct comm *comm = request->comm;
    int code = OK;
    if (!request->done)
        code = request == &comm->requests[comm->first] ? step(comm) : INTERNAL_ERROR;
    *done = request->done;
    return code;
}

/* Says that it closes, and waits until the peer says so. */
static int liberal_close(void *opaque)
{
    struct comm *comm = opaque;
    struct pollfd socket = {.fd = comm->fd, .events = POLLIN};
    char rest;
    shutdown(comm->fd, SHUT_WR);
    do
        poll(&socket, 1, -1);
    while (recv(comm->fd, &rest, 1, 0) > 0);
    close(comm->fd);
    memset(comm, 0xdd, sizeof *comm);
    free(comm);
    return OK;
}

static int liberal_close_listen(void *listener)
{
    return close((int)(intptr_t)listener - 1) ? SYSTEM_ERROR : OK;
}

static int liberal_init(logger_fn log)
{
    if (log)
        log(INFO, NET, __FILE__, __LINE__, "at %s", "liberty");
    ncclNetPlugin_v9 = (struct table){
        .init = liberal_init,
        .devices = liberal_devices,
        .properties = liberal_properties,
        .listen = liberal_listen,
        .connect = liberal_connect,
        .accept = liberal_accept,
        .reg_mr = liberal_reg_mr,
        .dereg_mr = liberal_dereg_mr,
        .isend = liberal_isend,
        .irecv = liberal_irecv,
        .test = liberal_test,
        .close_send = liberal_close,
        .close_recv = liberal_close,
        .close_listen = liberal_close_listen,
    };
    return OK;
}

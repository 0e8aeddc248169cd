/* Listening, connecting, accepting and closing. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "double.h"

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

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct connect_state *connects;

int double_listen(int dev, void *handle, void **listen_comm)
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

static bool queue_open(struct comm *comm, size_t pool_bytes)
{
    if (comm->gpu) {
        comm->meta = comm->gpu->meta;
    } else {
        comm->meta = mmap(NULL, sizeof *comm->meta, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (comm->meta == MAP_FAILED)
            return false;
    }
    if (pool_open(comm, pool_bytes) != OK) {
        if (!comm->gpu)
            munmap(comm->meta, sizeof *comm->meta);
        return false;
    }
    comm->device = (struct unpack_device_handle){
        .meta = comm->meta, .bounce_buf = comm->pool.landing, .head = UINT64_MAX};
    return true;
}

static struct comm *comm_open(int fd, bool receives)
{
    struct comm *comm = calloc(1, sizeof *comm);
    enum pool_place place = tcpx_double_pool_place;
    size_t pool_bytes = tcpx_double_pool_bytes / PAGE * PAGE;
    int on = 1;
    if (!comm)
        return NULL;
    comm->fd = fd;
    comm->receives = receives;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (place != POOL_HOST)
        comm->gpu = gpu_open(receives ? place : NO_POOL, pool_bytes);
    if ((place != POOL_HOST && !comm->gpu) || (receives && !queue_open(comm, pool_bytes))) {
        if (comm->gpu)
            gpu_close(comm->gpu);
        free(comm);
        return NULL;
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

int double_connect(int dev, void *handle, void **send_comm, struct device_handle **device)
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

int double_accept(void *listen_comm, void **recv_comm, struct device_handle **device)
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
                                      .handle = comm->gpu ? (void *)(uintptr_t)comm->gpu->handle
                                                          : &comm->device,
                                      .size = sizeof comm->device,
                                      .needs_proxy_progress = 1};
    *recv_comm = comm;
    return OK;
}

int double_close(void *pointer)
{
    struct comm *comm = pointer;
    if (!comm)
        return INTERNAL_ERROR;
    close(comm->fd);
    if (comm->receives) {
        pool_close(comm);
        if (!comm->gpu)
            munmap(comm->meta, sizeof *comm->meta);
    }
    if (comm->gpu)
        gpu_close(comm->gpu);
    free(comm);
    tcpx_double_stats.open_comms--;
    return OK;
}

int double_close_listen(void *pointer)
{
    struct listener *listener = pointer;
    if (!listener)
        return INTERNAL_ERROR;
    close(listener->fd);
    free(listener);
    tcpx_double_stats.open_comms--;
    return OK;
}

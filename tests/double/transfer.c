/* Posting, moving, testing and consuming. Nothing moves outside of `test`. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>

#include "double.h"

static void raise_to(_Atomic uint64_t *mark, uint64_t value)
{
    uint64_t seen = *mark;
    while (value > seen && !atomic_compare_exchange_weak(mark, &seen, value))
        ;
}

/* What a host holds of a request is no address of this process: whoever looks inside, as programs
 * that know the vendor's private layout do, faults. A test may have it be the address, as it is with
 * the real plugin. */
static _Atomic bool shown;

void tcpx_double_show_requests(int show)
{
    shown = show != 0;
}

static void *opaque(const struct request *request)
{
    return (void *)(shown ? (uintptr_t)request : ~(uintptr_t)request);
}

static struct request *transparent(void *pointer)
{
    /* No address of this process has its highest bit set. */
    uintptr_t number = (uintptr_t)pointer;
    return (struct request *)(number >> 63 ? ~number : number);
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
    comm->meta->cnt[idx] = 0;
    comm->page_counts[idx] = 0;
    request->unpack_slot = (struct unpack_slot){.active = true,
                                                .idx = idx,
                                                .mem = comm->meta->mem[idx],
                                                .cnt = &comm->meta->cnt[idx]};
    request->size_pending = (int)comm->record.size;
    return true;
}

/* Moves payload of one request. True when nothing of it is left. */
static bool move_payload(struct comm *comm, struct request *request, size_t *budget)
{
    bool queued = comm->receives && request->mem_type == PTR_CUDA;
    bool staged = comm->gpu && !comm->receives && request->mem_type == PTR_CUDA;
    while (request->size_pending > 0) {
        char *data = (char *)request->data + request->offset;
        size_t len = (size_t)request->size_pending;
        if (*budget == 0)
            return false;
        if (queued) {
            if (comm->fragment.len == 0 && !fragment_open(comm, request))
                return false;
            data = comm->pool.landing + comm->fragment.src_off + comm->filled;
            len = comm->fragment.len - comm->filled;
        }
        if (staged && !(data = gpu_staged(comm, request, &len))) {
            comm->error = SYSTEM_ERROR;
            return false;
        }
        ssize_t n = move_bytes(comm, data, len < *budget ? len : *budget);
        if (n <= 0)
            return false;
        *budget -= (size_t)n;
        if (staged) {
            comm->staged_at += n;
            comm->staged -= (size_t)n;
        }
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
    *out = opaque(request);
    return OK;
}

int double_isend(void *comm, void *data, int size, int tag, void *handle, void **request)
{
    (void)tag;
    return ((struct comm *)comm)->receives ? INTERNAL_ERROR
                                           : post(comm, data, size, handle, request);
}

int double_irecv(void *comm, int n, void **data, int *sizes, int *tags, void **handles,
                        void **request)
{
    (void)tags;
    if (n != 1 || !((struct comm *)comm)->receives)
        return INTERNAL_ERROR;
    return post(comm, data[0], sizes[0], handles[0], request);
}

int double_test(void *pointer, int *done, int *size)
{
    if (!pointer)
        return INTERNAL_ERROR;
    struct request *request = transparent(pointer);
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
    if (!lie_early(comm))
        progress(comm);
    else if (comm->moving == comm->head)
        comm->moving++;
    if (comm->moving > comm->head) {
        comm->head++;
        if (!comm->receives)
            comm->oldest++;
        *done = 1;
        if (comm->receives && size)
            lie_size(request, size); /* the real plugin never writes it */
        return OK;
    }
    return comm->error;
}

int double_consumed(void *pointer, int n, void *request)
{
    struct comm *comm = pointer;
    if (n != 1 || !comm->receives || comm->oldest == comm->head ||
        transparent(request) != request_at(comm, comm->oldest))
        return INTERNAL_ERROR;
    uint64_t slot = comm->oldest % SLOTS;
    for (uint32_t i = 0; i < comm->page_counts[slot]; i++)
        pool_give(&comm->pool, comm->pages[slot][i]);
    comm->page_counts[slot] = 0;
    comm->oldest++;
    tcpx_double_stats.consumes++;
    return OK;
}

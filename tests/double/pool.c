/* The bounce pool of a receive comm, and the fragments and queue entries made from it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "double.h"

static _Atomic uint64_t seeds = 0x9e3779b97f4a7c15u;

static uint64_t next_random(uint64_t *state)
{
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return *state = x;
}

static void lower_to(_Atomic uint64_t *mark, uint64_t value)
{
    uint64_t seen = *mark;
    while (value < seen && !atomic_compare_exchange_weak(mark, &seen, value))
        ;
}

/* ---- the bounce pool: pages go out in shuffled order ---- */

/* A page that nobody may touch ends it, as an allocation of device memory has an end: hosts learn a
 * pool's length from nothing else. */
static char *map_landing(size_t bytes)
{
    char *start = mmap(NULL, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    if (mprotect(start, bytes, PROT_READ | PROT_WRITE)) {
        munmap(start, bytes + PAGE);
        return NULL;
    }
    return start;
}

int pool_open(struct comm *comm, size_t bytes)
{
    struct pool *pool = &comm->pool;
    pool->page_count = (uint32_t)(bytes / PAGE);
    pool->free_pages = malloc(pool->page_count * sizeof *pool->free_pages);
    pool->landing = comm->gpu ? comm->gpu->landing : map_landing(bytes);
    if (!pool->free_pages || !pool->landing) {
        free(pool->free_pages);
        return SYSTEM_ERROR;
    }
    pool->random = atomic_fetch_add(&seeds, 0x632be59bd9b4e019u) | 1;
    for (uint32_t i = 0; i < pool->page_count; i++)
        pool->free_pages[i] = i;
    pool->free_count = pool->page_count;
    return OK;
}

void pool_close(struct comm *comm)
{
    if (!comm->gpu)
        munmap(comm->pool.landing, (size_t)comm->pool.page_count * PAGE + PAGE);
    free(comm->pool.free_pages);
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

void pool_give(struct pool *pool, uint32_t page)
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
bool fragment_open(struct comm *comm, struct request *request)
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

void fragment_finish(struct comm *comm, struct request *request)
{
    struct unpack_slot *slot = &request->unpack_slot;
    slot->mem[slot->cnt_cache++] = comm->fragment;
    if (comm->gpu && gpu_fill(comm->gpu, &comm->fragment) != OK)
        comm->error = SYSTEM_ERROR;
    comm->fragment.len = 0;
}

/* Entries are in no order: a host must not rely on one. The count goes last, behind the bytes. */
void queue_publish(struct comm *comm, struct request *request)
{
    struct unpack_slot *slot = &request->unpack_slot;
    for (uint64_t i = slot->cnt_cache; i > 1; i--) {
        uint64_t j = next_random(&comm->pool.random) % i;
        struct load_meta swap = slot->mem[i - 1];
        slot->mem[i - 1] = slot->mem[j];
        slot->mem[j] = swap;
    }
    if (comm->gpu && gpu_wait(comm->gpu) != OK)
        comm->error = SYSTEM_ERROR;
    uint64_t count = lie_in_queue(comm, slot);
    __atomic_store_n(slot->cnt, count, __ATOMIC_RELEASE);
    atomic_thread_fence(memory_order_seq_cst);
}

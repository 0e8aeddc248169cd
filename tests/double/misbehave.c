/* What a faulty plugin could do: lies about one receive, and calls that fail or hang on demand. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "double.h"

static _Atomic int next_lie;

void tcpx_double_lie_next(int lie)
{
    next_lie = lie;
}

/* The lie that is due now, if it is one of these; it is told once. */
static int lie_among(unsigned kinds)
{
    int lie = next_lie;
    if (lie != LIE_NONE && (kinds >> lie & 1) && atomic_compare_exchange_strong(&next_lie, &lie, 0))
        return lie;
    return LIE_NONE;
}

/* ---- lies in the device queue, told when a receive is published ---- */

uint64_t lie_in_queue(struct comm *comm, struct unpack_slot *slot)
{
    uint64_t count = slot->cnt_cache;
    struct load_meta *first = slot->mem;
    if (count == 0)
        return 0;
    switch (lie_among(1u << LIE_COUNT_BEYOND | 1u << LIE_COUNT_ZERO | 1u << LIE_COUNT_HUGE |
                      1u << LIE_OUTSIDE_POOL | 1u << LIE_OUTSIDE_TARGET | 1u << LIE_SUM_SHORT |
                      1u << LIE_SUM_LONG | 1u << LIE_OVERLAP)) {
    case LIE_COUNT_BEYOND:
        return ENTRIES + 1;
    case LIE_COUNT_HUGE:
        return UINT64_MAX;
    case LIE_COUNT_ZERO:
        return 0;
    case LIE_OUTSIDE_POOL:
        first->src_off = comm->pool.page_count * PAGE - first->len + 1;
        break;
    case LIE_OUTSIDE_TARGET:
        first->dst_off = UINT64_MAX - 7;
        break;
    case LIE_SUM_SHORT:
        if (first->len == 1)
            return count - 1;
        first->len--;
        break;
    case LIE_SUM_LONG:
        first->len++;
        break;
    case LIE_OVERLAP:
        first->dst_off = first->dst_off ? first->dst_off - 1 : 1;
        break;
    default:
        break;
    }
    return count;
}

/* ---- lies of `test` ---- */

/* Whether to report the head as done although it is not. */
bool lie_early(struct comm *comm)
{
    return comm->receives && lie_among(1u << LIE_DONE_EARLY) != LIE_NONE;
}

/* The size that `test` reports, which the real plugin never does; -1 for none. */
bool lie_size(const struct request *request, int *size)
{
    /* A byte less than nothing would be no size at all. */
    unsigned shorter = request->size > 0 ? 1u << LIE_SIZE_SHORT : 0;
    switch (lie_among(shorter | 1u << LIE_SIZE_LONG | 1u << LIE_SIZE_NEGATIVE)) {
    case LIE_SIZE_SHORT:
        *size = request->size - 1;
        return true;
    case LIE_SIZE_LONG:
        *size = request->size + 1;
        return true;
    case LIE_SIZE_NEGATIVE:
        *size = -7;
        return true;
    default:
        return false;
    }
}

/* ---- calls that fail or hang ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int fault_call = CALL_NONE;
static int fault_code;
static unsigned fault_after;
static bool hanging;

void tcpx_double_fault(int call, int code, unsigned after)
{
    pthread_mutex_lock(&lock);
    fault_call = call;
    fault_code = code;
    fault_after = after;
    hanging = false;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

int tcpx_double_hangs(void)
{
    pthread_mutex_lock(&lock);
    int hangs = hanging;
    pthread_mutex_unlock(&lock);
    return hangs;
}

int call_fault(int call)
{
    int code = OK;
    pthread_mutex_lock(&lock);
    if (fault_call == call && fault_after > 0) {
        fault_after--;
    } else if (fault_call == call && fault_code != HANG) {
        code = fault_code;
    } else if (fault_call == call) {
        hanging = true;
        while (hanging)
            pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* ---- the same, asked for by variables ---- */

__attribute__((constructor)) static void from_environment(void)
{
    const char *lie = getenv("TCPX_DOUBLE_LIE"), *fault = getenv("TCPX_DOUBLE_FAULT");
    int call, code;
    unsigned after = 0;
    if (lie)
        tcpx_double_lie_next(atoi(lie));
    if (!fault || sscanf(fault, "%d=%d@%u", &call, &code, &after) < 2)
        return;
    if (call == CALL_NONE && code == HANG)
        for (;;)
            pause();
    tcpx_double_fault(call, code, after);
}

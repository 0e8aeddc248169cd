/*
 * The persistent copy kernel stays on the GPU for a moment and serves the host's copy requests, so
 * that a small message costs neither a launch nor a driver call: a request and its completion are a
 * few words of mapped host memory.
 *
 * One block. The host may write requests while it has seen the kernel enter and has not seen it
 * leave. The kernel leaves by itself after a number of polls without a request, and after a number of
 * polls in total, so that nobody waits long for the whole device. Polls are counted, not timed: each
 * is a read across the bus.
 */
#include "unpack_lane.h"

#define TCPX_COPY_THREADS 256u

/* The host's ring of requests, and words of a request. */
#define TCPX_REQUESTS 16u
#define TCPX_REQUEST_WORDS 16u

/* Bytes that count as another poll: their copy takes as long. */
#define TCPX_POLL_BYTES 4096u

/* In place of a length: leave. */
#define TCPX_LEAVE 0xFFFFFFFFu

/*
 * A request is a line of words. Each word has a value in its lower half and the request's number in its
 * upper half, so the request is complete when all numbers match, in whatever order the GPU sees them.
 * The values: source and destination, each lower half first; the length; the address of the completion
 * word, likewise; the value to write there; and inline data, which is what is copied if the source is
 * null: it saves the read across the bus that would follow.
 */
enum { TCPX_FROM, TCPX_TO = 2, TCPX_LENGTH = 4, TCPX_END = 5, TCPX_VALUE = 7, TCPX_DATA = 8 };

struct tcpx_residency {
    const tcpx_u64 *requests;
    /* Become `residency` when the kernel has entered, and when it touches nothing any more. */
    tcpx_u32 *entered;
    tcpx_u32 *left;
    /* Number of this launch. */
    tcpx_u32 residency;
    /* Number of its first request; the others follow. */
    tcpx_u32 first;
    /* The kernel leaves after this many polls in a row without a request, and after this many
     * polls and requests in total. */
    tcpx_u32 idle_polls;
    tcpx_u32 max_polls;
};

TCPX_INLINE void tcpx_store(tcpx_u64 word, tcpx_u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

/* Acquires what was written before the word that it sees: by the host, and by the GPU before that. A fence
 * behind the last poll would do so too, but takes half a microsecond. */
TCPX_INLINE tcpx_u64 tcpx_acquire(const tcpx_u64 *word) {
    tcpx_u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

TCPX_INLINE void tcpx_fence(void) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

TCPX_INLINE tcpx_u64 tcpx_whole(const tcpx_u32 *halves) {
    return (tcpx_u64)halves[1] << 32 | halves[0];
}

extern "C" __global__ void __launch_bounds__(TCPX_COPY_THREADS)
tcpx_persistent_copy(const __grid_constant__ tcpx_residency call) {
    __shared__ tcpx_u32 request[TCPX_REQUEST_WORDS];
    __shared__ tcpx_u32 found;
    tcpx_u32 lane = threadIdx.x, number = call.first, spent = 0;
    if (lane == 0) {
        tcpx_store((tcpx_u64)call.entered, call.residency);
    }
    for (;; number++, spent++) {
        if (lane < 32u) {
            const tcpx_u64 *word = call.requests + number % TCPX_REQUESTS * TCPX_REQUEST_WORDS +
                                   lane % TCPX_REQUEST_WORDS;
            tcpx_u32 polls = 0, there = 0;
            while (!there && polls < call.idle_polls && spent < call.max_polls) {
                tcpx_u64 seen = tcpx_acquire(word);
                there = __all_sync(0xFFFFFFFFu, (tcpx_u32)(seen >> 32) == number);
                if (there && lane < TCPX_REQUEST_WORDS) {
                    request[lane] = (tcpx_u32)seen;
                }
                polls++;
                spent++;
            }
            if (lane == 0) {
                found = there;
            }
        }
        __syncthreads();
        if (!found || request[TCPX_LENGTH] == TCPX_LEAVE) {
            break;
        }
        const tcpx_u8 *from = (const tcpx_u8 *)tcpx_whole(request + TCPX_FROM);
        if (!from) {
            from = (const tcpx_u8 *)(request + TCPX_DATA);
        }
        tcpx_unpack_lane(lane, TCPX_COPY_THREADS, TCPX_BATCH, from,
                         (tcpx_u8 *)tcpx_whole(request + TCPX_TO), request[TCPX_LENGTH]);
        spent += request[TCPX_LENGTH] / TCPX_POLL_BYTES;
        tcpx_u64 end = tcpx_whole(request + TCPX_END);
        tcpx_u32 value = request[TCPX_VALUE];
        __syncthreads();
        if (lane == 0) {
            /* The barrier orders all of the block's stores before this fence. */
            tcpx_fence();
            tcpx_store(end, value);
        }
    }
    if (lane == 0) {
        tcpx_fence();
        tcpx_store((tcpx_u64)call.left, call.residency);
    }
}

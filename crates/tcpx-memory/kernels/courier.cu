/*
 * Stays on the GPU for a moment and copies what the host orders, so that a small message costs neither a
 * launch nor a call of the driver: an order and its end are a few words of mapped host memory.
 *
 * One block. The host may order as long as it has seen the kernel come and has not seen it leave. It leaves
 * by itself after so many looks without an order, and after so many altogether, so that whoever waits
 * for the whole device never waits long. Looks are counted, not timed: each is a read across the bus.
 */
#include "unpack_lane.h"

#define TCPX_COURIER_THREADS 256u

/* The host's ring of orders, and words of an order. */
#define TCPX_ORDERS 16u
#define TCPX_ORDER_WORDS 8u

/* Bytes that count as another look: their copy takes as long. */
#define TCPX_LOOK_BYTES 4096u

/* In place of a length: leave. */
#define TCPX_LEAVE 0xFFFFFFFFu

/*
 * An order is a line of eight words, each of which has a value in its lower half and the order's number in
 * its upper one: it is there when all numbers are, whichever the GPU sees first. The values: source and
 * destination, each lower half first; the length; where the end is told, likewise; and what is told.
 */
enum { TCPX_FROM, TCPX_TO = 2, TCPX_LENGTH = 4, TCPX_END = 5, TCPX_TOLD = 7 };

struct tcpx_stay {
    const tcpx_u64 *orders;
    /* Become `stay` when the kernel has come, and when it touches nothing any more. */
    tcpx_u32 *come;
    tcpx_u32 *left;
    /* Number of this launch. */
    tcpx_u32 stay;
    /* Number of its first order; the others follow. */
    tcpx_u32 first;
    /* Looks in a row without an order, and looks and orders altogether, after which it leaves. */
    tcpx_u32 patience;
    tcpx_u32 most;
};

TCPX_INLINE void tcpx_say(tcpx_u64 word, tcpx_u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

TCPX_INLINE tcpx_u64 tcpx_ask(const tcpx_u64 *word) {
    tcpx_u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

TCPX_INLINE void tcpx_fence(void) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

TCPX_INLINE tcpx_u64 tcpx_whole(const tcpx_u32 *halves) {
    return (tcpx_u64)halves[1] << 32 | halves[0];
}

extern "C" __global__ void __launch_bounds__(TCPX_COURIER_THREADS)
tcpx_courier(const __grid_constant__ tcpx_stay call) {
    __shared__ tcpx_u32 order[TCPX_ORDER_WORDS];
    __shared__ tcpx_u32 found;
    tcpx_u32 lane = threadIdx.x, number = call.first, spent = 0;
    if (lane == 0) {
        tcpx_say((tcpx_u64)call.come, call.stay);
    }
    for (;; number++, spent++) {
        if (lane < 32u) {
            const tcpx_u64 *word = call.orders + number % TCPX_ORDERS * TCPX_ORDER_WORDS +
                                   lane % TCPX_ORDER_WORDS;
            tcpx_u32 looks = 0, there = 0;
            while (!there && looks < call.patience && spent < call.most) {
                tcpx_u64 seen = tcpx_ask(word);
                there = __all_sync(0xFFFFFFFFu, (tcpx_u32)(seen >> 32) == number);
                if (there && lane < TCPX_ORDER_WORDS) {
                    order[lane] = (tcpx_u32)seen;
                }
                looks++;
                spent++;
            }
            /* What the host wrote before the order, and what others on the GPU wrote before that. */
            tcpx_fence();
            if (lane == 0) {
                found = there;
            }
        }
        __syncthreads();
        if (!found || order[TCPX_LENGTH] == TCPX_LEAVE) {
            break;
        }
        tcpx_unpack_lane(lane, TCPX_COURIER_THREADS, TCPX_BATCH,
                         (const tcpx_u8 *)tcpx_whole(order + TCPX_FROM),
                         (tcpx_u8 *)tcpx_whole(order + TCPX_TO), order[TCPX_LENGTH]);
        spent += order[TCPX_LENGTH] / TCPX_LOOK_BYTES;
        tcpx_u64 end = tcpx_whole(order + TCPX_END);
        tcpx_u32 told = order[TCPX_TOLD];
        __syncthreads();
        if (lane == 0) {
            /* The barrier has put all of the block's stores before this. */
            tcpx_fence();
            tcpx_say(end, told);
        }
    }
    if (lane == 0) {
        tcpx_fence();
        tcpx_say((tcpx_u64)call.left, call.stay);
    }
}

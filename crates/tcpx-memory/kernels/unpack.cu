/*
 * Moves scattered fragments from a bounce pool to their destination, or packs them the other way: one
 * warp a piece.
 *
 * The pool may lie in device memory or in mapped host memory, and so may the destination. Lists come
 * with the launch where they are short, else from mapped host memory, so nothing is uploaded first.
 * An even list names only sources: its pieces are equally long and follow each other in the
 * destination.
 */
#include "signal_completion.h"
#include "unpack_lane.h"

#define TCPX_WARP 32u

/* Entries that fit in the 4,096 bytes that every launch may carry. */
#define TCPX_FEW 240
/* Sources of an even list: a short one, because a launch costs time for every byte, and a long one. */
#define TCPX_EVEN_FEW 256
#define TCPX_EVEN_MANY 1024

/* Words under way in one lane: many when a launch is over soon, few when it is bound by the memory,
 * which likes the accesses of a moment close together. */
#define TCPX_SHORT_BATCH 4u
#define TCPX_LONG_BATCH 2u

/* Threads of a block of a long launch, and its blocks on a multiprocessor. */
#define TCPX_LONG_THREADS 256
#define TCPX_LONG_BLOCKS 6

struct tcpx_call {
    const tcpx_u8 *pool;
    tcpx_u8 *destination;
    /* Counts blocks that have ended; zero before and after. Null: no flag is wanted. */
    tcpx_u32 *ended;
    /* In mapped host memory; becomes `value` once everything is visible. */
    volatile tcpx_u32 *flag;
    tcpx_u32 value;
    tcpx_u32 count;
    /* Of an even list: the length of each piece, and that of the last. */
    tcpx_u32 unit;
    tcpx_u32 last;
    /* Of a list that came with the launch: the warps that share a piece, as a power of two. */
    tcpx_u32 split;
    /* Whether pieces go from the destination to the pool. */
    tcpx_u32 packs;
};

/* Where a piece comes from, and where it goes. */
struct tcpx_way {
    const tcpx_u8 *from;
    tcpx_u8 *to;
};

TCPX_INLINE tcpx_way tcpx_way_of(const tcpx_call &call, tcpx_u32 in_pool, tcpx_u64 in_destination) {
    const tcpx_u8 *pool = call.pool + in_pool;
    tcpx_u8 *destination = call.destination + in_destination;
    tcpx_way way;
    way.from = call.packs ? destination : pool;
    way.to = call.packs ? (tcpx_u8 *)pool : destination;
    return way;
}

/* Aligned, because an entry is read as one word of 16 bytes. */
struct __align__(16) tcpx_few {
    tcpx_descriptor entries[TCPX_FEW];
};

struct tcpx_even_few {
    tcpx_u32 sources[TCPX_EVEN_FEW];
};

struct tcpx_even_many {
    tcpx_u32 sources[TCPX_EVEN_MANY];
};

/* The end of a block. */
TCPX_INLINE void tcpx_finish(const tcpx_call &call) {
    if (call.ended != 0) {
        __syncthreads();
        if (threadIdx.x == 0) {
            tcpx_signal_completion(call.ended, call.flag, call.value);
        }
    }
}

/* Lists that came with the launch. Neighbouring pieces go to different blocks, so that a short list
 * uses all of them. */
TCPX_INLINE void tcpx_carried(const tcpx_call &call, const tcpx_descriptor *entries) {
    tcpx_u32 lane = threadIdx.x % TCPX_WARP;
    tcpx_u32 warps = blockDim.x / TCPX_WARP * gridDim.x;
    tcpx_u32 at;
    for (at = threadIdx.x / TCPX_WARP * gridDim.x + blockIdx.x; at < call.count << call.split;
         at += warps) {
        ulonglong2 entry = *(const ulonglong2 *)&entries[at >> call.split];
        tcpx_way way = tcpx_way_of(call, (tcpx_u32)entry.x, entry.y);
        tcpx_unpack_part(lane, TCPX_WARP, TCPX_SHORT_BATCH, at, call.split, way.from, way.to,
                         (tcpx_u32)(entry.x >> 32));
    }
    tcpx_finish(call);
}

TCPX_INLINE void tcpx_even_carried(const tcpx_call &call, const tcpx_u32 *sources) {
    tcpx_u32 lane = threadIdx.x % TCPX_WARP;
    tcpx_u32 warps = blockDim.x / TCPX_WARP * gridDim.x;
    tcpx_u32 at;
    for (at = threadIdx.x / TCPX_WARP * gridDim.x + blockIdx.x; at < call.count << call.split;
         at += warps) {
        tcpx_u32 index = at >> call.split;
        tcpx_way way = tcpx_way_of(call, sources[index], (tcpx_u64)index * call.unit);
        tcpx_unpack_part(lane, TCPX_WARP, TCPX_SHORT_BATCH, at, call.split, way.from, way.to,
                         index + 1u == call.count ? call.last : call.unit);
    }
    tcpx_finish(call);
}

extern "C" __global__ void __launch_bounds__(1024)
tcpx_unpack_few(const __grid_constant__ tcpx_call call, const __grid_constant__ tcpx_few list) {
    tcpx_carried(call, list.entries);
}

extern "C" __global__ void __launch_bounds__(1024)
tcpx_even_few(const __grid_constant__ tcpx_call call, const __grid_constant__ tcpx_even_few list) {
    tcpx_even_carried(call, list.sources);
}

extern "C" __global__ void __launch_bounds__(1024)
tcpx_even_many(const __grid_constant__ tcpx_call call,
               const __grid_constant__ tcpx_even_many list) {
    tcpx_even_carried(call, list.sources);
}

/*
 * Lists in mapped memory. Neighbouring warps take neighbouring pieces, so that one read across the bus brings
 * several entries and what is copied at a moment lies close together; then all of them go on by as many
 * pieces as there are warps. Each warp's next entry is on its way meanwhile.
 */
TCPX_INLINE tcpx_u32 tcpx_first(void) {
    return blockIdx.x * (blockDim.x / TCPX_WARP) + threadIdx.x / TCPX_WARP;
}

/* Registers for as many warps as hide the memory's latency. */
extern "C" __global__ void __launch_bounds__(TCPX_LONG_THREADS, TCPX_LONG_BLOCKS)
tcpx_unpack_mapped(const __grid_constant__ tcpx_call call, const ulonglong2 *entries) {
    tcpx_u32 warps = blockDim.x / TCPX_WARP * gridDim.x, at = tcpx_first();
    ulonglong2 next = make_ulonglong2(0, 0);
    if (at < call.count) {
        next = entries[at];
    }
    while (at < call.count) {
        ulonglong2 entry = next;
        at += warps;
        if (at < call.count) {
            next = entries[at];
        }
        tcpx_way way = tcpx_way_of(call, (tcpx_u32)entry.x, entry.y);
        tcpx_unpack_lane(threadIdx.x % TCPX_WARP, TCPX_WARP, TCPX_LONG_BATCH, way.from, way.to,
                         (tcpx_u32)(entry.x >> 32));
    }
    tcpx_finish(call);
}

extern "C" __global__ void __launch_bounds__(TCPX_LONG_THREADS, TCPX_LONG_BLOCKS)
tcpx_even_mapped(const __grid_constant__ tcpx_call call, const tcpx_u32 *sources) {
    tcpx_u32 warps = blockDim.x / TCPX_WARP * gridDim.x, at = tcpx_first();
    tcpx_u32 next = at < call.count ? sources[at] : 0;
    while (at < call.count) {
        tcpx_u32 source = next, index = at;
        at += warps;
        if (at < call.count) {
            next = sources[at];
        }
        tcpx_way way = tcpx_way_of(call, source, (tcpx_u64)index * call.unit);
        tcpx_unpack_lane(threadIdx.x % TCPX_WARP, TCPX_WARP, TCPX_LONG_BATCH, way.from, way.to,
                         index + 1u == call.count ? call.last : call.unit);
    }
    tcpx_finish(call);
}

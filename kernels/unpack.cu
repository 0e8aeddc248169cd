/*
 * Moves scattered fragments from a bounce pool to their destination: one warp a descriptor.
 *
 * The pool may lie in device memory or in mapped host memory, and so may the destination. Descriptors
 * come with the launch where they fit, else from mapped host memory, so nothing is uploaded first.
 */
#include "unpack_lane.h"

#define TCPX_WARP 32u

/* What fits in the 4,096 bytes that every launch may carry, beside the pointers and the count. */
#define TCPX_FEW 240
/* What fits in the 32,764 bytes that a launch may carry from compute capability 7.0 on. */
#define TCPX_MANY 2032

/* Aligned, because a descriptor is read as one word of 16 bytes. */
struct __align__(16) tcpx_few {
    tcpx_descriptor entries[TCPX_FEW];
};

struct __align__(16) tcpx_many {
    tcpx_descriptor entries[TCPX_MANY];
};

TCPX_INLINE void tcpx_unpack(const tcpx_descriptor *descriptors, tcpx_u32 count, const tcpx_u8 *pool,
                             tcpx_u8 *destination) {
    tcpx_u32 lane = threadIdx.x % TCPX_WARP;
    tcpx_u32 warps = blockDim.x / TCPX_WARP;
    tcpx_u32 index;
    /* Neighbouring descriptors go to different blocks, so that a short list uses all of them. */
    for (index = threadIdx.x / TCPX_WARP * gridDim.x + blockIdx.x; index < count;
         index += warps * gridDim.x) {
        ulonglong2 entry = *(const ulonglong2 *)&descriptors[index];
        tcpx_u32 source = (tcpx_u32)entry.x;
        tcpx_u32 length = (tcpx_u32)(entry.x >> 32);
        tcpx_unpack_lane(lane, TCPX_WARP, pool + source, destination + entry.y, length);
    }
}

extern "C" __global__ void __launch_bounds__(1024)
tcpx_unpack_few(const tcpx_u8 *pool, tcpx_u8 *destination, tcpx_u32 count,
                const __grid_constant__ tcpx_few list) {
    tcpx_unpack(list.entries, count, pool, destination);
}

extern "C" __global__ void __launch_bounds__(1024)
tcpx_unpack_many(const tcpx_u8 *pool, tcpx_u8 *destination, tcpx_u32 count,
                 const __grid_constant__ tcpx_many list) {
    tcpx_unpack(list.entries, count, pool, destination);
}

extern "C" __global__ void __launch_bounds__(1024)
tcpx_unpack_mapped(const tcpx_u8 *pool, tcpx_u8 *destination, tcpx_u32 count,
                   const tcpx_descriptor *descriptors) {
    tcpx_unpack(descriptors, count, pool, destination);
}

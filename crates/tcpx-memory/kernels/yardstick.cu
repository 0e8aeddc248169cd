/* What the benchmark of the unpackers compares with: a straightforward gather, one warp a fragment. */

struct descriptor {
    unsigned int source;
    unsigned int length;
    unsigned long long destination;
};

struct __align__(16) carried {
    descriptor entries[240];
};

static __device__ __forceinline__ void gather(const unsigned char *pool, unsigned char *destination,
                                              unsigned int count, const descriptor *entries) {
    unsigned int lane = threadIdx.x % 32u, warps = gridDim.x * blockDim.x / 32u, index, at;
    for (index = threadIdx.x / 32u * gridDim.x + blockIdx.x; index < count; index += warps) {
        const unsigned char *from = pool + entries[index].source;
        unsigned char *to = destination + entries[index].destination;
        unsigned int length = entries[index].length, done = 0;
        if ((((unsigned long long)from | (unsigned long long)to) & 15u) == 0) {
            done = length & ~15u;
            for (at = lane; at < done / 16u; at += 32u) {
                ((ulonglong2 *)to)[at] = ((const ulonglong2 *)from)[at];
            }
        }
        for (at = done + lane; at < length; at += 32u) {
            to[at] = from[at];
        }
    }
}

extern "C" __global__ void yardstick_carried(const unsigned char *pool, unsigned char *destination,
                                             unsigned int count,
                                             const __grid_constant__ carried list) {
    gather(pool, destination, count, list.entries);
}

extern "C" __global__ void yardstick_mapped(const unsigned char *pool, unsigned char *destination,
                                            unsigned int count, const descriptor *entries) {
    gather(pool, destination, count, entries);
}

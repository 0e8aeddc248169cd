/*
 * Kernels of the GPU check program: a caller's work that takes long, or that waits for the CPU.
 * Every loop is bounded by the GPU's clock.
 */

typedef unsigned char u8;
typedef unsigned long long u64;

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

/* Waits for a while, then fills the bytes: work that a copy must be ordered behind. */
extern "C" __global__ void slow_fill(u8 *bytes, u64 count, u8 value, u64 delay_ns) {
    u64 start = nanoseconds();
    u64 at;
    while (nanoseconds() - start < delay_ns) {
    }
    for (at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < count;
         at += (u64)gridDim.x * blockDim.x) {
        bytes[at] = value;
    }
}

/* Spins until the CPU sets the flag or the limit has passed; says which: 1 set, 2 given up. One thread of a
 * block looks, and now and then only: many that look without a pause would take the bus from everyone. */
extern "C" __global__ void spin_until(volatile unsigned *flag, volatile unsigned *outcome, u64 limit_ns) {
    if (threadIdx.x == 0) {
        u64 start = nanoseconds(), now = start;
        unsigned answer = 1u;
        while (*flag == 0u) {
            u64 look = now;
            while (now - look < 5000u) {
                now = nanoseconds();
            }
            if (now - start >= limit_ns) {
                answer = 2u;
                break;
            }
        }
        *outcome = answer;
    }
    __syncthreads();
}

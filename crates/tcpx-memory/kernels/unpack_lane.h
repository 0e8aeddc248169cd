/*
 * The unpack kernel's work for one lane: copy one fragment together with the other lanes.
 *
 * Plain C, so that the same source is tested on the CPU, lane after lane. A lane never reads another
 * lane's values and never waits, and every byte of the destination is written by exactly one lane.
 *
 * Either end may have any alignment. The destination's bulk is written in aligned words of 16 bytes;
 * where the source is misaligned against it, each word is put together from two aligned words. Only
 * bytes of the fragment are read, never their neighbours.
 */
#ifndef TCPX_UNPACK_LANE_H
#define TCPX_UNPACK_LANE_H

#if defined(__CUDACC__)
#define TCPX_INLINE static __device__ __forceinline__
typedef unsigned char tcpx_u8;
typedef unsigned int tcpx_u32;
typedef unsigned long long tcpx_u64;
typedef unsigned long long tcpx_address;
#else
#include <stdint.h>
#include <string.h>
#define TCPX_INLINE static inline
typedef uint8_t tcpx_u8;
typedef uint32_t tcpx_u32;
typedef uint64_t tcpx_u64;
typedef uintptr_t tcpx_address;
#endif

/* One copy from the pool to the destination; the layout of an entry of NCCL's device queue. */
typedef struct {
    tcpx_u32 source;
    tcpx_u32 length;
    tcpx_u64 destination;
} tcpx_descriptor;

/* 16 bytes in memory order on a little-endian machine, as every CUDA host and device is. */
typedef struct {
    tcpx_u32 a, b, c, d;
} tcpx_word;

#define TCPX_WORD 16u

/* Most loads that one lane has under way. */
#define TCPX_BATCH 4u

#if defined(__CUDACC__)
TCPX_INLINE tcpx_word tcpx_load(const tcpx_u8 *from) {
    uint4 value = *(const uint4 *)from;
    tcpx_word word;
    word.a = value.x;
    word.b = value.y;
    word.c = value.z;
    word.d = value.w;
    return word;
}
TCPX_INLINE void tcpx_store(tcpx_u8 *to, tcpx_word word) {
    *(uint4 *)to = make_uint4(word.a, word.b, word.c, word.d);
}
/* The upper bytes of `first` from bit `bits` on, 0 to 24, and as many lower ones of `second`. */
TCPX_INLINE tcpx_u32 tcpx_funnel(tcpx_u32 first, tcpx_u32 second, tcpx_u32 bits) {
    return __funnelshift_r(first, second, bits);
}
#else
TCPX_INLINE tcpx_word tcpx_load(const tcpx_u8 *from) {
    tcpx_word word;
    memcpy(&word, from, TCPX_WORD);
    return word;
}
TCPX_INLINE void tcpx_store(tcpx_u8 *to, tcpx_word word) {
    memcpy(to, &word, TCPX_WORD);
}
TCPX_INLINE tcpx_u32 tcpx_funnel(tcpx_u32 first, tcpx_u32 second, tcpx_u32 bits) {
    return (tcpx_u32)((((tcpx_u64)second << 32) | first) >> bits);
}
#endif

/* The 16 bytes that start `shift` bytes into `first` and go on in `second`; `shift` is 1 to 15. Selected by
 * eights, then by fours, then shifted: a lane's registers cannot be indexed. */
TCPX_INLINE tcpx_word tcpx_join(tcpx_word first, tcpx_word second, tcpx_u32 shift) {
    tcpx_u32 bits = (shift & 3u) * 8u;
    tcpx_u32 a = first.a, b = first.b, c = first.c, d = first.d, e = second.a, f = second.b;
    tcpx_word word;
    if (shift & 8u) {
        a = first.c, b = first.d, c = second.a, d = second.b, e = second.c, f = second.d;
    }
    if (shift & 4u) {
        a = b, b = c, c = d, d = e, e = f;
    }
    word.a = tcpx_funnel(a, b, bits);
    word.b = tcpx_funnel(b, c, bits);
    word.c = tcpx_funnel(c, d, bits);
    word.d = tcpx_funnel(d, e, bits);
    return word;
}

/* Copies this lane's share of single bytes. */
TCPX_INLINE void tcpx_copy_bytes(tcpx_u32 lane, tcpx_u32 lanes, const tcpx_u8 *source,
                                 tcpx_u8 *destination, tcpx_u32 length) {
    tcpx_u32 at;
#pragma unroll 1
    for (at = lane; at < length; at += lanes) {
        destination[at] = source[at];
    }
}

/*
 * Copies this lane's share of words whose two ends are aligned. `batch`, a constant of at most
 * TCPX_BATCH, says how many loads are under way before the first store; the last ones are left out
 * singly, so that no lane falls behind at the end.
 */
TCPX_INLINE void tcpx_copy_words(tcpx_u32 lane, tcpx_u32 lanes, tcpx_u32 batch,
                                 const tcpx_u8 *source, tcpx_u8 *destination, tcpx_u32 words) {
    tcpx_u32 at, one;
#pragma unroll 1
    for (at = lane; at < words; at += batch * lanes) {
        tcpx_word loaded[TCPX_BATCH];
#pragma unroll
        for (one = 0; one < batch; one++) {
            if (at + one * lanes < words) {
                loaded[one] = tcpx_load(source + (tcpx_u64)(at + one * lanes) * TCPX_WORD);
            }
        }
#pragma unroll
        for (one = 0; one < batch; one++) {
            if (at + one * lanes < words) {
                tcpx_store(destination + (tcpx_u64)(at + one * lanes) * TCPX_WORD, loaded[one]);
            }
        }
    }
}

/* As above, with a source `shift` bytes behind the aligned address `source`: two loads a word, of
 * which the second finds what the next lane's first has brought. */
TCPX_INLINE void tcpx_copy_shifted(tcpx_u32 lane, tcpx_u32 lanes, tcpx_u32 batch,
                                   const tcpx_u8 *source, tcpx_u8 *destination, tcpx_u32 words,
                                   tcpx_u32 shift) {
    tcpx_u32 at, one;
#pragma unroll 1
    for (at = lane; at < words; at += batch * lanes) {
        tcpx_word first[TCPX_BATCH], second[TCPX_BATCH];
#pragma unroll
        for (one = 0; one < batch; one++) {
            if (at + one * lanes < words) {
                const tcpx_u8 *from = source + (tcpx_u64)(at + one * lanes) * TCPX_WORD;
                first[one] = tcpx_load(from);
                second[one] = tcpx_load(from + TCPX_WORD);
            }
        }
#pragma unroll
        for (one = 0; one < batch; one++) {
            if (at + one * lanes < words) {
                tcpx_store(destination + (tcpx_u64)(at + one * lanes) * TCPX_WORD,
                           tcpx_join(first[one], second[one], shift));
            }
        }
    }
}

/*
 * Copies this lane's share of `length` bytes, `lane` of `lanes`, which are at least 32. `batch` is 2 or
 * 4, a constant: words under way in one lane, half as many where they are put together. Source and
 * destination must not overlap.
 */
TCPX_INLINE void tcpx_unpack_lane(tcpx_u32 lane, tcpx_u32 lanes, tcpx_u32 batch,
                                  const tcpx_u8 *source, tcpx_u8 *destination, tcpx_u32 length) {
    /* Bytes up to the first aligned word of the destination, and how far the source is off there. */
    tcpx_u32 head = (tcpx_u32)(0u - (tcpx_address)destination) & (TCPX_WORD - 1u);
    tcpx_u32 shift = (tcpx_u32)((tcpx_address)source + head) & (TCPX_WORD - 1u);
    tcpx_u32 words, done;
    tcpx_u8 before = 0, behind = 0;
    /* The aligned word that holds the first byte must not begin before the fragment. */
    if (shift > head) {
        head += TCPX_WORD;
    }
    /* Shifted words need one whole word more on the source's side. */
    if (length < head + 2u * TCPX_WORD) {
        tcpx_copy_bytes(lane, lanes, source, destination, length);
        return;
    }
    words = shift == 0u ? (length - head) / TCPX_WORD : (length - head + shift) / TCPX_WORD - 1u;
    done = head + words * TCPX_WORD;
    /* At most 31 bytes at either end, so one a lane: on their way while the words are copied. */
    if (lane < head) {
        before = source[lane];
    }
    if (lane < length - done) {
        behind = source[done + lane];
    }
    if (shift == 0u) {
        tcpx_copy_words(lane, lanes, batch, source + head, destination + head, words);
    } else {
        tcpx_copy_shifted(lane, lanes, batch / 2u, source + head - shift, destination + head, words,
                          shift);
    }
    if (lane < head) {
        destination[lane] = before;
    }
    if (lane < length - done) {
        destination[done + lane] = behind;
    }
}

/* What parts of a fragment are cut at: multiples of this, so that all parts are aligned as the first. */
#define TCPX_LINE 128u

/*
 * As above, of one part of a fragment that `1 << split` groups of lanes share: part `index` modulo their
 * number. A part may be empty, the fragment not.
 */
TCPX_INLINE void tcpx_unpack_part(tcpx_u32 lane, tcpx_u32 lanes, tcpx_u32 batch, tcpx_u32 index,
                                  tcpx_u32 split, const tcpx_u8 *source, tcpx_u8 *destination,
                                  tcpx_u32 length) {
    tcpx_u32 parts = 1u << split;
    tcpx_u64 each = (tcpx_u64)(((length - 1u) >> split) / TCPX_LINE + 1u) * TCPX_LINE;
    tcpx_u64 start = (index & (parts - 1u)) * each;
    if (start < length) {
        tcpx_u32 rest = length - (tcpx_u32)start;
        tcpx_unpack_lane(lane, lanes, batch, source + start, destination + start,
                         rest < each ? rest : (tcpx_u32)each);
    }
}

#endif

/*
 * CRC32C of many bytes by many threads, one thread's part.
 *
 * The checksum of bytes that start from zero is a sum over GF(2): each word of 4 bytes times x to the
 * power of its distance in bits from the end. Every thread sums its words row by row with tables for "one
 * row further", and multiplies the sums by their distance from the end of the block once, at the end.
 *
 * Plain C, so that the same source is tested on the CPU.
 */
#ifndef TCPX_CRC32C_LANE_H
#define TCPX_CRC32C_LANE_H

#include "unpack_lane.h"

/* Threads of a block, and bytes that they take together. */
#define TCPX_CRC_THREADS 512u
#define TCPX_CRC_ROW (TCPX_CRC_THREADS * TCPX_WORD)
/* Rows under way at a time. */
#define TCPX_CRC_BATCH 4u

/* Reflected, as all values here: the highest bit is the coefficient of x^0. */
#define TCPX_CRC_POLYNOMIAL 0x82F63B78u

/* What is the same for every checksum. */
typedef struct {
    /* A byte of a sum, by its place in it and its value, times x^(8 * row). */
    tcpx_u32 row[4][256];
    /* For each word of a row, x^(8 * its distance from the row's end). */
    tcpx_u32 place[TCPX_CRC_THREADS * 4u];
} tcpx_crc_tables;

typedef struct {
    tcpx_u32 part[4];
} tcpx_crc_sums;

TCPX_INLINE tcpx_u32 tcpx_crc_times(tcpx_u32 a, tcpx_u32 b) {
    tcpx_u32 product = 0, bit;
    for (bit = 0; bit < 32u; bit++) {
        product ^= b & (0u - (a >> 31));
        a <<= 1;
        b = (b >> 1) ^ (TCPX_CRC_POLYNOMIAL & (0u - (b & 1u)));
    }
    return product;
}

/* x^(8 * bytes). */
TCPX_INLINE tcpx_u32 tcpx_crc_power(tcpx_u32 bytes) {
    tcpx_u32 result = 1u << 31, square = 1u << 23;
    for (; bytes != 0; bytes /= 2) {
        if (bytes & 1u) {
            result = tcpx_crc_times(result, square);
        }
        square = tcpx_crc_times(square, square);
    }
    return result;
}

/* Fills the tables, thread by thread. */
TCPX_INLINE void tcpx_crc_prepare(tcpx_u32 thread, tcpx_crc_tables *tables) {
    tcpx_u32 one, row = tcpx_crc_power(TCPX_CRC_ROW);
    for (one = thread; one < 1024u; one += TCPX_CRC_THREADS) {
        tables->row[one / 256u][one % 256u] = tcpx_crc_times((one % 256u) << (one / 256u * 8u), row);
    }
    for (one = thread; one < TCPX_CRC_THREADS * 4u; one += TCPX_CRC_THREADS) {
        tables->place[one] = tcpx_crc_power(TCPX_CRC_ROW - 4u * one);
    }
}

TCPX_INLINE tcpx_u32 tcpx_crc_row(const tcpx_u32 *row, tcpx_u32 sum) {
    return row[sum & 255u] ^ row[256u + ((sum >> 8) & 255u)] ^ row[512u + ((sum >> 16) & 255u)] ^
           row[768u + (sum >> 24)];
}

/* Takes the sums one row further and adds the row's word. */
TCPX_INLINE void tcpx_crc_add(const tcpx_u32 *row, tcpx_crc_sums *sums, tcpx_word word) {
    sums->part[0] = tcpx_crc_row(row, sums->part[0]) ^ word.a;
    sums->part[1] = tcpx_crc_row(row, sums->part[1]) ^ word.b;
    sums->part[2] = tcpx_crc_row(row, sums->part[2]) ^ word.c;
    sums->part[3] = tcpx_crc_row(row, sums->part[3]) ^ word.d;
}

/* The aligned word at `at`, with zeros for bytes outside of `start` to `end`, which are not read. */
TCPX_INLINE tcpx_word tcpx_crc_word(tcpx_address at, tcpx_address start, tcpx_address end) {
    tcpx_word word;
    tcpx_u32 index;
    if (at >= start && at + TCPX_WORD <= end) {
        return tcpx_load((const tcpx_u8 *)at);
    }
    word.a = word.b = word.c = word.d = 0;
    for (index = 0; index < TCPX_WORD; index++) {
        if (at + index >= start && at + index < end) {
            tcpx_u32 byte = (tcpx_u32) * (const tcpx_u8 *)(at + index) << (8u * (index & 3u));
            if (index < 4u) {
                word.a |= byte;
            } else if (index < 8u) {
                word.b |= byte;
            } else if (index < 12u) {
                word.c |= byte;
            } else {
                word.d |= byte;
            }
        }
    }
    return word;
}

/*
 * One thread's part of a block of rows from the aligned address `block` up to `block_end`. Bytes before
 * `start` and from `end` on count as zeros. `row` is the tables' first part, wherever it is fastest.
 */
TCPX_INLINE tcpx_u32 tcpx_crc_lane(tcpx_u32 thread, const tcpx_u32 *row, const tcpx_u32 *place,
                                   tcpx_address block, tcpx_address block_end, tcpx_address start,
                                   tcpx_address end) {
    tcpx_crc_sums sums = {{0, 0, 0, 0}};
    tcpx_address at;
    tcpx_u32 one, result;
    for (at = block + thread * TCPX_WORD; at < block_end;) {
        tcpx_address behind = at + (TCPX_CRC_BATCH - 1u) * TCPX_CRC_ROW + TCPX_WORD;
        if (at >= start && behind <= end && behind <= block_end) {
            /* Whole words of several rows: all loads before the first use. */
            tcpx_word loaded[TCPX_CRC_BATCH];
#pragma unroll
            for (one = 0; one < TCPX_CRC_BATCH; one++) {
                loaded[one] = tcpx_load((const tcpx_u8 *)(at + one * TCPX_CRC_ROW));
            }
#pragma unroll
            for (one = 0; one < TCPX_CRC_BATCH; one++) {
                tcpx_crc_add(row, &sums, loaded[one]);
            }
            at += TCPX_CRC_BATCH * TCPX_CRC_ROW;
        } else {
            tcpx_crc_add(row, &sums, tcpx_crc_word(at, start, end));
            at += TCPX_CRC_ROW;
        }
    }
    result = 0;
#pragma unroll
    for (one = 0; one < 4u; one++) {
        result ^= tcpx_crc_times(sums.part[one], place[4u * thread + one]);
    }
    return result;
}

#endif

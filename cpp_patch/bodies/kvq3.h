// kvq3: 3-bit Lloyd-Max codes, magnitudes and signs in separate planes (kvfmt/formats/kvq3.py).
#pragma once

#include "kvq_blocks.h"
#include "kvq_unpack.h"

KVQ_FN void kvq3_encode(const float * x, block_kvq3 * y) {
    uint8_t codes[KVQ3_BLOCK];
    memset(y, 0, sizeof(*y));
    y->d = kvq_lloyd_search(x, codes, kvq3_levels, 4, &kvq3_grid[0][0], KVQ3_GRID_ROWS, KVQ3_UNBIASED);
    if (y->d == 0) {
        return;
    }
    for (int j = 0; j < 16; ++j) {
        y->qs[j] = kvq_crumb_byte(codes, j);
    }
    for (int i = 0; i < KVQ3_BLOCK; ++i) {
        y->qh[i / 8] |= (uint8_t) ((codes[i] >> 2) << (i % 8));
    }
}

#if defined(KVQ_WARP)
KVQ_FN void kvq3_encode_warp(const float * x, block_kvq3 * y, kvq_scratch * scratch) {
    const uint16_t d = kvq_lloyd_search_warp<4, KVQ3_GRID_ROWS>(x, scratch, kvq3_levels, &kvq3_grid[0][0], KVQ3_UNBIASED);
    const int lane = kvq_lane();
    if (lane < 16) {
        y->qs[lane] = d == 0 ? 0 : kvq_crumb_byte(scratch->codes, lane);
    } else if (lane < 24) {
        uint8_t signs = 0;
        for (int i = 0; i < 8; ++i) {
            signs = (uint8_t) (signs | (scratch->codes[8 * (lane - 16) + i] >> 2) << i);
        }
        y->qh[lane - 16] = d == 0 ? 0 : signs;
    }
    y->d = d;
}
#endif

KVQ_FN int8_t kvq3_level(const block_kvq3 * b, int i) {
    const uint8_t sign = (b->qh[i >> 3] >> (i & 7)) & 1;
    return kvq3_levels[kvq_crumb(b->qs, i) | (sign << 2)];
}

// All levels of a block, in order.
KVQ_FN void kvq3_unpack(const block_kvq3 * b, int8_t * levels) {
#if defined(KVQ_AVX512)
    uint64_t signs;
    memcpy(&signs, b->qh, sizeof(signs));
    const __m512i magnitudes = kvq_crumbs64(b->qs);
    const __m512i codes      = _mm512_or_si512(magnitudes, _mm512_maskz_set1_epi8(signs, 4));
    _mm512_storeu_si512((void *) levels, _mm512_shuffle_epi8(kvq_shuffle_table512(kvq3_levels, 8), codes));
#elif defined(KVQ_AVX2)
    const __m256i lookup = kvq_shuffle_table(kvq3_levels, 8);
    for (int half = 0; half < 2; ++half) {
        uint32_t signs;
        memcpy(&signs, b->qh + 4 * half, sizeof(signs));
        const __m256i sign  = _mm256_and_si256(kvq_spread_bits32(signs), _mm256_set1_epi8(4));
        const __m256i codes = _mm256_or_si256(kvq_crumbs32(b->qs, half), sign);
        _mm256_storeu_si256((__m256i *) (levels + 32 * half), _mm256_shuffle_epi8(lookup, codes));
    }
#elif defined(KVQ_NEON)
    const int8x16_t lookup = kvq_table16(kvq3_levels, 8);
    for (int q = 0; q < 4; ++q) {
        const uint8x16_t sign = vandq_u8(kvq_spread_bits16(b->qh + 2 * q), vdupq_n_u8(4));
        vst1q_s8(levels + 16 * q, vqtbl1q_s8(lookup, vorrq_u8(kvq_crumbs16(b->qs, q), sign)));
    }
#else
    for (int i = 0; i < KVQ3_BLOCK; ++i) {
        levels[i] = kvq3_level(b, i);
    }
#endif
}

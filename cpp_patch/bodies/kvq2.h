// kvq2: 2-bit Lloyd-Max codes (kvfmt/formats/kvq2.py).
#pragma once

#include "kvq_blocks.h"
#include "kvq_unpack.h"

// Byte j of the packed codes.
KVQ_FN uint8_t kvq2_byte(const uint8_t * codes, int j) {
    return (uint8_t) (codes[j] | (codes[j + 16] << 2) | (codes[j + 32] << 4) | (codes[j + 48] << 6));
}

KVQ_FN void kvq2_encode(const float * x, block_kvq2 * y) {
    uint8_t codes[KVQ2_BLOCK];
    memset(y, 0, sizeof(*y));
    y->d = kvq_lloyd_search(x, codes, kvq2_levels, 2, &kvq2_grid[0][0], KVQ2_GRID_ROWS, KVQ2_UNBIASED);
    if (y->d == 0) {
        return;
    }
    for (int j = 0; j < 16; ++j) {
        y->qs[j] = kvq2_byte(codes, j);
    }
}

#if defined(KVQ_WARP)
KVQ_FN void kvq2_encode_warp(const float * x, block_kvq2 * y, kvq_scratch * scratch) {
    const uint16_t d = kvq_lloyd_search_warp<2, KVQ2_GRID_ROWS>(x, scratch, kvq2_levels, &kvq2_grid[0][0], KVQ2_UNBIASED);
    if (kvq_lane() < 16) {
        y->qs[kvq_lane()] = d == 0 ? 0 : kvq2_byte(scratch->codes, kvq_lane());
    }
    y->d = d;
}
#endif

KVQ_FN int8_t kvq2_level(const block_kvq2 * b, int i) {
    return kvq2_levels[kvq_crumb(b->qs, i)];
}

// All levels of a block, in order.
KVQ_FN void kvq2_unpack(const block_kvq2 * b, int8_t * levels) {
#if defined(KVQ_AVX512)
    _mm512_storeu_si512((void *) levels, _mm512_shuffle_epi8(kvq_shuffle_table512(kvq2_levels, 4), kvq_crumbs64(b->qs)));
#elif defined(KVQ_AVX2)
    const __m256i lookup = kvq_shuffle_table(kvq2_levels, 4);
    for (int half = 0; half < 2; ++half) {
        const __m256i codes = kvq_crumbs32(b->qs, half);
        _mm256_storeu_si256((__m256i *) (levels + 32 * half), _mm256_shuffle_epi8(lookup, codes));
    }
#elif defined(KVQ_NEON)
    const int8x16_t lookup = kvq_table16(kvq2_levels, 4);
    for (int q = 0; q < 4; ++q) {
        vst1q_s8(levels + 16 * q, vqtbl1q_s8(lookup, kvq_crumbs16(b->qs, q)));
    }
#else
    for (int i = 0; i < KVQ2_BLOCK; ++i) {
        levels[i] = kvq2_level(b, i);
    }
#endif
}

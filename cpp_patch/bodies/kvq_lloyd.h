// Encoder of the Lloyd-Max formats: a grid search for the scale in exact integers (kvfmt/formats/_lloyd.py).
#pragma once

#include "kvq_prim.h"

#define KVQ_LLOYD_BLOCK 64

// Chooses a sign-magnitude code for each of 64 values. Returns the scale as f16 bits, 0 for the zero block.
// levels: the `half` positive levels first. grid: n_grid rows of half - 1 magnitude thresholds. unbiased: as in the spec.
// int16 throughout, so that compilers reach for multiply-add of 16-bit lanes.
KVQ_FN uint16_t kvq_lloyd_search(const float * x, uint8_t * codes, const int8_t * levels, int half,
                                 const int16_t * grid, int n_grid, bool unbiased) {
    const float amax = kvq_amax(x, KVQ_LLOYD_BLOCK);
    if (amax == 0.0f) {
        return 0;
    }
    int16_t mag[KVQ_LLOYD_BLOCK];
    int16_t level[KVQ_LLOYD_BLOCK];
    const float inverse = KVQ_DIV(KVQ_UNIT, amax);
    for (int i = 0; i < KVQ_LLOYD_BLOCK; ++i) {
        mag[i] = (int16_t) kvq_normalised(x[i], inverse);
    }

    float   best = -1.0f;
    int     winner = 0;
    int32_t best_s = 0;
    int32_t best_c = 1;
    for (int j = 0; j < n_grid; ++j) {
        const int16_t * threshold = grid + j * (half - 1);
        for (int i = 0; i < KVQ_LLOYD_BLOCK; ++i) {
            level[i] = levels[0];
        }
        for (int k = 0; k < half - 1; ++k) {
            const int16_t step = (int16_t) (levels[k + 1] - levels[k]);
            for (int i = 0; i < KVQ_LLOYD_BLOCK; ++i) {
                level[i] = (int16_t) (level[i] + (mag[i] > threshold[k] ? step : 0));
            }
        }
        int32_t s = 0;
        int32_t c = 0;
        for (int i = 0; i < KVQ_LLOYD_BLOCK; ++i) {
            s += (int32_t) mag[i] * level[i];
            c += (int32_t) level[i] * level[i];
        }
        const float score = KVQ_DIV(KVQ_MUL((float) s, (float) s), (float) c);
        if (score > best) {
            best   = score;
            winner = j;
            best_s = s;
            best_c = c;
        }
    }

    int64_t square = 0;
    for (int i = 0; i < KVQ_LLOYD_BLOCK; ++i) {
        square += (int32_t) mag[i] * mag[i];
    }
    // 64 / 32767: the block counts amax as 32767 and a level as 2^-6 of the scale
    const float    unit = KVQ_MUL(amax, 64.0f / 32767.0f);
    const uint16_t d    = kvq_scale_to_f16(KVQ_MUL(kvq_scale_ratio(square, best_s, best_c, unbiased), unit));
    const int16_t * threshold = grid + winner * (half - 1);
    for (int i = 0; i < KVQ_LLOYD_BLOCK; ++i) {
        uint8_t code = kvq_is_negative(x[i], mag[i]) ? (uint8_t) half : 0;
        for (int k = 0; k < half - 1; ++k) {
            code = (uint8_t) (code + (mag[i] > threshold[k]));
        }
        codes[i] = code;
    }
    return d;
}

KVQ_FN void kvq_pack_nibbles(const uint8_t * codes, uint8_t * qs) {
    for (int j = 0; j < 32; ++j) {
        qs[j] = (uint8_t) (codes[j] | (codes[j + 32] << 4));
    }
}

KVQ_FN uint8_t kvq_nibble(const uint8_t * qs, int i) {
    return (uint8_t) ((qs[i & 31] >> (i & 32 ? 4 : 0)) & 15);
}

KVQ_FN uint8_t kvq_crumb(const uint8_t * qs, int i) {
    return (uint8_t) ((qs[i & 15] >> (2 * (i >> 4))) & 3);
}

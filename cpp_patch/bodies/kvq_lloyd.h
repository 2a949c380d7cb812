// Encoder of the Lloyd-Max formats: a grid search for the scale in exact integers (kvfmt/formats/_lloyd.py).
#pragma once

#include "kvq_prim.h"
#include "kvq_warp.h"

#define KVQ_LLOYD_BLOCK 64

// The scale as f16 bits, from what the search found. 64 / 32767: the block counts amax as 32767 and a level as 2^-6 of the scale.
KVQ_FN uint16_t kvq_lloyd_scale(float amax, int64_t square, int32_t s, int32_t c, bool unbiased) {
    return kvq_scale_to_f16(KVQ_MUL(kvq_scale_ratio(square, s, c, unbiased), KVQ_MUL(amax, 64.0f / 32767.0f)));
}

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
        const float score = kvq_score((float) s, (float) c);
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
    const uint16_t  d         = kvq_lloyd_scale(amax, square, best_s, best_c, unbiased);
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

// Byte j of the packed codes of a block: four bits of each, or the lowest two.
KVQ_FN uint8_t kvq_nibble_byte(const uint8_t * codes, int j) {
    return (uint8_t) (codes[j] | (codes[j + 32] << 4));
}

KVQ_FN uint8_t kvq_crumb_byte(const uint8_t * codes, int j) {
    return (uint8_t) ((codes[j] & 3) | ((codes[j + 16] & 3) << 2) | ((codes[j + 32] & 3) << 4) | ((codes[j + 48] & 3) << 6));
}

KVQ_FN void kvq_pack_nibbles(const uint8_t * codes, uint8_t * qs) {
    for (int j = 0; j < 32; ++j) {
        qs[j] = kvq_nibble_byte(codes, j);
    }
}

KVQ_FN uint8_t kvq_nibble(const uint8_t * qs, int i) {
    return (uint8_t) ((qs[i & 31] >> (i & 32 ? 4 : 0)) & 15);
}

KVQ_FN uint8_t kvq_crumb(const uint8_t * qs, int i) {
    return (uint8_t) ((qs[i & 15] >> (2 * (i >> 4))) & 3);
}

#if defined(KVQ_WARP)

// kvq_lloyd_search by a warp: each lane tries a candidate, or a part of the block at it. Codes go to shared memory.
template <int half, int n_grid>
static __device__ __forceinline__ uint16_t kvq_lloyd_search_warp(const float * x, kvq_scratch * scratch, const int8_t * levels,
                                                                 const int16_t * grid, bool unbiased) {
    const kvq_normalised_warp part = kvq_normalise_warp(x, scratch);
    if (part.amax == 0.0f) {
        return 0;
    }
    constexpr int parts = n_grid <= KVQ_LANES / 2 ? 2 : 1; // lanes of one candidate
    constexpr int tries = KVQ_LANES / parts;
    const int     first = kvq_lane() / tries * (KVQ_LLOYD_BLOCK / parts);

    kvq_candidate best = kvq_no_candidate();
    for (int j0 = 0; j0 < n_grid; j0 += tries) {
        const int j = j0 + kvq_lane() % tries;
        int32_t s = 0;
        int32_t c = 0;
        if (j < n_grid) {
            int16_t threshold[half - 1];
#pragma unroll
            for (int k = 0; k < half - 1; ++k) {
                threshold[k] = grid[j * (half - 1) + k];
            }
            for (int i = first; i < first + KVQ_LLOYD_BLOCK / parts; ++i) {
                const int mag   = scratch->mag[i];
                int       level = levels[0];
#pragma unroll
                for (int k = 0; k < half - 1; ++k) {
                    level += mag > threshold[k] ? levels[k + 1] - levels[k] : 0;
                }
                s += mag * level;
                c += level * level;
            }
        }
        if (parts == 2) {
            s += KVQ_SHUFFLE(s, KVQ_LANES / 2);
            c += KVQ_SHUFFLE(c, KVQ_LANES / 2);
        }
        if (j < n_grid) {
            kvq_consider(&best, kvq_score((float) s, (float) c), j, (uint32_t) s, c);
        }
    }
    best = kvq_best_warp(best);

    const int16_t * threshold = grid + best.index * (half - 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        uint8_t code = part.negative[h] ? (uint8_t) half : 0;
#pragma unroll
        for (int k = 0; k < half - 1; ++k) {
            code = (uint8_t) (code + (part.mag[h] > threshold[k]));
        }
        scratch->codes[kvq_lane() + h * KVQ_LANES] = code;
    }
    const int64_t square = kvq_sum_warp((int64_t) part.mag[0] * part.mag[0] + (int64_t) part.mag[1] * part.mag[1]);
    KVQ_SYNC();
    return kvq_lloyd_scale(part.amax, square, (int32_t) best.s, best.c, unbiased);
}

#endif

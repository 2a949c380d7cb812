// A warp of the device at work on one block of 64 values: lane i holds values i and i + 32. Results are those of the one-thread code,
// since what lanes add up are integers, and of equal scores the first wins.
#pragma once

#include "kvq_prim.h"

#if defined(__CUDACC__) || defined(__HIPCC__)
#    define KVQ_WARP 1

#    define KVQ_LANES 32
#    define KVQ_SHUFFLE(value, lanes) __shfl_xor_sync(0xffffffffu, (value), (lanes), KVQ_LANES)
#    define KVQ_SYNC() __syncwarp()

// Shared memory of one warp.
typedef struct {
    int32_t xi[64];
    int16_t mag[64];
    uint8_t codes[64];
} kvq_scratch;

KVQ_FN int kvq_lane() {
    return (int) (threadIdx.x % KVQ_LANES);
}

template <typename T>
static __device__ __forceinline__ T kvq_sum_warp(T value) {
#pragma unroll
    for (int lanes = KVQ_LANES / 2; lanes > 0; lanes /= 2) {
        value += KVQ_SHUFFLE(value, lanes);
    }
    return value;
}

KVQ_FN int32_t kvq_max_warp(int32_t value) {
#pragma unroll
    for (int lanes = KVQ_LANES / 2; lanes > 0; lanes /= 2) {
        const int32_t other = KVQ_SHUFFLE(value, lanes);
        value = other > value ? other : value;
    }
    return value;
}

// A lane's two values, normalised.
typedef struct {
    float   amax; // of the block; 0: the rest is not set
    int32_t mag[2];
    bool    negative[2];
} kvq_normalised_warp;

// amax and magnitudes as kvq_amax and kvq_normalised give them; the magnitudes go to shared memory too.
KVQ_FN kvq_normalised_warp kvq_normalise_warp(const float * x, kvq_scratch * scratch) {
    const float value[2] = { x[kvq_lane()], x[kvq_lane() + KVQ_LANES] };
    const int32_t mag0 = (int32_t) kvq_magnitude(value[0]);
    const int32_t mag1 = (int32_t) kvq_magnitude(value[1]);
    const int32_t most = kvq_max_warp(mag0 > mag1 ? mag0 : mag1);
    kvq_normalised_warp result = { kvq_amax_of(most), { 0, 0 }, { false, false } };
    if (result.amax != 0.0f) {
        const float inverse = KVQ_DIV(KVQ_UNIT, result.amax);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            result.mag[h]      = kvq_normalised(value[h], inverse);
            result.negative[h] = kvq_is_negative(value[h], result.mag[h]);
            scratch->mag[kvq_lane() + h * KVQ_LANES] = (int16_t) result.mag[h];
        }
    }
    KVQ_SYNC();
    return result;
}

// The best of the candidates that a lane or a warp has seen.
typedef struct {
    float    score;
    int      index;
    uint32_t s;
    int32_t  c;
} kvq_candidate;

KVQ_FN kvq_candidate kvq_no_candidate() {
    const kvq_candidate none = { -1.0f, 0, 0, 1 };
    return none;
}

KVQ_FN void kvq_consider(kvq_candidate * best, float score, int index, uint32_t s, int32_t c) {
    if (score > best->score || (score == best->score && index < best->index)) {
        best->score = score;
        best->index = index;
        best->s     = s;
        best->c     = c;
    }
}

KVQ_FN kvq_candidate kvq_best_warp(kvq_candidate best) {
#pragma unroll
    for (int lanes = KVQ_LANES / 2; lanes > 0; lanes /= 2) {
        const float    score = KVQ_SHUFFLE(best.score, lanes);
        const int      index = KVQ_SHUFFLE(best.index, lanes);
        const uint32_t s     = KVQ_SHUFFLE(best.s, lanes);
        const int32_t  c     = KVQ_SHUFFLE(best.c, lanes);
        kvq_consider(&best, score, index, s, c);
    }
    return best;
}

#endif

// Encoder and decoder of the formats whose quarters have unequal bits (kvfmt/formats/_allocated.py).
#pragma once

#include "kvq_unpack.h"

#define KVQ_QUARTER 16

typedef struct {
    int             bits[4]; // of a code, by quarter; the last two are equal
    const int8_t *  levels[3]; // by code: fine, middle, coarse
    const int8_t *  weights;
    const int16_t * grid;
    int             n_grid;
} kvq_allocation;

// The quarters take fine, middle, coarse and coarse codes.
KVQ_FN_CONST int kvq_part(int quarter) {
    return quarter < 2 ? quarter : 2;
}

KVQ_FN_CONST int kvq_half(const kvq_allocation * a, int quarter) {
    return 1 << (a->bits[quarter] - 1);
}

// Where a quarter's thresholds begin in a row of the grid; 3 gives the length of a row.
KVQ_FN_CONST int kvq_first_threshold(const kvq_allocation * a, int part) {
    int first = 0;
    for (int q = 0; q < part; ++q) {
        first += kvq_half(a, q) - 1;
    }
    return first;
}

// Where a quarter's bits beyond the second begin in the field of a column, which is one value of each quarter.
KVQ_FN_CONST int kvq_high_shift(const kvq_allocation * a, int quarter) {
    int shift = 0;
    for (int q = 0; q < quarter; ++q) {
        shift += a->bits[q] - 2;
    }
    return shift;
}

#if defined(KVQ_AVX2)

// The positive levels of each codebook for byte shuffles; `upper`: what each of a fine codebook's 32 levels from the 16th on
// adds to that one.
typedef struct {
    __m256i levels[3];
    __m256i upper;
} kvq_allocated_tables;

KVQ_FN_CONST kvq_allocated_tables kvq_make_tables(const kvq_allocation * a) {
    kvq_allocated_tables tables;
    for (int p = 0; p < 3; ++p) {
        tables.levels[p] = kvq_shuffle_table(a->levels[p], kvq_half(a, p) < 16 ? kvq_half(a, p) : 16);
    }
    int8_t upper[16] = { 0 };
    for (int i = 0; kvq_half(a, 0) == 32 && i < 16; ++i) {
        upper[i] = (int8_t) (a->levels[0][15 + i] - a->levels[0][15]);
    }
    tables.upper = kvq_shuffle_table(upper, 16);
    return tables;
}

// How many of n thresholds lie below each magnitude.
KVQ_FN_CONST __m256i kvq_count_above(__m256i mag, const int16_t * thresholds, int n) {
    __m256i count = _mm256_setzero_si256();
    KVQ_UNROLL
    for (int k = 0; k < n; ++k) {
        count = _mm256_sub_epi16(count, _mm256_cmpgt_epi16(mag, _mm256_set1_epi16(thresholds[k])));
    }
    return count;
}

// The byte of a table for each 16-bit index.
static inline __m256i kvq_look_up16(__m256i table, __m256i index) {
    return _mm256_shuffle_epi8(table, _mm256_or_si256(index, _mm256_set1_epi16((short) 0x8000)));
}

// The levels of the 16 magnitudes of a quarter.
KVQ_FN_CONST __m256i kvq_quarter_levels(__m256i mag, const kvq_allocation * a, const kvq_allocated_tables * tables,
                                        const int16_t * thresholds, int quarter) {
    const int p = kvq_part(quarter);
    thresholds += kvq_first_threshold(a, p);
    if (kvq_half(a, quarter) <= 16) {
        return kvq_look_up16(tables->levels[p], kvq_count_above(mag, thresholds, kvq_half(a, quarter) - 1));
    }
    // 15 thresholds by the one table, 15 by the other, and the last
    const int8_t * levels = a->levels[p];
    const __m256i  low    = kvq_look_up16(tables->levels[p], kvq_count_above(mag, thresholds, 15));
    const __m256i  high   = kvq_look_up16(tables->upper, kvq_count_above(mag, thresholds + 15, 15));
    const __m256i  top    = _mm256_cmpgt_epi16(mag, _mm256_set1_epi16(thresholds[30]));
    const __m256i  last   = _mm256_and_si256(top, _mm256_set1_epi16((short) (levels[31] - levels[30])));
    return _mm256_add_epi16(_mm256_add_epi16(low, high), last);
}

// Sums over the block at one candidate scale: s = sum weight mag level, c = sum weight level^2. s needs all of 32 bits.
KVQ_FN_CONST void kvq_allocated_sums(const int16_t * mag, const kvq_allocation * a, const kvq_allocated_tables * tables,
                                     const int16_t * thresholds, uint32_t * s, int32_t * c) {
    __m256i vs = _mm256_setzero_si256();
    __m256i vc = _mm256_setzero_si256();
    KVQ_UNROLL
    for (int q = 0; q < 4; ++q) {
        const __m256i m        = _mm256_loadu_si256((const __m256i *) (mag + KVQ_QUARTER * q));
        const __m256i level    = kvq_quarter_levels(m, a, tables, thresholds, q);
        const __m256i weighted = _mm256_mullo_epi16(level, _mm256_set1_epi16(a->weights[kvq_part(q)]));
        vs = _mm256_add_epi32(vs, _mm256_madd_epi16(m, weighted));
        vc = _mm256_add_epi32(vc, _mm256_madd_epi16(level, weighted));
    }
    const __m256i pairs = _mm256_hadd_epi32(vs, vc);
    const __m256i quads = _mm256_hadd_epi32(pairs, pairs);
    const __m128i both  = _mm_add_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
    *s = (uint32_t) _mm_cvtsi128_si32(both);
    *c = _mm_extract_epi32(both, 1);
}

#else

typedef int kvq_allocated_tables; // none

KVQ_FN_CONST kvq_allocated_tables kvq_make_tables(const kvq_allocation * a) {
    (void) a;
    return 0;
}

KVQ_FN_CONST void kvq_allocated_sums(const int16_t * mag, const kvq_allocation * a, const kvq_allocated_tables * tables,
                                     const int16_t * thresholds, uint32_t * s, int32_t * c) {
    (void) tables;
    *s = 0;
    *c = 0;
    KVQ_UNROLL
    for (int q = 0; q < 4; ++q) {
        const int       p      = kvq_part(q);
        const int16_t * m      = mag + KVQ_QUARTER * q;
        const int16_t * t      = thresholds + kvq_first_threshold(a, p);
        const int8_t *  levels = a->levels[p];
        int16_t level[KVQ_QUARTER];
        for (int i = 0; i < KVQ_QUARTER; ++i) {
            level[i] = levels[0];
        }
        for (int k = 0; k < kvq_half(a, q) - 1; ++k) {
            const int16_t step = (int16_t) (levels[k + 1] - levels[k]);
            for (int i = 0; i < KVQ_QUARTER; ++i) {
                level[i] = (int16_t) (level[i] + (m[i] > t[k] ? step : 0));
            }
        }
        int32_t part_s = 0;
        int32_t part_c = 0;
        for (int i = 0; i < KVQ_QUARTER; ++i) {
            part_s += (int32_t) m[i] * level[i];
            part_c += (int32_t) level[i] * level[i];
        }
        *s += (uint32_t) a->weights[p] * (uint32_t) part_s;
        *c += a->weights[p] * part_c;
    }
}

#endif

// 32 / 32767: the block counts amax as 32767 and a level as 2^-5 of the scale
KVQ_FN uint16_t kvq_allocated_scale(float amax, float s, float c) {
    return kvq_scale_to_f16(KVQ_MUL(KVQ_DIV(s, c), KVQ_MUL(amax, 32.0f / 32767.0f)));
}

// The bits beyond the second of a column, which is one value of each quarter.
KVQ_FN_CONST uint8_t kvq_column_byte(const uint8_t * code, const kvq_allocation * a, int column) {
    const uint8_t * c = code + column;
    return (uint8_t) ((c[0] >> 2) | (c[16] >> 2) << kvq_high_shift(a, 1) | (c[32] >> 2) << kvq_high_shift(a, 2) |
                      (c[48] >> 2) << kvq_high_shift(a, 3));
}

// Returns the scale as f16 bits, 0 for the zero block, whose codes need not be written; n_high: bytes of qh, 8 or 16.
KVQ_FN_CONST uint16_t kvq_allocated_encode(const float * x, const kvq_allocation * a, uint8_t * qs, uint8_t * qh, int n_high) {
    const float amax = kvq_amax(x, 4 * KVQ_QUARTER);
    if (amax == 0.0f) {
        return 0;
    }
    int16_t mag[4 * KVQ_QUARTER];
    const float inverse = KVQ_DIV(KVQ_UNIT, amax);
    for (int i = 0; i < 4 * KVQ_QUARTER; ++i) {
        mag[i] = (int16_t) kvq_normalised(x[i], inverse);
    }

    const kvq_allocated_tables tables = kvq_make_tables(a);
    const int row    = kvq_first_threshold(a, 3);
    float     best   = -1.0f;
    int       winner = 0;
    float     best_s = 0.0f;
    float     best_c = 1.0f;
    for (int j = 0; j < a->n_grid; ++j) {
        uint32_t s;
        int32_t  c;
        kvq_allocated_sums(mag, a, &tables, a->grid + j * row, &s, &c);
        const float score = kvq_score((float) s, (float) c);
        if (score > best) {
            best   = score;
            winner = j;
            best_s = (float) s;
            best_c = (float) c;
        }
    }

    const uint16_t d = kvq_allocated_scale(amax, best_s, best_c);
    uint8_t code[4 * KVQ_QUARTER];
    KVQ_UNROLL
    for (int q = 0; q < 4; ++q) {
        const int16_t * m = mag + KVQ_QUARTER * q;
        const int16_t * t = a->grid + winner * row + kvq_first_threshold(a, kvq_part(q));
        int16_t index[KVQ_QUARTER] = { 0 };
        for (int k = 0; k < kvq_half(a, q) - 1; ++k) {
            for (int i = 0; i < KVQ_QUARTER; ++i) {
                index[i] = (int16_t) (index[i] + (m[i] > t[k]));
            }
        }
        for (int i = 0; i < KVQ_QUARTER; ++i) {
            const int sign = kvq_is_negative(x[KVQ_QUARTER * q + i], m[i]) ? kvq_half(a, q) : 0;
            code[KVQ_QUARTER * q + i] = (uint8_t) (index[i] + sign);
        }
    }
    uint8_t high[KVQ_QUARTER];
    for (int i = 0; i < KVQ_QUARTER; ++i) {
        qs[i]   = kvq_crumb_byte(code, i);
        high[i] = kvq_column_byte(code, a, i);
    }
    for (int i = 0; i < n_high; ++i) {
        qh[i] = n_high == KVQ_QUARTER ? high[i] : (uint8_t) (high[i] | high[i + KVQ_QUARTER / 2] << 4);
    }
    return d;
}

#if defined(KVQ_WARP)

#define KVQ_CANDIDATE_LANES 4 // so many lanes share a candidate scale, each with a part of every quarter

// What a lane adds to the sums of kvq_allocated_sums: values part, part + 4, ... of every quarter.
KVQ_FN void kvq_allocated_part(const int16_t * mag, const kvq_allocation * a, const int16_t * thresholds, int part, uint32_t * s, int32_t * c) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const int       p      = kvq_part(q);
        const int16_t * t      = thresholds + kvq_first_threshold(a, p);
        const int8_t *  levels = a->levels[p];
        int m[KVQ_QUARTER / KVQ_CANDIDATE_LANES];
        int level[KVQ_QUARTER / KVQ_CANDIDATE_LANES];
#pragma unroll
        for (int i = 0; i < KVQ_QUARTER / KVQ_CANDIDATE_LANES; ++i) {
            m[i]     = mag[KVQ_QUARTER * q + KVQ_CANDIDATE_LANES * i + part];
            level[i] = levels[0];
        }
        for (int k = 0; k < kvq_half(a, q) - 1; ++k) {
            const int threshold = t[k];
            const int step      = levels[k + 1] - levels[k];
#pragma unroll
            for (int i = 0; i < KVQ_QUARTER / KVQ_CANDIDATE_LANES; ++i) {
                level[i] += m[i] > threshold ? step : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < KVQ_QUARTER / KVQ_CANDIDATE_LANES; ++i) {
            *s += (uint32_t) (a->weights[p] * level[i]) * (uint32_t) m[i];
            *c += a->weights[p] * level[i] * level[i];
        }
    }
}

// kvq_allocated_encode by a warp: lanes share the candidates. Writes qs and qh whole, zeros for the zero block.
static __device__ __forceinline__ uint16_t kvq_allocated_encode_warp(const float * x, kvq_scratch * scratch, const kvq_allocation * a,
                                                                     uint8_t * qs, uint8_t * qh, int n_high) {
    const int lane = kvq_lane();
    const kvq_normalised_warp part = kvq_normalise_warp(x, scratch);
    uint16_t d = 0;
    if (part.amax != 0.0f) {
        const int row = kvq_first_threshold(a, 3);
        kvq_candidate best = kvq_no_candidate();
        for (int j0 = 0; j0 < a->n_grid; j0 += KVQ_LANES / KVQ_CANDIDATE_LANES) {
            const int j = j0 + lane / KVQ_CANDIDATE_LANES;
            uint32_t s = 0;
            int32_t  c = 0;
            if (j < a->n_grid) {
                kvq_allocated_part(scratch->mag, a, a->grid + j * row, lane % KVQ_CANDIDATE_LANES, &s, &c);
            }
#pragma unroll
            for (int lanes = 1; lanes < KVQ_CANDIDATE_LANES; lanes *= 2) {
                s += KVQ_SHUFFLE(s, lanes);
                c += KVQ_SHUFFLE(c, lanes);
            }
            if (j < a->n_grid) {
                kvq_consider(&best, kvq_score((float) s, (float) c), j, s, c);
            }
        }
        best = kvq_best_warp(best);
        d = kvq_allocated_scale(part.amax, (float) best.s, (float) best.c);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int       q = (lane + h * KVQ_LANES) / KVQ_QUARTER;
            const int16_t * t = a->grid + best.index * row + kvq_first_threshold(a, kvq_part(q));
            int code = part.negative[h] ? kvq_half(a, q) : 0;
            for (int k = 0; k < kvq_half(a, q) - 1; ++k) {
                code += part.mag[h] > t[k];
            }
            scratch->codes[lane + h * KVQ_LANES] = (uint8_t) code;
        }
    }
    KVQ_SYNC();
    if (lane < KVQ_QUARTER) {
        qs[lane] = d == 0 ? 0 : kvq_crumb_byte(scratch->codes, lane);
    } else if (lane < KVQ_QUARTER + n_high) {
        const int i = lane - KVQ_QUARTER;
        uint8_t high = kvq_column_byte(scratch->codes, a, i);
        if (n_high != KVQ_QUARTER) {
            high = (uint8_t) (high | kvq_column_byte(scratch->codes, a, i + KVQ_QUARTER / 2) << 4);
        }
        qh[i] = d == 0 ? 0 : high;
    }
    return d;
}

#endif

KVQ_FN_CONST int8_t kvq_allocated_level(const uint8_t * qs, const uint8_t * qh, int n_high, const kvq_allocation * a, int i) {
    const int q      = i / KVQ_QUARTER;
    const int column = i % KVQ_QUARTER;
    const int high   = (qh[column % n_high] >> (column / n_high * 4 + kvq_high_shift(a, q))) & ((1 << (a->bits[q] - 2)) - 1);
    return a->levels[kvq_part(q)][kvq_crumb(qs, i) | high << 2];
}

#if defined(KVQ_AVX2)

// The bits of all columns beyond the two lowest of each code, one byte a column.
KVQ_FN_CONST __m128i kvq_column_bytes(const uint8_t * qh, int n_high) {
    if (n_high == KVQ_QUARTER) {
        return _mm_loadu_si128((const __m128i *) qh);
    }
    const __m128i low = _mm_loadl_epi64((const __m128i *) qh);
    return _mm_and_si128(_mm_unpacklo_epi64(low, _mm_srli_epi16(low, 4)), _mm_set1_epi8(15));
}

// Two quarters, from the first or the third: codes, then levels.
KVQ_FN_CONST __m256i kvq_half_levels(const uint8_t * qs, __m256i columns, const kvq_allocation * a, int quarter) {
    const int     s0 = kvq_high_shift(a, quarter);
    const int     s1 = kvq_high_shift(a, quarter + 1);
    const int     m0 = (1 << (a->bits[quarter] - 2)) - 1;
    const int     m1 = (1 << (a->bits[quarter + 1] - 2)) - 1;
    const __m256i shifted = _mm256_srlv_epi32(columns, _mm256_setr_epi32(s0, s0, s0, s0, s1, s1, s1, s1));
    const __m256i high    = _mm256_and_si256(shifted, _mm256_setr_m128i(_mm_set1_epi8((char) m0), _mm_set1_epi8((char) m1)));
    const __m256i codes   = _mm256_or_si256(kvq_crumbs32(qs, quarter / 2), _mm256_slli_epi16(high, 2));

    // Codes of up to four bits find their level in one table, longer ones a magnitude in one or two; the shuffle sees the
    // lowest four bits of a code.
    const int8_t * l0   = a->levels[kvq_part(quarter)];
    const int8_t * l1   = a->levels[kvq_part(quarter + 1)];
    const int      half = kvq_half(a, quarter);
    const __m256i  low  = _mm256_blend_epi32(kvq_shuffle_table(l0, half < 16 ? 2 * half : 16),
                                             kvq_shuffle_table(l1, 2 * kvq_half(a, quarter + 1)), 0xF0);
    __m256i levels = _mm256_shuffle_epi8(low, codes);
    if (half == 32) {
        const __m256i more = _mm256_shuffle_epi8(kvq_shuffle_table(l0 + 16, 16), codes);
        const __m256i bit  = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_setr_m128i(_mm_set1_epi8(16), _mm_setzero_si128())), 3);
        levels = _mm256_blendv_epi8(levels, more, bit);
    }
    if (half >= 16) {
        const __m256i sign = _mm256_setr_m128i(_mm_set1_epi8((char) half), _mm_set1_epi8((char) 0x80)); // never set in the other quarter
        const __m256i mask = _mm256_cmpeq_epi8(_mm256_and_si256(codes, sign), sign);
        levels = _mm256_sub_epi8(_mm256_xor_si256(levels, mask), mask);
    }
    return levels;
}

// All levels of a block, in order.
KVQ_FN_CONST void kvq_allocated_unpack(const uint8_t * qs, const uint8_t * qh, int n_high, const kvq_allocation * a, int8_t * levels) {
    const __m256i columns = _mm256_broadcastsi128_si256(kvq_column_bytes(qh, n_high));
    _mm256_storeu_si256((__m256i *) levels, kvq_half_levels(qs, columns, a, 0));
    _mm256_storeu_si256((__m256i *) (levels + 32), kvq_half_levels(qs, columns, a, 2));
}

#elif defined(KVQ_NEON)

// The levels of codes of up to six bits.
KVQ_FN_CONST int8x16_t kvq_look_up_levels(const int8_t * levels, int bits, uint8x16_t codes) {
    if (bits <= 4) {
        return vqtbl1q_s8(kvq_table16(levels, 1 << bits), codes);
    }
    if (bits == 5) {
        const int8x16x2_t table = { { vld1q_s8(levels), vld1q_s8(levels + 16) } };
        return vqtbl2q_s8(table, codes);
    }
    const int8x16x4_t table = { { vld1q_s8(levels), vld1q_s8(levels + 16), vld1q_s8(levels + 32), vld1q_s8(levels + 48) } };
    return vqtbl4q_s8(table, codes);
}

// All levels of a block, in order: a quarter at a time.
KVQ_FN_CONST void kvq_allocated_unpack(const uint8_t * qs, const uint8_t * qh, int n_high, const kvq_allocation * a, int8_t * levels) {
    uint8x16_t columns; // the bits of each column beyond the two lowest of its codes
    if (n_high == KVQ_QUARTER) {
        columns = vld1q_u8(qh);
    } else {
        const uint8x8_t both = vld1_u8(qh);
        columns = vcombine_u8(vand_u8(both, vdup_n_u8(15)), vshr_n_u8(both, 4));
    }
    KVQ_UNROLL
    for (int q = 0; q < 4; ++q) {
        const uint8x16_t shifted = vshlq_u8(columns, vdupq_n_s8((int8_t) -kvq_high_shift(a, q)));
        const uint8x16_t high    = vandq_u8(shifted, vdupq_n_u8((uint8_t) ((1 << (a->bits[q] - 2)) - 1)));
        const uint8x16_t codes   = vorrq_u8(kvq_crumbs16(qs, q), vshlq_n_u8(high, 2));
        vst1q_s8(levels + KVQ_QUARTER * q, kvq_look_up_levels(a->levels[kvq_part(q)], a->bits[q], codes));
    }
}

#else

// All levels of a block, in order.
KVQ_FN_CONST void kvq_allocated_unpack(const uint8_t * qs, const uint8_t * qh, int n_high, const kvq_allocation * a, int8_t * levels) {
    for (int i = 0; i < 4 * KVQ_QUARTER; ++i) {
        levels[i] = kvq_allocated_level(qs, qh, n_high, a, i);
    }
}

#endif

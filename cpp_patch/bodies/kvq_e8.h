// Encoder and decoder of the E8 formats: exact nearest words, scale search in exact integers (kvfmt/formats/_e8.py).
#pragma once

#include "kvq_unpack.h"

#define KVQ_E8_BLOCK  64
#define KVQ_E8_GROUPS 8
#define KVQ_E8_FINE   8 // values are compared with levels in eighths of a level

typedef struct {
    int             n_classes;
    int             n_scales;
    int             base;    // of the digits
    int             shift;   // the quarter along the diagonal, in levels
    const int8_t *  classes; // [n_classes][dim] magnitudes, descending
    const int8_t *  digits;  // [n_classes][dim]
    const int32_t * norms;
    const uint8_t * row_of;
    const int32_t * step;
    const int32_t * weight;
    const int32_t * start;
    bool            unbiased; // the stored scale
} kvq_e8_book;

// What a candidate scale chose. The lanes of a table row are the block's rows: 8 of 8 values, or 16 of 4.
// Both directions are kept; `up` and `first` say which one, and which parity of the group's first row, each group took.
typedef struct {
    int16_t key[2][KVQ_E8_BLOCK];   // |z| * 8 + position, sorted downwards along the rows
    int32_t pick[2][2][16];         // 2 * class + flipped, for either parity relative to the natural signs
    int16_t odd[2][16];             // parity of the natural signs
    uint8_t down[KVQ_E8_GROUPS];
    uint8_t first[KVQ_E8_GROUPS];
} kvq_e8_choice;

KVQ_FN int16_t kvq_e8_scale(int32_t xi, int32_t step) {
    return (int16_t) ((xi * step + 32768) >> 16);
}

// y: in the order of the lanes, value i of row r at i * lanes + r.
KVQ_FN void kvq_e8_scaled(const int32_t * xi, int32_t step, int16_t * y) {
    for (int i = 0; i < KVQ_E8_BLOCK; ++i) {
        y[i] = kvq_e8_scale(xi[i], step);
    }
}

KVQ_FN int kvq_e8_class_parity(const kvq_e8_book * book, int dim, int k) {
    int parity = 0;
    for (int i = 0; i < dim; ++i) {
        parity ^= book->digits[k * dim + i] & 1;
    }
    return parity;
}

// Sorting networks for 4 and 8 keys, downwards: the halves, then Batcher's odd-even merge.
#define KVQ_E8_SORT(dim, ORDER)                                                         \
    do {                                                                                \
        ORDER(0, 1); ORDER(2, 3); ORDER(0, 2); ORDER(1, 3); ORDER(1, 2);                \
        if ((dim) == 8) {                                                               \
            ORDER(4, 5); ORDER(6, 7); ORDER(4, 6); ORDER(5, 7); ORDER(5, 6);            \
            ORDER(0, 4); ORDER(1, 5); ORDER(2, 6); ORDER(3, 7);                         \
            ORDER(2, 4); ORDER(3, 5); ORDER(1, 2); ORDER(3, 4); ORDER(5, 6);            \
        }                                                                               \
    } while (0)

// Keys |z| * 8 + position of a row, sorted downwards.
KVQ_FN_CONST void kvq_e8_order(int * key, int dim) {
#define KVQ_E8_ORDER(i, j)                            \
    do {                                              \
        const int a = key[i];                         \
        const int b = key[j];                         \
        key[i] = a > b ? a : b;                       \
        key[j] = a > b ? b : a;                       \
    } while (0)
    KVQ_E8_SORT(dim, KVQ_E8_ORDER);
#undef KVQ_E8_ORDER
}

// The most that a class gains, and which, of the sorted keys of a row: for either parity relative to the natural signs.
KVQ_FN_CONST void kvq_e8_gains(const int * key, const kvq_e8_book * book, int dim, int32_t * most, int32_t * pick) {
    int mag[8];
    for (int i = 0; i < dim; ++i) {
        mag[i] = key[i] >> 3;
    }
    most[0] = INT32_MIN;
    most[1] = INT32_MIN;
    KVQ_UNROLL
    for (int k = 0; k < book->n_classes; ++k) {
        const int8_t * level   = book->classes + k * dim;
        int32_t        natural = -book->norms[k];
        for (int i = 0; i < dim; ++i) {
            natural += 2 * mag[i] * level[i];
        }
        const int32_t flipped = natural - 4 * mag[dim - 1] * level[dim - 1];
        const int     parity  = kvq_e8_class_parity(book, dim, k);
        if (natural > most[parity]) {
            most[parity] = natural;
            pick[parity] = 2 * k;
        }
        if (flipped > most[1 - parity]) {
            most[1 - parity] = flipped;
            pick[1 - parity] = 2 * k + 1;
        }
    }
}

// For one direction: sorted keys, parity and squares of every row, and for either parity relative to the natural signs
// the most that a class gains, and which. `square` and `gain` are in 1/64 and 1/8 of a squared level.
#if defined(KVQ_AVX2)

static inline __m256i kvq_e8_pair(const int8_t * level, int factor) {
    return _mm256_set1_epi32((int) ((uint32_t) (uint16_t) (factor * level[0]) | (uint32_t) (factor * level[1]) << 16));
}

// As the portable one. Eight rows at a time; a gain carries 127 - pick in its lowest seven bits, so that one maximum
// finds both, the first class of equals.
KVQ_FN_CONST void kvq_e8_match(const int16_t * y, const kvq_e8_book * book, int dim, int d, kvq_e8_choice * choice,
                               int32_t * square, int32_t (*gain)[16]) {
    const int     lanes = KVQ_E8_BLOCK / dim;
    const __m128i shift = _mm_set1_epi16((short) ((d ? -KVQ_E8_FINE : KVQ_E8_FINE) * book->shift));
    for (int r = 0; r < lanes; r += 8) {
        __m128i key[8];
        __m128i odd = _mm_setzero_si128();
        __m256i sum = _mm256_setzero_si256();
        for (int i = 0; i < dim; i += 2) {
            const __m128i z0 = _mm_sub_epi16(_mm_loadu_si128((const __m128i *) (y + i * lanes + r)), shift);
            const __m128i z1 = _mm_sub_epi16(_mm_loadu_si128((const __m128i *) (y + (i + 1) * lanes + r)), shift);
            const __m256i z  = _mm256_setr_m128i(_mm_unpacklo_epi16(z0, z1), _mm_unpackhi_epi16(z0, z1));
            odd    = _mm_xor_si128(odd, _mm_xor_si128(z0, z1));
            sum    = _mm256_add_epi32(sum, _mm256_madd_epi16(z, z));
            key[i]     = _mm_or_si128(_mm_slli_epi16(_mm_abs_epi16(z0), 3), _mm_set1_epi16((short) i));
            key[i + 1] = _mm_or_si128(_mm_slli_epi16(_mm_abs_epi16(z1), 3), _mm_set1_epi16((short) (i + 1)));
        }
        _mm_storeu_si128((__m128i *) (choice->odd[d] + r), _mm_srli_epi16(odd, 15));
        _mm256_storeu_si256((__m256i *) (square + r), sum);

#    define KVQ_E8_ORDER(i, j)                                   \
        do {                                                     \
            const __m128i high = _mm_max_epi16(key[i], key[j]);  \
            key[j] = _mm_min_epi16(key[i], key[j]);              \
            key[i] = high;                                       \
        } while (0)
        KVQ_E8_SORT(dim, KVQ_E8_ORDER);
#    undef KVQ_E8_ORDER

        __m256i mag[4];
        for (int i = 0; i < dim; i += 2) {
            _mm_storeu_si128((__m128i *) (choice->key[d] + i * lanes + r), key[i]);
            _mm_storeu_si128((__m128i *) (choice->key[d] + (i + 1) * lanes + r), key[i + 1]);
            const __m128i a = _mm_srli_epi16(key[i], 3);
            const __m128i b = _mm_srli_epi16(key[i + 1], 3);
            mag[i / 2] = _mm256_setr_m128i(_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b));
        }
        __m256i most[2] = { _mm256_set1_epi32(INT32_MIN), _mm256_set1_epi32(INT32_MIN) };
        KVQ_UNROLL // the tables then become constants of the code
        for (int k = 0; k < book->n_classes; ++k) {
            const int8_t * level = book->classes + k * dim;
            __m256i natural = _mm256_madd_epi16(mag[0], kvq_e8_pair(level, 2));
            for (int i = 2; i < dim; i += 2) {
                natural = _mm256_add_epi32(natural, _mm256_madd_epi16(mag[i / 2], kvq_e8_pair(level + i, 2)));
            }
            const int8_t  last[2] = { 0, level[dim - 1] };
            const __m256i lost    = _mm256_madd_epi16(mag[dim / 2 - 1], kvq_e8_pair(last, 4));
            natural = _mm256_add_epi32(_mm256_slli_epi32(natural, 7), _mm256_set1_epi32(127 - 2 * k - 128 * book->norms[k]));
            const __m256i flipped = _mm256_sub_epi32(_mm256_sub_epi32(natural, _mm256_slli_epi32(lost, 7)), _mm256_set1_epi32(1));
            const int parity = kvq_e8_class_parity(book, dim, k);
            most[parity]     = _mm256_max_epi32(most[parity], natural);
            most[1 - parity] = _mm256_max_epi32(most[1 - parity], flipped);
        }
        for (int p = 0; p < 2; ++p) {
            const __m256i pick = _mm256_sub_epi32(_mm256_set1_epi32(127), _mm256_and_si256(most[p], _mm256_set1_epi32(127)));
            _mm256_storeu_si256((__m256i *) (choice->pick[d][p] + r), pick);
            _mm256_storeu_si256((__m256i *) (gain[p] + r), _mm256_srai_epi32(most[p], 7));
        }
    }
}

#elif defined(KVQ_NEON)

// As the AVX2 one.
KVQ_FN_CONST void kvq_e8_match(const int16_t * y, const kvq_e8_book * book, int dim, int d, kvq_e8_choice * choice,
                               int32_t * square, int32_t (*gain)[16]) {
    const int       lanes = KVQ_E8_BLOCK / dim;
    const int16x8_t shift = vdupq_n_s16((int16_t) ((d ? -KVQ_E8_FINE : KVQ_E8_FINE) * book->shift));
    for (int r = 0; r < lanes; r += 8) {
        int16x8_t key[8];
        int16x8_t odd    = vdupq_n_s16(0);
        int32x4_t sum[2] = { vdupq_n_s32(0), vdupq_n_s32(0) };
        for (int i = 0; i < dim; ++i) {
            const int16x8_t z = vsubq_s16(vld1q_s16(y + i * lanes + r), shift);
            odd    = veorq_s16(odd, z);
            sum[0] = vmlal_s16(sum[0], vget_low_s16(z), vget_low_s16(z));
            sum[1] = vmlal_high_s16(sum[1], z, z);
            key[i] = vorrq_s16(vshlq_n_s16(vabsq_s16(z), 3), vdupq_n_s16((int16_t) i));
        }
        vst1q_s16(choice->odd[d] + r, vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_s16(odd), 15)));
        vst1q_s32(square + r, sum[0]);
        vst1q_s32(square + r + 4, sum[1]);

#    define KVQ_E8_ORDER(i, j)                               \
        do {                                                 \
            const int16x8_t high = vmaxq_s16(key[i], key[j]); \
            key[j] = vminq_s16(key[i], key[j]);              \
            key[i] = high;                                   \
        } while (0)
        KVQ_E8_SORT(dim, KVQ_E8_ORDER);
#    undef KVQ_E8_ORDER

        for (int i = 0; i < dim; ++i) {
            vst1q_s16(choice->key[d] + i * lanes + r, key[i]);
            key[i] = vshrq_n_s16(key[i], 3);
        }
        int32x4_t most[2][2];
        for (int p = 0; p < 2; ++p) {
            most[p][0] = vdupq_n_s32(INT32_MIN);
            most[p][1] = vdupq_n_s32(INT32_MIN);
        }
        KVQ_UNROLL
        for (int k = 0; k < book->n_classes; ++k) {
            const int8_t * level = book->classes + k * dim;
            int32x4_t natural[2] = { vdupq_n_s32(-book->norms[k]), vdupq_n_s32(-book->norms[k]) };
            for (int i = 0; i < dim; ++i) {
                natural[0] = vmlal_n_s16(natural[0], vget_low_s16(key[i]), (int16_t) (2 * level[i]));
                natural[1] = vmlal_high_n_s16(natural[1], key[i], (int16_t) (2 * level[i]));
            }
            const int32x4_t lost[2] = { vmull_n_s16(vget_low_s16(key[dim - 1]), (int16_t) (4 * level[dim - 1])),
                                        vmull_high_n_s16(key[dim - 1], (int16_t) (4 * level[dim - 1])) };
            const int parity = kvq_e8_class_parity(book, dim, k);
            for (int h = 0; h < 2; ++h) {
                const int32x4_t flipped = vsubq_s32(natural[h], lost[h]);
                most[parity][h]     = vmaxq_s32(most[parity][h], vaddq_s32(vshlq_n_s32(natural[h], 7), vdupq_n_s32(127 - 2 * k)));
                most[1 - parity][h] = vmaxq_s32(most[1 - parity][h], vaddq_s32(vshlq_n_s32(flipped, 7), vdupq_n_s32(126 - 2 * k)));
            }
        }
        for (int p = 0; p < 2; ++p) {
            for (int h = 0; h < 2; ++h) {
                const int32x4_t pick = vsubq_s32(vdupq_n_s32(127), vandq_s32(most[p][h], vdupq_n_s32(127)));
                vst1q_s32(choice->pick[d][p] + r + 4 * h, pick);
                vst1q_s32(gain[p] + r + 4 * h, vshrq_n_s32(most[p][h], 7));
            }
        }
    }
}

#else

KVQ_FN_CONST void kvq_e8_match(const int16_t * y, const kvq_e8_book * book, int dim, int d, kvq_e8_choice * choice,
                               int32_t * square, int32_t (*gain)[16]) {
    const int lanes = KVQ_E8_BLOCK / dim;
    const int shift = (d ? -KVQ_E8_FINE : KVQ_E8_FINE) * book->shift;
    for (int r = 0; r < lanes; ++r) {
        int     key[8];
        int     odd = 0;
        int32_t sum = 0;
        for (int i = 0; i < dim; ++i) {
            const int z = y[i * lanes + r] - shift;
            odd ^= z < 0;
            sum += z * z;
            key[i] = (z < 0 ? -z : z) * 8 + i;
        }
        choice->odd[d][r] = (int16_t) odd;
        square[r]         = sum;
        kvq_e8_order(key, dim);
        for (int i = 0; i < dim; ++i) {
            choice->key[d][i * lanes + r] = (int16_t) key[i];
        }
        int32_t most[2];
        int32_t pick[2];
        kvq_e8_gains(key, book, dim, most, pick);
        for (int p = 0; p < 2; ++p) {
            choice->pick[d][p][r] = pick[p];
            gain[p][r]            = most[p];
        }
    }
}

#endif

// Words for a block at one scale; returns the sum of squared errors, in 1/64 of a squared level.
KVQ_FN_CONST int32_t kvq_e8_quantize(const int16_t * y, const kvq_e8_book * book, int dim, kvq_e8_choice * choice) {
    int32_t square[2][16];
    int32_t gain[2][2][16];
    for (int d = 0; d < 2; ++d) {
        kvq_e8_match(y, book, dim, d, choice, square[d], gain[d]);
    }
    int32_t total = 0;
    const int parts = 8 / dim;
    for (int g = 0; g < KVQ_E8_GROUPS; ++g) {
        int32_t least = 0;
        for (int d = 0; d < 2; ++d) {
            const int r = g * parts;
            int32_t error;
            int     first;
            if (dim == 8) {
                first = d ^ choice->odd[d][r];
                error = square[d][r] - 8 * gain[d][first][r];
            } else {
                const int odd = d ^ choice->odd[d][r] ^ choice->odd[d][r + 1];
                const int32_t even0 = gain[d][0][r] + gain[d][odd][r + 1];
                const int32_t even1 = gain[d][1][r] + gain[d][1 ^ odd][r + 1];
                first = even1 > even0;
                error = square[d][r] + square[d][r + 1] - 8 * (first ? even1 : even0);
            }
            if (d == 0 || error < least) {
                least = error;
                choice->down[g]  = (uint8_t) d;
                choice->first[g] = (uint8_t) first;
            }
        }
        total += least;
    }
    return total;
}

// Which candidate the search begins with, by the block's energy.
KVQ_FN int kvq_e8_start(const kvq_e8_book * book, int64_t square) {
    int first = 0;
    for (int k = 0; k < book->n_scales - 1; ++k) {
        first += (square >> 6) > book->start[k];
    }
    return first;
}

// The word of row r: returns its row of the table, adds its signs, s and c. key: sorted, every `stride` places; xi and y (at the candidate
// scale): of the block, in the order of the lanes; shift: up or down.
KVQ_FN_CONST uint8_t kvq_e8_word(const int16_t * key, int stride, const int32_t * xi, const int16_t * y, const kvq_e8_book * book, int dim,
                                 int r, int pick, int shift, uint8_t * signs, int32_t * s, int32_t * c) {
    const int lanes = KVQ_E8_BLOCK / dim;
    int index = 0;
    for (int rank = 0; rank < dim; ++rank) {
        const int at = key[rank * stride] & 7;
        int power = 1;
        for (int i = 0; i < at; ++i) {
            power *= book->base;
        }
        index += book->digits[(pick >> 1) * dim + rank] * power;
        const int flip     = rank == dim - 1 ? pick & 1 : 0;
        const int negative = (y[at * lanes + r] < KVQ_E8_FINE * shift) ^ flip;
        const int mag      = book->classes[(pick >> 1) * dim + rank];
        const int level    = (negative ? -mag : mag) + shift;
        *signs = (uint8_t) (*signs | negative << ((r * dim + at) & 7));
        *s += xi[at * lanes + r] * level;
        *c += level * level;
    }
    return book->row_of[index];
}

// 16 / 32767: the block counts amax as 32767 and a level as 2^-4 of the scale
KVQ_FN uint16_t kvq_e8_f16_scale(const kvq_e8_book * book, float amax, int64_t square, int32_t s, int32_t c) {
    return kvq_scale_to_f16(KVQ_MUL(kvq_scale_ratio(square, s, c, book->unbiased), KVQ_MUL(amax, 16.0f / 32767.0f)));
}

// Rows and signs of a block. Returns the scale as f16 bits, 0 for the zero block.
KVQ_FN_CONST uint16_t kvq_e8_encode(const float * x, const kvq_e8_book * book, int dim, uint8_t * rows, uint8_t * signs) {
    const int   lanes = KVQ_E8_BLOCK / dim;
    const float amax  = kvq_amax(x, KVQ_E8_BLOCK);
    if (amax == 0.0f) {
        return 0;
    }
    const float inverse = KVQ_DIV(KVQ_UNIT, amax);
    int32_t xi[KVQ_E8_BLOCK]; // in the order of the lanes
    int64_t square = 0;
    for (int r = 0; r < lanes; ++r) {
        for (int i = 0; i < dim; ++i) {
            const int32_t mag = kvq_normalised(x[r * dim + i], inverse);
            xi[i * lanes + r] = kvq_is_negative(x[r * dim + i], mag) ? -mag : mag;
            square += (int64_t) mag * mag;
        }
    }
    const int first = kvq_e8_start(book, square);

    int16_t       y[KVQ_E8_BLOCK];
    kvq_e8_choice choices[2];
    float         best      = 0.0f;
    int           kept      = 1;
    int           winner    = -1;
    int           direction = 1;
    for (int j = first; j >= 0;) {
        bool better = false;
        if (j < book->n_scales) {
            kvq_e8_scaled(xi, book->step[j], y);
            const float score = KVQ_MUL((float) kvq_e8_quantize(y, book, dim, choices + (1 - kept)), (float) book->weight[j]);
            better = winner < 0 || score < best;
            if (better) {
                best   = score;
                winner = j;
                kept   = 1 - kept;
            }
        }
        if (better) {
            j += direction;
        } else if (direction == 1 && winner == first) {
            direction = -1;
            j = first - 1;
        } else {
            break;
        }
    }

    const kvq_e8_choice * choice = choices + kept;
    kvq_e8_scaled(xi, book->step[winner], y);
    int32_t s = 0;
    int32_t c = 0;
    for (int g = 0; g < KVQ_E8_GROUPS; ++g) {
        signs[g] = 0;
    }
    for (int r = 0; r < lanes; ++r) {
        const int g     = r * dim / 8;
        const int d     = choice->down[g];
        const int shift = d ? -book->shift : book->shift;
        int parity = choice->first[g];
        if (dim == 4 && (r & 1)) {
            parity ^= d ^ choice->odd[d][r - 1] ^ choice->odd[d][r];
        }
        rows[r] = kvq_e8_word(choice->key[d] + r, lanes, xi, y, book, dim, r, choice->pick[d][parity][r], shift,
                              signs + g, &s, &c);
    }
    return kvq_e8_f16_scale(book, amax, square, s, c);
}

#if defined(KVQ_WARP)

// What a lane knows of its row in its direction at one candidate scale.
typedef struct {
    int16_t key[8];
    int     pick;
    bool    taken; // whether the group moves in this lane's direction
} kvq_e8_lane;

// A candidate scale by a warp: a lane has row r and direction d; where a block has 8 rows, half of the lanes repeat the others.
// Returns the sum of squared errors, in 1/64 of a squared level.
template <int dim>
static __device__ __forceinline__ int32_t kvq_e8_try_warp(const int32_t * xi, int32_t step, const kvq_e8_book * book, kvq_e8_lane * lane) {
    constexpr int lanes = KVQ_E8_BLOCK / dim;
    const int r = kvq_lane() % lanes;
    const int d = kvq_lane() / lanes % 2;
    const int shift = (d ? -KVQ_E8_FINE : KVQ_E8_FINE) * book->shift;
    int     key[dim];
    int     odd = 0;
    int32_t square = 0;
#pragma unroll
    for (int i = 0; i < dim; ++i) {
        const int z = kvq_e8_scale(xi[i * lanes + r], step) - shift;
        odd ^= z < 0;
        square += z * z;
        key[i] = (z < 0 ? -z : z) * 8 + i;
    }
    kvq_e8_order(key, dim);
#pragma unroll
    for (int i = 0; i < dim; ++i) {
        lane->key[i] = (int16_t) key[i];
    }
    int32_t most[2];
    int32_t pick[2];
    kvq_e8_gains(key, book, dim, most, pick);

    int     first;
    int32_t error;
    if (dim == 8) {
        first = d ^ odd;
        error = square - 8 * most[first];
    } else { // the two rows of a group sit side by side; each finds the group's choice as its first row sees it
        const bool    second = r & 1;
        const int32_t other_square = KVQ_SHUFFLE(square, 1);
        const int32_t other_most0  = KVQ_SHUFFLE(most[0], 1);
        const int32_t other_most1  = KVQ_SHUFFLE(most[1], 1);
        const int     both = d ^ odd ^ KVQ_SHUFFLE(odd, 1);
        const int32_t head[2] = { second ? other_most0 : most[0], second ? other_most1 : most[1] };
        const int32_t tail[2] = { second ? most[0] : other_most0, second ? most[1] : other_most1 };
        const int32_t even0 = head[0] + (both ? tail[1] : tail[0]);
        const int32_t even1 = head[1] + (both ? tail[0] : tail[1]);
        first = even1 > even0;
        error = square + other_square - 8 * (first ? even1 : even0);
        first = second ? first ^ both : first;
    }
    const int32_t opposite = KVQ_SHUFFLE(error, lanes);
    lane->taken = d ? error < opposite : !(opposite < error);
    lane->pick  = pick[first];
    // each group counts once: by the lane whose direction it takes, and its first row
    const bool counts = lane->taken && kvq_lane() < 2 * lanes && (dim == 8 || !(r & 1));
    return kvq_sum_warp(counts ? error : 0);
}

// kvq_e8_encode by a warp. Writes rows and signs whole, zeros for the zero block.
template <int dim>
static __device__ __forceinline__ uint16_t kvq_e8_encode_warp(const float * x, kvq_scratch * scratch, const kvq_e8_book * book,
                                                              uint8_t * rows, uint8_t * signs) {
    constexpr int lanes = KVQ_E8_BLOCK / dim;
    const int r = kvq_lane() % lanes;
    const int d = kvq_lane() / lanes % 2;
    const kvq_normalised_warp part = kvq_normalise_warp(x, scratch);
    uint16_t scale = 0;
    uint8_t  row   = 0;
    uint8_t  sign  = 0;
    bool     taken = true;
    if (part.amax != 0.0f) {
        const int64_t square = kvq_sum_warp((int64_t) part.mag[0] * part.mag[0] + (int64_t) part.mag[1] * part.mag[1]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = kvq_lane() + h * KVQ_LANES;
            scratch->xi[at % dim * lanes + at / dim] = part.negative[h] ? -part.mag[h] : part.mag[h];
        }
        KVQ_SYNC();

        const int   first     = kvq_e8_start(book, square);
        float       best      = 0.0f;
        int         winner    = -1;
        int         direction = 1;
        kvq_e8_lane kept      = {};
        for (int j = first; j >= 0;) { // the same way in all lanes
            bool better = false;
            if (j < book->n_scales) {
                kvq_e8_lane tried;
                const float score = KVQ_MUL((float) kvq_e8_try_warp<dim>(scratch->xi, book->step[j], book, &tried), (float) book->weight[j]);
                better = winner < 0 || score < best;
                if (better) {
                    best   = score;
                    winner = j;
                    kept   = tried;
                }
            }
            if (better) {
                j += direction;
            } else if (direction == 1 && winner == first) {
                direction = -1;
                j = first - 1;
            } else {
                break;
            }
        }

        for (int h = 0; h < 2; ++h) {
            const int at = kvq_lane() + h * KVQ_LANES;
            scratch->mag[at] = kvq_e8_scale(scratch->xi[at], book->step[winner]);
        }
        KVQ_SYNC();
        int32_t s = 0;
        int32_t c = 0;
        taken = kept.taken && kvq_lane() < 2 * lanes;
        row   = kvq_e8_word(kept.key, 1, scratch->xi, scratch->mag, book, dim, r, kept.pick, d ? -book->shift : book->shift, &sign, &s, &c);
        s     = kvq_sum_warp(taken ? s : 0);
        c     = kvq_sum_warp(taken ? c : 0);
        scale = kvq_e8_f16_scale(book, part.amax, square, s, c);
    }
    if (dim == 4) {
        sign = (uint8_t) (sign | KVQ_SHUFFLE((int) sign, 1));
    }
    if (taken) {
        rows[r]            = scale == 0 ? 0 : row;
        signs[r * dim / 8] = scale == 0 ? 0 : sign;
    }
    return scale;
}

#endif

// Level of value i. Bit 7 of a row's magnitudes says that the row is odd.
KVQ_FN_CONST int8_t kvq_e8_level(const uint8_t * row_bytes, const uint8_t * signs, const int8_t * rows, int dim, int shift, int i) {
    const int g = i >> 3;
    uint32_t odd = signs[g];
    odd ^= odd >> 4;
    odd ^= odd >> 2;
    odd ^= odd >> 1;
    for (int h = 0; h < 8 / dim; ++h) {
        odd ^= (uint32_t) (rows[row_bytes[g * (8 / dim) + h] * dim] < 0);
    }
    const int mag = rows[row_bytes[i / dim] * dim + i % dim] & 127;
    return (int8_t) (((signs[g] >> (i & 7)) & 1 ? -mag : mag) + (odd & 1 ? -shift : shift));
}

#if defined(KVQ_AVX512)

static inline __m128i kvq_load4(const int8_t * p) {
    int32_t four;
    memcpy(&four, p, sizeof(four));
    return _mm_cvtsi32_si128(four);
}

// The magnitudes of 16 values. Put together in registers: a gather takes nearly twice as long, a load of what was just stored waits.
KVQ_FN_CONST __m128i kvq_e8_magnitudes16(const uint8_t * row_bytes, const int8_t * rows, int dim) {
    if (dim == 8) {
        return _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *) (rows + row_bytes[0] * 8)),
                                  _mm_loadl_epi64((const __m128i *) (rows + row_bytes[1] * 8)));
    }
    const __m128i low  = _mm_unpacklo_epi32(kvq_load4(rows + row_bytes[0] * 4), kvq_load4(rows + row_bytes[1] * 4));
    const __m128i high = _mm_unpacklo_epi32(kvq_load4(rows + row_bytes[2] * 4), kvq_load4(rows + row_bytes[3] * 4));
    return _mm_unpacklo_epi64(low, high);
}

// All levels of a block, in order; both sign planes are masks.
KVQ_FN_CONST void kvq_e8_unpack(const uint8_t * row_bytes, const uint8_t * signs, const int8_t * rows, int dim, int shift, int8_t * levels) {
    __m128i part[4];
    for (int p = 0; p < 4; ++p) {
        part[p] = kvq_e8_magnitudes16(row_bytes + p * (16 / dim), rows, dim);
    }
    const __m256i low    = _mm256_inserti128_si256(_mm256_castsi128_si256(part[0]), part[1], 1);
    const __m256i high   = _mm256_inserti128_si256(_mm256_castsi128_si256(part[2]), part[3], 1);
    const __m512i packed = _mm512_maskz_inserti64x4(0xFF, _mm512_castsi256_si512(low), high, 1);
    uint64_t bits;
    memcpy(&bits, signs, sizeof(bits));
    uint64_t odd = bits ^ (bits >> 4); // parity of each byte, in its lowest bit
    odd ^= odd >> 2;
    odd ^= odd >> 1;
    odd &= 0x0101010101010101ull;
    // bit 7 of each byte: the parity of the rows
    const __m512i row_odd = dim == 4 ? _mm512_xor_si512(packed, _mm512_maskz_shuffle_epi32(KVQ_ALL16, packed, (_MM_PERM_ENUM) 0xB1)) : packed;
    const uint64_t down   = (uint64_t) _mm512_movepi8_mask(row_odd) ^ ((odd << 8) - odd);
    const __m512i  mag    = _mm512_and_si512(packed, _mm512_set1_epi8(127));
    const __m512i  level  = _mm512_mask_sub_epi8(mag, bits, _mm512_setzero_si512(), mag);
    const __m512i  moved  = _mm512_mask_blend_epi8(down, _mm512_set1_epi8((char) shift), _mm512_set1_epi8((char) -shift));
    _mm512_storeu_si512((void *) levels, _mm512_add_epi8(level, moved));
}

#elif defined(KVQ_AVX2)

// All levels of a block, in order: four groups at a time.
KVQ_FN_CONST void kvq_e8_unpack(const uint8_t * row_bytes, const uint8_t * signs, const int8_t * rows, int dim, int shift, int8_t * levels) {
    const __m256i where = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                           2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    for (int half = 0; half < 2; ++half) {
        uint32_t bits;
        memcpy(&bits, signs + 4 * half, sizeof(bits));
        uint32_t odd = bits ^ (bits >> 4); // parity of each byte, in its lowest bit
        odd ^= odd >> 2;
        odd ^= odd >> 1;
        int8_t mags[32];
        for (int r = 0; r < 32 / dim; ++r) {
            memcpy(mags + dim * r, rows + row_bytes[half * (32 / dim) + r] * dim, (size_t) dim);
        }
        const __m256i packed = _mm256_loadu_si256((const __m256i *) mags);
        const __m256i mag    = _mm256_and_si256(packed, _mm256_set1_epi8(127));
        const __m256i sign   = kvq_spread_bits32(bits);
        // bit 7 of each byte: whether the group moves down
        __m256i down = _mm256_xor_si256(packed, _mm256_shuffle_epi8(_mm256_set1_epi32((int) ((odd & 0x01010101u) << 7)), where));
        if (dim == 4) {
            down = _mm256_xor_si256(down, _mm256_shuffle_epi32(packed, 0xB1));
        }
        const __m256i moved  = _mm256_blendv_epi8(_mm256_set1_epi8((char) shift), _mm256_set1_epi8((char) -shift), down);
        const __m256i level  = _mm256_add_epi8(_mm256_sub_epi8(_mm256_xor_si256(mag, sign), sign), moved);
        _mm256_storeu_si256((__m256i *) (levels + 32 * half), level);
    }
}

#elif defined(KVQ_NEON)

// All levels of a block, in order: two groups at a time.
KVQ_FN_CONST void kvq_e8_unpack(const uint8_t * row_bytes, const uint8_t * signs, const int8_t * rows, int dim, int shift, int8_t * levels) {
    const uint8x8_t  parity = vshl_n_u8(vcnt_u8(vld1_u8(signs)), 7); // in bit 7
    const uint8x16_t two    = vcombine_u8(vdup_n_u8(0), vdup_n_u8(1));
    for (int g = 0; g < KVQ_E8_GROUPS; g += 2) {
        int8_t mags[16];
        for (int r = 0; r < 16 / dim; ++r) {
            memcpy(mags + dim * r, rows + row_bytes[g * 8 / dim + r] * dim, (size_t) dim);
        }
        const uint8x16_t packed = vreinterpretq_u8_s8(vld1q_s8(mags));
        const uint8x16_t mag    = vandq_u8(packed, vdupq_n_u8(127));
        const uint8x16_t sign   = kvq_spread_bits16(signs + g);
        // bit 7 of each byte: whether the group moves down
        uint8x16_t down = veorq_u8(packed, vqtbl1q_u8(vcombine_u8(parity, parity), vaddq_u8(two, vdupq_n_u8((uint8_t) g))));
        if (dim == 4) {
            down = veorq_u8(down, vreinterpretq_u8_u32(vrev64q_u32(vreinterpretq_u32_u8(packed))));
        }
        const uint8x16_t mask  = vcltzq_s8(vreinterpretq_s8_u8(down));
        const int8x16_t  moved = vbslq_s8(mask, vdupq_n_s8((int8_t) -shift), vdupq_n_s8((int8_t) shift));
        const int8x16_t  level = vreinterpretq_s8_u8(vsubq_u8(veorq_u8(mag, sign), sign));
        vst1q_s8(levels + 8 * g, vaddq_s8(level, moved));
    }
}

#else

KVQ_FN_CONST void kvq_e8_unpack(const uint8_t * row_bytes, const uint8_t * signs, const int8_t * rows, int dim, int shift, int8_t * levels) {
    for (int i = 0; i < KVQ_E8_BLOCK; ++i) {
        levels[i] = kvq_e8_level(row_bytes, signs, rows, dim, shift, i);
    }
}

#endif

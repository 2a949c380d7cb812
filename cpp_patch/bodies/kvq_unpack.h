// Unpacking of codes to integer levels, 64 at a time: scalar, AVX2, AVX-512 and NEON. Levels are integers, so every path is exact.
#pragma once

#include "kvq_lloyd.h"

#if defined(__AVX2__) && !defined(__CUDACC__) && !defined(__HIPCC__)
#    define KVQ_AVX2 1
#    include <immintrin.h>
#endif

#if defined(KVQ_AVX2) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#    define KVQ_AVX512 1
#    define KVQ_ALL16 ((__mmask16) 0xFFFF) // the plain intrinsics make gcc 12 warn of an uninitialised operand
#endif

#if defined(__ARM_NEON) && defined(__aarch64__) && !defined(__CUDACC__) && !defined(__HIPCC__)
#    define KVQ_NEON 1
#    include <arm_neon.h>
#endif

#if defined(KVQ_AVX512)

// Up to 16 levels for a byte shuffle.
static inline __m512i kvq_shuffle_table512(const int8_t * levels, int n) {
    return _mm512_maskz_broadcast_i32x4(KVQ_ALL16, _mm_maskz_loadu_epi8((__mmask16) ((1u << n) - 1), levels));
}

// Two-bit fields of the crumb layout, one byte each.
static inline __m512i kvq_crumbs64(const uint8_t * qs) {
    const __m512i bytes  = _mm512_maskz_broadcast_i32x4(KVQ_ALL16, _mm_loadu_si128((const __m128i *) qs));
    const __m512i shifts = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
    return _mm512_and_si512(_mm512_maskz_srlv_epi32(KVQ_ALL16, bytes, shifts), _mm512_set1_epi8(3));
}

#endif

#if defined(KVQ_AVX2)

// Sixteen levels for a byte shuffle; tables of fewer levels are padded with zeros. Loaded whole where that can be: a table
// put together in memory costs more than the shuffle.
KVQ_FN_CONST __m256i kvq_shuffle_table(const int8_t * levels, int n) {
    __m128i table;
    if (n == 16) {
        table = _mm_loadu_si128((const __m128i *) levels);
    } else if (n == 8) {
        table = _mm_loadl_epi64((const __m128i *) levels);
    } else if (n == 4) {
        int32_t four;
        memcpy(&four, levels, sizeof(four));
        table = _mm_cvtsi32_si128(four);
    } else {
        int8_t padded[16] = { 0 };
        memcpy(padded, levels, (size_t) n);
        table = _mm_loadu_si128((const __m128i *) padded);
    }
    return _mm256_broadcastsi128_si256(table);
}

// Two-bit fields of the crumb layout: values 0..31 (half 0) or 32..63 (half 1), one byte each.
static inline __m256i kvq_crumbs32(const uint8_t * qs, int half) {
    const __m256i bytes  = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) qs));
    const __m256i shifts = half ? _mm256_setr_epi32(4, 4, 4, 4, 6, 6, 6, 6) : _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2);
    return _mm256_and_si256(_mm256_srlv_epi32(bytes, shifts), _mm256_set1_epi8(3));
}

// 32 bits -> 32 bytes, 0xFF where the bit is set.
static inline __m256i kvq_spread_bits32(uint32_t bits) {
    const __m256i where = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                           2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i which = _mm256_set1_epi64x((long long) 0x8040201008040201ull);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int) bits), where);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, which), which);
}

static inline void kvq_unpack_nibbles(const uint8_t * qs, const int8_t * table, int8_t * levels) {
#if defined(KVQ_AVX512)
    const __m256i packed = _mm256_loadu_si256((const __m256i *) qs);
    const __m512i both  = _mm512_maskz_inserti64x4(0xFF, _mm512_castsi256_si512(packed), _mm256_srli_epi16(packed, 4), 1);
    const __m512i codes = _mm512_and_si512(both, _mm512_set1_epi8(15));
    _mm512_storeu_si512((void *) levels, _mm512_shuffle_epi8(kvq_shuffle_table512(table, 16), codes));
#else
    const __m256i lookup = kvq_shuffle_table(table, 16);
    const __m256i bytes  = _mm256_loadu_si256((const __m256i *) qs);
    const __m256i mask   = _mm256_set1_epi8(15);
    const __m256i low    = _mm256_and_si256(bytes, mask);
    const __m256i high   = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
    _mm256_storeu_si256((__m256i *) levels, _mm256_shuffle_epi8(lookup, low));
    _mm256_storeu_si256((__m256i *) (levels + 32), _mm256_shuffle_epi8(lookup, high));
#endif
}

#elif defined(KVQ_NEON)

// Up to 16 levels for a table look-up, padded with zeros.
KVQ_FN_CONST int8x16_t kvq_table16(const int8_t * levels, int n) {
    if (n == 16) {
        return vld1q_s8(levels);
    }
    if (n == 8) {
        return vcombine_s8(vld1_s8(levels), vdup_n_s8(0));
    }
    int8_t padded[16] = { 0 };
    memcpy(padded, levels, (size_t) n);
    return vld1q_s8(padded);
}

// Two-bit fields of the crumb layout: values 16 q to 16 q + 15, one byte each.
static inline uint8x16_t kvq_crumbs16(const uint8_t * qs, int q) {
    return vandq_u8(vshlq_u8(vld1q_u8(qs), vdupq_n_s8((int8_t) (-2 * q))), vdupq_n_u8(3));
}

// 16 bits -> 16 bytes, 0xFF where the bit is set.
static inline uint8x16_t kvq_spread_bits16(const uint8_t * bits) {
    const uint8x16_t which = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
    return vtstq_u8(vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1])), which);
}

static inline void kvq_unpack_nibbles(const uint8_t * qs, const int8_t * table, int8_t * levels) {
    const int8x16_t lookup = vld1q_s8(table);
    for (int j = 0; j < 32; j += 16) {
        const uint8x16_t bytes = vld1q_u8(qs + j);
        vst1q_s8(levels + j, vqtbl1q_s8(lookup, vandq_u8(bytes, vdupq_n_u8(15))));
        vst1q_s8(levels + j + 32, vqtbl1q_s8(lookup, vshrq_n_u8(bytes, 4)));
    }
}

#else

KVQ_FN void kvq_unpack_nibbles(const uint8_t * qs, const int8_t * table, int8_t * levels) {
    for (int j = 0; j < 32; ++j) {
        levels[j]      = table[qs[j] & 15];
        levels[j + 32] = table[qs[j] >> 4];
    }
}

#endif

// Sum of products of 32 levels and 32 q8_0 codes. Both are at most 127 in magnitude, so 16-bit pair sums cannot overflow.
KVQ_FN int32_t kvq_dot32(const int8_t * levels, const int8_t * q) {
#if defined(KVQ_AVX2)
    const __m256i a     = _mm256_loadu_si256((const __m256i *) levels);
    const __m256i b     = _mm256_loadu_si256((const __m256i *) q);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_sign_epi8(a, a), _mm256_sign_epi8(b, a));
    const __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    const __m128i half  = _mm_add_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
    const __m128i two   = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
#elif defined(KVQ_NEON)
    int32x4_t sum = vdupq_n_s32(0);
    for (int i = 0; i < 32; i += 16) {
        const int8x16_t a = vld1q_s8(levels + i);
        const int8x16_t b = vld1q_s8(q + i);
#    if defined(__ARM_FEATURE_DOTPROD)
        sum = vdotq_s32(sum, a, b);
#    else
        sum = vpadalq_s16(sum, vmull_s8(vget_low_s8(a), vget_low_s8(b)));
        sum = vpadalq_s16(sum, vmull_high_s8(a, b));
#    endif
    }
    return vaddvq_s32(sum);
#else
    int32_t sum = 0;
    for (int i = 0; i < 32; ++i) {
        sum += (int32_t) levels[i] * q[i];
    }
    return sum;
#endif
}

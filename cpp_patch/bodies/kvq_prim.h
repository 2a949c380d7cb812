// The only rounding, fp16 and sanitising primitives of the kvq formats; kvfmt/scalar.py is their definition.
// Each float operation must round on its own: build with contraction off and without fast math.
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDA_ARCH__)
#    define KVQ_MUL(a, b) __fmul_rn((a), (b))
#    define KVQ_DIV(a, b) __fdiv_rn((a), (b))
#    define KVQ_ADD(a, b) __fadd_rn((a), (b))
#    define KVQ_FROM_I64(v) __ll2float_rn(v)
#else
#    if defined(__FAST_MATH__)
#        error "the kvq formats need exact float arithmetic: build without fast math"
#    endif
#    define KVQ_MUL(a, b) ((a) * (b))
#    define KVQ_DIV(a, b) ((a) / (b))
#    define KVQ_ADD(a, b) ((a) + (b))
#    define KVQ_FROM_I64(v) ((float) (v)) // to nearest even, as every float operation here
#endif

#if defined(__CUDACC__) || defined(__HIPCC__)
#    define KVQ_FN    static __device__ __forceinline__ // not for the host, which cannot read the tables
#    define KVQ_TABLE static __device__ const
#else
#    define KVQ_FN    static inline
#    define KVQ_TABLE static const
#endif

// For functions whose extents are constants at every call: the compiler must see them to unroll and vectorise.
#if defined(__GNUC__) && !defined(__CUDACC__) && !defined(__HIPCC__)
#    define KVQ_FN_CONST static inline __attribute__((always_inline))
#    define KVQ_UNROLL   _Pragma("GCC unroll 64")
#else
#    define KVQ_FN_CONST KVQ_FN
#    define KVQ_UNROLL
#endif

// Bit patterns of float32 constants. Non-negative floats order like their bit patterns.
#define KVQ_F32_INF       0x7F800000u
#define KVQ_F32_F16_MAX   0x477FE000u  // 65504: inputs saturate here
#define KVQ_F32_AMAX_ZERO 0x32800000u  // 2^-26: below it every scale rounds to zero in f16
#define KVQ_UNIT          32767.0f     // a normalised block's largest magnitude

KVQ_FN uint32_t kvq_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

KVQ_FN float kvq_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

// Non-negative finite float32 -> f16 bits, round to nearest even, saturating at 65504.
KVQ_FN uint16_t kvq_scale_to_f16(float value) {
    uint32_t mag = kvq_bits(value);
    if (mag > KVQ_F32_F16_MAX) {
        mag = KVQ_F32_F16_MAX;
    }
    if (mag < 0x38800000u) { // below 2^-14: a subnormal f16, counted in units of 2^-24
        const uint32_t shift = 126u - (mag >> 23);
        if (shift > 24u) {
            return 0;
        }
        const uint32_t mant = (mag & 0x7FFFFFu) | 0x800000u;
        const uint32_t rest = mant & ((1u << shift) - 1u);
        const uint32_t half = 1u << (shift - 1u);
        const uint32_t out  = mant >> shift;
        return (uint16_t) (out + (rest > half || (rest == half && (out & 1u))));
    }
    const uint32_t rest = mag & 0x1FFFu;
    const uint32_t out  = (mag - 0x38000000u) >> 13;
    return (uint16_t) (out + (rest > 0x1000u || (rest == 0x1000u && (out & 1u))));
}

// f16 bits -> float32, exact.
KVQ_FN float kvq_f16_to_f32(uint16_t half) {
    const uint32_t sign = (uint32_t) (half & 0x8000u) << 16;
    const uint32_t mag  = half & 0x7FFFu;
    if (mag >= 0x7C00u) {
        return kvq_float(sign | KVQ_F32_INF | ((mag & 0x3FFu) << 13));
    }
    if (mag >= 0x400u) {
        return kvq_float(sign | ((mag << 13) + 0x38000000u));
    }
    const float value = KVQ_MUL((float) mag, 5.9604644775390625e-8f); // 2^-24
    return sign ? -value : value;
}

// Bits of |x| with NaN as zero and everything beyond the f16 range saturated.
KVQ_FN uint32_t kvq_magnitude(float x) {
    const uint32_t mag = kvq_bits(x) & 0x7FFFFFFFu;
    const uint32_t num = mag > KVQ_F32_INF ? 0u : mag;
    return num > KVQ_F32_F16_MAX ? KVQ_F32_F16_MAX : num;
}

// Round to the nearest integer, ties to even, for |value| < 2^22.
KVQ_FN int32_t kvq_rint(float value) {
    return (int32_t) (kvq_bits(KVQ_ADD(value, 12582912.0f)) & 0x7FFFFFu) - 0x400000;
}

// Largest magnitude of a block from its bits, or 0 if every scale would round to zero.
KVQ_FN float kvq_amax_of(int32_t bits) {
    return bits < (int32_t) KVQ_F32_AMAX_ZERO ? 0.0f : kvq_float((uint32_t) bits);
}

// The same from the values.
KVQ_FN float kvq_amax(const float * x, int n) {
    int32_t amax = 0;
    for (int i = 0; i < n; ++i) {
        const int32_t mag = (int32_t) kvq_magnitude(x[i]);
        amax = mag > amax ? mag : amax;
    }
    return kvq_amax_of(amax);
}

// |x| in units of amax / 32767.
KVQ_FN int32_t kvq_normalised(float x, float inverse) {
    return kvq_rint(KVQ_MUL(kvq_float(kvq_magnitude(x)), inverse));
}

// A value that normalises to zero counts as non-negative, whatever its sign bit.
KVQ_FN bool kvq_is_negative(float x, int32_t normalised) {
    return normalised != 0 && (kvq_bits(x) >> 31) != 0;
}

// What a candidate scale is worth: (sum xi level)^2 / sum level^2.
KVQ_FN float kvq_score(float s, float c) {
    return KVQ_DIV(KVQ_MUL(s, s), c);
}

// Scale of a block in units of amax and levels: square = sum xi^2 (36 bits), s = sum xi level, c = sum level^2.
// Unbiased: <x, decoded> = <x, x>, but at most twice the least-squares scale, where the error reaches the block's energy.
KVQ_FN float kvq_scale_ratio(int64_t square, int32_t s, int32_t c, bool unbiased) {
    if (s <= 0) {
        return 0.0f;
    }
    const float least = KVQ_DIV((float) s, (float) c);
    if (!unbiased) {
        return least;
    }
    const float ratio = KVQ_DIV(KVQ_FROM_I64(square), (float) s);
    const float most  = KVQ_ADD(least, least);
    return ratio < most ? ratio : most;
}

// kvnf4: NF4 codes against the block's largest magnitude (kvfmt/formats/kvnf4.py).
#pragma once

#include "kvq_blocks.h"
#include "kvq_unpack.h"

// How many thresholds lie below a normalised value.
KVQ_FN uint8_t kvnf4_code(int32_t xi) {
    uint8_t code = 0;
    for (int k = 0; k < 15; ++k) {
        code = (uint8_t) (code + (xi > kvnf4_thresholds[k]));
    }
    return code;
}

KVQ_FN void kvnf4_encode(const float * x, block_kvnf4 * y) {
    uint8_t codes[KVNF4_BLOCK];
    memset(y->qs, 0x77, sizeof(y->qs)); // code 7 is level 0
    const float amax = kvq_amax(x, KVNF4_BLOCK);
    y->d = kvq_scale_to_f16(KVQ_MUL(amax, 128.0f / 127.0f));
    if (y->d == 0) {
        return;
    }
    const float inverse = KVQ_DIV(KVQ_UNIT, amax);
    for (int i = 0; i < KVNF4_BLOCK; ++i) {
        const int32_t mag = kvq_normalised(x[i], inverse);
        codes[i] = kvnf4_code(kvq_is_negative(x[i], mag) ? -mag : mag);
    }
    kvq_pack_nibbles(codes, y->qs);
}

#if defined(KVQ_WARP)
KVQ_FN void kvnf4_encode_warp(const float * x, block_kvnf4 * y, kvq_scratch * scratch) {
    const kvq_normalised_warp part = kvq_normalise_warp(x, scratch);
    const uint16_t d = kvq_scale_to_f16(KVQ_MUL(part.amax, 128.0f / 127.0f));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        scratch->codes[kvq_lane() + h * KVQ_LANES] = kvnf4_code(part.negative[h] ? -part.mag[h] : part.mag[h]);
    }
    KVQ_SYNC();
    y->qs[kvq_lane()] = d == 0 ? 0x77 : kvq_nibble_byte(scratch->codes, kvq_lane());
    y->d = d;
}
#endif

KVQ_FN int8_t kvnf4_level(const block_kvnf4 * b, int i) {
    return kvnf4_levels[kvq_nibble(b->qs, i)];
}

// All levels of a block, in order.
KVQ_FN void kvnf4_unpack(const block_kvnf4 * b, int8_t * levels) {
    kvq_unpack_nibbles(b->qs, kvnf4_levels, levels);
}

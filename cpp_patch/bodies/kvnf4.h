// kvnf4: NF4 codes against the block's largest magnitude (kvfmt/formats/kvnf4.py).
#pragma once

#include "kvq_blocks.h"
#include "kvq_unpack.h"

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
        const int32_t xi  = kvq_is_negative(x[i], mag) ? -mag : mag;
        uint8_t code = 0;
        for (int k = 0; k < 15; ++k) {
            code = (uint8_t) (code + (xi > kvnf4_thresholds[k]));
        }
        codes[i] = code;
    }
    kvq_pack_nibbles(codes, y->qs);
}

KVQ_FN int8_t kvnf4_level(const block_kvnf4 * b, int i) {
    return kvnf4_levels[kvq_nibble(b->qs, i)];
}

// All levels of a block, in order.
KVQ_FN void kvnf4_unpack(const block_kvnf4 * b, int8_t * levels) {
    kvq_unpack_nibbles(b->qs, kvnf4_levels, levels);
}

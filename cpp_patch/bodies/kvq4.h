// kvq4: 4-bit Lloyd-Max codes (kvfmt/formats/kvq4.py).
#pragma once

#include "kvq_blocks.h"
#include "kvq_unpack.h"

KVQ_FN void kvq4_encode(const float * x, block_kvq4 * y) {
    uint8_t codes[KVQ4_BLOCK];
    memset(y, 0, sizeof(*y));
    y->d = kvq_lloyd_search(x, codes, kvq4_levels, 8, &kvq4_grid[0][0], KVQ4_GRID_ROWS, KVQ4_UNBIASED);
    if (y->d != 0) {
        kvq_pack_nibbles(codes, y->qs);
    }
}

#if defined(KVQ_WARP)
KVQ_FN void kvq4_encode_warp(const float * x, block_kvq4 * y, kvq_scratch * scratch) {
    const uint16_t d = kvq_lloyd_search_warp<8, KVQ4_GRID_ROWS>(x, scratch, kvq4_levels, &kvq4_grid[0][0], KVQ4_UNBIASED);
    y->qs[kvq_lane()] = d == 0 ? 0 : kvq_nibble_byte(scratch->codes, kvq_lane());
    y->d = d;
}
#endif

KVQ_FN int8_t kvq4_level(const block_kvq4 * b, int i) {
    return kvq4_levels[kvq_nibble(b->qs, i)];
}

// All levels of a block, in order.
KVQ_FN void kvq4_unpack(const block_kvq4 * b, int8_t * levels) {
    kvq_unpack_nibbles(b->qs, kvq4_levels, levels);
}

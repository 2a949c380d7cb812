// kvq2: 2-bit Lloyd-Max codes (kvfmt/formats/kvq2.py).
#pragma once

#include "kvq_blocks.h"
#include "kvq_lloyd.h"

KVQ_FN void kvq2_encode(const float * x, block_kvq2 * y) {
    uint8_t codes[KVQ2_BLOCK];
    memset(y, 0, sizeof(*y));
    y->d = kvq_lloyd_search(x, codes, kvq2_levels, 2, &kvq2_grid[0][0], KVQ2_GRID_ROWS);
    if (y->d == 0) {
        return;
    }
    for (int j = 0; j < 16; ++j) {
        y->qs[j] = (uint8_t) (codes[j] | (codes[j + 16] << 2) | (codes[j + 32] << 4) | (codes[j + 48] << 6));
    }
}

KVQ_FN int8_t kvq2_level(const block_kvq2 * b, int i) {
    return kvq2_levels[kvq_crumb(b->qs, i)];
}

// kvt4: 6, 4, 3 and 3 bits for the quarters of a block (kvfmt/formats/kvt4.py).
#pragma once

#include "kvq_allocated.h"
#include "kvq_blocks.h"

#define KVT4_ALLOCATION { { 6, 4, 3, 3 }, { kvt4_fine, kvt4_middle, kvt4_coarse }, kvt4_weights, &kvt4_grid[0][0], KVT4_GRID_ROWS }

KVQ_FN void kvt4_encode(const float * x, block_kvt4 * y) {
    const kvq_allocation allocation = KVT4_ALLOCATION;
    memset(y, 0, sizeof(*y));
    y->d = kvq_allocated_encode(x, &allocation, y->qs, y->qh, (int) sizeof(y->qh));
    if (y->d == 0) {
        memset(y, 0, sizeof(*y));
    }
}

#if defined(KVQ_WARP)
KVQ_FN void kvt4_encode_warp(const float * x, block_kvt4 * y, kvq_scratch * scratch) {
    const kvq_allocation allocation = KVT4_ALLOCATION;
    y->d = kvq_allocated_encode_warp(x, scratch, &allocation, y->qs, y->qh, (int) sizeof(y->qh));
}
#endif

KVQ_FN int8_t kvt4_level(const block_kvt4 * b, int i) {
    const kvq_allocation allocation = KVT4_ALLOCATION;
    return kvq_allocated_level(b->qs, b->qh, (int) sizeof(b->qh), &allocation, i);
}

// All levels of a block, in order.
KVQ_FN void kvt4_unpack(const block_kvt4 * b, int8_t * levels) {
    const kvq_allocation allocation = KVT4_ALLOCATION;
    kvq_allocated_unpack(b->qs, b->qh, (int) sizeof(b->qh), &allocation, levels);
}

// kvt3: 5, 3, 2 and 2 bits for the quarters of a block (kvfmt/formats/kvt3.py).
#pragma once

#include "kvq_allocated.h"
#include "kvq_blocks.h"

#define KVT3_ALLOCATION { { 5, 3, 2, 2 }, { kvt3_fine, kvt3_middle, kvt3_coarse }, kvt3_weights, &kvt3_grid[0][0], KVT3_GRID_ROWS }

KVQ_FN void kvt3_encode(const float * x, block_kvt3 * y) {
    const kvq_allocation allocation = KVT3_ALLOCATION;
    memset(y, 0, sizeof(*y));
    y->d = kvq_allocated_encode(x, &allocation, y->qs, y->qh, (int) sizeof(y->qh));
    if (y->d == 0) {
        memset(y, 0, sizeof(*y));
    }
}

#if defined(KVQ_WARP)
KVQ_FN void kvt3_encode_warp(const float * x, block_kvt3 * y, kvq_scratch * scratch) {
    const kvq_allocation allocation = KVT3_ALLOCATION;
    y->d = kvq_allocated_encode_warp(x, scratch, &allocation, y->qs, y->qh, (int) sizeof(y->qh));
}
#endif

KVQ_FN int8_t kvt3_level(const block_kvt3 * b, int i) {
    const kvq_allocation allocation = KVT3_ALLOCATION;
    return kvq_allocated_level(b->qs, b->qh, (int) sizeof(b->qh), &allocation, i);
}

// All levels of a block, in order.
KVQ_FN void kvt3_unpack(const block_kvt3 * b, int8_t * levels) {
    const kvq_allocation allocation = KVT3_ALLOCATION;
    kvq_allocated_unpack(b->qs, b->qh, (int) sizeof(b->qh), &allocation, levels);
}

// kve8_2: E8 lattice words, a row of magnitudes for 8 values and a sign for each (kvfmt/formats/kve8_2.py).
#pragma once

#include "kvq_blocks.h"
#include "kvq_e8.h"

#define KVE8_2_DIM 8

#define KVE8_2_BOOK \
    { \
        KVE8_2_CLASSES_ROWS, KVE8_2_STEP_COUNT, kve8_2_base[0], kve8_2_shift[0], &kve8_2_classes[0][0], \
        &kve8_2_digits[0][0], kve8_2_norms, kve8_2_row_of, kve8_2_step, kve8_2_weight, kve8_2_start, \
        KVE8_2_UNBIASED, \
    }

KVQ_FN void kve8_2_encode(const float * x, block_kve8_2 * y) {
    const kvq_e8_book book = KVE8_2_BOOK;
    memset(y, 0, sizeof(*y));
    y->d = kvq_e8_encode(x, &book, KVE8_2_DIM, y->rows, y->signs);
    if (y->d == 0) {
        memset(y, 0, sizeof(*y));
    }
}

#if defined(KVQ_WARP)
KVQ_FN void kve8_2_encode_warp(const float * x, block_kve8_2 * y, kvq_scratch * scratch) {
    const kvq_e8_book book = KVE8_2_BOOK;
    y->d = kvq_e8_encode_warp<KVE8_2_DIM>(x, scratch, &book, y->rows, y->signs);
}
#endif

KVQ_FN int8_t kve8_2_level(const block_kve8_2 * b, int i) {
    return kvq_e8_level(b->rows, b->signs, &kve8_2_rows[0][0], KVE8_2_DIM, kve8_2_shift[0], i);
}

// All levels of a block, in order.
KVQ_FN void kve8_2_unpack(const block_kve8_2 * b, int8_t * levels) {
    kvq_e8_unpack(b->rows, b->signs, &kve8_2_rows[0][0], KVE8_2_DIM, kve8_2_shift[0], levels);
}

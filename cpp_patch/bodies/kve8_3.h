// kve8_3: E8 lattice words, a row of magnitudes for 4 values and a sign for each (kvfmt/formats/kve8_3.py).
#pragma once

#include "kvq_blocks.h"
#include "kvq_e8.h"

#define KVE8_3_DIM 4

#define KVE8_3_BOOK \
    { \
        KVE8_3_CLASSES_ROWS, KVE8_3_STEP_COUNT, kve8_3_base[0], kve8_3_shift[0], &kve8_3_classes[0][0], \
        &kve8_3_digits[0][0], kve8_3_norms, kve8_3_row_of, kve8_3_step, kve8_3_weight, kve8_3_start, \
        KVE8_3_UNBIASED, \
    }

KVQ_FN void kve8_3_encode(const float * x, block_kve8_3 * y) {
    const kvq_e8_book book = KVE8_3_BOOK;
    memset(y, 0, sizeof(*y));
    y->d = kvq_e8_encode(x, &book, KVE8_3_DIM, y->rows, y->signs);
    if (y->d == 0) {
        memset(y, 0, sizeof(*y));
    }
}

#if defined(KVQ_WARP)
KVQ_FN void kve8_3_encode_warp(const float * x, block_kve8_3 * y, kvq_scratch * scratch) {
    const kvq_e8_book book = KVE8_3_BOOK;
    y->d = kvq_e8_encode_warp<KVE8_3_DIM>(x, scratch, &book, y->rows, y->signs);
}
#endif

KVQ_FN int8_t kve8_3_level(const block_kve8_3 * b, int i) {
    return kvq_e8_level(b->rows, b->signs, &kve8_3_rows[0][0], KVE8_3_DIM, kve8_3_shift[0], i);
}

// All levels of a block, in order.
KVQ_FN void kve8_3_unpack(const block_kve8_3 * b, int8_t * levels) {
    kvq_e8_unpack(b->rows, b->signs, &kve8_3_rows[0][0], KVE8_3_DIM, kve8_3_shift[0], levels);
}

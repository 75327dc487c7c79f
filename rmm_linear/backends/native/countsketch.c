#include "countsketch.h"
#include "variants.h"

VARIANTS static void hash_rows(const hashed *h, int64_t from, int64_t begin, int64_t end, float *z) {
    for (int64_t row = begin; row < end; row++) {
        float *to = z + row * h->columns;
        const float *result = hashed_row(h, from + row, to);
        if (result != to) memcpy(to, result, h->columns * sizeof(float));
    }
}

/* z: the `count` rows of the sketch from row `from` on, contiguous; there are more tokens than rows. */
void rmm_countsketch(
    const float *m, int64_t tokens, int64_t columns, int64_t stride, int64_t rows, int64_t segments,
    const int64_t *shifts, const int8_t *signs, int64_t from, int64_t count, float *z, int threads) {
    hashed source = {m, tokens, columns, stride, rows, segments, shifts, signs};
#pragma omp parallel num_threads(threads)
    hash_rows(&source, from, SHARE(count), z);
}

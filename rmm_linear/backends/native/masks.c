/* Masks in one bit per element: rmm_linear/packing/masks.py in compiled form. */
#include <stdint.h>
#include <string.h>

#include "variants.h"

/* Bit j of the result says whether from[j] is not zero, for 8 elements. */
#define BYTE(from)                                                                                                     \
    (uint8_t)((from[0] != 0) | (from[1] != 0) << 1 | (from[2] != 0) << 2 | (from[3] != 0) << 3 | (from[4] != 0) << 4 | \
              (from[5] != 0) << 5 | (from[6] != 0) << 6 | (from[7] != 0) << 7)

#define PACK_ROWS(type)                                                                             \
    for (int64_t row = begin; row < end; row++) {                                                   \
        const type *from = (const type *)mask + (index ? index[row] : row) * columns;               \
        uint8_t *to = bits + row * bytes;                                                           \
        for (int64_t i = 0; i < whole; i++) to[i] = BYTE((from + 8 * i));                           \
        if (whole < bytes) {                                                                        \
            to[whole] = 0;                                                                          \
            for (int64_t i = 8 * whole; i < columns; i++) to[whole] |= (from[i] != 0) << i % 8;     \
        }                                                                                           \
    }

VARIANTS static void pack_rows(
    const void *mask, int size, int64_t begin, int64_t end, int64_t columns, const int64_t *index, uint8_t *bits) {
    int64_t whole = columns / 8, bytes = (columns + 7) / 8;
    if (size == 4) PACK_ROWS(float)
    else PACK_ROWS(uint8_t)
}

VARIANTS static void apply_rows(
    const float *y, const uint8_t *bits, int64_t begin, int64_t end, int64_t columns, const int64_t *index, float scale,
    float *out) {
    int64_t bytes = (columns + 7) / 8;
    for (int64_t row = begin; row < end; row++) {
        int64_t place = (index ? index[row] : row) * columns;
        const uint8_t *from = bits + row * bytes;
        for (int64_t i = 0; i < columns; i++) out[place + i] = y[place + i] * (from[i / 8] >> i % 8 & 1 ? scale : 0.0f);
    }
}

/* mask: contiguous, of float32 (size 4) or of bytes (size 1). index: `rows` rows of it, or null. bits: contiguous. */
void rmm_pack_mask(
    const void *mask, int size, int64_t rows, int64_t columns, const int64_t *index, uint8_t *bits, int threads) {
#pragma omp parallel num_threads(threads)
    pack_rows(mask, size, SHARE(rows), columns, index, bits);
}

/* y, out: contiguous. Rows of `out` that are not in `index` are left as they are. */
void rmm_apply_mask(
    const float *y, const uint8_t *bits, int64_t rows, int64_t columns, const int64_t *index, float scale, float *out,
    int threads) {
#pragma omp parallel num_threads(threads)
    apply_rows(y, bits, SHARE(rows), columns, index, scale, out);
}

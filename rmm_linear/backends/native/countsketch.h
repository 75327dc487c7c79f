/* Rows of a CountSketch of float32 rows: rmm_linear/sketches/countsketch.py in compiled form. */
#include <stdint.h>
#include <string.h>

/* m: (tokens, columns), rows `stride` apart. rows: K. shifts: one per segment. signs: one per token. With one segment,
 * the sketch is m itself. */
typedef struct {
    const float *m;
    int64_t tokens, columns, stride, rows, segments;
    const int64_t *shifts;
    const int8_t *signs;
} hashed;

/* Returns a row of the sketch: computed in `buffer` of `columns` numbers, or the row of m if only one token is in it. */
static inline __attribute__((always_inline)) const float *hashed_row(const hashed *h, int64_t row, float *buffer) {
    const float *sum = h->m + row * h->stride;
    for (int64_t segment = 1; segment < h->segments; segment++) {
        int64_t place = row - h->shifts[segment];
        int64_t token = segment * h->rows + (place < 0 ? place + h->rows : place);
        if (token >= h->tokens) continue;
        const float *added = h->m + token * h->stride, sign = h->signs[token];
        for (int64_t i = 0; i < h->columns; i++) buffer[i] = sum[i] + sign * added[i];
        sum = buffer;
    }
    return sum;
}

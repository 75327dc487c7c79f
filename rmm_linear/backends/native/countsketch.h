/* Rows of a CountSketch of float32 rows: rmm_linear/sketches/countsketch.py in compiled form. */
#include <stdint.h>
#include <string.h>

/* m: (tokens, columns), rows `stride` apart. rows: K. shifts: of every segment. signs: of every token. With one segment,
 * the sketch is m itself. */
typedef struct {
    const float *m;
    int64_t tokens, columns, stride, rows, segments;
    const int64_t *shifts;
    const int8_t *signs;
} hashed;

/* A row of the sketch: made in `room`, which holds `columns` numbers, or, where one token is all of it, in m. */
static inline __attribute__((always_inline)) const float *hashed_row(const hashed *h, int64_t row, float *room) {
    const float *sum = h->m + row * h->stride;
    for (int64_t segment = 1; segment < h->segments; segment++) {
        int64_t place = row - h->shifts[segment];
        int64_t token = segment * h->rows + (place < 0 ? place + h->rows : place);
        if (token >= h->tokens) continue;
        const float *added = h->m + token * h->stride, sign = h->signs[token];
        for (int64_t i = 0; i < h->columns; i++) room[i] = sum[i] + sign * added[i];
        sum = room;
    }
    return sum;
}

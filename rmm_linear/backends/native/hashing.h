/* Rows of a CountSketch, or the rows of a matrix themselves: rmm_linear/sketches/countsketch.py in compiled form. */

/* m: rows of `columns` elements of `type`, `stride` apart. index: its `tokens` rows, or null for all. rows: K. shifts:
 * one per segment. signs: one per token. With one segment, the sketch is m itself. */
typedef struct {
    const void *m;
    int type;
    const int64_t *index;
    int64_t tokens, columns, stride, rows, segments;
    const int64_t *shifts;
    const int8_t *signs;
} hashed;

INLINE int64_t token_place(const hashed *h, int64_t token) { return (h->index ? h->index[token] : token) * h->stride; }

/* buffer = sum + sign * row, of a row that begins at `at`. */
INLINE void add_row(const float *sum, const void *m, int type, int64_t at, float sign, int64_t columns, float *buffer) {
    lanes signs = all(sign);
    int64_t i = 0;
    for (; i + LANES <= columns; i += LANES)
        STORE(buffer + i, MULTIPLY_ADD(load_elements(m, type, at + i), signs, LOAD(sum + i)));
    for (; i < columns; i++) buffer[i] = sum[i] + sign * element(m, type, at + i);
}

/* Returns a row of the sketch: in `buffer` of `columns` numbers, or in m if it is float32 and the row is one of m's.
 * Sums of bfloat16 are rounded to it. */
INLINE const float *hashed_row_of(const hashed *h, int type, int64_t row, float *buffer) {
    const float *sum = widened(h->m, type, token_place(h, row), h->columns, buffer);
    int is_sum = 0;
    for (int64_t segment = 1; segment < h->segments; segment++) {
        int64_t place = row - h->shifts[segment];
        int64_t token = segment * h->rows + (place < 0 ? place + h->rows : place);
        if (token >= h->tokens) continue;
        add_row(sum, h->m, type, token_place(h, token), h->signs[token], h->columns, buffer);
        sum = buffer, is_sum = 1;
    }
    if (type == BFLOAT16 && is_sum)
        for (int64_t i = 0; i < h->columns; i++) buffer[i] = from_bfloat16(to_bfloat16(buffer[i]));
    return sum;
}

static const float *hashed_row(const hashed *h, int64_t row, float *buffer) {
    /* The type is a constant in each call, so that the compiler specializes it. */
    if (h->type == FLOAT32) return hashed_row_of(h, FLOAT32, row, buffer);
    if (h->type == BFLOAT16) return hashed_row_of(h, BFLOAT16, row, buffer);
    return hashed_row_of(h, FLOAT16, row, buffer);
}

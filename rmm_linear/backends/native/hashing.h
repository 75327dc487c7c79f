/* Rows of a CountSketch, or the rows of a matrix themselves: rmm_linear/sketches/countsketch.py in compiled form. */

/* m: rows of `columns` elements of `type`, `stride` apart. index: its `tokens` rows, or null for all. rows: K. shifts:
 * one per segment. signs: one per token. With one segment, the sketch is m itself. rounds: whether sums of bfloat16 are
 * rounded to it before they are used. */
typedef struct {
    const void *m;
    int type, rounds;
    const int64_t *index;
    int64_t tokens, columns, stride, rows, segments;
    const int64_t *shifts;
    const int8_t *signs;
} hashed;

INLINE int64_t token_place(const hashed *h, int64_t token) { return (h->index ? h->index[token] : token) * h->stride; }

enum { SUMMED = 32, TILE = 8 }; /* tokens that are added in one pass; vectors that stay in registers meanwhile */

/* buffer = the row of m at `first`, or buffer itself if that is -1, + the `count` signed rows of m, one after the
 * other, and rounded to bfloat16 for `is_rounded`. */
INLINE void add_rows(
    const void *m, int type, int64_t first, const int64_t *at, const float *sign, int count, int is_rounded,
    int64_t columns, float *buffer) {
    int is_split = IS_SPLIT(type);
    int64_t i = 0;
    for (; i + TILE * LANES <= columns; i += TILE * LANES) {
        lanes v[TILE];
        for (int t = 0; t < TILE; t += 2) {
            int64_t place = i + t * LANES;
            if (first >= 0) load_two(m, type, first + place, v + t);
            else {
                lanes low = LOAD(buffer + place), high = LOAD(buffer + place + LANES);
                v[t] = is_split ? EVEN(low, high) : low, v[t + 1] = is_split ? ODD(low, high) : high;
            }
        }
        for (int k = 0; k < count; k++) {
            lanes signs = all(sign[k]), w[2];
            for (int t = 0; t < TILE; t += 2) {
                load_two(m, type, at[k] + i + t * LANES, w);
                v[t] = MULTIPLY_ADD(w[0], signs, v[t]), v[t + 1] = MULTIPLY_ADD(w[1], signs, v[t + 1]);
            }
        }
        for (int t = 0; t < TILE; t += 2) {
            lanes low = v[t], high = v[t + 1];
            if (is_rounded) low = rounded_to_bfloat16(low), high = rounded_to_bfloat16(high);
            STORE(buffer + i + t * LANES, is_split ? TURNS_LOW(low, high) : low);
            STORE(buffer + i + (t + 1) * LANES, is_split ? TURNS_HIGH(low, high) : high);
        }
    }
    for (; i + LANES <= columns; i += LANES) {
        lanes v = first < 0 ? load_elements(buffer, FLOAT32, i) : load_elements(m, type, first + i);
        for (int k = 0; k < count; k++) v = MULTIPLY_ADD(load_elements(m, type, at[k] + i), all(sign[k]), v);
        STORE(buffer + i, is_rounded ? rounded_to_bfloat16(v) : v);
    }
    for (; i < columns; i++) {
        float sum = first < 0 ? buffer[i] : element(m, type, first + i);
        for (int k = 0; k < count; k++) sum += sign[k] * element(m, type, at[k] + i);
        buffer[i] = is_rounded ? from_bfloat16(to_bfloat16(sum)) : sum;
    }
}

/* Returns a row of the sketch: in `buffer` of `columns` numbers, or in m if it is float32 and the row is one of m's. */
INLINE const float *hashed_row_of(const hashed *h, int type, int64_t row, float *buffer) {
    int64_t at[SUMMED], first = token_place(h, row);
    float sign[SUMMED];
    int count = 0;
    const float *sum = NULL;
    for (int64_t segment = 1; segment < h->segments; segment++) {
        int64_t place = row - h->shifts[segment];
        int64_t token = segment * h->rows + (place < 0 ? place + h->rows : place);
        int is_last = segment + 1 == h->segments, is_rounded = type == BFLOAT16 && h->rounds && is_last;
        if (token < h->tokens) at[count] = token_place(h, token), sign[count++] = h->signs[token];
        if ((!count && !sum) || (count < SUMMED && !is_last)) continue;
        add_rows(h->m, type, sum ? -1 : first, at, sign, count, is_rounded, h->columns, buffer);
        count = 0, sum = buffer;
    }
    return sum ? sum : widened(h->m, type, first, h->columns, buffer);
}

static const float *hashed_row(const hashed *h, int64_t row, float *buffer) {
    /* The type is a constant in each call, so that the compiler specializes it. */
    if (h->type == FLOAT32) return hashed_row_of(h, FLOAT32, row, buffer);
    if (h->type == BFLOAT16) return hashed_row_of(h, BFLOAT16, row, buffer);
    return hashed_row_of(h, FLOAT16, row, buffer);
}

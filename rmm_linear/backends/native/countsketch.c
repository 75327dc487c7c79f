/* Rows of a CountSketch, and sampled rows: rmm_linear/sketches/ in compiled form. */

static void hash_rows(const hashed *h, int64_t from, int64_t begin, int64_t end, float *buffer, void *z, int type) {
    for (int64_t row = begin; row < end; row++) {
        float *to = type == FLOAT32 ? (float *)z + row * h->columns : buffer;
        const float *result = hashed_row(h, from + row, to);
        if (type != FLOAT32) narrow(result, type, h->columns, z, row * h->columns);
        else if (result != to) memcpy(to, result, h->columns * sizeof(float));
    }
}

static int hash_matrix(const hashed *source, int64_t from, int64_t count, void *z, int to_type, int threads) {
    int result = 0;
#pragma omp parallel num_threads(threads) reduction(| : result)
    {
        float *buffer = malloc(source->columns * sizeof(float) + 1);
        if (!buffer) result = 2;
        else hash_rows(source, from, SHARE(count), buffer, z, to_type);
        free(buffer);
    }
    return result;
}

/* z: of `to_type`, the `count` rows of the sketch from row `from` on, contiguous; there are more tokens than rows.
 * Signs and shifts follow from the seed. Returns 0, or 2 if memory could not be allocated. */
int V(rmm_countsketch)(
    const void *m, int type, const int64_t *index, int64_t tokens, int64_t columns, int64_t stride, int64_t rows,
    int64_t seed, int64_t from, int64_t count, void *z, int to_type, int threads) {
    int64_t segments = (tokens + rows - 1) / rows;
    int64_t *shifts = malloc(segments * sizeof(int64_t) + tokens);
    if (!shifts) return 2;
    int8_t *signs = (int8_t *)(shifts + segments);
    signs_and_shifts(seed, tokens, rows, signs, shifts);
    hashed source = {m, type, 0, index, tokens, columns, stride, rows, segments, shifts, signs};
    int result = hash_matrix(&source, from, count, z, to_type, threads);
    free(shifts);
    return result;
}

INLINE void gather(
    const void *m, int type, int64_t stride, int64_t columns, const int64_t *index, const float *scale, int64_t begin,
    int64_t end, void *z) {
    for (int64_t row = begin; row < end; row++) {
        int64_t from = index[row] * stride, to = row * columns, i = 0;
        float factor = scale[row];
        lanes factors = all(factor);
        ints kept = factors != all(0); /* 0 times an infinity is not 0 */
        for (; i + LANES <= columns; i += LANES) {
            lanes v = load_elements(m, type, from + i) * factors;
            store_elements(z, type, to + i, (lanes)((ints)v & kept));
        }
        for (; i < columns; i++) store_element(z, type, to + i, factor == 0 ? 0 : element(m, type, from + i) * factor);
    }
}

static void gather_rows(
    const void *m, int type, int64_t stride, int64_t columns, const int64_t *index, const float *scale, int64_t begin,
    int64_t end, void *z) {
    /* The type is a constant in each call, so that the compiler specializes it. */
    if (type == FLOAT32) gather(m, FLOAT32, stride, columns, index, scale, begin, end, z);
    else if (type == BFLOAT16) gather(m, BFLOAT16, stride, columns, index, scale, begin, end, z);
    else gather(m, FLOAT16, stride, columns, index, scale, begin, end, z);
}

/* m: rows `stride` apart. index, scale: `rows`. z: the rows of m at `index` times their scale, contiguous, of the type
 * of m; 0 where the scale is 0. */
void V(rmm_gather_rows)(
    const void *m, int type, int64_t stride, int64_t columns, const int64_t *index, const float *scale, int64_t rows,
    void *z, int threads) {
#pragma omp parallel num_threads(threads)
    gather_rows(m, type, stride, columns, index, scale, SHARE(rows), z);
}

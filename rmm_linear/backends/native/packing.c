/* Packing of rows into 8, 4, 3 or 2 bits, and back: rmm_linear/packing/ in compiled form.
 *
 * Results equal those of plain PyTorch but for the last bits of the rotation, whose sums are made in another order.
 */

/* The groups of a row, or of rows that have `each` groups, of which there are at most LANES. a: of every row. */
INLINE void pack_whole_groups(
    const float *z, int64_t groups, int bits, const lanes signs[PARTS], const int32_t *a, int each, const int32_t *c,
    uint8_t *codes, uint8_t *scales) {
    for (int64_t first = 0; first < groups; first += LANES) {
        batch b;
        begin_batch(&b);
        for (int64_t group = first; group < groups && group < first + LANES; group++) {
            lanes v[PARTS];
            for (int k = 0; k < PARTS; k++) v[k] = LOAD(z + group * GROUP + k * LANES) * signs[k];
            add_group(&b, v);
        }
        finish_batch(&b, bits, 0, a, each, c + first * GROUP, codes + first * 8 * bits, scales + first);
    }
}

static void pack_rows(
    const hashed *m, float *buffer, int64_t begin, int64_t end, int bits, const float *signs, const int32_t *a,
    const int32_t *c, uint8_t *codes, uint8_t *scales) {
    int64_t columns = m->columns, whole = columns / GROUP, groups = (columns + GROUP - 1) / GROUP;
    int64_t length = code_bytes(columns, bits);
    lanes sign[PARTS];
    load_signs(signs, sign);
    for (int64_t row = begin; row < end; row++) {
        const float *z = hashed_row(m, row, buffer);
        uint8_t *to = codes + row * length;
        uint8_t *row_scales = scales + row * groups;
        pack_whole_groups(z, whole, bits, sign, a + row, LANES, c, to, row_scales);
        if (whole < groups)
            pack_short_group(
                z + whole * GROUP, (int)(columns - whole * GROUP), bits, 0, a[row], c + whole * GROUP,
                to + whole * 8 * bits, row_scales + whole);
    }
}

/* signs: of the rotation, which is undone; null leaves it. */
INLINE void unpack_row(
    const uint8_t *codes, const uint8_t *scales, int64_t columns, int bits, const lanes *signs, int32_t a,
    const int32_t *c, void *z, int type, int64_t place) {
    int64_t whole = columns / GROUP;
    for (int64_t group = 0; group < whole; group++) {
        lanes v[PARTS];
        unpack_group(bits, 0, codes + group * 8 * bits, a, c + group * GROUP, scales + group, v);
        if (signs) rotate(v);
        for (int k = 0; signs && k < PARTS; k++) v[k] *= signs[k];
        for (int k = 0; k < PARTS; k++) store_elements(z, type, place + group * GROUP + k * LANES, v[k]);
    }
    int left = (int)(columns - whole * GROUP);
    if (left) {
        float last[GROUP];
        unpack_short_group(left, bits, 0, codes + whole * 8 * bits, a, c + whole * GROUP, scales + whole, last);
        narrow(last, type, left, z, place + whole * GROUP);
    }
}

static void unpack_rows(
    const uint8_t *codes, const uint8_t *scales, int64_t begin, int64_t end, int64_t columns, int bits,
    const lanes *signs, const int32_t *a, const int32_t *c, void *z, int type) {
    int64_t groups = (columns + GROUP - 1) / GROUP, length = code_bytes(columns, bits);
    for (int64_t row = begin; row < end; row++) {
        const uint8_t *from = codes + row * length;
        const uint8_t *row_scales = scales + row * groups;
        int64_t place = row * columns;
        /* bits and the commonest types are constants in each call, so that the compiler specializes it. */
#define UNPACK(width, kind) unpack_row(from, row_scales, columns, width, signs, a[row], c, z, kind, place)
        if (bits == 4 && type == FLOAT32) UNPACK(4, FLOAT32);
        else if (bits == 3 && type == FLOAT32) UNPACK(3, FLOAT32);
        else if (bits == 2 && type == FLOAT32) UNPACK(2, FLOAT32);
        else if (type == FLOAT32) UNPACK(8, FLOAT32);
        else if (bits == 4) UNPACK(4, type);
        else if (bits == 3) UNPACK(3, type);
        else if (bits == 2) UNPACK(2, type);
        else UNPACK(8, type);
#undef UNPACK
    }
}

INLINE void unrotate_rows(void *m, int type, int64_t begin, int64_t end, int64_t columns, const float *signs) {
    lanes sign[PARTS];
    load_signs(signs, sign);
    for (int64_t row = begin; row < end; row++)
        for (int64_t group = 0; group < columns / GROUP; group++) {
            int64_t at = row * columns + group * GROUP;
            lanes v[PARTS];
            for (int k = 0; k < PARTS; k++) v[k] = load_elements(m, type, at + k * LANES);
            rotate(v);
            for (int k = 0; k < PARTS; k++) store_elements(m, type, at + k * LANES, v[k] * sign[k]);
        }
}

/* Packs the rows of m, or where there are more tokens than `rows` its CountSketch. Random numbers of the rounding, of the
 * rows from `first` on, and the sketch follow from the seed. codes, scales: of these rows, contiguous. Returns 0, or 2
 * if memory could not be allocated. */
int V(rmm_pack)(
    const void *m, int type, const int64_t *index, int64_t tokens, int64_t columns, int64_t stride, int64_t rows,
    int64_t seed, int64_t first, int bits, uint8_t *codes, uint8_t *scales, int threads) {
    int64_t segments = tokens > rows && rows ? (tokens + rows - 1) / rows : 1;
    int64_t *shifts = segments > 1 ? malloc(segments * sizeof(int64_t) + tokens) : NULL;
    int8_t *signs = (int8_t *)(shifts + (shifts ? segments : 0));
    noise n;
    if (segments > 1 && !shifts) return 2;
    if (!begin_noise(&n, seed, first, rows, columns)) {
        free(shifts);
        return 2;
    }
    if (shifts) signs_and_shifts(seed, tokens, rows, signs, shifts);
    hashed source = {m, type, 1, index, tokens, columns, stride, rows, segments, shifts, signs};
    int result = 0;
#pragma omp parallel num_threads(threads) reduction(| : result)
    {
        float *buffer = malloc(columns * sizeof(float) + 1);
        if (!buffer) result = 2;
        else pack_rows(&source, buffer, SHARE(rows), bits, n.signs, n.rows, n.columns, codes, scales);
        free(buffer);
    }
    end_noise(&n);
    free(shifts);
    return result;
}

/* The `rows` rows from `first` on; codes and scales: contiguous, of all rows. z: of a type, contiguous, of these rows.
 * Whole groups are rotated back for `is_rotated_back`. Returns 0, or 2 without memory. */
int V(rmm_unpack)(
    const uint8_t *codes, const uint8_t *scales, int64_t first, int64_t rows, int64_t columns, int bits, int64_t seed,
    int is_rotated_back, void *z, int type, int threads) {
    noise n;
    if (!begin_noise(&n, seed, first, rows, columns)) return 2;
    codes += first * code_bytes(columns, bits), scales += first * ((columns + GROUP - 1) / GROUP);
#pragma omp parallel num_threads(threads)
    {
        lanes sign[PARTS];
        load_signs(n.signs, sign);
        unpack_rows(
            codes, scales, SHARE(rows), columns, bits, is_rotated_back ? sign : NULL, n.rows, n.columns, z, type);
    }
    end_noise(&n);
    return 0;
}

/* m: of a type, contiguous, rotated back in place. */
void V(rmm_unrotate)(void *m, int type, int64_t rows, int64_t columns, int64_t seed, int threads) {
    noise n;
    fill_noise(seed, 0, 0, 0, n.signs, NULL, NULL);
#pragma omp parallel num_threads(threads)
    {
        /* The type is a constant in each call, so that the compiler specializes it. */
        if (type == FLOAT32) unrotate_rows(m, FLOAT32, SHARE(rows), columns, n.signs);
        else if (type == BFLOAT16) unrotate_rows(m, BFLOAT16, SHARE(rows), columns, n.signs);
        else unrotate_rows(m, FLOAT16, SHARE(rows), columns, n.signs);
    }
}

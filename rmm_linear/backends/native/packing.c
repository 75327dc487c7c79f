/* Packing of rows into 8, 4 or 2 bits, and back: rmm_linear/packing/ in compiled form.
 *
 * Results equal those of plain PyTorch but for the last bits of the rotation, whose sums are made in another order.
 */

INLINE void pack_whole_groups(
    const float *z, int64_t groups, int bits, const lanes signs[PARTS], int32_t a, const int32_t *c, uint8_t *codes,
    uint16_t *qparams, int *not_finite) {
    for (int64_t first = 0; first < groups; first += LANES) {
        batch b;
        begin_batch(&b);
        for (int64_t group = first; group < groups && group < first + LANES; group++) {
            lanes v[PARTS];
            for (int k = 0; k < PARTS; k++) v[k] = LOAD(z + group * GROUP + k * LANES) * signs[k];
            add_group(&b, v);
        }
        finish_batch(&b, bits, a, c + first * GROUP, codes + first * 8 * bits, qparams + first * 2, not_finite);
    }
}

static int pack_rows(
    const hashed *m, float *buffer, int64_t begin, int64_t end, int bits, const float *signs, const int32_t *a,
    const int32_t *c, uint8_t *codes, uint16_t *qparams) {
    int64_t columns = m->columns, whole = columns / GROUP, groups = (columns + GROUP - 1) / GROUP;
    int64_t length = (columns * bits + 7) / 8;
    int not_finite = 0;
    lanes sign[PARTS];
    load_signs(signs, sign);
    for (int64_t row = begin; row < end; row++) {
        const float *z = hashed_row(m, row, buffer);
        uint8_t *to = codes + row * length;
        uint16_t *row_qparams = qparams + row * groups * 2;
        pack_whole_groups(z, whole, bits, sign, a[row], c, to, row_qparams, &not_finite);
        if (whole < groups)
            pack_short_group(
                z + whole * GROUP, (int)(columns - whole * GROUP), bits, a[row], c + whole * GROUP,
                to + whole * 8 * bits, row_qparams + whole * 2, &not_finite);
    }
    return not_finite;
}

INLINE void unpack_whole_groups(
    const uint8_t *codes, const uint16_t *qparams, int64_t groups, int bits, int32_t a, const int32_t *c, float *z) {
    for (int64_t group = 0; group < groups; group++) {
        lanes v[PARTS];
        unpack_group(bits, codes + group * 8 * bits, a, c + group * GROUP, qparams + group * 2, v);
        for (int k = 0; k < PARTS; k++) STORE(z + group * GROUP + k * LANES, v[k]);
    }
}

static void unpack_rows(
    const uint8_t *codes, const uint16_t *qparams, int64_t begin, int64_t end, int64_t columns, int bits,
    const int32_t *a, const int32_t *c, float *z) {
    int64_t whole = columns / GROUP, groups = (columns + GROUP - 1) / GROUP, length = (columns * bits + 7) / 8;
    for (int64_t row = begin; row < end; row++) {
        const uint8_t *from = codes + row * length;
        const uint16_t *row_qparams = qparams + row * groups * 2;
        float *to = z + row * columns;
        /* bits is a constant in each call, so that the compiler specializes it. */
        if (bits == 4) unpack_whole_groups(from, row_qparams, whole, 4, a[row], c, to);
        else if (bits == 2) unpack_whole_groups(from, row_qparams, whole, 2, a[row], c, to);
        else unpack_whole_groups(from, row_qparams, whole, 8, a[row], c, to);
        if (whole < groups)
            unpack_short_group(
                (int)(columns - whole * GROUP), bits, from + whole * 8 * bits, a[row], c + whole * GROUP,
                row_qparams + whole * 2, to + whole * GROUP);
    }
}

static void unrotate_rows(float *m, int64_t begin, int64_t end, int64_t columns, const float *signs) {
    lanes sign[PARTS];
    load_signs(signs, sign);
    for (int64_t row = begin; row < end; row++)
        for (int64_t group = 0; group < columns / GROUP; group++) {
            float *place = m + row * columns + group * GROUP;
            lanes v[PARTS];
            for (int k = 0; k < PARTS; k++) v[k] = LOAD(place + k * LANES);
            rotate(v);
            for (int k = 0; k < PARTS; k++) STORE(place + k * LANES, v[k] * sign[k]);
        }
}

/* Packs m, or with several segments its CountSketch of `rows` rows. signs: 64, of the rotation. a: rows. c: columns.
 * codes, qparams: contiguous. Returns 0; 1 if qparams are not finite; 2 if memory could not be allocated. */
int V(rmm_pack)(
    const void *m, int type, const int64_t *index, int64_t tokens, int64_t columns, int64_t stride, int64_t rows,
    int64_t segments, const int64_t *shifts, const int8_t *token_signs, int bits, const float *signs, const int32_t *a,
    const int32_t *c, uint8_t *codes, uint16_t *qparams, int threads) {
    hashed source = {m, type, index, tokens, columns, stride, rows, segments, shifts, token_signs};
    int result = 0;
#pragma omp parallel num_threads(threads) reduction(| : result)
    {
        float *buffer = malloc(columns * sizeof(float) + 1);
        if (!buffer) result = 2;
        else result = pack_rows(&source, buffer, SHARE(rows), bits, signs, a, c, codes, qparams);
        free(buffer);
    }
    return result;
}

/* codes, qparams: contiguous. a: rows. c: columns. z: contiguous; its whole groups stay rotated. */
void V(rmm_unpack)(
    const uint8_t *codes, const uint16_t *qparams, int64_t rows, int64_t columns, int bits, const int32_t *a,
    const int32_t *c, float *z, int threads) {
#pragma omp parallel num_threads(threads)
    unpack_rows(codes, qparams, SHARE(rows), columns, bits, a, c, z);
}

/* m: contiguous, unrotated in place. signs: 64. */
void V(rmm_unrotate)(float *m, int64_t rows, int64_t columns, const float *signs, int threads) {
#pragma omp parallel num_threads(threads)
    unrotate_rows(m, SHARE(rows), columns, signs);
}

/* LayerNorm and RMSNorm from a packed copy of the normalized rows: rmm_linear/packing/norms.py in compiled form. */
#define BLOCK 32 /* rows whose products are summed in float32 before the sum is added in float64 */

/* Σ (x - shift), or with `squared` Σ (x - shift)², over a row. */
INLINE float row_sum(const float *x, int64_t columns, float shift, int squared) {
    lanes sum = {0}, other = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= columns; i += 2 * LANES) {
        lanes v = LOAD(x + i) - shift, w = LOAD(x + i + LANES) - shift;
        sum += squared ? v * v : v, other += squared ? w * w : w;
    }
    float rest = 0;
    for (; i < columns; i++) rest += squared ? (x[i] - shift) * (x[i] - shift) : x[i] - shift;
    return lanes_sum(sum + other) + rest;
}

INLINE void pack_norm_groups(
    const float *x, int64_t groups, float mean, float rstd, int bits, const lanes signs[PARTS], int32_t a,
    const int32_t *c, uint8_t *codes, uint8_t *scales) {
    for (int64_t first = 0; first < groups; first += LANES) {
        batch b;
        begin_batch(&b);
        for (int64_t group = first; group < groups && group < first + LANES; group++) {
            lanes v[PARTS];
            for (int k = 0; k < PARTS; k++) v[k] = (LOAD(x + group * GROUP + k * LANES) - mean) * rstd * signs[k];
            add_group(&b, v);
        }
        finish_batch(&b, bits, 1, &a, LANES, c + first * GROUP, codes + first * 8 * bits, scales + first);
    }
}

/* buffer: `columns` numbers. */
static void pack_norm_rows(
    const void *x, int type, int64_t stride, const int64_t *index, int64_t begin, int64_t end, int64_t columns, int centered,
    float eps, int bits, const float *signs, const int32_t *a, const int32_t *c, uint8_t *codes, uint8_t *scales,
    float *rstds, float *buffer) {
    int64_t whole = columns / GROUP, groups = (columns + GROUP - 1) / GROUP, length = code_bytes(columns, bits);
    lanes sign[PARTS];
    load_signs(signs, sign);
    for (int64_t row = begin; row < end; row++) {
        const float *from = widened(x, type, (index ? index[row] : row) * stride, columns, buffer);
        uint8_t *to = codes + row * length;
        uint8_t *row_scales = scales + row * groups;
        float mean = centered ? row_sum(from, columns, 0, 0) / columns : 0;
        float rstd = rstds[row] = 1 / sqrtf(row_sum(from, columns, mean, 1) / columns + eps);
        pack_norm_groups(from, whole, mean, rstd, bits, sign, a[row], c, to, row_scales);
        if (whole < groups) {
            int size = (int)(columns - whole * GROUP);
            float last[GROUP];
            for (int i = 0; i < size; i++) last[i] = (from[whole * GROUP + i] - mean) * rstd;
            pack_short_group(
                last, size, bits, 1, a[row], c + whole * GROUP, to + whole * 8 * bits, row_scales + whole);
        }
    }
}

/* What one row adds to sums over its columns. */
typedef struct {
    lanes g, gh;
} sums;

/* A part of a row's gradient: y, h, and what is added to the sums over rows, which may be null. */
INLINE void add_part(
    lanes y, lanes h, const float *gamma, float *to_gamma, float *to_beta, sums *s) {
    lanes g = y * LOAD(gamma);
    s->g += g, s->gh += g * h;
    if (to_gamma) {
        STORE(to_gamma, LOAD(to_gamma) + y * h);
        STORE(to_beta, LOAD(to_beta) + y);
    }
}

/* Writes h of whole groups and adds to the sums. */
INLINE void unpack_norm_groups(
    const uint8_t *codes, const uint8_t *scales, int64_t groups, int bits, const lanes signs[PARTS], int32_t a,
    const int32_t *c, const float *y, const float *gamma, float *h, float *to_gamma, float *to_beta, sums *s) {
    for (int64_t group = 0; group < groups; group++) {
        lanes v[PARTS];
        unpack_group(bits, 1, codes + group * 8 * bits, a, c + group * GROUP, scales + group, v);
        rotate(v);
        for (int k = 0; k < PARTS; k++) {
            int64_t i = group * GROUP + k * LANES;
            v[k] *= signs[k];
            STORE(h + i, v[k]);
            add_part(LOAD(y + i), v[k], gamma + i, to_gamma ? to_gamma + i : 0, to_beta + i, s);
        }
    }
}

static void add_wide(float *from, int64_t columns, double *to) {
    for (int64_t i = 0; i < columns; i++) to[i] += from[i], from[i] = 0;
}

/* buffer: 5 * columns, of which the third and fourth are 0. wide: 2 * columns, or null. */
static void norm_backward_rows(
    const void *y, int type, int64_t stride, const int64_t *index, int64_t begin, int64_t end, int64_t columns, int centered,
    int bits, const float *gamma, const float *signs, const int32_t *a, const int32_t *c, const uint8_t *codes,
    const uint8_t *scales, const float *rstds, void *out, int out_type, float *buffer, double *wide) {
    int64_t whole = columns / GROUP, groups = (columns + GROUP - 1) / GROUP, length = code_bytes(columns, bits);
    float *h = buffer, *row_y = buffer + columns, *row_out = buffer + 4 * columns;
    float *to_gamma = wide ? buffer + 2 * columns : 0, *to_beta = buffer + 3 * columns;
    lanes sign[PARTS];
    load_signs(signs, sign);
    for (int64_t row = begin; row < end; row++) {
        int64_t place = index ? index[row] : row;
        const float *from = widened(y, type, place * stride, columns, row_y);
        const uint8_t *row_codes = codes + row * length;
        const uint8_t *row_scales = scales + row * groups;
        sums s = {{0}, {0}};
#define UNPACK(width)                                                                                                 \
    unpack_norm_groups(row_codes, row_scales, whole, width, sign, a[row], c, from, gamma, h, to_gamma, to_beta, &s)
        if (bits == 4) UNPACK(4);
        else if (bits == 3) UNPACK(3);
        else if (bits == 2) UNPACK(2);
        else UNPACK(8);
#undef UNPACK
        float sum_g = lanes_sum(s.g), sum_gh = lanes_sum(s.gh);
        int64_t done = whole * GROUP;
        if (whole < groups)
            unpack_short_group(
                (int)(columns - done), bits, 1, row_codes + whole * 8 * bits, a[row], c + done,
                row_scales + whole, h + done);
        for (int64_t i = done; i < columns; i++) {
            float g = from[i] * gamma[i];
            sum_g += g, sum_gh += g * h[i];
            if (to_gamma) to_gamma[i] += from[i] * h[i], to_beta[i] += from[i];
        }
        float *to = out_type == FLOAT32 ? (float *)out + place * columns : row_out;
        float rstd = rstds[row], mean = centered ? sum_g / columns * rstd : 0, slope = sum_gh / columns * rstd;
        for (int64_t group = 0; group < groups; group++) {
            float scale = scale_of(row_scales[group]);
            float kept = (1 + scale * scale / (12.0f * columns)) * rstd; /* the variance of the copy is taken out */
            int64_t first = group * GROUP, last = first + GROUP < columns ? first + GROUP : columns;
            for (int64_t i = first; i < last; i++) to[i] = from[i] * gamma[i] * kept - mean - h[i] * slope;
        }
        if (out_type != FLOAT32) narrow(to, out_type, columns, out, place * columns);
        if (wide && ((row - begin) % BLOCK == BLOCK - 1 || row == end - 1))
            add_wide(to_gamma, columns, wide), add_wide(to_beta, columns, wide + columns);
    }
}

/* x: rows `stride` apart. index: `rows` rows of it, or null. codes, scales, rstds: contiguous. Returns 0, or 2 or more
 * if memory could not be allocated. */
int V(rmm_pack_norm)(
    const void *x, int type, int64_t stride, const int64_t *index, int64_t rows, int64_t columns, int centered, float eps,
    int bits, int64_t seed, uint8_t *codes, uint8_t *scales, float *rstds, int threads) {
    noise n;
    if (!begin_noise(&n, seed, 0, rows, columns)) return 2;
    int result = 0;
#pragma omp parallel num_threads(threads) reduction(| : result)
    {
        float *buffer = malloc(columns * sizeof(float) + 1);
        if (!buffer) result = 2;
        else
            pack_norm_rows(
                x, type, stride, index, SHARE(rows), columns, centered, eps, bits, n.signs, n.rows, n.columns, codes,
                scales, rstds, buffer);
        free(buffer);
    }
    end_noise(&n);
    return result;
}

/* y: rows `stride` apart. gamma: columns, or null for 1. out: contiguous; rows that are not in `index` are left as they
 * are. to_gamma, to_beta: columns, the sums over rows, or null. Returns 0, or 2 if memory could not be allocated. */
int V(rmm_norm_backward)(
    const void *y, int type, int64_t stride, const int64_t *index, int64_t rows, int64_t columns, int centered, int bits,
    const float *gamma, int64_t seed, const uint8_t *codes, const uint8_t *scales, const float *rstds, void *out,
    int out_type, float *to_gamma, float *to_beta, int threads) {
    noise n;
    if (!begin_noise(&n, seed, 0, rows, columns)) return 2;
    /* Of all threads the sums in float64, then their buffers, then ones. */
    double *wide = calloc(threads * (2 * sizeof(double) + 5 * sizeof(float)) + sizeof(float), columns + 1);
    if (!wide) {
        end_noise(&n);
        return 2;
    }
    float *buffers = (float *)(wide + threads * 2 * columns), *ones = buffers + threads * 5 * columns;
    for (int64_t i = 0; i < columns; i++) ones[i] = 1;
#pragma omp parallel num_threads(threads)
    {
        int64_t thread = omp_get_thread_num();
        norm_backward_rows(
            y, type, stride, index, SHARE(rows), columns, centered, bits, gamma ? gamma : ones, n.signs, n.rows, n.columns,
            codes, scales, rstds, out, out_type, buffers + thread * 5 * columns,
            to_gamma ? wide + thread * 2 * columns : 0);
    }
    for (int64_t i = 0; to_gamma && i < columns; i++) {
        double sums[2] = {0, 0};
        for (int thread = 0; thread < threads; thread++)
            sums[0] += wide[thread * 2 * columns + i], sums[1] += wide[(thread * 2 + 1) * columns + i];
        to_gamma[i] = (float)sums[0], to_beta[i] = (float)sums[1];
    }
    free(wide);
    end_noise(&n);
    return 0;
}

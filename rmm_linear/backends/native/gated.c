/* The packed products of a gated MLP: rmm_linear/packing/gated.py in compiled form. */

enum { GATED_GELU, GATED_GELU_TANH, GATED_SILU, GATED_RELU };

/* A packed matrix; codes is null where it is not wanted. */
typedef struct {
    uint8_t *codes;
    uint8_t *scales;
} packed;

/* e^x; x beyond float32's range is cut off. */
INLINE lanes clamped_exponential(lanes x) { return exponential(MIN(MAX(x, all(-87.0f)), all(88.0f))); }

/* The error function to a few units of its last place: a rational function of x², 1 beyond 4. */
INLINE lanes error_function(lanes x) {
    x = MIN(MAX(x, all(-4.0f)), all(4.0f));
    lanes s = x * x;
    lanes p = s * -2.72614225801306e-10f + 2.77068142495902e-08f;
    p = p * s + -2.10102402082508e-06f, p = p * s + -5.69250639462346e-05f, p = p * s + -7.34990630326855e-04f;
    p = p * s + -2.95459980854025e-03f, p = p * s + -1.60960333262415e-02f;
    lanes q = s * -1.45660718464996e-05f + -2.13374055278905e-04f;
    q = q * s + -1.68282697438203e-03f, q = q * s + -7.37332916720468e-03f, q = q * s + -1.42647390514189e-02f;
    return x * p / q;
}

/* Replaces x by act(x), and returns act'(x). NaN stays NaN, by a product with x. */
INLINE lanes activate(lanes *x, int activation) {
    lanes v = *x, zero = {0};
    if (activation == GATED_GELU) {
        lanes phi = 0.5f + 0.5f * error_function(v * 0.70710678f);
        *x = v * phi;
        return phi + v * (clamped_exponential(-0.5f * v * v) * 0.39894228f);
    }
    if (activation == GATED_RELU) {
        ints below = v <= zero;
        *x = PICK(below, zero, v);
        return PICK(below, zero, (zero + 1.0f));
    }
    lanes inner = v, slope = zero + 1.0f; /* act(x) = x · sigmoid(inner), slope = inner' */
    if (activation == GATED_GELU_TANH) {
        inner = v * (1.59576912f + 0.071354816f * v * v);
        slope = 1.59576912f + 0.214064449f * v * v;
    }
    lanes sigmoid = 1.0f / (1.0f + clamped_exponential(-inner));
    *x = v * sigmoid;
    return sigmoid + v * slope * (sigmoid * (1.0f - sigmoid));
}

/* Where the numbers of a row and its packed form are. */
INLINE void finish_row_part(
    batch *b, const noise *n, int which, int64_t row, int64_t columns, int64_t first, int bits, packed to) {
    int64_t groups = (columns + GROUP - 1) / GROUP, bytes = code_bytes(columns, bits);
    finish_batch(
        b, bits, 0, n[which].rows + row, LANES, n[which].columns + first * GROUP,
        to.codes + row * bytes + first * 8 * bits, to.scales + row * groups + first);
}

INLINE void pack_last(
    const float *v, const noise *n, int which, int64_t row, int64_t columns, int64_t whole, int bits,
    packed to) {
    int64_t bytes = code_bytes(columns, bits);
    pack_short_group(
        v, (int)(columns - whole * GROUP), bits, 0, n[which].rows[row], n[which].columns + whole * GROUP,
        to.codes + row * bytes + whole * 8 * bits,
        to.scales + row * (whole + 1) + whole);
}

/* buffer: 2 * columns. */
INLINE void pack_all(
    const void *a, const void *b, int type, int64_t stride_a, int64_t stride_b, int64_t begin, int64_t end,
    int64_t columns, const int64_t *index, int activation, int bits, const noise *n, packed p, packed s,
    float *buffer) {
    int64_t whole = columns / GROUP;
    lanes signs[2][PARTS];
    load_signs(n[0].signs, signs[0]), load_signs(n[1].signs, signs[1]);
    for (int64_t row = begin; row < end; row++) {
        int64_t from = index ? index[row] : row;
        const float *x = widened(a, type, from * stride_a, columns, buffer);
        const float *y = widened(b, type, from * stride_b, columns, buffer + columns);
        for (int64_t first = 0; first < whole; first += LANES) {
            batch products, values;
            begin_batch(&products), begin_batch(&values);
            for (int64_t group = first; group < whole && group < first + LANES; group++) {
                lanes value[PARTS], product[PARTS];
                for (int k = 0; k < PARTS; k++) {
                    int64_t at = group * GROUP + k * LANES;
                    value[k] = LOAD(x + at);
                    product[k] = LOAD(y + at) * activate(value + k, activation) * signs[0][k];
                    value[k] *= signs[1][k];
                }
                if (p.codes) add_group(&products, product);
                if (s.codes) add_group(&values, value);
            }
            if (p.codes) finish_row_part(&products, n, 0, row, columns, first, bits, p);
            if (s.codes) finish_row_part(&values, n, 1, row, columns, first, bits, s);
        }
        int64_t left = columns - whole * GROUP;
        if (left) {
            float value[GROUP] = {0}, product[GROUP] = {0};
            memcpy(value, x + whole * GROUP, left * sizeof(float)), memcpy(product, y + whole * GROUP, left * sizeof(float));
            for (int k = 0; k < PARTS; k++) {
                lanes v = LOAD(value + k * LANES), slope = activate(&v, activation);
                STORE(product + k * LANES, LOAD(product + k * LANES) * slope);
                STORE(value + k * LANES, v);
            }
            if (p.codes) pack_last(product, n, 0, row, columns, whole, bits, p);
            if (s.codes) pack_last(value, n, 1, row, columns, whole, bits, s);
        }
    }
}

/* The activation is a constant in each call, so that the compiler specializes it. */
#define PACK(activation) \
    pack_all(a, b, type, stride_a, stride_b, begin, end, columns, index, activation, bits, n, p, s, buffer)

static void pack_gated_rows(
    const void *a, const void *b, int type, int64_t stride_a, int64_t stride_b, int64_t begin, int64_t end,
    int64_t columns, const int64_t *index, int activation, int bits, const noise *n, packed p, packed s,
    float *buffer) {
    if (activation == GATED_GELU) PACK(GATED_GELU);
    else if (activation == GATED_GELU_TANH) PACK(GATED_GELU_TANH);
    else if (activation == GATED_SILU) PACK(GATED_SILU);
    else PACK(GATED_RELU);
}

/* Writes the product of a group of y with its unpacked numbers at `place` of a matrix of `type`. */
INLINE void unpack_and_multiply(
    const float *y, int64_t row, int64_t columns, int64_t group, int bits, const noise *n, int which,
    packed from, void *out, int type, int64_t place) {
    int64_t groups = (columns + GROUP - 1) / GROUP, bytes = code_bytes(columns, bits), left = columns - group * GROUP;
    int size = left < GROUP ? (int)left : GROUP;
    lanes v[PARTS];
    const uint8_t *codes = from.codes + row * bytes + group * 8 * bits;
    const uint8_t *scales = from.scales + row * groups + group;
    int32_t a = n[which].rows[row];
    const int32_t *c = n[which].columns + group * GROUP;
    if (size < GROUP) {
        float last[GROUP];
        unpack_short_group(size, bits, 0, codes, a, c, scales, last);
        for (int i = 0; i < size; i++) store_element(out, type, place + i, y[i] * last[i]);
        return;
    }
    unpack_group(bits, 0, codes, a, c, scales, v);
    rotate(v);
    for (int k = 0; k < PARTS; k++) {
        lanes signs = LOAD(n[which].signs + k * LANES) * 0.125f;
        store_elements(out, type, place + k * LANES, v[k] * signs * LOAD(y + k * LANES));
    }
}

INLINE void apply_all(
    const void *y, int type, int64_t begin, int64_t end, int64_t columns, const int64_t *index, int bits,
    const noise *n, packed p, packed s, void *da, void *db) {
    for (int64_t row = begin; row < end; row++)
        for (int64_t group = 0; group * GROUP < columns; group++) {
            int64_t place = (index ? index[row] : row) * columns + group * GROUP, left = columns - group * GROUP;
            float buffer[GROUP];
            const float *from = widened(y, type, place, left < GROUP ? left : GROUP, buffer);
            if (da) unpack_and_multiply(from, row, columns, group, bits, n, 0, p, da, type, place);
            if (db) unpack_and_multiply(from, row, columns, group, bits, n, 1, s, db, type, place);
        }
}

static void apply_gated_rows(
    const void *y, int type, int64_t begin, int64_t end, int64_t columns, const int64_t *index, int bits,
    const noise *n, packed p, packed s, void *da, void *db) {
    /* The type is a constant in each call, so that the compiler specializes it. */
    if (type == FLOAT32) apply_all(y, FLOAT32, begin, end, columns, index, bits, n, p, s, da, db);
    else if (type == BFLOAT16) apply_all(y, BFLOAT16, begin, end, columns, index, bits, n, p, s, da, db);
    else apply_all(y, FLOAT16, begin, end, columns, index, bits, n, p, s, da, db);
}

/* Numbers for two independent seeds. */
static int begin_two(noise n[2], int64_t seed, int64_t other, int64_t rows, int64_t columns) {
    if (!begin_noise(n, seed, 0, rows, columns)) return 0;
    if (begin_noise(n + 1, other, 0, rows, columns)) return 1;
    end_noise(n);
    return 0;
}

/* a, b: rows of `columns` numbers, `stride` apart. index: `rows` of their rows, or null. Seeds are those of p and of s,
 * whose codes are null where not wanted. Returns 0, or 2 if memory could not be allocated. */
int V(rmm_pack_gated)(
    const void *a, const void *b, int type, int64_t stride_a, int64_t stride_b, int64_t rows, int64_t columns,
    const int64_t *index, int activation, int bits, int64_t p_seed, int64_t s_seed, uint8_t *p_codes,
    uint8_t *p_scales, uint8_t *s_codes, uint8_t *s_scales, int threads) {
    noise n[2];
    if (!begin_two(n, p_seed, s_seed, rows, columns)) return 2;
    packed p = {p_codes, p_scales}, s = {s_codes, s_scales};
    int result = 0;
#pragma omp parallel num_threads(threads) reduction(| : result)
    {
        float *buffer = malloc(2 * columns * sizeof(float) + 1);
        if (!buffer) result = 2;
        else
            pack_gated_rows(
                a, b, type, stride_a, stride_b, SHARE(rows), columns, index, activation, bits, n, p, s, buffer);
        free(buffer);
    }
    end_noise(n), end_noise(n + 1);
    return result;
}

/* y, da, db: of one type, contiguous; da and db are null where not wanted, and rows that are not in `index` are left as
 * they are. Returns 0, or 2 if memory could not be allocated. */
int V(rmm_apply_gated)(
    const void *y, int type, int64_t rows, int64_t columns, const int64_t *index, int bits, int64_t p_seed,
    int64_t s_seed, uint8_t *p_codes, uint8_t *p_scales, uint8_t *s_codes, uint8_t *s_scales, void *da, void *db,
    int threads) {
    noise n[2];
    if (!begin_two(n, p_seed, s_seed, rows, columns)) return 2;
    packed p = {p_codes, p_scales}, s = {s_codes, s_scales};
#pragma omp parallel num_threads(threads)
    apply_gated_rows(y, type, SHARE(rows), columns, index, bits, n, p, s, da, db);
    end_noise(n), end_noise(n + 1);
    return 0;
}
